"""What ``attemper.Store`` refuses and keeps: no folder of the machine, and whether a run is of the model of now."""

from __future__ import annotations

from pathlib import Path

import pytest

import attemper
from attemper.readings.sample import SiteLabel
from attemper.store.fragment import Fragment
from attemper.store.place import Earlier
from attemper.store.store import sentence
from tests.support.samples import sample, sites


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


MODULES = {"layers.0.attn", "layers.1.attn", "layers.2.attn"}


def earlier(**about: object) -> Earlier:
    """Of a run of two sites with three heads each, in which a third one was expected."""
    fragment = Fragment(None)
    fragment.append(sample(9))
    fragment.describe({"model": "Tiny", **about})
    fragment.cover({("layers.2.attn", "self", "train"): "not seen"})
    return Earlier.of(fragment.tables(), 9)


def label(name: str, heads: int = 3, mode: str = "train") -> SiteLabel:
    return SiteLabel(name, "self", mode, 0, "full", "softmax", heads)


@pytest.mark.parametrize(
    ("seen", "modules", "about", "same"),
    [
        (sites(), MODULES, {}, True),
        (sites(1), MODULES, {}, True),
        (sites(2, mode="eval"), MODULES, {}, True),
        (sites(3), MODULES, {}, True),
        ((label("layers.0.attn"), label("layers.0.attn#2")), MODULES, {}, True),
        (sites(), MODULES, {"model": "Other"}, False),
        (sites(2, heads=4), MODULES, {}, False),
        (sites(4), MODULES | {"layers.3.attn"}, {}, False),
        (sites(4), MODULES | {"layers.3.attn"}, {"sites": ["layers.0"]}, True),
        (sites(1), {"layers.0.attn"}, {}, False),
        ((label("blocks.0"),), {"blocks.0"}, {}, False),
    ],
)
def test_a_run_is_of_the_same_model_by_its_class_heads_and_sites_where_all_were_watched(seen, modules, about, same):
    assert earlier(**about).is_of("Tiny", seen, modules) == same


def test_the_warning_says_what_stood_there_and_what_to_do():
    said = earlier().difference("Other", sites(1), MODULES, 0) or ""
    assert said.startswith(" holds a run of another model: Tiny with 2 sites and 6 heads, up to step 9. ")
    assert "This one is of Other with 1 site and 3 heads." in said
    assert "Give each run a separate folder" in said
