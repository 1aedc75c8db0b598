"""``dense_weights``: the weights that attention applies, and what follows from them by their definitions."""

import pytest
import torch

import attemper
from attemper import functional as F
from tests.support import cases

pytestmark = pytest.mark.each


@pytest.mark.parametrize(**cases.by_name)
@pytest.mark.turns(3)
def test_dense_weights_reproduce_output_and_statistics(case: cases.Case):
    call = cases.tensors(case)
    names = tuple(
        name for name in case.names if name not in ("gini", "lse", "max_logit", "mean_logit", "logit_variance")
    )
    output, stats = attemper.attention(**call, stats=names, backend="blocked")
    assert stats is not None
    weights = attemper.functional.dense_weights(**call)
    assert weights.shape == (case.batch, case.heads, case.rows, case.keys)
    assert weights.dtype == case.dtype
    # A weight is rounded to its type: 2^-9 relative in bfloat16, and as much again in what is made of it.
    loose = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-8, torch.float32: 1e-5, torch.float64: 1e-10}[case.dtype]

    def close(one: torch.Tensor, two: torch.Tensor, what: str) -> None:
        torch.testing.assert_close(
            one.double(), two.double(), rtol=loose, atol=loose, msg=lambda text: f"{what}: {text}"
        )

    wide = weights.double()
    value = call["value"].repeat_interleave(case.heads // case.groups, 1).double()
    close(wide @ value, output, "output")
    close(wide.sum(-1), stats.mass, "mass")
    close(F.entropy_of(wide), stats.entropy, "entropy")
    close(F.effective_tokens(wide), stats.effective_tokens, "effective tokens")
    close(F.max_weight(wide), stats.max_weight, "max weight")
    plain = wide / wide.sum(-1, keepdim=True).clamp(min=1e-300)
    close(plain.sum(-2), stats.key_mass, "key mass")
    assert (wide >= 0).all()
    assert (wide.sum(-1)[stats.empty] == 0).all()
    assert ((wide > 0).sum(-1) <= stats.visible_keys).all()


def test_dense_weights_are_before_dropout_and_take_no_part_in_what_is_reported():
    query, key = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 4)
    plain = attemper.functional.dense_weights(query, key)
    assert torch.equal(
        attemper.functional.dense_weights(query, key, dropout_p=0.5, stats="all", backend="blocked"), plain
    )
    torch.testing.assert_close(plain, torch.softmax(query @ key.mT / 2, -1))


@pytest.mark.parametrize("normalizer", ["sparsemax", "entmax15"])
def test_equal_keys_share_the_weight_to_the_last_digit(normalizer: str):
    for keys in (3, 7, 41):
        query, key = torch.ones(1, 1, 1, 2, dtype=torch.float64), torch.ones(1, 1, keys, 2, dtype=torch.float64)
        weights = attemper.functional.dense_weights(query, key, normalizer=normalizer)
        torch.testing.assert_close(weights, torch.full_like(weights, 1 / keys), rtol=4 * 2.0**-52, atol=0)
