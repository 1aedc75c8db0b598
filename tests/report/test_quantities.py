"""What the page calls the numbers of a head."""

from __future__ import annotations

import torch

from attemper.report.quantities import QUANTITIES
from tests.support.calls import attended


def test_a_spread_beside_a_large_logit_says_that_it_is_under_the_weights():
    named = {quantity.key: quantity for quantity in QUANTITIES}
    assert named["logit_std"].title == "Logit spread under the weights"
    assert "0 where one key takes all" in named["logit_std"].meaning
    # The reading that the name must not mislead about: a largest logit of 77, all the weight on its key.
    scores = torch.randn(1, 1, 1, 64)
    scores[..., 7] = 77.25
    query, key = torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 64, 1)
    stats = attended("blocked", query, key, key, scores, stats=("logit_variance", "score_variance")).stats
    assert stats.max_logit.item() == 77.25
    assert stats.logit_variance.sqrt().item() < 1e-6
    assert stats.score_variance.sqrt().item() > 9
