"""Faults of masks: windows, causality, documents, padding, and numbers added to scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .models import Block, inputs
from .specs import TOKENS
from .subjects import Expect, Subject, Table, expect

masking = Table()

PLAIN = "llama qwen2 gpt2 opt phi gpt_neox phi3 cohere"
"""Causal, without a window."""


def visible(subject: Subject, old: Tensor | None, rows: int, keys: int) -> Tensor:
    """Which keys the model itself lets a row see, [batch or 1, 1, rows, keys]."""
    if old is None:
        full = torch.ones(rows, keys, dtype=torch.bool)
        return (full.tril() if subject.spec.causal else full)[None, None]
    return old if old.dtype == torch.bool else old > -1e9


Rule = Callable[[Tensor], Tensor]


def masks(subject: Subject, rule: Rule, chosen: list[Block] | None = None) -> None:
    """Replaces the mask of attentions by ``rule`` of what was visible: bool, or numbers to add."""
    name = "mask" if subject.spec.name == "t5" else "attention_mask"
    causal = subject.spec.causal

    def before(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        states = args[0] if args else kwargs["hidden_states"]
        assert name in kwargs
        old = kwargs[name]
        count = states.shape[1]
        seen = torch.ones(count, count, dtype=torch.bool)
        seen = (seen.tril() if causal else seen)[None, None] if old is None else visible(subject, old, count, count)
        new = rule(seen)
        if new.dtype == torch.bool:
            least = torch.finfo(states.dtype).min
            new = torch.zeros(new.shape, dtype=states.dtype).masked_fill(~new, least)
        kwargs[name] = new.to(states.dtype)
        return args, kwargs

    for block in chosen or subject.blocks:
        block.attention.register_forward_pre_hook(before, with_kwargs=True)


def positions(seen: Tensor) -> Tensor:
    """How far a key lies behind a row; negative: ahead."""
    return torch.arange(seen.shape[-2])[:, None] - torch.arange(seen.shape[-1])[None, :]


@masking("window", "mistral", one_more=(13,), one_less=(11,), none=(None,), half=(6,))
def window_of_another_length(subject: Subject, keys: int | None) -> Expect:
    subject.model.config.sliding_window = keys
    return expect("window", at=subject.site(0), value=keys, back=12)


@masking("window", "gemma2 gpt_oss", one_more=(1,), one_less=(-1,))
def window_of_some_layers(subject: Subject, more: int) -> Expect:
    """Of the layers with a window."""
    config = subject.model.config
    before = config.sliding_window
    config.sliding_window = before + more
    for block in subject.blocks:
        if block.attention.sliding_window:
            block.attention.sliding_window = before + more
    first = config.layer_types.index("sliding_attention")
    return expect("window", at=subject.site(first), value=before + more, back=before)


@masking("window", "gemma2 gpt_oss")
def windows_at_the_other_layers(subject: Subject) -> Expect:
    config = subject.model.config
    other = {"sliding_attention": "full_attention", "full_attention": "sliding_attention"}
    config.layer_types = [other[kind] for kind in config.layer_types]
    for block, kind in zip(subject.blocks, config.layer_types, strict=True):
        block.attention.sliding_window = config.sliding_window if kind == "sliding_attention" else None
    return expect("window", at=subject.site(0))


@masking("window", PLAIN, eight=(8,), twenty=(20,))
def window_where_there_is_none(subject: Subject, keys: int) -> Expect:
    masks(subject, lambda seen: seen & (positions(seen) < keys))
    return expect("window", at=subject.site(0), value=keys)


@masking("window", "llama gpt2 phi")
def window_of_one_layer(subject: Subject) -> Expect:
    masks(subject, lambda seen: seen & (positions(seen) < 10), [subject.block])
    return expect("window", at=subject.site(), value=10)


@masking("window", "bert minilm")
def window_to_both_sides(subject: Subject) -> Expect:
    masks(subject, lambda seen: seen & (positions(seen).abs() < 9))
    return expect("window", "scores", at=subject.site(0))


@masking("window", "llama mistral qwen2 gpt2")
def first_tokens_kept_and_a_window(subject: Subject) -> Expect:
    """StreamingLLM: four first tokens, then the last ten."""

    def rule(seen: Tensor) -> Tensor:
        first = torch.arange(seen.shape[-1]) < 4
        return seen & ((positions(seen) < 10) | first)

    masks(subject, rule)
    return expect("window", "scores", at=subject.site(0))


@masking("window", "llama qwen2 mistral")
def chunks_for_a_window(subject: Subject) -> Expect:
    """A row sees its own chunk of 12, not the last 12."""

    def rule(seen: Tensor) -> Tensor:
        chunk = torch.arange(seen.shape[-1]) // 12
        return torch.ones_like(seen).tril() & (chunk[:, None] == chunk[None, :])

    masks(subject, rule)
    return expect("documents window", "scores", at=subject.site(0))


@masking("causality", PLAIN)
def causality_missing(subject: Subject) -> Expect:
    masks(subject, torch.ones_like)
    return expect("causality", at=subject.site(0), back=0)


@masking("causality", "bert minilm t5")
def causality_where_there_is_none(subject: Subject) -> Expect:
    masks(subject, lambda seen: seen & torch.ones_like(seen).tril())
    return expect("causality", at=subject.site(0), value=0)


@masking("causality", PLAIN, next=(1,), next_three=(3,))
def next_token_seen(subject: Subject, ahead: int) -> Expect:
    masks(subject, lambda seen: torch.ones_like(seen).tril(ahead))
    return expect("causality", at=subject.site(0), value=ahead, back=0)


@masking("causality", "llama gpt2 phi opt")
def own_token_not_seen(subject: Subject) -> Expect:
    """Strictly before: the diagonal is off by one; the first row keeps itself."""

    def rule(seen: Tensor) -> Tensor:
        strict = torch.ones_like(seen).tril(-1)
        strict[..., 0, 0] = True
        return strict

    masks(subject, rule)
    return expect("causality", "scores", at=subject.site(0))


@masking("causality", "llama qwen2 gpt2 gpt_neox")
def prefix_seen_by_all(subject: Subject) -> Expect:
    """A prefix language model: the first 12 tokens see each other."""
    masks(subject, lambda seen: seen | (torch.arange(seen.shape[-1]) < 12).expand_as(seen))
    return expect("causality", "scores", at=subject.site(0))


@masking("documents", "llama mistral qwen2 gpt2 opt bert gpt_neox t5 minilm gemma2", three=((11, 25),), two=((18,),))
def documents_hidden(subject: Subject, ends: tuple[int, ...]) -> Expect:
    """Packed documents, kept apart by run b alone."""

    def rule(seen: Tensor) -> Tensor:
        document = sum((torch.arange(seen.shape[-1]) >= end).long() for end in ends)
        assert isinstance(document, Tensor)
        return seen & (document[:, None] == document[None, :])

    masks(subject, rule)
    return expect("documents", "scores", at=subject.site(0), true="documents")


@masking("documents", "llama bert gpt2 phi")
def documents_of_other_ends(subject: Subject) -> Expect:
    """Both runs keep documents apart; run b's end is off by one."""

    def rule(end: int) -> Rule:
        def hides(seen: Tensor) -> Tensor:
            document = (torch.arange(seen.shape[-1]) >= end).long()
            return seen & (document[:, None] == document[None, :])

        return hides

    subject.clean = "documents"
    spec = subject.spec
    subject.prepare = lambda other: masks(other, rule(17))
    assert spec is subject.spec
    masks(subject, rule(18))
    return expect("documents", "scores", at=subject.site(0), true="documents")


