"""Models of every layout of projections, with inputs: tiny, random, sharp enough that heads differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as tf
from torch import nn

from attemper.lab.model import ByteConfig, ByteModel
from tests.monitor.tiny_models import GROUPED, TEXT, TINY, inputs, sharpened

PHI: dict[str, Any] = GROUPED | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


class Block(nn.Module):
    """torch's own attention over embedded tokens."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(101, 48)
        self.attention = nn.MultiheadAttention(48, 4, batch_first=True, **options)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        return self.attention(x, x, x, need_weights=False)[0]


def _more(model: Any, config: Any, **options: Any) -> Callable[[], Any]:
    return lambda: model._from_config(config(**options), attn_implementation="eager")


DEEPSEEK: dict[str, Any] = TEXT | {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 16, "first_k_dense_replace": 2, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip

BUILD: dict[str, Callable[[], Any]] = {
    "nn.MultiheadAttention": Block,
    "nn.MultiheadAttention, sizes": lambda: Block(kdim=48, vdim=48, bias=False),
    **{name: TINY[name].build for name in ("llama", "mistral", "gpt2", "gemma2", "gpt-oss", "bert", "vit")},
    "gpt-neox": _more(tf.GPTNeoXForCausalLM, tf.GPTNeoXConfig, **TEXT, max_position_embeddings=128),
    "bloom": _more(tf.BloomForCausalLM, tf.BloomConfig, vocab_size=101, hidden_size=48, n_layer=2, n_head=4),
    "phi3": _more(tf.Phi3ForCausalLM, tf.Phi3Config, **{k: v for k, v in PHI.items() if k != "head_dim"}),
    "modernbert": _more(tf.ModernBertModel, tf.ModernBertConfig, **TEXT, max_position_embeddings=128, pad_token_id=0),
    "deepseek_v3": _more(tf.DeepseekV3ForCausalLM, tf.DeepseekV3Config, **DEEPSEEK),
    "deepseek_v3, no low rank": _more(
        tf.DeepseekV3ForCausalLM, tf.DeepseekV3Config, **DEEPSEEK | {"q_lora_rank": None}
    ),
}


def built(name: str) -> tuple[Any, dict[str, Any]]:
    """The model in eval mode and a batch of it."""
    torch.manual_seed(0)
    model = BUILD[name]()
    if isinstance(model, tf.PreTrainedModel):
        sharpened(model)
    if name == "vit":
        return model.eval(), inputs("vision", None)
    ids = torch.randint(3, 101, (2, 16))
    return model.eval(), {"input_ids": ids}


def small(heads: int = 2) -> ByteModel:
    """Two layers that call SDPA, in eval mode."""
    torch.manual_seed(0)
    return ByteModel(ByteConfig(layers=2, width=32, heads=heads)).eval()


@torch.no_grad()
def output(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """The first thing that the model returns for a batch."""
    result = model(**batch)
    return result if isinstance(result, torch.Tensor) else result[0]


def checkpointed(model: Any, reentrant: bool | None) -> None:
    """Turns activation checkpointing of a transformers model on, of one kind or the other; None: off."""
    newer = hasattr(model, "activation_checkpointing_enable")
    if reentrant is None:
        (model.activation_checkpointing_disable if newer else model.gradient_checkpointing_disable)()
        return
    enable = model.activation_checkpointing_enable if newer else model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
