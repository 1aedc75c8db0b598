"""Faults of engines: scale, cap, mask, window, rotary angles, caches; what a serving engine does otherwise."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .models import SIZE, TOKENS, Block
from .subjects import Expect, Subject, Table, expect

engine = Table()

DECODERS = "llama mistral qwen2 qwen3 gemma2 phi gpt_neox gpt2 opt cohere mixtral phi3"
ROTARY = "llama qwen2 qwen3 phi gpt_neox cohere gemma2 mistral phi3"


def scaled(block: Block, factor: float, heads: slice = slice(None)) -> None:
    """Scores of these heads times a factor, by the scale or by the weights of the queries."""
    attention: Any = block.attention
    if heads == slice(None) and isinstance(getattr(attention, "scaling", None), float):
        attention.scaling *= factor
        return
    block.weight("q")[heads] *= factor
    if (bias := block.bias("q")) is not None:
        bias[heads] *= factor


@engine(
    "scale",
    "llama mistral qwen2 qwen3 gpt2 opt bert phi gpt_neox vit gpt_oss phi3 minilm",
    missing=(SIZE**0.5, "all"),
    of_twice_the_size=(2**-0.5, "all"),
    one_layer=(0.7, "one"),
)
def scale(subject: Subject, factor: float, where: str) -> Expect:
    if subject.spec.name == "minilm" and factor > 1:
        factor = 32**0.5
    chosen = subject.blocks if where == "all" else [subject.block]
    for block in chosen:
        scaled(block, factor)
    return expect("scale", at=chosen[0].site, value=factor, back=1 / factor, true="factor")


@engine("scale", "t5 gemma2")
def scale_of_its_own_ignored(subject: Subject) -> Expect:
    """T5 has none, Gemma 2 its own: here 1/sqrt(size) on top."""
    for block in subject.all_blocks():
        scaled(block, 0.25)
    return expect("scale", at=subject.site(0), value=0.25, back=4.0, true="factor")


@engine("scale", "llama gpt2 bert t5 gpt_neox minilm phi qwen2")
def scale_of_one_head(subject: Subject) -> Expect:
    scaled(subject.block, 1.3, slice(2, 3))
    return expect("scale", at=subject.site(), value=1.3, back=1 / 1.3, true="factor")


@engine("scale", "gpt_oss")
def magnitude_of_yarn_missing(subject: Subject) -> Expect:
    rotary = subject.model.model.rotary_emb
    factor = rotary.attention_scaling**-2
    rotary.attention_scaling = 1.0
    return expect("scale", at=subject.site(0), value=factor, back=1 / factor, true="yarn factor")


@engine("scale", "llama phi gpt2 bert")
def keys_longer(subject: Subject) -> Expect:
    """Keys of one layer 1.5 times as long: a scale stored twice."""
    block = subject.block
    for each in (block.weight("k"), block.bias("k")):
        if each is not None:
            each.mul_(1.5)
    return expect("scale", at=block.site, value=1.5, back=1 / 1.5, true="factor")


@engine("softcap", "gemma2", missing=(None, "all"), other=(2.5, "all"), one_layer=(7.0, "one"))
def softcap(subject: Subject, cap: float | None, where: str) -> Expect:
    chosen = subject.blocks if where == "all" else [subject.block]
    for block in chosen:
        block.attention.attn_logit_softcapping = cap
    return expect("softcap", at=chosen[0].site, value=cap, back=4.0)


@engine("sink", "gpt_oss", higher=(1.5,), lower=(-2.0,))
def sinks_moved(subject: Subject, by: float) -> Expect:
    for block in subject.blocks:
        block.attention.sinks.data += by
    return expect("sink", at=subject.site(0), value=by, back=-by)


@engine("sink", "gpt_oss")
def sink_of_one_head_moved(subject: Subject) -> Expect:
    subject.block.attention.sinks.data[1] += 2.0
    return expect("sink", at=subject.site(), value=2.0, back=-2.0)


@engine("sink", "gpt_oss", missing=("missing",), zero=("zero",), mixed=("mixed",))
def sinks_of_another_kind(subject: Subject, how: str) -> Expect:
    for block in subject.blocks:
        sinks = block.attention.sinks.data
        sinks.copy_({"missing": torch.full_like(sinks, -1e4), "zero": 0 * sinks, "mixed": sinks.roll(1)}[how])
    return expect("sink", at=subject.site(0))


def by_row(subject: Subject, factors: Tensor) -> None:
    """Queries of each position times a factor."""
    for block in subject.blocks:
        module = block.module("q")
        heads, _, size = block.heads
        wide = module.weight.shape[1 if subject.spec.name == "gpt2" else 0]
        part = slice(0, heads * size) if wide > heads * size else slice(None)

        def after(module: nn.Module, args: Any, out: Tensor, part: slice = part) -> Tensor:
            out = out.clone()
            out[..., part] *= factors[: out.shape[1], None].to(out.dtype)
            return out

        module.register_forward_hook(after)


@engine("logn", "llama qwen2 phi gpt2 opt phi3", sixteen=(16,), eight=(8,))
def queries_grow_with_length(subject: Subject, trained: int) -> Expect:
    """log n attention beyond the length of training, as Qwen had it."""
    count = torch.arange(1.0, TOKENS + 1)
    by_row(subject, (count.log() / math.log(trained)).clamp_min(1.0))
    return expect("logn", at=subject.site(0), value=trained)


def angles(subject: Subject) -> Any:
    return next(module for name, module in subject.model.named_modules() if name.endswith("rotary_emb"))


def base_of(frequencies: Tensor) -> float:
    return float(frequencies[1].double() ** -len(frequencies))


@engine("rotary", ROTARY, larger=(50.0,), smaller=(0.1,))
def rotary_base(subject: Subject, times: float) -> Expect:
    rotary = angles(subject)
    pairs = len(rotary.inv_freq)
    before = base_of(rotary.inv_freq)
    value = times * before
    rotary.inv_freq = value ** -(torch.arange(pairs) / pairs)
    return expect("rotary", at=subject.site(0), value=value, back=before)


@engine("rotary", "llama qwen2 phi cohere")
def positions_divided(subject: Subject) -> Expect:
    """Linear scaling of positions that one run has."""
    angles(subject).inv_freq /= 4.0
    return expect("rotary", at=subject.site(0), value=4.0, back=0.25)


@engine("rotary", "llama qwen2 mistral")
def low_frequencies_scaled(subject: Subject) -> Expect:
    """Llama 3's scaling: slow pairs divided by 8, quick ones kept."""
    frequencies = angles(subject).inv_freq
    frequencies[len(frequencies) // 3 :] /= 8.0
    return expect("rotary", "weights", at=subject.site(0))


@engine("rotary", "gpt_oss")
def angles_of_yarn_missing(subject: Subject) -> Expect:
    rotary = angles(subject)
    pairs = len(rotary.inv_freq)
    rotary.inv_freq = 150000.0 ** -(torch.arange(pairs) / pairs)
    return expect("rotary", at=subject.site(0))


def turn_by(subject: Subject, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], chosen: list[Block]) -> None:
    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        kwargs["position_embeddings"] = change(*kwargs["position_embeddings"])
        return args, kwargs

    for block in chosen:
        block.attention.register_forward_pre_hook(before, with_kwargs=True)


