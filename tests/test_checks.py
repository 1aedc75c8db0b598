"""Argument checks: what they take, and the nearest name of one that was mistyped."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import attemper
from attemper import InputError
from attemper.backends.table import resolve
from attemper.call.normalizer import normalization
from attemper.checks import MOST, did_you_mean, indentation, index_of, one_of, positive_number, whole_number
from attemper.lab import run, train
from attemper.lab.experiment import Experiment
from attemper.lab.model import ByteConfig
from attemper.lab.trained.interventions import configure
from attemper.readings.reading import Reading
from attemper.results.comparison import Comparison
from attemper.statistics import asked_names
from attemper.types import Calibration, Explanation


def test_the_nearest_name_is_named_and_a_distant_one_is_not():
    names = ("scan", "calibrate", "bench", "Entropy")
    assert did_you_mean("scna", names) == " Did you mean 'scan'?"
    assert did_you_mean("entropy", names) == " Did you mean 'Entropy'?"
    assert did_you_mean("xyz", names) == did_you_mean(3, names) == did_you_mean("scan", ()) == ""
    both = {f" Did you mean {' or '.join(pair)}?" for pair in permutations(("'step2'", "'step3'"))}
    assert did_you_mean("step1", ("step2", "seed", "step3")) in both


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


@pytest.mark.parametrize("number", [3, np.int64(3), np.uint8(3), np.array(3), torch.tensor(3), torch.tensor(3).short()])
def test_a_whole_number_is_one_of_python_numpy_or_torch(number: object):
    taken = whole_number("f(x=...)", number)
    assert (taken, type(taken)) == (3, int)


@pytest.mark.parametrize(
    "number", [3.0, "3", None, True, np.bool_(True), torch.tensor(True), torch.tensor(3.0), torch.tensor([3]), [3]]
)
def test_what_is_no_whole_number_is_refused(number: object):
    assert index_of(number) is None
    with pytest.raises(InputError, match=r"f\(x=\.\.\.\) must be an int of at least 1, or None, got "):
        whole_number("f(x=...)", number, none=", or None")


HUGE = {
    "rows": lambda: attemper.attention_statistics(Q, Q, rows=10**25),
    "first tokens": lambda: attemper.attention(Q, Q, Q, stats="all", first_tokens=10**25),
    "window": lambda: attemper.attention(Q, Q, Q, window_size=(10**25, 0)),
    "scale": lambda: attemper.attention(Q, Q, Q, scale=10**400),
    "temperature": lambda: attemper.attention(Q, Q, Q, temperature=10**400),
    "softcap": lambda: attemper.attention(Q, Q, Q, softcap=10**400),
    "every": lambda: attemper.watch(torch.nn.Linear(1, 1), every=10**25),
    "fewest keys": lambda: attemper.scan(torch.nn.Linear(1, 1), [Q], fewest_keys=10**25),
}
Q = torch.randn(1, 1, 3, 4)


@pytest.mark.parametrize("name", HUGE)
def test_a_number_that_nothing_holds_is_refused_in_one_short_line(name: str):
    with pytest.raises(InputError) as raised:
        HUGE[name]()
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 300


def test_the_largest_numbers_are_taken():
    assert whole_number("x", MOST) == MOST
    assert positive_number("x", 10**300, "") == 1e300
    assert attemper.attention(Q, Q, Q, window_size=(MOST, MOST)).output.isfinite().all()


@pytest.mark.parametrize("kind", [Calibration, Comparison, Experiment, Explanation, Reading, attemper.Scan])
@pytest.mark.parametrize("path", ["a.json", Path("a.json"), True, 2.0])
def test_a_path_in_the_place_of_an_indentation_gets_the_line_that_writes_the_file(kind: Any, path: Any):
    reading = Mock(to_json=partial(Reading.to_json, Mock()))
    self = Mock(spec=kind, to_dict=dict, reading=reading)
    name = r"'a\.json'" if "json" in str(path) else "path"
    with pytest.raises(InputError, match=rf"to_json\(indent\) returns a string.*Path\({name}\)\.write_text\(\w+\.to_j"):
        kind.to_json(self, path)


def test_whole_numbers_and_none_are_indentations():
    assert [indentation(value, "scan") for value in (None, 0, np.int64(2))] == [None, 0, 2]
