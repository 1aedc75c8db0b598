"""``attemper.attention`` against the oracle: every feature, every backend, results and gradients."""

from itertools import product

import pytest

from tests.support import agreement, cases
from tests.support.calls import DTYPES
from tests.support.fixtures import BACKENDS

pytestmark = [pytest.mark.each, pytest.mark.usefixtures("poisoned_empty")]


@pytest.mark.parametrize(
    ("backend", "case"),
    [
        pytest.param(name, case, id=f"{name}-{case.name}")
        for name, case in product(BACKENDS, cases.CASES)
        if str(case.dtype).removeprefix("torch.") in DTYPES[name]
    ],
)
def test_results_and_gradients_are_those_of_the_oracle(backend: str, case: cases.Case):
    agreement.assert_agreement(case, backend)
