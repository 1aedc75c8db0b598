"""A run is read as it was written: whole, resumed, by several ranks, beside its writer."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import attemper
from attemper.readings import history
from attemper.readings.sample import Sample, SiteKey
from attemper.report.overview import overview
from attemper.results.run import Run, open_run
from attemper.store import export
from attemper.store.fragment import Fragment
from attemper.store.ranks import Ranks, columns
from attemper.store.series import FragmentReader
from attemper.store.writer import open_writer
from tests.support.runs import written
from tests.support.samples import sample, samples, samples_of, sites


def numbers(taken: list[Sample], name: str) -> np.ndarray:
    """[samples, heads] of a quantity."""
    return np.stack([one.values[one.quantities.index(name)] for one in taken])


def test_a_history_is_what_was_written_in_cold_chunks_and_hot_rows(tmp_path: Path) -> None:
    taken = written(tmp_path / "a", samples(300, every=10), bits=None)
    run = open_run(tmp_path / "a")
    np.testing.assert_array_equal(run.steps, np.arange(300) * 10)
    assert [site.name for site in run.sites] == ["layers.0.attn", "layers.1.attn"]
    whole = run.history("max_logit")
    np.testing.assert_array_equal(whole.values.reshape(300, 6), numbers(taken, "max_logit"))
    site = run.history("max_logit", "layers.1.attn")
    np.testing.assert_array_equal(site.values, whole.values[:, 1])
    assert (site.site, site.head, site.sites) == ("layers.1.attn", None, (run.sites[1],))
    head = run.history("max_logit", site="layers.1.attn", head=2)
    np.testing.assert_array_equal(head.values, whole.values[:, 1, 2])
    np.testing.assert_array_equal(run.history("max_logit", head=2).values, whole.values[:, :, 2])
    assert head.values.dtype == np.float32


def test_a_part_of_a_history_is_the_same_numbers(tmp_path: Path) -> None:
    written(tmp_path / "a", samples(300, every=10))
    run = open_run(tmp_path / "a")
    whole = run.history("entropy")
    for start, stop in ((0, 3000), (1275, 1285), (1280, None), (None, 5), (2990, None), (7, 9)):
        part = run.history("entropy", start=start, stop=stop)
        wanted = (whole.steps >= (start or 0)) & (whole.steps < (stop or 10_000))
        np.testing.assert_array_equal(part.steps, whole.steps[wanted])
        np.testing.assert_array_equal(part.values, whole.values[wanted])


@pytest.mark.parametrize("back", [500, 501, 510, 1000])
@pytest.mark.slow("takes many seconds")
def test_thinning_brings_nothing_back_that_was_replaced(tmp_path: Path, back: int) -> None:
    label = sites(2, 3)
    old = [replace(one, values=one.values + 100) for one in samples(1030, labels=label)]
    written(tmp_path / "a", old, bits=None)
    written(tmp_path / "a", (sample(step, label) for step in range(back, 2500)), bits=None, max_bytes=150_000)
    run = open_run(tmp_path / "a")
    assert run.remarks[0].startswith("thinned: up to step ")
    assert run.remarks[0].endswith("is kept, and alarms use only those")
    found = run.history("entropy")
    assert found.steps[0] == 0
    assert (np.diff(found.steps) > 0).all()
    assert (found.values[found.steps < back] > 50).all()
    assert (found.values[found.steps >= back] < 50).all()
    one = columns(run.ranks, "entropy_nats", label[0].key, 25)
    assert (one.least[one.steps < back - 100] > 50).all()
    assert (one.largest[one.steps >= back] < 50).all()


def test_ranks_that_do_not_come_back_lose_the_steps_that_the_others_replaced(tmp_path: Path) -> None:
    labels = sites(3, 2)
    for rank, many in enumerate((200, 200, 210)):
        written(tmp_path / "a", (sample(step, labels[rank : rank + 1]) for step in range(many)), rank=rank, bits=None)
    before = open_run(tmp_path / "a")
    assert before.steps[-1] == 209
    for rank in (0, 1):
        later = (sample(step, labels[rank : rank + 1]) for step in range(150, 180))
        written(tmp_path / "a", later, rank=rank, bits=None)
    for run in (before, open_run(tmp_path / "a")):
        np.testing.assert_array_equal(run.steps, np.arange(180))
        found = run.history("entropy").values
        assert not np.isnan(found[:, :2]).any()
        assert not np.isnan(found[:150, 2]).any()
        assert np.isnan(found[150:, 2]).all()
        assert columns(run.ranks, "entropy_nats", labels[2].key, 4).steps[-1] < 150
    written(tmp_path / "a", (sample(step, labels[2:]) for step in range(180, 190)), rank=2, bits=None)
    assert open_run(tmp_path / "a").steps[-1] == 189


def test_a_step_that_goes_back_replaces_what_it_overlaps_and_begins_a_segment(tmp_path: Path) -> None:
    written(tmp_path / "a", (sample(step) for step in (0, 10, 20, 30, 15, 25)))
    written(tmp_path / "a", (sample(step) for step in (22, 40)))
    run = open_run(tmp_path / "a")
    assert run.steps.tolist() == [0, 10, 15, 22, 40]
    assert [(s.samples, s.first_step, s.last_step) for s in run.segments] == [(2, 0, 10), (1, 15, 15), (2, 22, 40)]


def test_sites_of_other_heads_and_sites_that_come_later_are_filled_up_with_nan(tmp_path: Path) -> None:
    one, two = sites(1, 2), (*sites(1, 2), replace(sites(2, 3)[1], mode="eval"))
    written(tmp_path / "a", [sample(0, one), *(sample(step, two) for step in range(1, 140)), sample(140, one)])
    run = open_run(tmp_path / "a")
    found = run.history("entropy").values
    assert found.shape == (141, 2, 3)
    assert np.isnan(found[:, 0, 2]).all()
    assert not np.isnan(found[:, 0, :2]).any()
    assert np.isnan(found[[0, 140], 1]).all()
    assert not np.isnan(found[1:140, 1]).any()
    assert run.history("entropy", mode="eval").values.shape == (141, 1, 3)
    assert run.mean("entropy").shape == (2, 3)


def test_mean_deviation_and_trend_are_those_of_the_history(tmp_path: Path) -> None:
    written(tmp_path / "a", samples(300, every=10))
    run, where = open_run(tmp_path / "a"), ("entropy", "layers.0.attn")
    found = run.history(*where, start=500)
    np.testing.assert_array_equal(run.mean(*where, start=500), history.mean(found.values))
    np.testing.assert_array_equal(run.std(*where, start=500), history.std(found.values))
    slope = history.trend(found.steps, found.values).slope
    np.testing.assert_array_equal(run.trend(*where, start=500).slope, slope)
    assert run.trend(*where, 1, start=500).slope == slope[1]
    assert float(run.mean(*where, 1)) > 0


def test_a_step_is_a_scan_with_what_was_stored_and_none_for_the_rest(tmp_path: Path) -> None:
    taken = written(tmp_path / "a", samples(200), bits=None)
    scan = open_run(tmp_path / "a").at(130)
    head = scan.sites[1].heads[2]
    for name in ("entropy_nats", "normalized_entropy", "max_logit", "nonfinite_rows"):
        assert np.float32(getattr(head, name)) == numbers(taken, name)[130, 5]
    assert (head.gini, head.mass, head.rows, head.judged, head.layer) == (None, None, 0, False, 1)
    assert scan.tokens == 64
    assert scan.reading.date == "1970-01-01T00:18:50Z"
    assert scan.to_json()
    assert str(scan)


def test_ranks_with_other_sites_are_joined_by_step(tmp_path: Path) -> None:
    labels = sites(4, 2)
    first = written(tmp_path / "a", (sample(step, labels[:2]) for step in range(0, 200, 2)), rank=0, bits=None)
    second = written(tmp_path / "a", (sample(step, labels[2:]) for step in range(0, 210, 2)), rank=1, bits=None)
    run = open_run(tmp_path / "a")
    assert run.sites == labels
    np.testing.assert_array_equal(run.steps, np.arange(0, 210, 2))
    found = run.history("entropy").values
    np.testing.assert_array_equal(found[:100, :2].reshape(100, 4), numbers(first, "entropy_nats"))
    np.testing.assert_array_equal(found[:, 2:].reshape(105, 4), numbers(second, "entropy_nats"))
    assert np.isnan(found[100:, :2]).all()
    assert [site.name for site in run.at(20).sites] == [label.name for label in labels]
    assert [site.name for site in run.at(206).sites] == [label.name for label in labels[2:]]
    assert not run.remarks


def test_of_a_site_that_two_ranks_wrote_the_first_one_counts_and_that_is_said(tmp_path: Path) -> None:
    first = written(tmp_path / "a", samples(10), rank=0, bits=None)
    other = [replace(one, values=one.values + 1) for one in samples(20)]
    written(tmp_path / "a", other, rank=1, bits=None)
    run = open_run(tmp_path / "a")
    found = run.history("entropy").values.reshape(20, 6)
    np.testing.assert_array_equal(found[:10], numbers(first, "entropy_nats"))
    np.testing.assert_array_equal(found[10:], numbers(other[10:], "entropy_nats"))
    (remark,) = run.remarks
    assert "2 sites were written by several ranks, such as layers.0.attn" in remark


def split_in_heads(whole: Iterable[Sample], first: int) -> Iterator[Sample]:
    """What a rank has that holds heads ``first`` and the next of each of two sites of four heads."""
    for one in whole:
        labels = tuple(replace(label, heads=2, first_head=first) for label in one.sites)
        values = one.values.reshape(-1, 2, 4)[:, :, first : first + 2].reshape(-1, 4)
        yield replace(one, sites=labels, values=values)


def test_ranks_that_have_different_heads_of_a_site_are_joined_to_the_whole_site(tmp_path: Path) -> None:
    whole = written(tmp_path / "whole", samples(300, labels=sites(2, 4)), bits=None)
    for rank in (0, 1):
        written(tmp_path / "a", split_in_heads(whole, 2 * rank), rank=rank, bits=None)
    run, expected = open_run(tmp_path / "a"), open_run(tmp_path / "whole")
    assert run.sites == expected.sites == sites(2, 4)
    for site, head in ((None, None), ("layers.1.attn", None), ("layers.1.attn", 3), (None, 2)):
        found, wanted = (one.history("entropy", site, head).values for one in (run, expected))
        np.testing.assert_array_equal(found, wanted)
    assert run.at(299).reading.sites == expected.at(299).reading.sites
    assert run.alarms() == expected.alarms()
    joined, wanted = (list(samples_of(one)) for one in (run, expected))
    for one, other in zip(joined, wanted, strict=True):
        assert one.sites == other.sites
        np.testing.assert_array_equal(one.values, other.values)
    assert not run.remarks
    assert overview(run).changes == overview(expected).changes


def test_heads_of_a_rank_that_lost_a_sample_have_no_numbers_there(tmp_path: Path) -> None:
    whole = written(tmp_path / "whole", samples(6, labels=sites(2, 4)), bits=None)
    written(tmp_path / "a", split_in_heads(whole, 0), rank=0, bits=None)
    written(tmp_path / "a", split_in_heads(whole[:3], 2), rank=1, bits=None)
    run = open_run(tmp_path / "a")
    found = run.history("entropy", "layers.0.attn").values
    assert not np.isnan(found[:3]).any()
    assert np.isnan(found[3:, 2:]).all()
    assert not np.isnan(found[3:, :2]).any()
    assert {label.heads for one in samples_of(run) for label in one.sites} == {4}
    assert [head.entropy_nats is None for head in run.at(5).reading.sites[0].heads] == [False, False, True, True]


def test_a_rank_alone_numbers_its_heads_as_the_whole_model_does(tmp_path: Path) -> None:
    whole = list(samples(4, labels=sites(2, 4)))
    written(tmp_path / "a", split_in_heads(whole, 2), bits=None)
    run = open_run(tmp_path / "a")
    assert [head.head for head in run.at(3).reading.sites[0].heads] == [2, 3]
    np.testing.assert_array_equal(
        run.history("entropy", "layers.1.attn", 3).values, [one.values[0, 7] for one in whole]
    )
    with pytest.raises(attemper.InputError, match=r"whole number from 2 to 3, got 0: layers\.1\.attn has 2 h"):
        run.history("entropy", "layers.1.attn", 0)
    with pytest.raises(attemper.InputError, match="whole number from 2 to 3, got 4: the sites have at most 2 heads"):
        run.history("entropy", head=4)


def test_a_run_is_read_beside_its_writer_and_nothing_of_it_is_changed(tmp_path: Path) -> None:
    fragment = Fragment(tmp_path / "fragment-0.sqlite")
    fragment.append(sample(0))
    run = open_run(tmp_path)
    assert len(run) == 1
    for step in range(1, 300):
        fragment.append(sample(step))
        fragment.fold()
        if step % 29 == 0:
            log = (tmp_path / "fragment-0.sqlite-wal").read_bytes()
            assert not np.isnan(run.history("entropy").values).any()
            assert len(run) == step + 1
            assert (tmp_path / "fragment-0.sqlite-wal").read_bytes() == log
    run.close()
    fragment.close()
    assert [file.name for file in tmp_path.iterdir()] == ["fragment-0.sqlite"]


def test_a_reader_of_a_busy_writer_sees_whole_samples_only(tmp_path: Path) -> None:
    taken = list(samples(300))
    writer, run = open_writer(tmp_path), open_run(tmp_path)
    expected = {one.step: one.values[2] for one in taken}
    writer.take(taken[0])
    writer.flush()
    for one in taken[1:]:
        writer.take(one)
    seen = 0
    while seen < len(taken):
        found = run.history("max_logit")
        assert len(found) >= seen
        seen = len(found)
        np.testing.assert_array_equal(found.steps, np.arange(seen))
        wanted = np.array([expected[step] for step in range(seen)]).reshape(seen, 2, 3)
        np.testing.assert_allclose(found.values, wanted, rtol=1.6e-5)
    writer.close()


@pytest.mark.parametrize(("bits", "ranks"), [(None, 1), (15, 2)])
def test_counts_beyond_float32_are_exact(tmp_path: Path, ranks: int, bits: int | None) -> None:
    names = ("normalized_entropy", "rows", "empty_rows", "nonfinite_rows", "judged_rows")
    counts = [2**24 + 1, 2**24, 3, 2**24 + 3, 123_456_789_123, 0]

    def taken(rank: int) -> Iterator[Sample]:
        for step in range(160):
            values = np.array([np.full(6, np.float32(0.7)), *(np.roll(counts, place) for place in range(4))])
            values = values if step % 3 == 0 else np.minimum(values, 2**24).astype(np.float32)
            yield Sample(step, 1000.0 + step, sites(4)[2 * rank : 2 * rank + 2], names, values)

    for rank in range(ranks):
        written(tmp_path / "a", taken(rank), rank=rank, bits=bits)
    run = open_run(tmp_path / "a")
    assert run.statistics == names
    for place, name in enumerate(names[1:]):
        expected = np.tile(np.roll(counts, place), ranks)
        found = run.history(name).values.reshape(160, -1)
        np.testing.assert_array_equal(found[::3], np.tile(expected, (54, 1)))
        np.testing.assert_array_equal(found[1::3], np.tile(np.minimum(expected, 2**24), (53, 1)))
    for step, most in ((150, np.inf), (151, 2**24)):
        heads = [head for site in run.at(step).sites for head in site.heads]
        assert [head.rows for head in heads] == np.minimum(np.tile(counts, ranks), most).tolist()
        assert [head.empty_rows for head in heads] == np.minimum(np.tile(np.roll(counts, 1), ranks), most).tolist()
        assert {head.normalized_entropy for head in heads} == {run.at(1).sites[0].heads[0].normalized_entropy}
    summed = run.ranks.readers[0].tables.rows("SELECT nonfinite_rows FROM summary WHERE sample = 3")
    assert sum(row for (row,) in summed) == sum(counts)
    frame = export.tables(run.ranks)
    assert next(frame)["rows"][:3].tolist() == counts[:3]


def test_a_history_in_memory_is_read_the_same_way() -> None:
    fragment = Fragment(None)
    for one in samples(200):
        fragment.append(one)
        fragment.fold()
    run = Run(Ranks([FragmentReader(fragment.tables())]))
    assert run.history("entropy").values.shape == (200, 2, 3)
    assert run.name == "this run"
    assert repr(run) == "Run('this run': 200 samples, steps 0 to 199, 2 sites, 6 heads)"


def test_what_was_noted_of_a_run_is_told(tmp_path: Path) -> None:
    fragment = Fragment(tmp_path / "fragment-0.sqlite", versions={"attemper": "1"})
    fragment.describe({"name": "warm-up", "tags": ["a", "b"], "notes": "hot", "model": "tiny", "fewest_keys": 8})
    fragment.cover({("layers.0.attn", "self", "train"): None, ("x", "self", "train"): "no queries"})
    fragment.lose(3, 7, "disk full")
    fragment.append(sample(0))
    fragment.close()
    run = open_run(tmp_path)
    assert (run.name, run.tags, run.notes, run.live) == ("warm-up", ("a", "b"), "hot", False)
    assert run.segments[0].versions == {"attemper": "1"}
    assert [(one.name, one.reason) for one in run.coverage.skipped] == [("x", "no queries")]
    assert ("x", "self", "train") in run.coverage.expected
    assert len(run.coverage.seen) == 2
    assert [(one.samples, one.reason, one.step) for one in run.lost] == [(3, "disk full", 7)]
    assert run.remarks == ("3 samples are lost: disk full",)
    scan = run.at(0)
    assert (scan.model, scan.reading.fewest_keys) == ("tiny", 8)
    assert [(one.name, one.reason) for one in scan.skipped] == [("x", "no queries")]


def test_two_runs_are_compared_by_their_last_samples(tmp_path: Path) -> None:
    written(tmp_path / "a", samples(20))
    written(tmp_path / "b", samples(30))
    one, two = open_run(tmp_path / "a"), open_run(tmp_path / "b")
    found = one.compare(two)
    assert (found.before, found.after) == ("a", "b")
    assert len(found.heads) == 6
    assert found.heads[0].differs("normalized_entropy")
    assert len(one.compare(two.at(19)).heads) == 6
    assert attemper.compare(one, two).to_dict()["heads"] == found.to_dict()["heads"]


def test_reading_loads_no_torch(tmp_path: Path) -> None:
    written(tmp_path / "a", samples(3))
    code = (
        "import sys, attemper\n"
        "run = attemper.open(sys.argv[1]); run.trend('entropy'); run.at(2); print(run.compare(run.at(1)))\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "a")], check=True, capture_output=True)


def test_samples_come_back_in_their_order_with_the_statistics_that_were_asked_for(tmp_path: Path) -> None:
    train, evaluation = sites(2), sites(1, 2, mode="eval")
    both = (sample(step, labels) for step in range(0, 1500, 5) for labels in (train, evaluation))
    taken = written(tmp_path / "a", both, bits=None)
    found = list(samples_of(open_run(tmp_path / "a"), {"max_logit", "entropy_nats"}))
    assert [(one.step, one.sites) for one in found] == [(one.step, one.sites) for one in taken]
    for one, expected in zip(found, taken, strict=True):
        assert one.quantities == ("entropy_nats", "max_logit")
        np.testing.assert_array_equal(one.values, expected.values[[0, 2]])


def test_samples_of_several_ranks_are_one_a_step_and_pass(tmp_path: Path) -> None:
    labels = sites(4, 2)
    written(tmp_path / "a", (sample(step, labels[:2]) for step in (0, 0, 10, 20)), rank=0)
    written(tmp_path / "a", (sample(step, labels[1:]) for step in (0, 10, 10, 30)), rank=1)
    found = [(one.step, len(one.sites)) for one in samples_of(open_run(tmp_path / "a"))]
    assert found == [(0, 4), (0, 2), (10, 4), (10, 3), (20, 2), (30, 3)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.quick("0")
def test_whatever_was_written_a_run_is_what_counts_of_it(tmp_path: Path, seed: int) -> None:
    """Processes that come and go, steps that repeat and go back, sites that change: against a plain list."""
    random = np.random.default_rng(seed)
    every_site = (*sites(2, 2), *sites(2, 3, mode="eval"))
    segments: list[list[Sample]] = []
    for _ in range(4):
        fragment, step = Fragment(tmp_path / "fragment-0.sqlite", bits=None), int(random.integers(0, 300))
        segments.append([])
        for _ in range(int(random.integers(0, 400))):
            step = max(0, step + int(random.choice([1, 3, 0, -40], p=[0.8, 0.1, 0.09, 0.01])))
            if segments[-1] and step < segments[-1][-1].step:
                segments.append([])
            chosen = tuple(label for label in every_site if random.random() < 0.7) or every_site[:1]
            one = sample(step, chosen)
            one = replace(one, values=one.values + np.float32(random.random()))
            fragment.append(one)
            fragment.fold()
            segments[-1].append(one)
        fragment.close()
    expected: dict[int, dict[SiteKey, np.ndarray]] = {}
    for segment in filter(None, segments):
        expected = {step: found for step, found in expected.items() if step < segment[0].step}
        for one in segment:
            row = one.values[one.quantities.index("max_logit")]
            expected.setdefault(one.step, {}).update({key: row[place] for key, place in one.places.items()})
    run = open_run(tmp_path)
    assert run.steps.tolist() == sorted(expected)
    for label in run.sites:
        values = run.history("max_logit", label).values
        for step, found in zip(run.steps.tolist(), values, strict=True):
            np.testing.assert_array_equal(found, expected[step].get(label.key, np.full(label.heads, np.nan)))
