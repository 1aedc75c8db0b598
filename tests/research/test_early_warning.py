"""Judging early warnings on made runs whose answer is known: limits, halves, leads, intervals, control, tables."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from research.early_warning import costs, detectors, run_file
from research.early_warning.cases import courses, judge_files, noise_floor
from research.early_warning.default_alarms import first_alarms
from research.early_warning.detectors import DETECTORS
from research.early_warning.encoder import EncoderConfig
from research.early_warning.faults import Fault
from research.early_warning.grid import SEEDS, Trial
from research.early_warning.judging import (
    Case,
    Course,
    clopper_pearson,
    combine,
    fit,
    halves,
    judge,
    judge_left_out,
    recall_at,
    recall_together,
    ring,
    shuffle_labels,
)

from attemper.lab.experiment import Experiment
from attemper.lab.trained.runs import plain
from research import early_warning
from tests.support.small_runs import corpus, small

pytestmark = pytest.mark.long("research")

RESULTS = import_module("research.early_warning.results")
STEPS = np.arange(0.0, 100.0, 5.0)


def course(level: float, rises_at: float = np.inf, to: float = 0.0) -> Course:
    return Course(STEPS, np.where(rises_at <= STEPS, to, level))


def cases(kinds: str = "ab", configurations: int = 8, seeds: int = 5) -> list[Case]:
    """``early`` sees fault "a" 10 steps after it begins, ``loss`` 40; ``other`` sees "b"; ``blind`` sees nothing."""
    drawn = random.Random(0)
    found = []
    for place in range(configurations):
        for seed in range(seeds):
            levels = {name: course(drawn.random()) for name in ("early", "loss", "other", "blind")}
            name = f"configuration {place}"
            found.append(Case(name, seed, levels))
            kind = kinds[(place + seed) % len(kinds)]
            seen = {"early": course(drawn.random(), 30, 2.0), "loss": course(drawn.random(), 60, 2.0)}
            rung = seen if kind == "a" else {"other": course(drawn.random(), 40, 2.0)}
            found.append(Case(name, seed, levels | rung, kind, since=20, hurt=True, told=75))
    return found


def test_halves_never_part_a_fault_from_its_twin_and_both_hold_healthy_runs():
    first, second = halves(cases())
    assert len(first) + len(second) == len(cases())
    assert not {case.configuration for case in first} & {case.configuration for case in second}
    assert len({case.configuration for case in first}) == 4


def test_a_detector_finds_what_it_sees_with_its_lead_and_nothing_else():
    found = judge(cases(), ["early"], "loss")
    assert found.found == (20, 40)
    assert {kind: tuple(share) for kind, share in found.by_kind.items()} == {"a": (20, 20), "b": (0, 20)}
    assert (np.median(found.leads), np.median(found.held_out_leads)) == (30, 45)
    assert found.false.total == 40
    assert found.false.hits <= 3  # the largest of 20 is seldom far above the largest of 20 others
    assert judge(cases(), ["blind"], "loss").found.hits <= 3


def test_the_limit_is_the_largest_score_of_healthy_runs_and_lets_so_many_ring():
    made = cases()
    peaks = sorted(case.courses["early"].peak() for case in made if not case.kind)
    assert [fit(made, "early", allowed) for allowed in (0, 1)] == [peaks[-1], peaks[-2]]
    assert fit([], "early") == np.inf
    assert recall_at(made, "early", 0) == (20, 40)


def test_a_ring_before_the_fault_is_the_twins_and_only_scores_that_are_known_ring():
    case = Case("x", 0, {"one": Course(STEPS, np.where(STEPS < 20, 9.0, 0.0))}, "a", since=20, hurt=True)
    assert ring(case, {"one": 5.0}) is None
    assert case.courses["one"].ring(5.0) == 0
    assert Course(STEPS[:3], np.array([np.nan, np.nan, np.inf])).ring(1e9) == 10
    assert Course(STEPS[:2], np.array([np.nan, np.nan])).peak() == -np.inf


def test_a_combination_takes_what_finds_more_and_no_more():
    assert set(combine(cases(), ["blind", "loss", "other", "early"])) == {"other", "loss"}
    both = judge(cases(), ["early", "other", "blind"], "loss", combined=True)
    assert both.found == (40, 40)
    assert both.members == ("early", "other")
    assert recall_together(cases(), ["early", "other", "blind"]) == (40, 40)
    assert recall_together(cases(), ["early", "blind"]).hits < 40


def test_a_combination_that_may_ring_in_one_healthy_run_finds_what_lies_between():
    def case(kind: str, seed: int, score: float) -> Case:
        return Case("one", seed, {"a": Course(np.arange(2.0), np.array([0.0, score]))}, kind=kind, hurt=bool(kind))

    made = [case("", 0, 5.0), case("", 1, 1.0), case("x", 0, 3.0), case("x", 1, 6.0)]
    assert [recall_together(made, ["a"], allowed) for allowed in (0, 1)] == [(1, 2), (2, 2)]


def test_without_a_kind_the_combination_does_not_learn_of_it():
    left = judge_left_out(cases(), ["early", "other"], "loss")
    assert left["a"].members == ("other",)
    assert left["a"].found.hits <= 2
    assert left["a"].found.total == 20


def test_with_shuffled_labels_nothing_is_found_beyond_the_false_alarms():
    made = cases(configurations=20)
    shuffled = [shuffle_labels(made, seed) for seed in range(10)]
    assert {len(one) for one in shuffled} == {len(made)}
    judged = [judge(one, ["early"], "loss") for one in shuffled]
    assert np.mean([one.found.hits / one.found.total for one in judged]) < 0.05
    assert np.mean([one.false.hits / one.false.total for one in judged]) < 0.05
    assert judge(made, ["early"], "loss").found.hits >= 50


@pytest.mark.parametrize(
    ("hits", "total", "expected"),
    [(0, 100, (0, 0.036217)), (5, 10, (0.187086, 0.812914)), (100, 100, (0.963783, 1)), (0, 0, (0, 1))],
)
def test_intervals_are_those_of_clopper_and_pearson(hits: int, total: int, expected: tuple[float, float]):
    assert clopper_pearson(hits, total) == pytest.approx(expected, abs=1e-6)


def test_scores_of_detectors_rise_where_their_signal_does():
    quiet = 2 + 0.1 * np.sin(np.arange(80, dtype=np.float32))
    jumps = np.where(np.arange(80) == 70, 6, quiet).astype(np.float32)
    for one, name in ((detectors.LOSS, "loss"), (detectors.GRADIENT_NORM, "gradient_norm")):
        scores = one.score({name: jumps})
        assert np.isnan(scores[:50]).all()
        assert int(np.nanargmax(scores)) == 70
    assert detectors.gradient_norm({"gradient_norm": jumps})[70] == pytest.approx(3, rel=0.05)
    assert detectors.loss_deviations({"loss": np.append(quiet, np.nan).astype(np.float32)})[80] == np.inf
    doubling = np.full((20, 1, 2), 60, np.float32)
    doubling[:, 0, 1] = 60 * 2.0 ** np.maximum(0, np.arange(20) - 5)
    fast = detectors.logit_growth({"max_logit": doubling})
    assert (fast[3:6] == 0).all()
    assert fast[-1] == pytest.approx(1 / 5)  # doublings a step: readings are 5 steps apart
    falls = np.ones((10, 1, 2), np.float32)
    falls[7:, 0, 0] = 0.1
    assert detectors.entropy_fall({"normalized_entropy": falls})[-1] == pytest.approx(-0.1)
    assert detectors.entropy_spread({"normalized_entropy": falls})[-1] == pytest.approx(0.45)
    ranks = {"output_rank": np.array([[8, 4], [8, 2]], np.float32), "head_rank": np.ones((2, 2, 2), np.float32)}
    assert detectors.rank_loss(ranks).tolist() == [-2, -1]


def made_files(folder: Path, *, broken: bool = False) -> list[Trial]:
    """Files of two configurations, five seeds each, and a fault in each that raises logits and held-out loss."""
    trials = []
    for rate in (1e-3, 3e-3):
        for seed in range(SEEDS):
            for fault in (None, Fault("scale", 8.0, 50)):
                trial = Trial(small(rate=rate, seed=seed, steps=100, every=5), fault)
                trials.append(trial)
                _write(folder, trial, broken)
    return trials


def _write(folder: Path, trial: Trial, broken: bool) -> None:
    heads, level = (20, 2, 2), 3.0 + 0.01 * trial.run.seed
    late = np.arange(20)[:, None, None] >= (10 if trial.fault else 99)
    signals = {
        "loss": np.full(100, level) + 0.1 * np.sin(np.arange(100.0)),
        "gradient_norm": np.where((np.arange(100) >= 70) & (trial.fault is not None), 9.0, 1.0),
        "update_norm": np.ones(100),
        "held_out": np.full(4, level) + np.where(np.arange(4) >= 3, 1.0 if trial.fault else 0.0, 0.0),
        "max_logit": np.where(late, 80.0, 5.0) * np.ones(heads),
        "output_rank": np.ones((10, 2)),
        **{name: np.ones((10, 2, 2)) for name in ("head_rank", "increment_entropy")},
        **{name: np.full(heads, 0.5) for name in ("normalized_entropy", "first_token_mass", "disagreement")},
        **{name: np.ones(heads) for name in ("score_std", "logit_std", "entropy")},
    }
    values = {
        "held_out": None if broken and trial.fault else level + (0.5 if trial.fault else 0.0),
        "diverged_at": 90 if broken and trial.fault else None,
        "seconds": {"training": 2.0} | dict.fromkeys(
            ("attention", "gradient_norm", "update_norm", "output_rank", "increment_entropy"), 0.1
        ),
    }  # fmt: skip
    arrays = {name: np.asarray(signal, np.float32) for name, signal in signals.items()}
    run_file.write(folder / run_file.file_name(trial, corpus()), run_file.identity(trial, corpus()), values, arrays)


@pytest.fixture(autouse=True)
def known_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are measured in a test of their own; few shuffles."""
    each = {name: {"signal": 10.0 if one.signal != "loss" else 0.0, "score": 2.0} for name, one in DETECTORS.items()}
    monkeypatch.setattr(RESULTS, "SHUFFLES", 2)
    monkeypatch.setattr(RESULTS, "measure_costs", lambda run, corpus: {"step": 1000.0, "detectors": each})


