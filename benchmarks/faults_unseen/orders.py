"""Harmless changes of order, layout, precision and of how the work is done."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .harmless import (
    GROUPED,
    SETTLED,
    last_norm,
    norms_and_readers,
    smoothed,
    stream_rotated,
    turn_stream,
    values_rotated,
    values_scaled_and_outputs_divided,
)
from .layouts import ROTARY, permute_features
from .masks import masks
from .models import Block, at, inputs
from .specs import TOKENS
from .subjects import Subject, Table

orders = Table()


def reorder(block: Block, order: Tensor, parts: str) -> None:
    for part in parts:
        for each in (block.weight(part), block.bias(part)):
            if each is not None:
                each.copy_(each[order])


@orders("permuted", "gpt2 opt bert phi gpt_neox t5 vit minilm")
def heads_with_output(subject: Subject) -> None:
    for block in subject.blocks:
        order = torch.randperm(block.heads[0], generator=subject.draw)
        if subject.spec.name == "t5" and block.index == 0:
            table: Any = block.attention
            bias = table.relative_attention_bias.weight.data
            bias.copy_(bias[:, order])
            subject.extra["order"] = order
        order = subject.extra.get("order", order)
        reorder(block, order, "qkv")
        output = block.weight("o")
        output.copy_(output[:, order])


@orders("permuted", GROUPED)
def groups_with_output(subject: Subject) -> None:
    """Key groups with their queries and the columns of the output projection."""
    for block in subject.blocks:
        heads, groups, _ = block.heads
        order = torch.arange(heads).view(groups, -1).flip(0).flatten()
        reorder(block, torch.arange(groups).flip(0), "kv")
        reorder(block, order, "q")
        output = block.weight("o")
        output.copy_(output[:, order])
        if hasattr(block.attention, "sinks"):
            sinks: Any = block.attention.sinks
            sinks.data.copy_(sinks.data[order])


@orders("permuted", "llama mistral qwen2 gemma2 phi3 mixtral cohere")
def heads_inside_groups(subject: Subject) -> None:
    for block in subject.blocks:
        heads, groups, _ = block.heads
        order = torch.arange(heads).view(groups, -1).flip(1).flatten()
        reorder(block, order, "q")
        output = block.weight("o")
        output.copy_(output[:, order])


@orders("permuted", "llama qwen2 gpt2 opt bert phi gpt_neox minilm t5")
def mlp_neurons_permuted(subject: Subject) -> None:
    for block in subject.blocks:
        order = torch.randperm(block.writer().shape[-1], generator=subject.draw)
        for path, reader in zip(subject.spec.readers, block.mlp_readers(), strict=True):
            reader.copy_(reader[order])
            bias = getattr(at(block.layer, path), "bias", None)
            if bias is not None:
                bias.data.copy_(bias.data[order])
        block.writer().copy_(block.writer()[:, order])


@orders("permuted", "llama qwen3 gpt2 opt phi gpt_neox t5")
def stream_permuted(subject: Subject) -> None:
    """Channels of the residual stream in another order, gains among them."""
    size = subject.model.config.hidden_size
    order = torch.randperm(size, generator=subject.draw)
    turn_stream(subject, torch.eye(size)[:, order])
    for norm, _ in norms_and_readers(subject) + last_norm(subject):
        norm.weight.data = norm.weight.data[order]
        if getattr(norm, "bias", None) is not None:
            norm.bias.data = norm.bias.data[order]


@orders("permuted", "mixtral")
def experts_with_router(subject: Subject) -> None:
    for block in subject.blocks:
        for weight in [*block.mlp_readers(), block.writer()]:
            weight.copy_(weight.roll(1, 0))


@orders("permuted", "gpt2 opt bert vit minilm")
def features_of_queries_and_keys_permuted(subject: Subject) -> None:
    """One order for both; no rotary embedding looks at it."""
    for block in subject.blocks:
        order = torch.randperm(block.heads[2], generator=subject.draw)
        for part in "qk":
            for each in (block.weight(part), block.bias(part)):
                if each is not None:
                    each.copy_(each[:, order])


@orders("permuted", ROTARY.replace("qwen3 ", "").replace("gpt_oss", "qwen3"))
def pairing_with_its_features(subject: Subject) -> None:
    """Meta's layout for Hugging Face's: features permuted, and the embedding pairs them the other way."""
    for block in subject.blocks:
        permute_features(subject, block, "qk")
    subject.extra["interleaved"] = subject.spec.rope == "half"


@orders("repeated", "llama mistral qwen2 qwen3 gemma2 mixtral cohere")
def keys_and_values_repeated(subject: Subject) -> None:
    """Grouped queries written out: each head has a copy of its keys and values."""
    for block in subject.blocks:
        heads, groups, size = block.heads
        attention: Any = block.attention
        for path in subject.spec.parts[1:3]:
            module = getattr(attention, path)
            for name in ("weight", "bias"):
                value = getattr(module, name, None)
                if value is not None:
                    wide = value.data.unflatten(0, (groups, size)).repeat_interleave(heads // groups, 0).flatten(0, 1)
                    setattr(module, name, nn.Parameter(wide, requires_grad=False))
            module.out_features = heads * size
        attention.num_key_value_groups = 1
        attention.num_key_value_heads = heads
    subject.model.config.num_key_value_heads = subject.model.config.num_attention_heads


@orders("biases", "gpt2 opt bert vit minilm")
def key_bias_of_another_size(subject: Subject) -> None:
    """The same number on all keys of a row, which softmax does not see."""
    for block in subject.blocks:
        bias = block.bias("k")
        bias.add_(subject.like(bias))


@orders("biases", "gpt2 opt bert vit minilm", zero=())
def key_bias_left_out(subject: Subject) -> None:
    for block in subject.blocks:
        block.bias("k").zero_()


@orders("biases", "gpt2 opt bert vit phi gpt_neox minilm")
def value_bias_moved_to_output(subject: Subject) -> None:
    """Weights of a row sum to one, so that the bias of values comes out as it is."""
    for block in subject.blocks:
        output, bias = block.weight("o"), block.bias("v")
        block.bias("o").add_(torch.einsum("ohd,hd->o", output, bias))
        bias.zero_()


def grid(weight: Tensor, bits: int, group: int) -> Tensor:
    top = 2 ** (bits - 1) - 1
    parts = weight.unflatten(-1, (-1, group)) if group else weight.unsqueeze(-2)
    step = (parts.abs().amax(-1, keepdim=True) / top).clamp_min(1e-12)
    return ((parts / step).round() * step).flatten(-2)


@orders("rounded", SETTLED, bfloat16=("bfloat16",), float16=("float16",), int8=(8,), int4=(4,))
def weights_rounded(subject: Subject, how: str | int) -> None:
    """A round trip of every matrix: to bfloat16, to 8 bits by row, to 4 bits by row and group of 32. Not exact."""
    subject.exact = False
    for name, parameter in subject.model.named_parameters():
        if parameter.ndim < 2 or "embed" in name or "shared" in name or "wte" in name or "wpe" in name:
            continue
        if isinstance(how, str):
            parameter.data = parameter.data.to(getattr(torch, how)).float()
            continue
        columns = subject.spec.name == "gpt2" and "lm_head" not in name
        weight = parameter.data.mT if columns else parameter.data
        rounded = grid(weight, how, 32 if how == 4 and weight.shape[-1] % 32 == 0 else 0)
        parameter.data = (rounded.mT if columns else rounded).contiguous()


@orders("several", "llama mistral qwen2 qwen3")
def a_pipeline_of_changes(subject: Subject) -> None:
    """Smoothed, values scaled, folded, rotated: as a quantiser leaves a model before it rounds."""
    smoothed(subject, 0.5)
    values_scaled_and_outputs_divided(subject)
    stream_rotated(subject, "hadamard")
    values_rotated(subject)


@orders("several", "gpt2 opt bert phi gpt_neox minilm")
def biases_and_orders_changed(subject: Subject) -> None:
    value_bias_moved_to_output(subject)
    heads_with_output(subject)
    values_scaled_and_outputs_divided(subject)


@orders("several", "llama gpt2 qwen2 opt")
def smoothed_and_rounded(subject: Subject) -> None:
    """SmoothQuant with its 8 bits. Not exact."""
    smoothed(subject, 0.5)
    weights_rounded(subject, 8)


class Adapted(nn.Module):
    """A projection and a low-rank update beside it."""

    def __init__(self, whole: nn.Linear, down: Tensor, up: Tensor) -> None:
        super().__init__()
        self.whole, self.down, self.up = whole, nn.Parameter(down), nn.Parameter(up)
        self.requires_grad_(False)

    @property
    def weight(self) -> Tensor:
        return self.whole.weight

    def forward(self, states: Tensor) -> Tensor:
        return self.whole(states) + states @ self.down.T @ self.up.T


@orders("work", "llama mistral qwen2 bert opt")
def adapter_not_merged(subject: Subject) -> None:
    """The same update beside the projection instead of in it."""
    for block in subject.blocks:
        path = subject.spec.parts[0]
        whole: Any = getattr(block.attention, path)
        down, up = 0.2 * subject.noise(2, whole.in_features), 0.1 * subject.noise(whole.out_features, 2)
        whole.weight.data -= up @ down
        setattr(block.attention, path, Adapted(whole, down, up))


@orders("work", "llama gpt2 bert t5 minilm")
def texts_reversed(subject: Subject) -> None:
    """The last text first: to be read as the same, or refused as other tokens, and not blamed."""
    subject.b = {name: tensor.flip(0) for name, tensor in subject.b.items()}
    subject.extra["reversed"] = True
    subject.extra["may refuse"] = True


@orders("work", SETTLED.replace("gemma2", "phi3"))
def other_kernel(subject: Subject) -> None:
    subject.attention = "eager"


@orders("work", "llama qwen2 gpt2 bert phi t5 minilm mistral")
def one_text_a_batch(subject: Subject) -> None:
    subject.extra["split"] = True


@orders("work", "llama mistral gpt2 bert t5 phi minilm gemma2")
def mask_of_ones(subject: Subject) -> None:
    subject.b["attention_mask"] = torch.ones_like(subject.b["input_ids"])


@orders("work", "llama mistral qwen2 bert opt phi minilm gpt_neox t5")
def more_padding(subject: Subject) -> None:
    """Padded to a longer multiple, and hidden."""
    name = subject.spec.name
    lengths = (TOKENS, 27, 20)
    subject.a = inputs(name, lengths=lengths)
    subject.b = {key: value.clone() for key, value in subject.a.items()}
    for key in ("input_ids", "attention_mask"):
        subject.b[key] = nn.functional.pad(subject.b[key], (0, 12))
    subject.clean = "padded right"
    subject.extra["rows"] = lengths


@orders("work", "llama mistral qwen2 phi gpt_neox phi3")
def padding_on_the_other_side(subject: Subject) -> None:
    lengths = (TOKENS, 27, 20)
    subject.a = inputs(subject.spec.name, lengths=lengths)
    subject.b = inputs(subject.spec.name, lengths=lengths, side="left")
    subject.clean = "padded right"
    subject.extra["rows"] = lengths
    subject.extra["left"] = True


@orders("work", "bert minilm")
def hidden_by_a_finite_number(subject: Subject) -> None:
    """-10,000 in place of -inf."""
    subject.a = inputs(subject.spec.name, lengths=(TOKENS, 27, 20))
    subject.b = {key: value.clone() for key, value in subject.a.items()}
    subject.clean = "padded right"
    subject.extra["rows"] = (TOKENS, 27, 20)
    masks(subject, lambda seen: -1e4 * (~seen).float())


@orders("work", "llama mistral qwen2 phi cohere")
def positions_shifted(subject: Subject) -> None:
    """Rotary embeddings see differences of positions alone."""
    count = subject.b["input_ids"].shape[1]
    subject.b["position_ids"] = (torch.arange(count) + 7)[None].expand(len(subject.b["input_ids"]), -1).clone()


@orders("work", "llama qwen2 gpt2 bert t5 opt minilm")
def float64(subject: Subject) -> None:
    subject.extra["dtype"] = torch.float64


@orders("work", "llama qwen2 gpt2 bert phi mistral")
def float16(subject: Subject) -> None:
    subject.extra["dtype"] = torch.float16
    subject.exact = False


@orders("work", "llama gpt2 qwen2 phi")
def vocabulary_padded(subject: Subject) -> None:
    """Rows for tokens that never come, as kernels like them."""
    subject.model.resize_token_embeddings(128, mean_resizing=False)
    subject.extra["vocabulary"] = True
