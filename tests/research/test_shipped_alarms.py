"""Judging the alarms that ship: runs of other optimizers, long ones together, watched ones, and tables of made rows."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from research.early_warning import run_file
from research.early_warning.cases import Outcome
from research.early_warning.faults import EVERY_KIND, RAMP, Fault
from research.early_warning.grid import Trial
from research.early_warning.optimizers import OPTIMIZERS, SCHEDULES, OtherRun, orthogonalized
from research.early_warning.run_file import RunFile
from research.shipped_alarms import plan
from research.shipped_alarms.long_runs import Optimizers, Together, measure_together
from research.shipped_alarms.parts import LONG, UNSEEN, WATCHED
from research.shipped_alarms.resampled import resampled
from research.shipped_alarms.results import peak
from research.shipped_alarms.tables import experiment
from research.shipped_alarms.unseen import ALARMED, OtherTraining, measure_unseen
from research.shipped_alarms.verdicts import (
    alarms_of,
    begun,
    first_steps,
    is_warning,
    quantities,
    samples,
    with_surplus,
)
from research.shipped_alarms.watched import measure_watched

from attemper.lab.corpus import drawn_windows
from attemper.lab.model import ByteConfig, ByteModel
from attemper.lab.trained.training import adamw
from attemper.readings.judge import Judge
from research import shipped_alarms
from tests.support.small_runs import corpus, small

CONFIG = ByteConfig(layers=2, heads=2, width=16, context=40)


def other(**values: Any) -> OtherRun:
    return OtherRun(steps=8, batch=2, every=1, config=CONFIG, rate=1e-2).change(**values)


# --- by default ---


def test_the_plan_has_two_healthy_runs_for_each_fault_and_half_of_the_faults_are_rises_of_the_rate():
    parts = {part: [job.trial for job in plan() if job.part == part] for part in (UNSEEN, LONG, WATCHED)}
    kinds = Counter(trial.fault.kind for trial in parts[UNSEEN] if trial.fault)
    assert (len(parts[UNSEEN]), kinds.total()) == (60, 20)
    assert kinds["jump"] + kinds["ramp"] == 10
    assert len({trial.run.optimizer for trial in parts[UNSEEN] if isinstance(trial.run, OtherRun)}) >= 6
    healthy = [trial for trial in parts[UNSEEN] if trial.fault is None]
    assert all(trial.twin in healthy for trial in parts[UNSEEN])
    assert [(trial.fault, trial.run.steps) for trial in parts[LONG]] == [(None, 20_000)] * 6
    assert [trial.fault is None for trial in parts[WATCHED]] == [True, False] * 20
    assert all(trial.run.every == 1 for trial in parts[WATCHED])
    assert plan() == plan()


def test_a_rate_that_rises_gradually_comes_to_its_size_and_stays():
    rate = EVERY_KIND["ramp"].effect(Fault("ramp", 16.0, 100), other()).rate
    assert [rate(step) for step in (0, 100, 100 + RAMP // 2, 100 + RAMP, 5000)] == pytest.approx([1, 1, 4, 16, 16])


def test_schedules_begin_at_the_peak_and_never_rise():
    for name, schedule in SCHEDULES.items():
        shares = [schedule(place / 20) for place in range(21)]
        assert shares[0] == 1, name
        assert all(first >= second >= 0 for first, second in pairwise(shares)), name
    run = other(steps=100, warmup=0.1, schedule="linear")
    assert [run.learning_rate(step) / run.rate for step in (0, 9, 55)] == pytest.approx([0.1, 1.0, 0.5])


def run_with(signals: dict[str, Any], fault: Fault | None = None, **values: Any) -> RunFile:
    trial = Trial(other(**values), fault)
    return RunFile(run_file.identity(trial, corpus(), part=UNSEEN) | {"diverged_at": None}, signals)


def quiet(steps: int = 200) -> dict[str, Any]:
    drawn = np.random.default_rng(0)
    heads = {name: np.full((steps, 2, 2), 0.5, np.float32) for name in ALARMED}
    heads["normalized_entropy"] += 0.02 * drawn.standard_normal((steps, 2, 2)).astype(np.float32)
    return heads | {"loss": (2 + 0.05 * drawn.standard_normal(steps)).astype(np.float32)}


def test_a_file_is_judged_as_a_watch_judges_one_sample_after_another():
    signals = quiet()
    assert not [alarm for alarm in alarms_of(run_with(signals), 1) if is_warning(alarm.kind)]
    signals["loss"][150:] += 1
    signals["max_logit"][100:, 1, 0] = 150
    file = run_with(signals)
    one, found = Judge(), alarms_of(file, 5)
    for sample in with_surplus(samples(file.about["trial"]["run"], quantities(signals, file), 5)).each():
        one.feed(sample)
    for step, loss in enumerate(signals["loss"].tolist()):
        one.loss.feed_one(step, loss)
    assert list(map(str, found)) == list(map(str, one.alarms))
    assert first_steps(found) == {"logits": 100, "logit_growth": 105, "loss_spike": 150}
    assert first_steps(found, since=106) == {"loss_spike": 150}
    assert begun(found) == {"logits": 1, "logit_growth": 1, "loss_spike": 1}
    signals["loss"][160] = np.nan
    assert first_steps(alarms_of(run_with(signals), 5))["nonfinite_loss"] == 160


def test_heads_that_see_one_key_more_are_told_where_no_mask_is_declared():
    signals = quiet() | {"visible_keys": np.full((200, 2, 2), 20.5, np.float32)}
    assert "visible_keys" not in first_steps(alarms_of(run_with(signals), 5))
    signals["visible_keys"][102:, 1, 0] += 0.5
    assert first_steps(alarms_of(run_with(signals), 5)) == {"visible_keys": 105}


def test_the_peak_is_where_the_loss_is_farthest_above_the_twins():
    twin, worse = quiet(), quiet()
    worse["loss"][120:150] += np.concatenate([np.linspace(0, 3, 15), np.linspace(3, 0, 15)]).astype(np.float32)
    worse["loss"][50] += 9  # before the fault
    file = run_with(worse, Fault("jump", 9.0, 100))
    one = Outcome(file, "", run_with(twin), 1.0, hurt=True, told=None)
    assert abs((peak(one) or 0) - 134) <= 2
    broken = RunFile(file.about | {"diverged_at": 130}, file.signals)
    assert peak(replace(one, file=broken)) == 130


def test_resampled_noise_has_the_increments_of_the_run_and_no_trend():
    signals = quiet(2000)
    signals["loss"] += np.linspace(3, 0, 2000, dtype=np.float32)
    drawn = resampled(signals, 5000, np.random.default_rng(1))
    assert {name: len(values) for name, values in drawn.items()} == dict.fromkeys(("loss", *ALARMED), 5000)
    assert drawn["loss"].std() == pytest.approx(0.05, rel=0.1)
    assert drawn["loss"].mean() == pytest.approx(signals["loss"][1000:].mean(), abs=0.01)
    assert (drawn["normalized_entropy"] <= 1).all()
    known = {round(float(one), 3) for one in np.diff(signals["normalized_entropy"][:, 0, 0])}
    increments = np.diff(drawn["normalized_entropy"][:200, 0, 0])
    assert np.mean([round(float(one), 3) in known for one in increments]) > 0.5


# --- with --long ---


@pytest.mark.long("research")
def test_singular_values_of_a_change_are_brought_near_one():
    values = torch.linalg.svdvals(orthogonalized(torch.randn(3, 12, 30)))
    assert (values > 0.5).all()
    assert (values < 1.3).all()
    tall = torch.randn(30, 12)
    torch.testing.assert_close(orthogonalized(tall), orthogonalized(tall.T).T)


@pytest.mark.long("research")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_lowers_the_loss_of_text_that_follows_a_rule(optimizer: str):
    rate = {"SGD": 0.3, "Lion": 1e-3}.get(optimizer, 1e-2)
    trial = Trial(other(steps=60, every=20, optimizer=optimizer, rate=rate))
    values, signals = measure_unseen(trial, corpus())
    assert values["diverged_at"] is None
    assert signals["loss"][-5:].mean() < signals["loss"][:5].mean() - 0.3


@pytest.mark.long("research")
@pytest.mark.parametrize("optimizer", ["AdamW", "Muon"])
def test_runs_that_are_trained_together_are_trained_as_alone(optimizer: str):
    trials = [Trial(other(rate=rate, seed=seed, optimizer=optimizer)) for seed, rate in enumerate((1e-2, 3e-3))]
    together = Together(trials)
    stepping = Optimizers(together, trials)
    for number, trial in enumerate(trials):
        torch.manual_seed(trial.run.seed)
        alone = ByteModel(CONFIG)
        own = OPTIMIZERS[optimizer](alone, trial.run) if optimizer == "Muon" else adamw(alone, trial.run)
        model, other_steps = (together, stepping) if number == 0 else (Together(trials), None)
        other_steps = other_steps or Optimizers(model, trials)
        for step in range(3):
            ids = torch.randint(256, (2, 2, 41), generator=torch.Generator().manual_seed(step))
            losses = model.losses(ids)
            loss = alone.loss(ids[number])
            torch.testing.assert_close(losses[number], loss)
            other_steps.step(step, model.gradient(losses.sum()))
            own.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(alone.parameters(), trial.run.clip)
            for group in own.param_groups:
                group["lr"] = trial.run.learning_rate(step)
            own.step()
        for name, weight in alone.named_parameters():
            torch.testing.assert_close(model.weights[name][number], weight, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.long("research")
def test_a_long_run_measures_heads_at_every_step_as_a_run_alone_does():
    trials = [Trial(other(seed=seed)) for seed in (0, 1)]
    (_, first), _ = measure_together(trials, corpus())
    assert {name: values.shape for name, values in first.items()} == {
        "loss": (8,),
        "gradient_norm": (8,),
        **dict.fromkeys(ALARMED, (8, 2, 2)),
    }
    training = OtherTraining(trials[0], corpus())
    training.batch = lambda step: _drawn(2, step)  # type: ignore[method-assign]
    training.advance()
    for name in ("loss", *ALARMED):
        np.testing.assert_allclose(first[name], training.signals.arrays()[name], rtol=2e-3, atol=1e-4, err_msg=name)


def _drawn(runs: int, step: int) -> torch.Tensor:
    return drawn_windows(corpus().training, runs * 2, 41, seed=2**41 + step)[:2]


@pytest.mark.long("research")
def test_a_watched_run_has_the_warnings_of_its_stored_run_and_of_its_file(tmp_path: Path):
    run = small(steps=90, batch=2, every=1, rate=1e-2, config=CONFIG)
    for fault in (None, Fault("jump", 100.0, 60), Fault("leak", 2.0, 60)):
        values, signals = measure_watched(Trial(run, fault), corpus())
        assert values["live"] == values["stored"]
        path = tmp_path / f"{fault and fault.kind}.npz"
        run_file.write(path, run_file.identity(Trial(run, fault), corpus(), part=WATCHED), values, signals)
        told = first_steps(alarms_of(run_file.read(path), 1))
        assert {kind for kind in told if is_warning(kind)} == {kind for kind, *_ in values["stored"]}
        assert math.isfinite(signals["loss"].sum())


@pytest.mark.long("research")
def test_a_quick_plan_is_trained_goes_on_and_is_shown(tmp_path: Path):
    planned = plan(quick=True)
    lines: list[str] = []
    how: dict[str, Any] = {"quick": True, "workers": 1, "corpus": corpus()}
    content = shipped_alarms.results(planned, tmp_path, **how, at_most=1)
    assert (len(content["runs"]), content["planned"]) == (1, len(planned))
    content = shipped_alarms.results(planned, tmp_path, **how)
    assert len(content["runs"]) == content["planned"] == len(planned)
    shipped_alarms.train(planned, tmp_path, workers=1, corpus=corpus(), report=lines.append)
    assert len(lines) == 1, "nothing is trained again"
    assert experiment(content).table("long healthy runs, sampled at every step").rows
