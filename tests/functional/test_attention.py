"""``attemper.attention`` against the oracle: every feature, both backends, results and gradients."""

import pytest

from tests.support import agreement, cases
from tests.support.calls import skip_without

pytestmark = pytest.mark.usefixtures("poisoned_empty")


@pytest.mark.parametrize(**cases.by_name)
def test_results_and_gradients_are_those_of_the_oracle(case: cases.Case, backend: str):
    skip_without(backend, case.dtype)
    agreement.assert_agreement(case, backend)
