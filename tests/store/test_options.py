"""What ``attemper.Store`` refuses and keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

import attemper


def test_a_path_is_enough_and_the_rest_has_defaults():
    store = attemper.Store("runs/a")
    assert (store.name, store.tags, store.notes, store.bits, store.max_bytes) == (None, (), "", 15, None)
    assert attemper.Store(Path("runs/a")).last_name == "a"
    assert attemper.Store("s3://bucket/runs/b/").last_name == "b"
    assert attemper.Store("runs/a", tags=["one", "two"]).tags == ("one", "two")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": ""}, r"Store\(path=...\) must be the path of a folder, got ''"),
        ({"path": 3}, r"Store\(path=...\) must be the path of a folder, got 3"),
        ({"path": "a", "tags": "one"}, r"Store\(tags=...\) must be names, got 'one'. Write tags="),
        ({"path": "a", "tags": (1,)}, r"Store\(tags=...\) must be names"),
        (
            {"path": "a", "bits": 0},
            r"Store\(bits=...\) must be a whole number from 1 to 23, got 0; None keeps all bits",
        ),
        ({"path": "a", "bits": 24}, "from 1 to 23, got 24"),
        ({"path": "a", "bits": 15.0}, "got 15.0"),
        ({"path": "a", "bits": True}, "got True"),
        ({"path": "a", "max_bytes": 1000}, r"at least 1,048,576, got 1000; None sets no bound"),
    ],
)
def test_what_has_no_meaning_is_refused(options, message):
    with pytest.raises(attemper.InputError, match=message):
        attemper.Store(**options)