@engine("rotary", "llama qwen3 phi gpt_neox cohere gemma2", one=("one",), all=("all",))
def not_turned(subject: Subject, which: str) -> Expect:
    """No rotary embedding, in one layer or in all."""
    chosen = [subject.block] if which == "one" else subject.blocks
    turn_by(subject, lambda cos, sin: (torch.ones_like(cos), torch.zeros_like(sin)), chosen)
    return expect("rotary", "weights", at=chosen[0].site)


@engine("rotary", "llama qwen2 phi cohere")
def turned_backwards(subject: Subject) -> Expect:
    turn_by(subject, lambda cos, sin: (cos, -sin), subject.blocks)
    return expect("rotary", "weights", at=subject.site(0))


@engine("rotary", "phi gpt_neox", quarter=(0.25,), whole=(1.0,))
def another_share_turned(subject: Subject, share: float) -> Expect:
    """rotary_pct read as another number: other features turn, by other angles."""
    size = subject.block.heads[2]
    turned = int(size * share)
    rotary = angles(subject)
    rotary.inv_freq = 10000.0 ** -(torch.arange(0, turned, 2) / turned)
    for block in subject.blocks:
        block.attention.rotary_ndims = turned
    return expect("rotary", "weights", at=subject.site(0))


@engine("rotary", "llama qwen2 phi3 mistral")
def angles_in_half_precision(subject: Subject) -> Expect:
    """The whole model was cast, angles too."""
    rotary = angles(subject)
    rotary.inv_freq = rotary.inv_freq.bfloat16().float()
    anywhere = ("None", *(block.site for block in subject.blocks))
    small = [(kind, "fair", anywhere) for kind in ("weights", "too_small")]
    return expect("rotary", at=subject.site(0), also=small)


