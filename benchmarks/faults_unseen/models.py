"""Small models of many architectures, and one description of where each keeps its weights.

Weights are random with a fixed seed, and dressed so that attention is not uniform: heads of different sharpness, keys
that resemble queries in some heads, gains with a few large channels, spectra that fall. ``minilm`` is pretrained.
"""

from __future__ import annotations

import copy
import functools
import operator
import zlib
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

from benchmarks.minilm import batch, pretrained

from .specs import SIZE, SPECS, TOKENS, VOCABULARY, Spec

logging.set_verbosity_error()
logging.disable_progress_bar()


def at(root: Any, path: str) -> Any:
    return (
        operator.attrgetter(path)(root) if not path[0].isdigit() else functools.reduce(getattr, path.split("."), root)
    )


def rows(module: Any) -> Tensor:
    """Its weight as [outputs, inputs], or [experts, outputs, inputs]; a view."""
    weight = module if isinstance(module, Tensor) else module.weight
    return weight.data.mT if isinstance(module, Conv1D) else weight.data


@dataclass
class Block:
    """One layer: its projections as views of [heads, size, inputs], whatever stores them."""

    spec: Spec
    model: Any
    index: int

    @property
    def layer(self) -> Any:
        return at(self.model, self.spec.layers)[self.index]

    @property
    def attention(self) -> Any:
        return at(self.layer, self.spec.attention)

    @property
    def site(self) -> str:
        return f"{self.spec.layers}.{self.index}.{self.spec.attention}"

    @property
    def heads(self) -> tuple[int, int, int]:
        """Heads, heads of keys, size of a head."""
        config: Any = self.model.config
        heads = config.num_attention_heads
        size = getattr(config, "d_kv", None) or getattr(config, "head_dim", None) or config.hidden_size // heads
        return heads, getattr(config, "num_key_value_heads", None) or heads, size

    def module(self, part: str) -> Any:
        path = self.spec.parts["qkvo".index(part)]
        if part == "o" and self.spec.out:
            return at(self.layer, self.spec.out)
        return at(self.attention, path)

    def weight(self, part: str) -> Tensor:
        """[heads, size, inputs] of q, k or v; [outputs, heads, size] of o; a view."""
        heads, _, size = self.heads
        whole = rows(self.module(part))
        if part == "o":
            return whole.unflatten(1, (heads, size))
        return self._part(part, whole)

    def bias(self, part: str) -> Any:
        """[heads, size] of q, k or v; [outputs] of o; a view; None where there is none."""
        bias = getattr(self.module(part), "bias", None)
        if bias is None:
            return None
        return bias.data if part == "o" else self._part(part, bias.data)

    def _part(self, part: str, whole: Tensor) -> Tensor:
        heads, groups, size = self.heads
        if self.spec.fused == "heads":
            return whole.unflatten(0, (heads, 3, size))[:, "qkv".index(part)]
        if self.spec.fused == "rows":
            counts = (heads, groups, groups)
            start = sum(counts[: "qkv".index(part)]) * size
            whole = whole[start : start + counts["qkv".index(part)] * size]
        return whole.unflatten(0, (-1, size))

    @property
    def norm(self) -> Any:
        return at(self.layer, self.spec.norm) if self.spec.norm else None

    @property
    def mlp_norm(self) -> Any:
        return at(self.layer, self.spec.mlp_norm) if self.spec.mlp_norm else None

    def mlp_readers(self) -> list[Tensor]:
        """Weights that read the residual stream; channels of the stream on the last axis."""
        return [self._reader(path) for path in self.spec.readers]

    def _reader(self, path: str) -> Tensor:
        module = at(self.layer, path)
        return module.data.mT if self._stored_inputs_first(path) else rows(module)

    def _stored_inputs_first(self, path: str) -> bool:
        return self.spec.name == "gpt_oss" and "experts" in path

    def writer(self) -> Tensor:
        """Weight of the MLP that writes the stream, [outputs, inputs] or [experts, outputs, inputs]."""
        return self._reader(self.spec.writer)

    def mlp_biases(self) -> list[Tensor]:
        """Biases added to the stream by the MLP."""
        module = at(self.layer, self.spec.writer)
        if self.spec.name == "gpt_oss":
            return [at(self.layer, f"{self.spec.writer}_bias").data]
        return [module.bias.data] if getattr(module, "bias", None) is not None else []


def blocks(spec: Spec, model: nn.Module) -> list[Block]:
    return [Block(spec, model, index) for index in range(len(at(model, spec.layers)))]


def seed(*words: object) -> int:
    return zlib.crc32(repr(words).encode())


def generator(*words: object) -> torch.Generator:
    return torch.Generator().manual_seed(seed(*words))


@functools.cache
def base(name: str) -> Any:
    """The clean model in float32; do not change it."""
    spec = SPECS[name]
    if name == "minilm":
        return pretrained().requires_grad_(False)
    config = getattr(transformers, spec.config)(**spec.options)
    model = getattr(transformers, spec.model)(config).eval().requires_grad_(False)
    dress(spec, model)
    if spec.head and at(model, spec.head).weight is at(model, spec.embeddings[0].rpartition(".")[0]).weight:
        at(model, spec.head).weight = nn.Parameter(at(model, spec.head).weight.data.clone(), requires_grad=False)
    return model


def fresh(name: str) -> Any:
    return copy.deepcopy(base(name))


