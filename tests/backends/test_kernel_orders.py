"""The names that Python gives to what compiled kernels read and leave are theirs, in their order.

A statistic that the kernels do not know is computed beside them and changes nothing of what they give.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import attemper
from attemper.backends.native.arguments import STATISTICS
from attemper.backends.native.library import check, library
from attemper.backends.native.rows import DERIVED
from attemper.backends.normalizers import CODES
from attemper.backends.sums import BINNED, BINS, COLUMNS, SUMMED, WIDTH
from attemper.errors import BackendError
from attemper.statistics import ONE_PASS, Column, state_columns
from tests.support.fixtures import NATIVE

BACKENDS = Path(attemper.__file__).parent / "backends"
COLUMN_OF = {
    "M": Column.MAXIMUM,
    "Z": Column.LOG_SUM,
    "N": Column.VISIBLE_KEYS,
    "A": Column.MEAN_DEPTH,
    "V": Column.VARIANCE,
    "C": Column.SQUARED_WEIGHTS,
    "F": Column.FIRST_TOKENS,
}
"""Symbol of docs/design/0002, as Triton's kernels name their variables -> the state column."""


def members(file: str, enum: str) -> tuple[str, ...]:
    """The members of an ``enum`` of the C++ sources; the last one, their number, is left out."""
    found = re.search(
        rf"enum {enum}(?: : \w+)? \{{(.*?)\}};", (BACKENDS / "native" / "source" / file).read_text("utf-8"), re.S
    )
    assert found is not None
    return tuple(name.strip() for name in found[1].split(","))[:-1]


def test_state_columns_are_those_of_the_native_source():
    assert members("arguments.h", "Name") == tuple(column.name for column in Column)


@pytest.mark.skipif(not NATIVE, reason="the native kernels are not built here")
@pytest.mark.parametrize("code", [-1, len(CODES), 1 << 40])
def test_the_library_refuses_a_normalizer_that_it_does_not_know(code: int):
    nothing = (None, 0, None, None)
    assert library().attemper_weights(1, 1, code, 0.0, 0.0, *nothing, 1) != 0
    assert library().attemper_gradient(1, 1, code, 0.0, *nothing, None, 1) != 0
    with pytest.raises(
        BackendError, match=r"does not know this normalizer\. Build it again: python scripts/build_native"
    ):
        check("attemper_weights", library().attemper_weights(1, 1, code, 0.0, 0.0, *nothing, 1))


@pytest.mark.skipif(not NATIVE, reason="the native kernels are not built here")
@pytest.mark.parametrize("backward", [False, True])
def test_attention_by_a_normalizer_that_the_library_does_not_know_is_refused(
    monkeypatch: pytest.MonkeyPatch, backward: bool
):
    x = torch.randn(1, 1, 3, 4, requires_grad=True)
    output = attemper.attention(x, x, x, normalizer="sparsemax", backend="native").output
    monkeypatch.setitem(CODES, "sparsemax", len(CODES))
    with pytest.raises(BackendError, match="does not know this normalizer"):
        output.sum().backward() if backward else attemper.attention(x, x, x, normalizer="sparsemax", backend="native")


def test_derived_statistics_have_the_order_of_the_native_source():
    assert tuple(map(str.lower, members("arguments.h", "Derived"))) == DERIVED
    assert len(DERIVED) + 1 == STATISTICS


def test_sums_have_the_order_of_the_native_source():
    assert members("sums.cpp", "Summed") == tuple(column.name for column in SUMMED)
    assert tuple(map(str.lower, members("sums.cpp", "Sum"))) == COLUMNS
    assert tuple(map(str.lower, members("sums.cpp", "Group"))) == BINNED
    assert len(COLUMNS) + BINS * len(BINNED) == WIDTH


def test_sums_have_the_numbers_of_the_triton_source():
    source = (BACKENDS / "triton" / "sums.py").read_text("utf-8")
    loaded = re.search(r"^ +([a-z](?:, [a-z])+)(?:, _)+ = softmax\.load\(", source, re.M)
    assert loaded is not None
    assert tuple(COLUMN_OF[symbol.upper()] for symbol in loaded[1].split(", ")) == SUMMED
    added = source[source.index("def _add(") : source.index("return single, bins")]
    assert list(map(int, re.findall(r"\bsingle\[(\d+)\]", added))) == list(range(len(COLUMNS)))
    assert list(map(int, re.findall(r"\bbins\[(\d+)\]", added))) == list(range(len(BINNED)))
    assert COLUMNS[3] == "max_logit"


def test_a_state_for_the_sums_is_that_of_all_statistics_of_one_pass():
    assert state_columns(ONE_PASS) == SUMMED


ADD_A_ROW = """
import importlib.util
import sys
from pathlib import Path

ROW = '''    Statistic(
        "perplexity", "e^H", "1 to n", softmax=(Column.MEAN_DEPTH,), rowwise=(Column.ENTROPY,),
        shown=Display("perplexity", "Perplexity", "keys", "Keys that would have this entropy with equal weights."),
    ),
'''
BEFORE = '''    Statistic(
        "normalized_entropy"'''
spec = importlib.util.find_spec("attemper.statistics")
module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
source = Path(spec.origin).read_text("utf-8")
assert source.count(BEFORE) == 1
exec(compile(source.replace(BEFORE, ROW + BEFORE), spec.origin, "exec"), module.__dict__)
"""
COMPARE = """
from types import SimpleNamespace as Some

import torch

import attemper
from attemper.backends.sums import SUMMED
from attemper.call.formulas import FORMULAS
from attemper.call.call_sums import BACKEND, accumulates
from attemper.monitor.head_sums import SiteSums
from attemper.readings.sample import SiteLabel

FORMULAS["perplexity"] = lambda row: row["entropy"].exp()
torch.manual_seed(0)
query, key, value = torch.randn(3, 1, 2, 9, 8)
found = []
for backend in ("native", "reference"):
    stats = attemper.attention(query, key, value, stats="all", is_causal=True, backend=backend).stats
    site = SiteSums(SiteLabel("site", "self", "eval", None, "full", "softmax", 2))
    site.add(stats, 9, 9)
    found.append((stats, site.sums))
(one, its_sums), (two, other_sums) = found
assert "perplexity" in one.names
for name in one.names:
    torch.testing.assert_close(one[name], two[name], rtol=1e-4, atol=1e-5)
torch.testing.assert_close(its_sums, other_sums, rtol=1e-4, atol=1e-5)
problem = Some(rowwise=False, positions=None, backend=BACKEND, columns=SUMMED)
held = tuple(name for name in one.names if name != "perplexity")
assert accumulates(Some(problem=problem, names=held))
assert not accumulates(Some(problem=problem, names=one.names))
"""


@pytest.mark.slow("takes many seconds")
@pytest.mark.skipif(not NATIVE, reason="the native kernels are not built here")
def test_a_new_statistic_of_one_pass_leaves_the_others_what_they_are():
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, "-c", ADD_A_ROW + COMPARE], capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr
