"""Shards of many texts: the same bits whoever scans them, in whatever order, and however often he is killed."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attemper.distributed import shards, workers
from attemper.distributed.shards import ShardTask, scan_shard, scan_texts
from attemper.errors import InputError
from attemper.readings import part_file
from attemper.readings.part import Part
from attemper.statistics import SHOWN
from tests.support.killed_workers import load, task, text_file


def merged(task: ShardTask) -> Part:
    return part_file.merge_files(task.path(index) for index in range(task.shards))


def bits(part: Part) -> list[tuple[Any, ...]]:
    return [(site.key, site.queries, site.keys, site.sums.tobytes()) for site in part.sites]


def scanned(task: ShardTask, order: list[int] | None = None) -> Part:
    """All shards by this process."""
    loaded = task.load()
    for index in order if order is not None else range(task.shards):
        scan_shard(task, loaded, index)
    return merged(task)


@pytest.mark.slow("takes many seconds")
def test_shards_in_any_order_have_the_same_bits_and_are_the_whole(tmp_path: Path):
    texts = text_file(tmp_path / "texts.txt", 140)
    one = scanned(task(texts, tmp_path / "one", 3))
    two = scanned(task(texts, tmp_path / "two", 3), [2, 0, 1])
    assert bits(one) == bits(two)
    assert not one.missing
    whole = scan_texts(task(texts, tmp_path / "none", 1), load(), lambda texts: None)
    assert sum(shard.texts or 0 for shard in one.shards) == sum(shard.texts or 0 for shard in whole.shards) == 140
    assert sum(shard.tokens for shard in one.shards) == whole.shards[0].tokens
    for mine, theirs in zip(one.reading().heads, whole.reading().heads, strict=True):
        assert mine.normalized_entropy_histogram == theirs.normalized_entropy_histogram
        for name in SHOWN:
            one_value, other = getattr(mine, name), getattr(theirs, name)
            assert one_value is other or one_value == pytest.approx(other, rel=1e-12, abs=1e-12), name


def test_more_shards_than_blocks_are_whole_all_the_same(tmp_path: Path):
    texts = text_file(tmp_path / "texts.txt", 70)
    found = scanned(task(texts, tmp_path / "parts", 4))
    assert [(shard.texts, shard.blocks) for shard in found.shards] == [(64, 1), (6, 1), (0, 0), (0, 0)]
    assert found.reading().sites


def test_a_shard_that_was_stopped_goes_on_at_its_last_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shards, "SAVE_SECONDS", -1.0)
    texts = text_file(tmp_path / "texts.txt", 300)
    expected = bits(scanned(task(texts, tmp_path / "one", 1)))
    stopped, loaded, read = task(texts, tmp_path / "two", 1), load(), []

    def batches(texts: Any) -> Any:
        read.append(len(texts))
        if len(read) == 4:
            raise KeyboardInterrupt
        return loaded.batches(texts)

    with pytest.raises(KeyboardInterrupt):
        scan_shard(stopped, replace(loaded, batches=batches), 0)
    begun = stopped.path(0).with_name(f"{stopped.path(0).name}.partial")
    assert begun.exists()
    with pytest.raises(InputError, match="is an unfinished shard"):
        part_file.load(begun)
    progress: list[int] = []
    assert scan_shard(stopped, replace(loaded, batches=batches), 0, progress.append)
    assert read == [64] * 5 + [44]  # three blocks before, the fourth twice, the fifth
    assert sum(progress) == stopped.survey.texts_of(0, 1) == 300
    assert not begun.exists()
    assert bits(merged(stopped)) == expected


@pytest.mark.parametrize("content", [b"", b"no file of ours"])
def test_a_damaged_beginning_is_begun_again(content: bytes, tmp_path: Path):
    work = task(text_file(tmp_path / "texts.txt", 70), tmp_path / "parts", 1)
    begun = work.path(0).with_name(f"{work.path(0).name}.partial")
    begun.write_bytes(content)
    assert scan_shard(work, work.load(), 0)
    assert not begun.exists()
    assert merged(work).shards[0].texts == 70


def test_a_shard_that_is_there_is_done_already(tmp_path: Path):
    work = task(text_file(tmp_path / "texts.txt", 70), tmp_path / "parts", 1)
    loaded, progress = work.load(), []
    assert scan_shard(work, loaded, 0)
    before = work.path(0).read_bytes()
    assert not scan_shard(work, loaded, 0, progress.append)
    assert sum(progress) == 70
    assert work.path(0).read_bytes() == before


def of_another_model(work: ShardTask, loaded: Any, path: Path) -> Any:
    next(loaded.model.parameters()).data += 1
    return work, loaded


OTHERS: dict[str, Callable[[ShardTask, Any, Path], tuple[ShardTask, Any]]] = {
    "fewest_keys (32)": lambda work, loaded, _: (replace(work, options=replace(work.options, fewest_keys=8)), loaded),
    "input (": lambda work, loaded, path: (task(text_file(path / "others.txt", 71), path / "parts", 2), loaded),
    "model (a model)": of_another_model,
}
"""What differs -> another task and what it has loaded."""


@pytest.mark.parametrize("what", OTHERS)
def test_a_shard_of_something_else_stands_in_the_way(what: str, tmp_path: Path):
    work, loaded = task(text_file(tmp_path / "texts.txt", 70), tmp_path / "parts", 2), load()
    scan_shard(work, loaded, 0)
    other = OTHERS[what](work, loaded, tmp_path)
    with pytest.raises(InputError, match=re.escape(f"is there already, of another {what}")) as caught:
        scan_shard(*other, 0)
    assert "Name another folder with --out, or remove it." in str(caught.value)


def test_another_tokenizer_gives_other_readings_and_is_refused(tmp_path: Path):
    work, loaded = task(text_file(tmp_path / "texts.txt", 70), tmp_path / "parts", 2), load()
    scan_shard(work, loaded, 0)
    other = replace(loaded, tokenizer="another")
    with pytest.raises(InputError, match=r"part-00000-of-00002.safetensors is there already, of another tokenizer"):
        scan_shard(work, other, 0)
    scan_shard(work, other, 1)
    with pytest.raises(InputError, match=r"0/2 and 1/2 differ in the tokenizer .*: bytes and another\. Their sums are"):
        merged(work)


# --- processes ---


def kills(folder: Path, many: int) -> Path:
    folder.mkdir()
    for number in range(many):
        (folder / str(number)).touch()
    return folder


def by_processes(texts: Path, out: Path, shards: int, count: int, killed: Path | None = None) -> Part:
    work, progress = task(texts, out, shards, killed), []
    workers.run(work, range(shards), count, progress.append)
    assert sum(progress) == work.survey.texts, "texts of a try that was lost do not count"
    return merged(work)


@pytest.mark.slow("starts several processes")
def test_workers_have_the_same_bits_though_one_is_killed(tmp_path: Path):
    texts = text_file(tmp_path / "texts.txt", 500)
    expected = scanned(task(texts, tmp_path / "one", 3))
    killed = kills(tmp_path / "kills", 1)
    found = by_processes(texts, tmp_path / "two", 3, 2, killed)
    assert not list(killed.iterdir())
    assert bits(found) == bits(expected)
    assert all("1 thread," in machine for machine in found.computed_on)


@pytest.mark.long("64 shards by 1, 2 and 4 processes")
def test_64_shards_by_any_number_of_workers_with_five_killed_are_the_same_bits(tmp_path: Path):
    texts = text_file(tmp_path / "texts.txt", 64 * 64 + 17)
    expected = bits(by_processes(texts, tmp_path / "one", 64, 1))
    assert bits(by_processes(texts, tmp_path / "two", 64, 2)) == expected
    killed = kills(tmp_path / "kills", 5)
    assert bits(by_processes(texts, tmp_path / "four", 64, 4, killed)) == expected
    assert not list(killed.iterdir())
    whole = scan_texts(task(texts, tmp_path / "none", 1), load(), lambda texts: None)
    for (key, _, _, sums), site in zip(expected, whole.sites, strict=True):
        assert key == site.key
        np.testing.assert_allclose(np.frombuffer(sums).reshape(site.sums.shape), site.sums, rtol=1e-12)


@pytest.mark.long("processes that are killed again and again")
def test_a_shard_whose_workers_die_three_times_is_named(tmp_path: Path):
    work = task(text_file(tmp_path / "texts.txt", 500), tmp_path / "parts", 2, kills(tmp_path / "kills", 100))
    with pytest.raises(
        ChildProcessError, match=r"the process of shard 0/2, 1/2 ended 3 times without a word \(SIGKILL\)"
    ):
        workers.run(work, range(2), 2, lambda texts: None)


@pytest.mark.slow("starts processes")
def test_an_error_of_a_worker_is_raised_here(tmp_path: Path):
    work = task(text_file(tmp_path / "texts.txt", 500), tmp_path / "parts", 2)
    (tmp_path / "texts.txt").write_text("another text\n" * 500)
    with pytest.raises(InputError, match=r"the texts of texts\.txt changed while they were read"):
        workers.run(work, range(2), 2, lambda texts: None)


STARTS_TWO = """
import multiprocessing, signal
from attemper.distributed.workers import block_interrupts

def tell(connection):
    connection.send(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))

if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    for _ in range(2):
        ours, theirs = spawn.Pipe()
        with block_interrupts():
            spawn.Process(target=tell, args=(theirs,)).start()
        print(ours.recv(), signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no signal masks")
def test_every_process_is_deaf_to_interrupts_the_first_too_and_its_parent_is_not(tmp_path: Path):
    script = tmp_path / "two.py"
    script.write_text(STARTS_TWO, "utf-8")
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert ended.stdout.split() == ["True", "False"] * 2, ended.stderr