@engine("rotary", "llama phi cohere gpt_neox")
def queries_one_position_ahead(subject: Subject) -> Expect:
    """A cache counts from 1, the queries from 0: all queries of a layer are turned by one position."""
    from .evidence import turned

    block = subject.block
    frequencies = angles(subject).inv_freq
    pairing = subject.spec.rope or "half"
    for each in (block.weight("q"), block.bias("q")):
        if each is not None:
            states = each if each.ndim == 2 else each.mT
            after = turned(states, frequencies[None], pairing)
            each.copy_(after if each.ndim == 2 else after.mT)
    return expect("rotary weights", at=block.site)


def on_grid(states: Tensor, bits: int, axis: int) -> Tensor:
    top = 2 ** (bits - 1) - 1
    step = (states.float().abs().amax(axis, keepdim=True) / top).clamp_min(1e-12)
    return ((states.float() / step).round() * step).to(states.dtype)


@engine("cache", "gpt2 opt bert", four=(4,), eight=(8,))
def keys_rounded(subject: Subject, bits: int) -> Expect:
    """A quantised cache: keys on a grid of each head and token. Bits are those of the grid."""
    heads, _, size = subject.block.heads
    fused = subject.spec.name == "gpt2"
    for block in subject.blocks:
        part = slice(heads * size, 2 * heads * size) if fused else slice(None)

        def after(module: nn.Module, args: Any, out: Tensor, part: slice = part) -> Tensor:
            out = out.clone()
            states = out[..., part].unflatten(-1, (-1, size))
            out[..., part] = on_grid(states, bits, -1).flatten(-2)
            return out

        block.module("k").register_forward_hook(after)
    return expect("key_rounding", at=subject.site(0), value=bits, true="grid")


@engine("cache", "llama opt bert qwen2 minilm")
def values_rounded(subject: Subject) -> Expect:
    """Values of a cache on a grid of 4 bits."""
    size = subject.block.heads[2]

    def after(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return on_grid(out.unflatten(-1, (-1, size)), 4, -1).flatten(-2)

    for block in subject.blocks:
        block.module("v").register_forward_hook(after)
    return expect("values", at=subject.site(0), true="grid")


@engine("inputs", "llama gpt2 opt mistral")
def submodule_left_in_training(subject: Subject) -> Expect:
    """Dropout of one block's output is still drawn."""
    subject.layer %= 2

    def after(module: nn.Module, args: Any, out: Any) -> Any:
        draw = torch.Generator().manual_seed(1)
        states = out[0] if isinstance(out, tuple) else out
        kept = torch.rand(states.shape, generator=draw) > 0.1
        states = states * kept / 0.9
        return (states, *out[1:]) if isinstance(out, tuple) else states

    subject.block.layer.register_forward_hook(after)
    return expect("input", at=(subject.site(), subject.site(subject.layer + 1)))


@engine("inputs", "llama bert phi gpt_neox")
def half_of_an_output(subject: Subject) -> Expect:
    """A sum over two ranks divided by two once too often."""
    subject.layer %= 2
    block = subject.block
    block.weight("o").mul_(0.5)
    if (bias := block.bias("o")) is not None:
        bias.mul_(0.5)
    sites = (block.site, subject.site(subject.layer + 1))
    return expect("input", at=sites, also=[("weights", "fair", sites)])


@engine("inputs", "gemma2")
def embeddings_not_multiplied(subject: Subject) -> Expect:
    """Gemma multiplies them by the root of the width; the norm of the first layer hides it."""
    subject.model.model.embed_tokens.weight.data /= 8.0
    return expect("input", at=(subject.site(0), subject.site(1)))


@engine("inputs", "llama mistral qwen2 gpt2 gpt_neox")
def fewer_contributions_of_the_mlp(subject: Subject) -> Expect:
    """A multiplier of the residual stream that one run has not."""
    subject.layer %= 2
    block = subject.block
    block.writer().mul_(0.7)
    for bias in block.mlp_biases():
        bias.mul_(0.7)
    sites = (block.site, subject.site(subject.layer + 1))
    return expect("input", at=sites, also=[("weights", "fair", sites)])
