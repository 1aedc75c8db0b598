"""What is kept of a run names no folder of the machine that wrote it."""

from __future__ import annotations

import pytest

from attemper.store.fragment import Fragment
from attemper.store.store import sentence


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("cannot read /home/ada/models/tiny.bin: no such file", "cannot read tiny.bin: no such file"),
        ("cannot read '/home/ada lovelace/models/tiny.bin'", "cannot read 'tiny.bin'"),
        (r"cannot read C:\Users\ada\tiny.bin (or ~/models/other)", "cannot read tiny.bin (or other)"),
        ("see file:///home/ada/x and ~ada/y", "see x and y"),
        ("1/2 of and/or at s3://bucket/run, or / alone", "1/2 of and/or at s3://bucket/run, or / alone"),
    ],
)
def test_a_sentence_keeps_of_absolute_paths_the_last_name(text, kept):
    assert sentence(text) == kept


def test_reasons_why_a_site_is_not_read_and_why_samples_are_lost_hold_no_folder():
    fragment = Fragment(None)
    fragment.cover({("a", "self", "train"): "'/home/ada/x.py' is compiled", ("b", "self", "train"): None})
    fragment.lose(3, 7, "[Errno 28] No space left on device: '/home/ada/runs/a'")
    tables = fragment.tables()
    assert tables.rows("SELECT reason FROM coverage ORDER BY name") == [("'x.py' is compiled",), (None,)]
    assert tables.rows("SELECT reason FROM lost") == [("[Errno 28] No space left on device: 'a'",)]
