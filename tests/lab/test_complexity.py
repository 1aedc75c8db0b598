"""What attention costs: counts against counters of others, the blocked backend's own sizes, measured parts marked."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from attemper.backends.blocked.tiles import Problem, key_blocks, tiles
from attemper.bench import hardware
from attemper.lab import complexity
from attemper.lab.complexity import (
    HEADS,
    LENGTHS,
    ROWS,
    SIZE,
    TILE,
    TOLD,
    WAYS,
    blocked_bytes,
    blocked_memory,
    bytes_eager,
    eager,
    eager_memory,
    inputs,
    largest_error,
    operations,
    usual_operations,
)
from tests.lab.printed import column, rows


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short texts, and no process that measures memory."""
    monkeypatch.setattr(complexity, "LENGTHS", (16, 32))
    monkeypatch.setattr(complexity, "peak_mib", lambda: None)


# Counts


def test_the_count_that_the_article_meant_is_33_816_576_and_the_operations_are_twice_as_many():
    assert (usual_operations(*TOLD), operations(*TOLD).total) == (33_816_576, 68_681_728)


@pytest.mark.slow("loads the compiler of torch")
@pytest.mark.parametrize("tokens", [16, 100])
def test_products_are_those_that_torch_counts(tokens: int):
    tensors = inputs(tokens, 0)
    with FlopCounterMode(display=False) as counter:
        eager(*tensors)
    one = operations(tokens, SIZE)
    assert counter.get_total_flops() == HEADS * (one.scores + one.mixture)


def test_bytes_of_eager_code_are_what_its_steps_read_and_write():
    """Every step of eager code, its inputs and its output, by the sizes of real tensors."""
    n = 48
    q, k, v = (t[0, 0] for t in inputs(n, 0))
    scores = q @ k.T
    scaled = scores / 8.0
    weights = scaled.softmax(-1)
    output = weights @ v
    steps = [(q, k, scores), (scores, scaled), (scaled, weights), (weights, v, output)]
    moved = sum(t.numel() * t.element_size() for step in steps for t in step)
    assert bytes_eager(n, SIZE) == moved


@pytest.mark.parametrize("tokens", LENGTHS)
def test_blocked_bytes_and_memory_follow_the_tiles_of_the_backend(tokens: int):
    q, k, v = inputs(tokens, 0)
    problem = Problem(q, k, v, mask=None, multiplier=torch.ones(1, 1, 1))
    cut = [tile for tile, _, _ in tiles(problem)]
    rows = {tile.rows.stop - tile.rows.start for tile in cut}
    assert rows == {min(ROWS, tokens)}
    moved = 4 * (2 * tokens * SIZE * HEADS)
    largest = 0
    for tile in cut:
        batches, heads, height = tile.shape
        for low, high in key_blocks(problem, tile):
            moved += 4 * 2 * heads * (high - low) * SIZE
            largest = max(largest, batches * heads * height * (high - low))
    assert HEADS * blocked_bytes(tokens, SIZE) == moved
    assert largest == min(TILE, HEADS * tokens * tokens)
    assert blocked_memory(tokens) == 5 * 4 * largest


def test_the_three_ways_compute_the_same():
    tensors = inputs(64, 0, torch.float64)
    for way, run in WAYS.items():
        torch.testing.assert_close(run(*tensors), eager(*tensors), rtol=0, atol=1e-14, msg=way)
        # Values of size 1 to 4, some hundred roundings of 6e-8.
        assert 0 < largest_error(run, 0) < 5e-6


# The experiment


def test_what_is_counted_is_the_same_in_two_runs_and_what_is_measured_says_so(short):
    before = torch.get_rng_state()
    one, two = complexity.complexity(seed=1), complexity.complexity(seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(inputs(16, 4)[0], inputs(16, 5)[0])
    for first, second in ((one.tables, two.tables), (one.charts, two.charts)):
        assert [part for part in first if not part.measured] == [part for part in second if not part.measured]
    measured = [part.title.split()[0] for part in (*one.tables, *one.charts) if part.measured]
    assert measured == ["time", "speed", "peak", "time,"]


def test_a_column_holds_what_its_unit_says_and_memory_that_is_not_told_is_named(short):
    result = complexity.complexity()
    times, speeds, peaks = (part for part in result.tables if part.measured)
    assert times.column("n") == (16, 32)
    assert [column.unit for column in times.columns] == ["tokens", "ms", "ms", "ms", ""]
    done = HEADS * operations(32, SIZE).total
    for row in rows(speeds):
        assert row[1] == pytest.approx(done / (column(times, row[0])[-1] / 1e3) / 1e9)
        assert 0 < row[2] < 5e-6
    order = times.see.partition("from the fastest: ")[2].partition(". The shortest")[0].split(", ")
    assert order == sorted(WAYS, key=lambda way: column(times, way)[-1])
    assert "Not measured: this system has no /proc/self/clear_refs" in peaks.see
    assert {peaks.column(way) for way in WAYS} == {(None, None)}


def test_a_system_that_does_not_tell_memory_gives_none_and_a_process_that_fails_its_message(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(hardware.Path, "exists", lambda path: False)
    assert complexity.peak_mib() is None
    monkeypatch.setattr(hardware.Path, "exists", lambda path: True)
    monkeypatch.setattr(hardware.sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="lab complexity: the process that measures memory failed"):
        complexity.peak_mib()


@pytest.mark.slow("takes many seconds")
def test_eager_memory_is_the_counted_one_and_blocked_memory_stops_growing():
    peaks = complexity.peak_mib()
    if peaks is None:
        pytest.skip("this system does not tell the peak of a process")
    last, before = LENGTHS[-1], LENGTHS[-2]
    counted = eager_memory(last) / 2**20
    # Beyond the counted tensors: pages of code that runs for the first time, buffers of the matrix product.
    assert counted <= peaks[last]["eager"] <= counted + 8
    assert peaks[last]["blocked"] <= blocked_memory(last) / 2**20 + 8
    assert peaks[last]["blocked"] < 1.5 * peaks[before]["blocked"]
    assert peaks[last]["SDPA"] < blocked_memory(last) / 2**20