def shown(folder: Path, trials: list[Trial]) -> Experiment:
    content = early_warning.results(trials, folder, quick=False, workers=1, corpus=corpus(), at_most=0)
    return early_warning.experiment(json.loads(json.dumps(plain(content))))


def test_tables_say_what_is_in_the_files(tmp_path: Path):
    result = shown(tmp_path, made_files(tmp_path))
    table = result.table("found and false alarms")
    rows = {row[0]: row for row in table.rows}
    assert set(rows) == {*DETECTORS, "combination"}
    assert rows["largest logit"][1:6:2] == ("10 of 10", "0 of 10", "10 of 10")
    assert rows["entropy"][1] == "0 of 10"
    assert rows["combination"][5:7] == ("10 of 10", "10 of 10")
    leads = {row[0]: row for row in result.table("lead and cost").rows}
    assert leads["largest logit"][3:5] == (25, 10)  # rings at 50, held-out loss tells at 75
    assert leads["largest logit"][5:7] == (20, 10)  # the gradient norm rings at 70
    assert leads["gradient norm"][5:7] == (0, 10)
    assert leads["entropy"][5:7] == (None, 0)
    assert leads["largest logit"][7:] == (10, 2, "1.2%", 5)
    assert leads["loss z-score"][7:10] == (0, 2, "0.2%")
    assert leads["combination"][7:10] == (10, 2, "1.2%")
    assert "scores and weights took 5.0% of the training" in result.table("lead and cost").see
    runs = {row[0]: row for row in result.table("the runs").rows}
    assert runs["scale"][2:] == (10, 10, 0.5)
    assert "20 of 20 runs are done, 20 are judged: 10 healthy ones and 10 with a fault" in result.table("the runs").see
    counts = ("0 of 10", "0 of 0", "10 of 10", 20, 10)  # a sample each 5 steps
    alarms = result.table("the alarms that ship, by their defaults")
    assert alarms.rows == (("logit_growth", "warning", *counts), ("any above notice", None, *counts))
    assert "In no run at all: nonfinite, collapsed" in alarms.see


