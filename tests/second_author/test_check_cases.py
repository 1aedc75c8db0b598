from __future__ import annotations

import pytest

from tests.second_author.check_cases import FAULTS, PAIRS, judge


@pytest.mark.long("each case takes a second, and there are hundreds")
def test_faults_are_named_by_rule_and_first_layer():
    wrong = [row for row in map(judge, FAULTS) if not row["right"]]
    assert len(wrong) <= len(FAULTS) // 100, wrong


@pytest.mark.long("each case takes a second, and there are hundreds")
def test_no_correct_model_is_blamed():
    blamed = [row for row in map(judge, PAIRS) if not row["right"]]
    assert not blamed, blamed


def test_cases_have_names_of_their_own():
    assert len({case.name for case in (*FAULTS, *PAIRS)}) == len(FAULTS) + len(PAIRS) >= 400
