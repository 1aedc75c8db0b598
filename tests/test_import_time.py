"""What importing costs, told by what is loaded: torch takes seconds, so nothing loads it before it is needed.

Times are measured by ``benchmarks/import_time.py``; here are only the facts that keep them short.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "attemper"
HEAVY = {"torch", "numpy", "transformers"}
COMMAND_LINE = {"typer", "rich", "click"}
WITHOUT_TORCH = ("errors", "checks", "files", "text", "statistics", "records", "store", "report", "cli")

HELP = """
import sys
sys.argv = ["attemper", *{arguments!r}]
from attemper.cli import main
try:
    status = main()
except SystemExit as stop:
    status = stop.code
assert not status, status
"""

REPORT = "\nimport json, sys\nprint('\\nloaded:', json.dumps(sorted(sys.modules)))"


def run(code: str) -> tuple[str, set[str]]:
    """What ``code`` prints in a fresh interpreter, and the top-level modules that are loaded when it is done."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code + REPORT], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    printed, _, modules = done.stdout.rpartition("loaded:")
    return printed, {name.split(".")[0] for name in json.loads(modules)}


def test_the_probe_sees_what_is_loaded():
    assert "numpy" in run("import numpy")[1]


def test_import_attemper_loads_neither_torch_nor_the_command_line():
    loaded = run("import attemper; attemper.__version__; dir(attemper)")[1]
    assert "attemper" in loaded
    assert not loaded & (HEAVY | COMMAND_LINE)


def test_a_public_name_loads_its_home_when_it_is_used():
    loaded = run("import attemper; attemper.InputError")[1]
    assert not loaded & HEAVY
    assert "torch" in run("import attemper; attemper.attention")[1]


def test_attention_loads_without_transformers_and_without_the_command_line():
    loaded = run("import attemper; attemper.attention; attemper.functional")[1]
    assert not loaded & (COMMAND_LINE | {"transformers"})


def test_scan_loads_without_transformers():
    assert "transformers" not in run("import attemper; attemper.scan")[1]


def test_nothing_loads_the_compiler_of_torch_before_somebody_compiles():
    """``torch._dynamo`` is more than a second of a first call."""
    code = """
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
    run(code)


@pytest.mark.parametrize(
    "layer", [name for name in WITHOUT_TORCH if (SRC / name).is_dir() or (SRC / f"{name}.py").is_file()]
)
def test_a_layer_without_torch_loads_without_it(layer):
    assert not run(f"import attemper.{layer}")[1] & HEAVY


@pytest.mark.parametrize("arguments", [["--help"], ["scan", "--help"], ["doctor", "--help"]], ids=" ".join)
def test_help_loads_no_torch(arguments):
    printed, loaded = run(HELP.format(arguments=arguments))
    assert "Usage" in printed
    assert not loaded & HEAVY
