"""Argument checks: what they take, and the nearest name of one that was mistyped."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import attemper
from attemper import InputError
from attemper.backends.table import resolve
from attemper.call.normalizer import normalization
from attemper.checks import did_you_mean, one_of
from attemper.lab import run, train
from attemper.lab.model import ByteConfig
from attemper.lab.trained.interventions import configure
from attemper.readings.comparison import Comparison
from attemper.statistics import asked_names


def test_the_nearest_name_is_named_and_a_distant_one_is_not():
    names = ("scan", "calibrate", "bench", "Entropy")
    assert did_you_mean("scna", names) == " Did you mean 'scan'?"
    assert did_you_mean("entropy", names) == " Did you mean 'Entropy'?"
    assert did_you_mean("xyz", names) == did_you_mean(3, names) == did_you_mean("scan", ()) == ""


def test_two_names_that_are_as_near_are_both_named():
    assert did_you_mean("step1", ("step2", "seed", "step3")) in (
        " Did you mean 'step2' or 'step3'?",
        " Did you mean 'step3' or 'step2'?",
    )


def test_one_of_gives_the_name_back_or_says_which_there_are():
    assert one_of("f(x=...)", "a", ("a", "b")) == "a"
    with pytest.raises(InputError, match=r"f\(x=...\) must be one of 'alpha', 'beta'; got 'alhpa'\. Did you mean 'alp"):
        one_of("f(x=...)", "alhpa", ("alpha", "beta"))
    with pytest.raises(InputError, match=r"got 3\.$"):
        one_of("f(x=...)", 3, ("alpha", "beta"))


MISTYPED = {
    "statistic": (lambda: asked_names("attention", ["entorpy"]), "'entropy'"),
    "statistic of a comparison": (lambda: Comparison("a", "b", (), (), ()).largest("max_logits"), "'max_logit'"),
    "normalizer": (lambda: normalization("attention", "sparse_max"), "'sparsemax'"),
    "backend": (lambda: resolve("nativ", frozenset()), "'native'"),
    "limit": (lambda: attemper.AlarmLimits.of({"colapsed": 1.0}), "'collapsed'"),
    "experiment": (lambda: run("scalling"), "'scaling'"),
    "experiment that trains": (lambda: train("colapse", out=None), "'collapse'"),  # type: ignore[arg-type]
    "intervention": (lambda: configure(ByteConfig(), "qk-norm"), "'QK-norm'"),
    "feature map": (
        lambda: attemper.functional.linear_attention(*torch.zeros(3, 1, 1, 2, 2), feature_map="rleu"),  # type: ignore[arg-type]
        "'relu'",
    ),
}


@pytest.mark.parametrize("what", MISTYPED)
def test_a_mistyped_name_is_answered_with_the_nearest(what: str):
    call, nearest = MISTYPED[what]
    with pytest.raises(InputError, match=f"Did you mean {nearest}"):
        call()


def test_a_mistyped_public_name_is_answered_with_the_nearest():
    code = "import attemper; attemper.regularise"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "module 'attemper' has no attribute 'regularise'. Did you mean: 'regularize'?" in ended.stderr