def test_visible_keys_of_a_run_are_counted_from_its_masks_when_it_is_judged(tmp_path: Path):
    trial = Trial(small(steps=100, every=5), Fault("leak", 1.0, 50, head=1))
    _write(tmp_path, trial, broken=False)
    (path,) = tmp_path.glob("*.npz")
    found = courses(run_file.read(path))["visible keys"]
    assert (found.ring(0.0), len(found.scores)) == (50, 20)


def test_costs_are_of_each_detector_and_the_loss_is_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(costs, "REPEATS", 2)
    found = costs.measure_costs(small(every=5), corpus())
    assert set(found["detectors"]) == set(DETECTORS)
    signals = {name: cost["signal"] for name, cost in found["detectors"].items()}
    assert [name for name, taken in signals.items() if taken == 0] == ["loss z-score"]
    assert signals["largest logit"] == signals["logit growth"], "one signal, measured once"


def test_runs_that_broke_did_hurt_and_have_no_excess(tmp_path: Path):
    runs = {row[0]: row for row in shown(tmp_path, made_files(tmp_path, broken=True)).table("the runs").rows}
    assert runs["scale"][2:] == (10, 10, None)


def test_a_configuration_without_five_healthy_runs_is_not_judged_and_files_of_other_plans_are_left_out(tmp_path: Path):
    trials = made_files(tmp_path)
    first, *rest = (tmp_path / run_file.file_name(one, corpus()) for one in trials)
    assert {one.document["run"]["rate"] for one in judge_files(map(run_file.read, rest))} == {3e-3}
    first.unlink()
    for planned, count in ((trials, len(rest)), (trials[1:5], 4)):
        result = early_warning.results(planned, tmp_path, quick=False, workers=1, corpus=corpus(), at_most=0)
        assert (len(result["runs"]), result["planned"]) == (count, len(planned))
    assert [row["fault"] is None for row in result["runs"]].count(True) == 2


