"""What is no run, or not the one that was meant, is told in one clear line, and nothing is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from attemper.errors import InputError
from attemper.results.run import open_run
from attemper.store.folder import delete_run, files_of, runs_below
from attemper.store.fragment import Fragment
from attemper.store.process import Lock
from tests.support.runs import written
from tests.support.samples import sample, samples, sites


def refused(path: Path) -> str:
    with pytest.raises(InputError) as error:
        open_run(path)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_damaged_fragment_is_told_and_the_others_are_read(tmp_path: Path) -> None:
    written(tmp_path / "a", samples(3), rank=0)
    (tmp_path / "a" / "fragment-1.sqlite").write_bytes(b"garbage" * 1000)
    run = open_run(tmp_path / "a")
    assert len(run) == 3
    assert "fragment-1.sqlite is not a file of an attemper run" in run.remarks[0]


def test_a_name_that_is_not_there_is_answered_with_the_nearest(tmp_path: Path) -> None:
    written(tmp_path / "warm-up", samples(1))
    assert refused(tmp_path / "warmup").endswith("Did you mean 'warm-up'?")
    assert "there is no run" in refused(tmp_path / "far" / "away")
    with pytest.raises(InputError, match="must be the path of a folder"):
        open_run(3)  # type: ignore[arg-type]


def test_a_folder_of_runs_is_not_one_of_them(tmp_path: Path) -> None:
    for name in ("b", "a"):
        written(tmp_path / name, samples(1))
    assert "is a folder of 2 runs: a, b. Name one of them." in refused(tmp_path)
    assert [run.name for run in runs_below(tmp_path)] == ["a", "b"]


def test_a_run_without_a_sample_has_an_empty_history_and_no_page(tmp_path: Path) -> None:
    written(tmp_path / "a", ())
    run = open_run(tmp_path / "a")
    assert (len(run), run.sites, run.statistics, run.alarms()) == (0, (), (), [])
    assert "no sample yet" in repr(run)
    with pytest.raises(InputError, match="has no sample yet"):
        run.to_html(tmp_path / "page.html")
    with pytest.raises(InputError, match="the run 'a' has no sample yet"):
        run.history("entropy")
    with pytest.raises(InputError, match=r"step 5 has no sample: the run has none yet\."):
        run.at(5)


BOTH = (*sites(2), *sites(2, mode="eval"))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"statistic": "entrpy"}, "Did you mean 'entropy'"),
        ({"statistic": "gini"}, r"'gini' is not in the run 'a'. It has entropy_nats, normalized_entropy, max"),
        ({"statistic": "judged_normalized_entropy"}, r"'judged_.* is not.*Did you mean 'normalized_entropy'\?"),
        ({"site": "layers.1.atn"}, r"'layers.1.atn' is not in the run 'a'.*Did you mean 'layers.1.attn'\?"),
        ({"site": "layers.1.attn"}, r"seen in several ways: .*'train'.*'eval'.*say mode="),
        *(({"site": BOTH[0], "head": head}, "whole number from 0 to 2") for head in (3, -1, True, 1.0)),
        ({"mode": "tain"}, "modes are 'train' and 'eval'"),
        ({"start": "0"}, "must be a step, a whole number"),
        ({"stop": 1.5}, "must be a step, a whole number"),
        ({"stop": True}, "must be a step, a whole number"),
    ],
)
def test_what_is_not_in_a_run_is_named_with_what_is(tmp_path: Path, asked: dict[str, Any], message: str) -> None:
    written(tmp_path / "a", [sample(0, BOTH)])
    with open_run(tmp_path / "a") as run, pytest.raises(InputError, match=message):
        run.history(**{"statistic": "entropy", **asked})


@pytest.mark.parametrize(
    ("step", "message"),
    [(14, "The nearest are 10 and 20."), (99, "The nearest is 20."), ("last", "must be a whole number")],
)
def test_a_step_that_was_not_sampled_is_refused_with_the_nearest(tmp_path: Path, step: Any, message: str) -> None:
    written(tmp_path / "a", samples(3, every=10))
    with open_run(tmp_path / "a") as run, pytest.raises(InputError, match=message):
        run.at(step)


def test_a_site_is_asked_for_by_name_and_mode_by_key_or_by_label(tmp_path: Path) -> None:
    written(tmp_path / "a", [sample(0, BOTH)])
    run = open_run(tmp_path / "a")
    assert run.history("entropy", "layers.1.attn", mode="eval").sites == (BOTH[3],)
    assert run.history("entropy", BOTH[3]).sites == (BOTH[3],)
    assert run.history("entropy", BOTH[0].key).sites == (BOTH[0],)


def test_deleting_a_run_takes_its_files_and_leaves_what_is_not_ours(tmp_path: Path) -> None:
    for name in ("a", "b"):
        written(tmp_path / name, samples(2))
    (tmp_path / "b" / "notes.txt").write_text("mine")
    assert files_of(tmp_path / "a").bytes > 0
    delete_run(tmp_path / "a")
    delete_run(tmp_path / "b")
    assert not (tmp_path / "a").exists()
    assert [file.name for file in (tmp_path / "b").iterdir()] == ["notes.txt"]


def test_a_run_that_is_written_to_is_live_and_not_deleted(tmp_path: Path) -> None:
    lock = Lock(tmp_path / "fragment-0.lock")
    fragment = Fragment(tmp_path / "fragment-0.sqlite")
    fragment.append(sample(0))
    assert open_run(tmp_path).live
    with pytest.raises(InputError, match="is written to at this moment"):
        delete_run(tmp_path)
    fragment.close()
    lock.release()
    assert not open_run(tmp_path).live