def cast(model: Any, dtype: torch.dtype) -> Any:
    """Parameters in ``dtype``; angles of rotary embeddings stay float32, as a checkpoint is loaded."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    return model


def dress(spec: Spec, model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        draw = generator(spec.name, name)
        value = torch.randn(parameter.shape, generator=draw)
        if "norm" in name.lower() or ".ln_" in name:
            if name.endswith("bias"):
                parameter.data = 0.1 * value
                continue
            gain = torch.exp(0.25 * value)
            gain[..., torch.randperm(gain.shape[-1], generator=draw)[: max(1, gain.shape[-1] // 24)]] *= 2.5
            parameter.data = gain - 1 if spec.style == "rms+1" else gain
        elif name.endswith("bias") or parameter.ndim == 1:
            parameter.data = 0.1 * value
        elif any(name.endswith(path) for path in spec.embeddings) or "embed" in name:
            parameter.data = value * (0.6 if "pos" in name else 1.0)
            if "patch" in name:
                parameter.data = value * parameter[0].numel() ** -0.5
        elif "relative_attention_bias" in name:
            parameter.data = value
        else:
            inputs = parameter.shape[
                -2 if (spec.name == "gpt2" and "c_" in name) or ("gpt_oss" in spec.name and "experts" in name) else -1
            ]
            parameter.data = 0.8 * _matrix(parameter.shape, draw) * inputs**-0.5
    _dress_attention(spec, model)


def _matrix(shape: torch.Size, draw: torch.Generator) -> Tensor:
    """Entries of variance 1 with a few strong directions, as trained projections have."""
    noise = torch.randn(shape, generator=draw)
    left = torch.randn((*shape[:-1], 6), generator=draw)
    right = torch.randn((*shape[:-2], 6, shape[-1]), generator=draw)
    return 0.85 * noise + 0.52 * (left * torch.tensor([0.7, 0.5, 0.35, 0.25, 0.2, 0.15])) @ right


def _dress_attention(spec: Spec, model: nn.Module) -> None:
    for block in blocks(spec, model) + (decoder_blocks(spec, model) if spec.name == "t5" else []):
        query, key = block.weight("q"), block.weight("k")
        draw = generator(spec.name, block.site, "sharpness")
        each = query.shape[0] // key.shape[0]
        for group in range(key.shape[0]):
            if group % 2 == 0:
                key[group] = 0.75 * key[group] + 0.65 * query[group * each]
        sharpness = 0.9 + 1.1 * torch.rand(query.shape[0], generator=draw)
        scale = SIZE**-0.5 if spec.name == "t5" else 1.0
        query.mul_((sharpness * 1.3 * scale)[:, None, None])
        key.mul_(1.3)
        for part in "qk":
            if (bias := block.bias(part)) is not None:
                bias.mul_(4.0)
        if hasattr(block.attention, "sinks"):
            block.attention.sinks.data = torch.randn(query.shape[0], generator=draw)


def decoder_blocks(spec: Spec, model: nn.Module) -> list[Block]:
    """Of T5: self-attention and cross-attention of the decoder."""
    return [Block(side, model, index) for side in sides(spec) for index in range(len(at(model, side.layers)))]


def sides(spec: Spec) -> tuple[Spec, Spec]:
    own = replace(spec, layers="decoder.block", causal=True)
    cross = replace(own, attention="layer.1.EncDecAttention", norm="layer.1.layer_norm", causal=False)
    mlp = {
        "mlp_norm": "layer.2.layer_norm",
        "readers": ("layer.2.DenseReluDense.wi",),
        "writer": "layer.2.DenseReluDense.wo",
        "final": "decoder.final_layer_norm",
    }
    return replace(own, **mlp), replace(cross, **mlp)


@functools.cache
def tokens(count: int = 2, length: int = TOKENS) -> Tensor:
    """Ids with few common and many rare ones, as in text."""
    draw = generator("tokens", count, length)
    shares = 1.0 / torch.arange(3, VOCABULARY - 2 + 3)[: VOCABULARY - 3]
    return 3 + torch.multinomial(shares.expand(count, -1), length, replacement=True, generator=draw)


@functools.cache
def _text(count: int, length: int) -> dict[str, Tensor]:
    return batch(length, count)


def inputs(name: str, *, lengths: tuple[int, ...] | None = None, side: str = "right") -> dict[str, Tensor]:
    """A batch; with ``lengths`` padded on one side and with its mask."""
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 20, 20, generator=generator("image"))}
    count, length = (2, TOKENS) if lengths is None else (len(lengths), max(lengths))
    ids = _text(count, length)["input_ids"] if name == "minilm" else tokens(count, length)
    batch = {"input_ids": ids.clone()}
    if lengths is not None:
        mask = torch.zeros_like(ids)
        for number, real in enumerate(lengths):
            kept = slice(0, real) if side == "right" else slice(length - real, length)
            mask[number, kept] = 1
            batch["input_ids"][number, kept] = ids[number, :real]
        batch["input_ids"] = batch["input_ids"] * mask
        batch["attention_mask"] = mask
    if name == "t5":
        batch["decoder_input_ids"] = tokens(count, 24)
    return batch


def outputs(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Logits, or the last hidden state."""
    with torch.no_grad():
        out = model(**batch)
    return (out.logits if hasattr(out, "logits") else out.last_hidden_state).double()
