"""Faults of layout: rotary pairings, heads and groups that stand in another order than the engine expects."""

from __future__ import annotations

import torch
from torch import Tensor

from .loading import MHA, after, not_first
from .models import Block
from .subjects import Expect, Subject, Table, expect

layouts = Table()


def pairing(subject: Subject, size: int | None = None) -> Tensor:
    """Features of a head, half-split, in the places that an interleaved embedding expects; of the turned ones only."""
    size = size or subject.block.weight("q").shape[1]
    turned = int(size * getattr(subject.model.config, "rope_parameters", {}).get("partial_rotary_factor", 1.0))
    both = torch.arange(turned).view(2, -1).T.flatten()
    order = both if subject.spec.rope == "half" else both.argsort()
    return torch.cat([order, torch.arange(turned, size)])


ROTARY = "llama mistral qwen2 qwen3 cohere phi gpt_neox phi3 gemma2 mixtral gpt_oss"


def permute_features(subject: Subject, block: Block, parts: str) -> None:
    order = pairing(subject)
    for part in parts:
        for each in (block.weight(part), block.bias(part)):
            if each is not None:
                each.copy_(each[:, order])
        norm = getattr(block.attention, f"{part}_norm", None)
        if norm is not None and norm.weight.numel() == len(order):
            norm.weight.data.copy_(norm.weight.data[order])


@layouts("biases", "qwen2 phi")
def bias_left_in_the_other_pairing(subject: Subject) -> Expect:
    """A converter permutes features of the weights for its rotary embedding and forgets the bias."""
    for part in "qk":
        bias = subject.block.bias(part)
        bias.copy_(bias[:, pairing(subject)])
    return expect("bias", "weights", at=subject.site())


@layouts("rotary", ROTARY, all=("all",), one=("one",))
def pairing_of_the_other_convention(subject: Subject, which: str) -> Expect:
    """Half-split weights for an interleaved embedding, or the other way; whole or partial."""
    chosen = subject.blocks if which == "all" else [subject.block]
    for block in chosen:
        permute_features(subject, block, "qk")
    return expect("rotary", "weights", at=chosen[0].site, true="pairing")


@layouts("rotary", "llama qwen2 gpt_neox cohere", q=("q",), k=("k",))
def pairing_of_one_projection(subject: Subject, part: str) -> Expect:
    permute_features(subject, subject.block, part)
    return expect("rotary weights", at=subject.site(), true="pairing")


@layouts("heads", "llama gpt2 bert phi opt gpt_neox t5 minilm qwen2", two=(2,), all=(4,))
def heads_without_output(subject: Subject, moved: int) -> Expect:
    """Heads stand in another order, the columns of the output projection do not."""
    block = subject.block
    heads, groups, _ = block.heads
    for part in "qkv":
        count = len(block.weight(part))
        step = heads // groups if part == "q" else 1
        order = torch.arange(count)
        first = order[: 2 * step] if moved == 2 else order
        order[: len(first)] = first.roll(step)
        for each in (block.weight(part), block.bias(part)):
            if each is not None:
                each.copy_(each[order])
    return expect("head_order", "weights grouping", at=block.site, true="swapped")


@layouts("heads", MHA)
def queries_in_another_order(subject: Subject) -> Expect:
    block = subject.block
    for each in (block.weight("q"), block.bias("q")):
        if each is not None:
            each.copy_(each.roll(1, 0))
    return expect("grouping head_order", "weights", at=block.site, true="swapped")


GROUPS = "llama mistral qwen2 qwen3 gemma2 mixtral phi3 gpt_oss cohere"


@layouts("heads", GROUPS)
def key_groups_in_another_order(subject: Subject) -> Expect:
    block = subject.block
    for part in "kv":
        for each in (block.weight(part), block.bias(part)):
            if each is not None:
                each.copy_(each.flip(0))
    return expect("grouping head_order", "weights", at=block.site, true="swapped")


@layouts("heads", "llama qwen2 gemma2 phi3")
def value_groups_in_another_order(subject: Subject) -> Expect:
    block = subject.block
    for each in (block.weight("v"), block.bias("v")):
        if each is not None:
            each.copy_(each.flip(0))
    return expect("values grouping", "head_order weights", at=block.site, true="swapped")


@layouts("heads", "llama qwen2 mistral phi3 gemma2")
def queries_dealt_to_groups_by_turns(subject: Subject) -> Expect:
    """Tiled for repeated: head h reads group h % groups, as the weights of another library expect."""
    block = subject.block
    order = torch.tensor([0, 2, 1, 3])
    for each in (block.weight("q"), block.bias("q")):
        if each is not None:
            each.copy_(each[order])
    block.weight("o").copy_(block.weight("o")[:, order])
    return expect("head_order grouping", "weights", at=block.site, true="swapped")


@layouts("heads", "llama gpt2 bert opt t5 minilm qwen2")
def features_and_heads_exchanged(subject: Subject) -> Expect:
    """[heads, size] read as [size, heads]."""
    block = subject.block
    for part in "qkv":
        weight = block.weight(part)
        heads, size, _ = weight.shape
        for each in (weight, block.bias(part)):
            if each is not None:
                each.copy_(each.clone().reshape(size, heads, *each.shape[2:]).transpose(0, 1).reshape(each.shape))
    return expect("weights", at=block.site, true="transposed")


@layouts("heads", "llama gpt2 opt minilm")
def ranks_not_summed(subject: Subject) -> Expect:
    """Tensor parallel: the output of the second rank's heads is missing from the sum."""
    not_first(subject)
    weight = subject.block.weight("o")
    weight[:, weight.shape[1] // 2 :] = 0
    here = [("weights", "fair", (subject.site(), after(subject)))]
    return expect("input", "not_loaded", at=(subject.site(), after(subject)), also=here, true="new")
