"""``attemper.attention`` against the oracle: every feature, both backends, results and gradients."""

import pytest

from tests import agreement, cases

pytestmark = pytest.mark.usefixtures("poisoned_empty")


@pytest.mark.parametrize(**cases.by_name)
def test_results_and_gradients_are_those_of_the_oracle(case: cases.Case, backend: str):
    agreement.assert_agreement(case, backend)
