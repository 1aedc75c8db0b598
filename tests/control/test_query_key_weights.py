"""Where query and key weights lie: scaling a head's rows scales its logits in the model itself, and no other's."""

from typing import Any

import pytest
import torch
from torch import nn

import attemper
from attemper import InputError
from attemper.control.query_key_weights import normalises, projections_of
from tests.control.models import BUILD, built
from tests.monitor.tiny_models import TINY

FACTOR = 3.0


def logits(model: nn.Module, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Standard deviation of the logits of each head under the weights, by site, and the largest logit."""
    table = attemper.scan(model, [batch])
    return {
        site.name: torch.tensor([[head.max_logit or 0.0, head.logit_std or 0.0] for head in site.heads])
        for site in table.sites
    }


@pytest.mark.parametrize("name", BUILD)
@pytest.mark.parametrize("which", ["query", "key"])
@pytest.mark.quick("key")
@pytest.mark.turns(3)
def test_scaling_the_rows_of_a_head_scales_its_logits_alone(name: str, which: str):
    model, batch = built(name)
    before = logits(model, batch)
    site = next(iter(before))
    module = model.get_submodule(site)
    found = projections_of(module)
    assert not normalises(module)
    rows = getattr(found, which)
    factors = torch.ones(rows.heads)
    factors[1] = FACTOR
    rows.scale_(factors)
    if found.query_alone is not None:  # the rest of the logit, from keys that all heads share
        found.query_alone.scale_(torch.where(factors > 1, 0.0, 1.0))
        model2, _ = built(name)
        own = projections_of(model2.get_submodule(site))
        assert own.query_alone is not None
        own.query_alone.scale_(torch.where(factors > 1, 0.0, 1.0))
        before = logits(model2, batch)
    after = logits(model, batch)
    moved = slice(1, 2) if which == "query" else slice(found.repeats, 2 * found.repeats)
    others = torch.ones(found.query.heads, dtype=torch.bool)
    others[moved] = False
    torch.testing.assert_close(after[site][others], before[site][others])
    if name == "gemma2":  # its softcap bends them
        assert (after[site][moved, 0] > before[site][moved, 0] * 1.05).all()
    elif name == "bloom":  # ALiBi is added to them
        assert (after[site][moved, 0] - before[site][moved, 0]).abs().max() > 0.1
    else:
        torch.testing.assert_close(after[site][moved, 0], before[site][moved, 0] * FACTOR, rtol=1e-4, atol=1e-4)


def test_normalised_queries_are_told():
    model = TINY["qwen3"].build()
    assert normalises(model.model.layers[0].self_attn)


def test_what_is_not_known_is_refused_with_what_is():
    with pytest.raises(
        InputError, match=r"Linear: the layout of its query and key projections is not known. Known are"
    ):
        projections_of(nn.Linear(3, 3))
    module = nn.Module()
    module.q_proj, module.k_proj = nn.Linear(4, 4), nn.Linear(4, 4)
    with pytest.raises(InputError, match="the number of heads is not to be found under num_heads"):
        projections_of(module)
    with pytest.raises(InputError, match="keeps weights apart and biases together"):
        projections_of(nn.MultiheadAttention(8, 2, kdim=6))