def test_a_difference_within_the_noise_of_seeds_does_not_hurt():
    assert noise_floor([1.0, 1.0, 1.0, 1.0, 1.0]) == 0
    assert noise_floor([0.9, 1.0, 1.1]) == pytest.approx(3 * 2**0.5 * 0.1)


def test_default_alarms_are_those_of_a_watch(tmp_path: Path):
    trial = Trial(small(steps=100, every=5))
    _write(tmp_path, trial, broken=False)
    (path,) = tmp_path.glob("*.npz")
    file = run_file.read(path)
    assert first_alarms(file) == {}
    file.signals["max_logit"][12:] = 150
    assert first_alarms(file)["logits"] == 60
    assert "logits" not in first_alarms(file, since=65)
    assert "logits" not in first_alarms(file, limits={"logits": 160})


def test_another_model_is_judged_by_the_limits_of_the_small_ones_and_changes_nothing_of_theirs(tmp_path: Path):
    trials = made_files(tmp_path)
    before = shown(tmp_path, trials).table("found and false alarms")
    config = EncoderConfig(layers=2, heads=2, width=16, context=16)
    others = [Trial(replace(one.run, config=config), one.fault) for one in trials[:10]]
    for other in others:
        _write(tmp_path, other, broken=False)
    result = shown(tmp_path, trials + others)
    assert result.table("found and false alarms") == before
    table = result.table("the same limits on a pretrained encoder")
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["largest logit"] == rows["any alarm above notice"] == ("0 of 5", "0 of 0", "5 of 5")
    assert rows["entropy"] == ("0 of 5", "0 of 0", "0 of 5")
    assert table.see.startswith("10 of 10 runs of all-MiniLM-L6-v2")


def test_a_remedy_is_held_against_the_run_unchanged_and_the_noise_floor(tmp_path: Path):
    trials = made_files(tmp_path)
    ends = {"QKClip": [3.3, 3.31, 3.51], "roll-back": [None, 3.6, 9.0]}  # unchanged: 3.5, 3.51, 3.52; the floor: 0.067
    for remedy, losses in ends.items():
        for trial, end in zip(trials[1:6:2], losses, strict=True):
            known = {"branch": {"remedy": remedy, "step": 60}}
            values = {"held_out": end, "diverged_at": None, "seconds": {}}
            path = tmp_path / run_file.file_name(trial, corpus(), **known)
            run_file.write(path, run_file.identity(trial, corpus(), **known), values, {"loss": np.ones(2, np.float32)})
    title = "branch at the alarm: the same faulty runs, gone on otherwise from their first warning"
    content = early_warning.results(trials, tmp_path, quick=False, workers=1, corpus=corpus(), at_most=0)
    table = early_warning.experiment(content).table(title)
    assert table.rows == (("QKClip", "hurt", 3, 3, 2, 0, 0.2), ("roll-back", "hurt", 3, 0, 0, 3, -2.79))
    for one in content["branches"]:
        if one["remedy"] == "QKClip":
            one["unchanged"] = one["twin"]
    rows = early_warning.experiment(content).table(title).rows
    assert [row[:3] for row in rows] == [("roll-back", "hurt", 3), ("QKClip", "without harm", 3)]
    assert table.see.startswith("6 branches of 3 faulty runs")
