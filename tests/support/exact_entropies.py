"""Mean entropies of a model's heads from its own weights in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def exact_entropies(folder: Path, ids: Tensor) -> dict[tuple[str, int], float]:
    """Site and head -> mean entropy, in nats, of a saved Llama over all rows of a batch."""
    import transformers

    model: Any = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    with torch.no_grad():
        layers = model(ids, output_attentions=True).attentions
    found = {}
    for layer, weights in enumerate(layers):
        means = torch.special.entr(weights.double()).sum(-1).mean((0, 2)).tolist()
        found |= {(f"model.layers.{layer}.self_attn", head): mean for head, mean in enumerate(means)}
    return found