LENGTHS = (TOKENS, 27, 20)


def padded(subject: Subject, side: str) -> None:
    subject.a = inputs(subject.spec.name, lengths=LENGTHS, side=side)
    subject.b = {name: tensor.clone() for name, tensor in subject.a.items()}
    subject.clean = f"padded {side}"


@masking("padding", "bert minilm t5")
def padding_not_hidden(subject: Subject) -> Expect:
    padded(subject, "right")
    subject.b["attention_mask"].fill_(1)
    return expect("padding", at=subject.site(0), true="padding")


@masking("padding", "bert minilm llama", forgotten=())
def mask_forgotten(subject: Subject) -> Expect:
    padded(subject, "left" if subject.spec.causal else "right")
    del subject.b["attention_mask"]
    return expect("padding", at=subject.site(0), true="padding")


@masking("padding", "llama mistral qwen2 phi gpt_neox gpt2 opt")
def padding_on_the_left_not_hidden(subject: Subject) -> Expect:
    padded(subject, "left")
    subject.b["attention_mask"].fill_(1)
    absolute = [("input", "best", subject.site(0))] if subject.spec.rope is None else []
    return expect("padding", at=subject.site(0), also=absolute, true="padding")


@masking("padding", "bert minilm")
def last_token_taken_for_padding(subject: Subject) -> Expect:
    """A length off by one: each text's last token is hidden from its other tokens."""
    padded(subject, "right")
    mask = subject.b["attention_mask"]
    for number, real in enumerate(LENGTHS):
        mask[number, real - 1] = 0
    return expect("padding", at=subject.site(0), true="padding")


