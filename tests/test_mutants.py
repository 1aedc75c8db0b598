"""The tables of mutants stay true to the kernels: ``tests/mutants.py`` itself takes minutes and runs by hand."""

import pytest

from tests import mutants_native, mutants_native_rows, mutants_triton
from tests.mutants import MUTANTS as BLOCKED
from tests.mutants import ROOT, Mutant

TABLES = {
    "blocked": BLOCKED,
    "triton": mutants_triton.MUTANTS,
    "native": mutants_native.MUTANTS,
    "native rows": mutants_native_rows.MUTANTS,
}
MUTANTS = [mutant for table in TABLES.values() for mutant in table]


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_the_text_that_a_mutant_changes_stands_once_in_the_kernel(mutant: Mutant):
    text = (ROOT / "src" / "attemper" / mutant.file).read_text()
    assert text.count(mutant.before) == 1
    assert mutant.before != mutant.after


@pytest.mark.parametrize(("kernel", "least"), [("blocked", 15), ("triton", 60), ("native", 100), ("native rows", 80)])
def test_no_mutant_is_listed_twice_and_the_tests_that_kill_them_exist(kernel: str, least: int):
    table = TABLES[kernel]
    assert len({mutant.name for mutant in table}) == len(table) >= least
    assert len({(mutant.file, mutant.before, mutant.after) for mutant in table}) == len(table)
    for test in {test for mutant in table for test in mutant.tests}:
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text() if name else (ROOT / file).is_file()
