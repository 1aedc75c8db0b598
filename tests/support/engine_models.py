"""Small models of transformers with random weights whose attention is as that of trained ones, a trained encoder, and
tokens for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attemper.lab.model import shipped_text
from tests.support import encoder

TOKENS = 96
VOCABULARY = 120
WINDOW = 24

SHARED = {
    "vocab_size": VOCABULARY, "hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "head_dim": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}  # fmt: skip
_SLIDING = ["sliding_attention", "full_attention"] * 2
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "gemma2": ("Gemma2", {"sliding_window": WINDOW, "layer_types": _SLIDING, "query_pre_attn_scalar": 32}),
    "gemma3": ("Gemma3Text", {"sliding_window": WINDOW, "layer_types": _SLIDING, "query_pre_attn_scalar": 32}),
    "gpt_oss": ("GptOss", {"sliding_window": WINDOW, "layer_types": _SLIDING, **_EXPERTS}),
    "gpt2": ("GPT2", {}),
    "bert": ("Bert", {}),
    "mixtral": ("Mixtral", {"sliding_window": None, **_EXPERTS}),
    "phi": ("Phi", {}),
    "olmo2": ("Olmo2", {}),
    "qwen3_moe": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1},
    ),
}
"""Name -> classes of transformers, and what differs from ``SHARED``."""
PRETRAINED = "minilm"
"""The trained one among them: all-MiniLM-L6-v2, on the shipped text."""


@dataclass
class Tiny:
    """A small model and its attention modules, in order."""

    name: str
    model: Any
    attentions: list[Any]
    heads: int = 4
    size: int = 32

    @property
    def causal(self) -> bool:
        return self.name not in ("bert", PRETRAINED)

    @property
    def rotary(self) -> bool:
        return self.causal and self.name != "gpt2"


def tiny(
    name: str, seed: int = 0, *, layers: int = 4, dtype: torch.dtype = torch.float32, kernel: str = "sdpa"
) -> Tiny:
    """A model with random weights whose scores spread as those of a trained one do; or the trained one."""
    import transformers

    if name == PRETRAINED:
        return _found(name, transformers.AutoModel.from_pretrained(encoder.folder(), attn_implementation=kernel), dtype)
    prefix, changes = ARCHITECTURES[name]
    given = {**SHARED, **changes, "num_hidden_layers": layers}
    if name == "gemma3":
        del given["rope_parameters"]
    if name == "phi":
        given["rope_parameters"] = {**given["rope_parameters"], "partial_rotary_factor": 0.5}
    if "layer_types" in given:
        given["layer_types"] = (_SLIDING * layers)[:layers]
    if name == "gpt2":
        given = {
            "vocab_size": VOCABULARY, "n_embd": 128, "n_layer": layers, "n_head": 4, "n_positions": 256,
            "bos_token_id": 1, "eos_token_id": 2,
        }  # fmt: skip
    elif name in ("bert", "phi"):
        given |= {"hidden_size": 128, "num_key_value_heads": 4}
        del given["head_dim"]
    config = getattr(transformers, f"{prefix}Config")(**given)
    config._attn_implementation = "eager" if name in ("gemma2", "gpt_oss") and kernel == "sdpa" else kernel
    torch.manual_seed(seed)
    kind = getattr(transformers, f"{prefix}Model")
    model = kind(config).eval()
    as_if_trained(model, torch.Generator().manual_seed(seed + 1))
    return _found(name, model, dtype)


def _found(name: str, model: Any, dtype: torch.dtype) -> Tiny:
    model = model.to(dtype).eval()
    named = [m for n, m in model.named_modules() if n.rsplit(".", 1)[-1] in ("self_attn", "attn", "self")]
    attentions = [module for module in named if not isinstance(module, nn.ModuleList)]
    return Tiny(name, model, attentions, heads=model.config.num_attention_heads)


def as_if_trained(model: nn.Module, generator: torch.Generator) -> None:
    """Weights of some size, biases and norms that are not trivial, queries and keys that tell tokens apart."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            if "sinks" in name:
                parameter.copy_(drawn * 0.5 + 1.0)
            elif parameter.dim() == 1 and name.endswith("bias"):
                parameter.copy_(drawn * 0.2)
            elif parameter.dim() == 1:
                gemma = "Gemma" in type(model).__name__
                parameter.copy_(drawn * 0.1 + (0.0 if gemma else 1.0))
            elif "embed" in name or "wte" in name or "wpe" in name:
                parameter.copy_(drawn * 0.5)
            else:
                wide = parameter.shape[-1] if parameter.dim() == 2 and "c_" not in name else parameter.shape[-2]
                strong = 1.6 if any(part in name for part in ("q_proj", "k_proj", "query", "key", "c_attn")) else 0.8
                parameter.copy_(drawn * strong * wide**-0.5)


def tokens(seed: int = 0, sequences: int = 2) -> dict[str, Tensor]:
    """A batch without padding."""
    generator = torch.Generator().manual_seed(100 + seed)
    ids = torch.randint(3, VOCABULARY, (sequences, TOKENS), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def padded(seed: int = 0, side: str = "left", lengths: Sequence[int] = (TOKENS, 60)) -> dict[str, Tensor]:
    """A batch with padding on one side."""
    generator = torch.Generator().manual_seed(200 + seed)
    ids, mask = (
        torch.zeros(len(lengths), TOKENS, dtype=torch.int64),
        torch.zeros(len(lengths), TOKENS, dtype=torch.int64),
    )
    for number, length in enumerate(lengths):
        part = slice(TOKENS - length, TOKENS) if side == "left" else slice(0, length)
        ids[number, part] = torch.randint(3, VOCABULARY, (length,), generator=generator)
        mask[number, part] = 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}


def text(seed: int = 0, lengths: Sequence[int] = (TOKENS, TOKENS)) -> dict[str, Tensor]:
    """Sequences of the shipped text as the trained encoder reads it, padded on the right."""
    _, tokenizer = encoder.loaded()
    words = bytes(shipped_text().tolist()).decode(errors="replace")
    ids = tokenizer(words, add_special_tokens=False)["input_ids"]
    starts = [(seed * len(lengths) + number) * TOKENS for number in range(len(lengths))]
    cut = [{"input_ids": ids[start : start + length]} for start, length in zip(starts, lengths, strict=True)]
    return dict(tokenizer.pad(cut, padding_side="right", return_tensors="pt"))
