"""What importing costs, told by what is loaded: torch takes seconds, so nothing loads it before it is needed.

Times are measured by ``benchmarks/import_time.py``; here are only the facts that keep them short.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "attemper"
HEAVY = {"torch", "numpy", "transformers"}
COMMAND_LINE = {"typer", "rich", "click"}
WITHOUT_TORCH = ("errors", "checks", "files", "text", "statistics", "readings", "store", "report", "cli")

HELP = "import sys; sys.argv = ['attemper', *{arguments!r}]; from attemper.cli import main; raise SystemExit(main())"
ASK = """
import contextlib, io, json, sys

for question in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            exec(question, {})
        except SystemExit as stop:
            assert not stop.code, (question, stop.code)
    print(json.dumps([printed.getvalue(), sorted({name.split(".")[0] for name in sys.modules})]))
"""


@functools.cache
def asked(*questions: str) -> dict[str, tuple[str, set[str]]]:
    """What each prints in one fresh interpreter, in which those before it have run, and what is loaded after it."""
    # An older typer imports what the newest click is about to drop.
    warnings = ("-W", "error", "-W", "default::DeprecationWarning:typer")
    command = [sys.executable, *warnings, "-c", ASK, json.dumps(questions)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    return {question: (text, set(loaded)) for question, (text, loaded) in zip(questions, answers, strict=True)}


ROOT = "import attemper; attemper.__version__; dir(attemper)"
ERROR = "import attemper; attemper.InputError"
READINGS = "import attemper; attemper.Scan, attemper.compare, attemper.AlarmLimits"
ATTENTION = "import attemper; attemper.attention; attemper.functional"
SCAN = "import attemper; attemper.scan"
NO_COMPILER = """
import sys
import torch
from torch import nn
import attemper
from attemper import functional

def compiler_is_absent(after):
    assert "torch._dynamo" not in sys.modules, after

compiler_is_absent("torch, which would hide what follows")
q = torch.randn(1, 2, 6, 4, requires_grad=True)
found = attemper.attention(q, q, q, stats="all")
(found.output.sum() + found.stats.entropy.sum()).backward()
compiler_is_absent("attention")
attemper.attention_statistics(q, q).entropy
compiler_is_absent("attention_statistics")
functional.linear_attention(q, q, q, is_causal=True).output.sum().backward()
functional.entmax(q, 1.3).sum().backward()
compiler_is_absent("functional")
model = attemper.nn.MultiheadAttention(8, 2, temperature=attemper.nn.LearnedTemperature(2))
x = torch.randn(2, 5, 8)
model(x, x, x)[0].sum().backward()
attemper.scan(model, [(x, x, x)])
compiler_is_absent("scan")
plain = nn.MultiheadAttention(8, 2, batch_first=True)
with attemper.watch(plain):
    plain(x, x, x)
attemper.tap(q, q, name="own")
compiler_is_absent("watch and tap")
with attemper.temper(plain, temperature=2.0):
    penalty = attemper.regularize(plain, attemper.EntropyTarget(1.0, 0.1))
    penalty.attach(plain(x, x, x)[0].sum()).backward()
compiler_is_absent("temper and regularize")
"""
LAYERS = [name for name in WITHOUT_TORCH if (SRC / name).is_dir() or (SRC / f"{name}.py").is_file()]
OPTIONS = [["--help"], ["scan", "--help"], ["doctor", "--help"]]


def loaded_by_names(question: str) -> set[str]:
    return asked(ROOT, ERROR, READINGS, ATTENTION, SCAN, NO_COMPILER)[question][1]


def without_torch(question: str) -> tuple[str, set[str]]:
    """Of the layers, and then of the command line."""
    layers = (f"import attemper.{layer}" for layer in LAYERS)
    return asked(*layers, *(HELP.format(arguments=arguments) for arguments in OPTIONS))[question]


def test_the_probe_sees_what_is_loaded():
    assert "numpy" in asked("import numpy")["import numpy"][1]


def test_import_attemper_loads_neither_torch_nor_the_command_line():
    loaded = loaded_by_names(ROOT)
    assert "attemper" in loaded
    assert not loaded & (HEAVY | COMMAND_LINE)


def test_a_public_name_loads_its_home_when_it_is_used():
    assert not loaded_by_names(ERROR) & HEAVY
    assert not loaded_by_names(READINGS) & (HEAVY | {"rich"})
    assert "torch" in loaded_by_names(ATTENTION)
    assert not loaded_by_names(ATTENTION) & (COMMAND_LINE | {"transformers"})
    assert "transformers" not in loaded_by_names(SCAN)


def test_nothing_loads_the_compiler_of_torch_before_somebody_compiles():
    """``torch._dynamo`` is more than a second of a first call."""
    loaded_by_names(NO_COMPILER)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_without_torch_loads_without_it(layer: str):
    assert not without_torch(f"import attemper.{layer}")[1] & HEAVY


@pytest.mark.parametrize("arguments", OPTIONS, ids=" ".join)
def test_help_loads_no_torch(arguments: list[str]):
    printed, loaded = without_torch(HELP.format(arguments=arguments))
    assert "Usage" in printed
    assert not loaded & HEAVY