@masking("padding", "bert minilm")
def mask_added_as_numbers(subject: Subject) -> Expect:
    """Ones and zeros are added to scores: nothing is hidden."""
    padded(subject, "right")
    masks(subject, lambda seen: seen.float())
    return expect("padding", at=subject.site(0), true="padding")


@masking("padding", "t5")
def padding_not_hidden_from_the_decoder(subject: Subject) -> Expect:
    padded(subject, "right")
    cross = [block for block in subject.all_blocks() if "EncDec" in block.site]

    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        kwargs["mask"] = None
        return args, kwargs

    for block in cross:
        block.attention.register_forward_pre_hook(before, with_kwargs=True)
    return expect("padding", at=cross[0].site, true="padding")


@masking("bias of scores", "llama gpt2 bert opt minilm", first=((0,), 2.0), four=((0, 5, 9, 17), -1.5))
def keys_shifted(subject: Subject, keys: tuple[int, ...], by: float) -> Expect:
    def rule(seen: Tensor) -> Tensor:
        added = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.bfloat16).min)
        added[..., list(keys)] += by
        return added

    masks(subject, rule)
    return expect("key_shift", "scores", at=subject.site(0), value=by, back=-by)


@masking("bias of scores", "llama opt bert gpt2", all_heads=("same",), slopes=("slopes",))
def distance_bias(subject: Subject, how: str) -> Expect:
    """ALiBi where the other run has none."""
    heads = subject.block.heads[0]
    slopes = torch.full((heads,), 0.125) if how == "same" else 2.0 ** -(1.0 + torch.arange(heads))

    def rule(seen: Tensor) -> Tensor:
        added = -slopes[:, None, None] * positions(seen).abs()
        return added.expand(seen.shape[0], -1, -1, -1).masked_fill(~seen, torch.finfo(torch.bfloat16).min)

    masks(subject, rule)
    return expect("distance_bias", "scores", at=subject.site(0))


@masking("bias of scores", "t5")
def relative_bias_not_loaded(subject: Subject) -> Expect:
    attention: Any = subject.blocks[0].attention
    attention.relative_attention_bias.weight.data = 0.02 * subject.like(attention.relative_attention_bias.weight)
    return expect("distance_bias scores not_loaded", at=subject.site(0), true="new")


@masking("bias of scores", "t5", fewer=("relative_attention_max_distance", 20), flat=("zero", 0))
def relative_bias_of_another_form(subject: Subject, name: str, value: int) -> Expect:
    attention: Any = subject.blocks[0].attention
    if name == "zero":
        attention.relative_attention_bias.weight.data.zero_()
    else:
        setattr(attention, name, value)
    return expect("distance_bias scores", at=subject.site(0))


@masking("inputs", "gpt2 opt")
def positions_counted_with_padding(subject: Subject) -> Expect:
    """Left padding, positions from 0 at the first pad."""
    padded(subject, "left")
    count = subject.a["input_ids"].shape[1]
    mask = subject.a["attention_mask"]
    subject.a["position_ids"] = (mask.cumsum(1) - 1).clamp_min(0)
    subject.b["position_ids"] = torch.arange(count).expand_as(mask).clone()
    subject.clean = "padded left, positions"
    return expect("input", at=subject.site(0), true="padding")
