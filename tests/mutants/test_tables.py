"""The tables of mutants stay true to the kernels: running them takes minutes, and is done by hand."""

import pytest

from tests.mutants.__main__ import TABLES
from tests.mutants.runner import ROOT

LEAST = {"blocked": 15, "triton": 60, "native": 100, "native-rows": 80}


@pytest.mark.parametrize("kernel", TABLES)
def test_the_text_that_a_mutant_changes_stands_once_in_the_kernel(kernel: str):
    texts = {mutant.source: mutant.source.read_text() for mutant in TABLES[kernel]}
    for mutant in TABLES[kernel]:
        assert texts[mutant.source].count(mutant.before) == 1, mutant.name
        assert mutant.before != mutant.after, mutant.name


@pytest.mark.parametrize("kernel", TABLES)
def test_no_mutant_is_listed_twice_and_the_tests_that_kill_them_exist(kernel: str):
    table = TABLES[kernel]
    assert len({mutant.name for mutant in table}) == len(table) >= LEAST[kernel]
    assert len({(mutant.file, mutant.before, mutant.after) for mutant in table}) == len(table)
    for test in {test for mutant in table for test in mutant.tests}:
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text() if name else (ROOT / file).is_file()
