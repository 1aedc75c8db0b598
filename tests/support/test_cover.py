"""Covers meet every pair, and what a default run keeps still meets every feature, normalizer and backend."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from itertools import combinations, product
from pathlib import Path

import pytest

from tests.backends import test_normalizers as rowwise
from tests.support import cases
from tests.support.calls import PRESENT
from tests.support.cover import chosen, cover, each_value, in_turn

ROOT = Path(__file__).parents[2]
SOFTMAX, ROWWISE = "tests/functional/test_attention.py", "tests/backends/test_normalizers.py"


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


def test_each_value_stands_once_at_least_and_none_much_oftener_than_the_others():
    rows = list(product("abcd", range(12), (True, False)))
    kept = [rows[place] for place in each_value(rows)]
    assert len(kept) == 12
    for axis, most in enumerate((3, 1, 6)):
        assert Counter(row[axis] for row in kept) == {row[axis]: most for row in rows}


def test_tests_of_one_table_take_turns_and_none_is_left_without_a_case():
    for many, one_in in product((1, 2, 15), (1, 3, 5)):
        taken = [in_turn(f"test_{number}", many, one_in) for number in range(40)]
        assert set().union(*taken) == set(range(many))
        assert {len(one) for one in taken} <= {max(1, many // one_in), -(-many // one_in)}


@pytest.mark.slow("it collects the tests once more")
def test_a_default_run_meets_every_feature_normalizer_and_backend():
    found = collected(SOFTMAX, ROWWISE)
    compiled = [name for name in PRESENT if name != "triton"]
    for name, axes in {
        "test_results_and_gradients_are_those_of_the_oracle": (compiled, [case.name for case in cases.CASES]),
        "test_output_and_statistics_are_those_of_loops_over_rows": (
            [one.name for one in rowwise.CASES], [one.name for one in rowwise.NORMALIZERS], rowwise.BACKENDS
        ),
    }.items():  # fmt: skip
        kept = [row for row in product(*axes) if "-".join(row) in found[name]]
        assert len(kept) == len(found[name])
        assert [set(column) for column in zip(*kept, strict=True)] == list(map(set, axes))
