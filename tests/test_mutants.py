"""The table of mutants stays true to the kernel: ``tests/mutants.py`` itself takes minutes and runs by hand."""

import pytest

from tests.mutants import MUTANTS, QUICK, ROOT, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_the_text_that_a_mutant_changes_stands_once_in_the_kernel(mutant: Mutant):
    text = (ROOT / "src" / "attemper" / mutant.file).read_text()
    assert text.count(mutant.before) == 1
    assert mutant.before != mutant.after


def test_no_mutant_is_listed_twice_and_the_tests_that_kill_them_exist():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 15
    assert len({(mutant.file, mutant.before, mutant.after) for mutant in MUTANTS}) == len(MUTANTS)
    assert (ROOT / QUICK).is_file()
