"""Covers meet every pair, and what a default run keeps still meets every feature, normalizer and backend in pairs."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import combinations, product
from pathlib import Path

import pytest

from tests.backends import test_normalizers as rowwise
from tests.backends.triton import test_rowwise as interpreted
from tests.support import cases
from tests.support.calls import PRESENT
from tests.support.cover import chosen, cover

ROOT = Path(__file__).parents[2]
SOFTMAX, ROWWISE = "tests/functional/test_attention.py", "tests/backends/test_normalizers.py"
TRITON = ("tests/backends/triton/test_agreement.py", "tests/backends/triton/test_rowwise.py")


def pairs(rows: list[tuple]) -> set:
    return {pair for row in rows for pair in combinations(enumerate(row), 2)}


@pytest.mark.parametrize("sizes", [(36, 7, 2), (4, 4, 4, 4), (5, 4, 3, 2, 2), (2, 3), (6,)], ids=str)
def test_a_cover_meets_every_pair_with_few_rows_and_is_the_same_each_time(sizes: tuple[int, ...]):
    axes = [range(size) for size in sizes]
    rows = cover(*axes)
    assert pairs(rows) == pairs(list(product(*axes)))
    assert rows == cover(*axes)
    assert {row[0] for row in rows} == set(axes[0])
    two = sorted(sizes)[-2:]
    assert len(rows) <= 1.6 * (two[0] * two[-1] if len(two) > 1 else two[0])


def test_of_a_grid_with_holes_what_is_there_is_covered():
    rows = [row for row in product("abcd", range(4), (True, False)) if row[0] != "b" or row[1] > 1]
    assert pairs([rows[place] for place in chosen(rows)]) == pairs(rows)


def collected(*files: str) -> dict[str, list[str]]:
    """What a default run takes of these files: function -> what stands in brackets."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300)
    found: dict[str, list[str]] = {}
    for name, case in re.findall(r"::(\w+)\[(.*)\]$", done.stdout, re.MULTILINE):
        found.setdefault(name, []).append(case)
    return found


@pytest.mark.slow("it collects the tests once more")
def test_a_default_run_meets_every_pair_of_feature_normalizer_and_backend():
    found = collected(SOFTMAX, ROWWISE, *(TRITON if "triton" in PRESENT else ()))
    compiled = [name for name in PRESENT if name != "triton"]
    assert {f"{backend}-{case.name}" for backend, case in product(compiled, cases.CASES)} == set(
        found["test_results_and_gradients_are_those_of_the_oracle"]
    )
    kept = set(found["test_output_and_statistics_are_those_of_loops_over_rows"])
    rows = [
        (case.name, given.name, backend)
        for case, given, backend in product(rowwise.CASES, rowwise.NORMALIZERS, rowwise.BACKENDS)
        if f"{case.name}-{given.name}-{backend}" in kept
    ]
    assert len(rows) == len(kept)
    axes = ([one.name for one in axis] for axis in (rowwise.CASES, rowwise.NORMALIZERS))
    assert pairs(rows) == pairs(list(product(*axes, rowwise.BACKENDS)))
    if "triton" in PRESENT:
        features = {case.name for case in cases.CASES if case.dtype.itemsize < 8}
        assert features == set(found["test_every_feature_agrees"])
        ours = found["test_every_normalizer_agrees_with_the_reference"]
        some = {tuple(case.split("-", 1)) for case in ours}
        assert {name for name, _ in some} == set(interpreted.NORMALIZERS)
        assert {feature for _, feature in some} == set(interpreted.FEATURES)
