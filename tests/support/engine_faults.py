"""Small models whose attention is made wrong on purpose, as engines have got it wrong, beside a twin that is right.

A fault is a patch of a transformers model: another weight, another mask, another angle. Nothing here is known to the
code that names faults, and no formula is shared with it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.support.engine_converters import (
    exchanged,
    initialised,
    permuted_features,
    reordered_groups,
    swapped,
    tied,
    transposed,
)
from tests.support.engine_models import PRETRAINED, WINDOW, Tiny
from tests.support.engine_patches import (
    attributes,
    biased,
    changed,
    grid,
    interleaved,
    logarithms,
    masked,
    noise,
    projected,
    stored,
    turned,
)

Patch = Callable[[Tiny, list[int], float], Any]
"""(model, sites, size) -> a context in which the model is wrong."""


@dataclass(frozen=True)
class Fault:
    """One way to be wrong."""

    kind: str
    """What a namer should say."""
    variant: str
    sizes: tuple[float, ...]
    patch: Patch
    fits: Callable[[Tiny], bool] = field(default=lambda _: True)
    value: Callable[[Tiny, float], float | None] = field(default=lambda _, __: None)
    """The number that a namer should give."""
    shift: int = 0
    """How many sites after the patched one it is first seen."""
    padding: bool = False
    """Whether the batch must be padded."""
    at: Callable[[Tiny, int], bool] = field(default=lambda _, __: True)
    """Whether it can be at a site."""
    everywhere: bool = False
    """Whether it is of the whole model."""
    heads: Callable[[int, int], tuple[int, ...]] | None = None
    """Which heads have it, by how many there are of queries and of keys; None where that is not compared."""


def _weights(tiny: Tiny, sites: list[int], *names: str) -> list[Tensor]:
    return [getattr(tiny.attentions[s], n).weight for s in sites for n in names if hasattr(tiny.attentions[s], n)]


def _norms(tiny: Tiny, sites: list[int]) -> list[Tensor]:
    """Weights of the norms before attention."""
    found = []
    for name, module in tiny.model.named_modules():
        parts = name.split(".")
        if parts[-1] in ("input_layernorm", "ln_1") and int(parts[-2]) in sites:
            found.append(module.weight)
    return found


def _mlps(tiny: Tiny, sites: list[int]) -> list[Tensor]:
    """Weights with which a block ends."""
    endings = ("mlp.down_proj.weight", "mlp.c_proj.weight", "mlp.fc2.weight", "output.dense.weight")
    named = [
        (name, parameter)
        for name, parameter in tiny.model.named_parameters()
        if name.endswith(endings) and "attention" not in name
    ]
    return [parameter for name, parameter in named if any(f".{site}." in f".{name}" for site in sites)]


def _is_square(tiny: Tiny) -> bool:
    """Whether projections are as wide as what they read, and there are as many heads of keys as of queries."""
    return tiny.name in ("gpt2", "bert", "phi", PRETRAINED)


def _can_be_permuted(tiny: Tiny) -> bool:
    return tiny.rotary and _no_norm(tiny) and tiny.name != "gpt_oss"


def _has(name: str) -> Callable[[Tiny], bool]:
    return lambda tiny: hasattr(tiny.attentions[0], name)


def _is_rotary(tiny: Tiny) -> bool:
    return tiny.rotary


def _is_causal(tiny: Tiny) -> bool:
    return tiny.causal


def _scaled(tiny: Tiny, sites: list[int], c: float) -> Any:
    return attributes([tiny.attentions[s] for s in sites], "scaling", lambda scale: scale * c)


def _one_head(tiny: Tiny, sites: list[int], c: float) -> Any:
    def change(q: Tensor) -> Tensor:
        factor = torch.ones(q.shape[-2], 1)
        factor[1] = c
        return (q * factor).to(q.dtype)  # in float32: bfloat16 has 1.046875 and no 1.05

    return projected(tiny, sites, "q", change)


def _no_norm(tiny: Tiny) -> bool:
    return not any(hasattr(tiny.attentions[0], name) for name in ("q_norm", "q_layernorm"))


def _logn(tiny: Tiny, sites: list[int], length: float) -> Any:
    def change(q: Tensor) -> Tensor:
        return q * logarithms(q.shape[1], length)[None, :, None, None].to(q.dtype)

    return projected(tiny, sites, "q", change)


def _own_window(tiny: Tiny, site: int) -> bool:
    """Whether the model has a window there."""
    module = tiny.attentions[site]
    own = getattr(module, "sliding_window", None)
    # Mistral's modules do not say; its masks follow the configuration alone.
    return own is not None or tiny.name == "mistral"


def _windowed(tiny: Tiny, sites: list[int], size: float) -> Any:
    """A window of ``size`` keys; of -1 or 1: the model's own, off by one."""

    def change(seen: Tensor) -> Tensor:
        i = torch.arange(seen.shape[2])
        distance = i[:, None] - i[None]
        if abs(size) > 1:
            return seen & (distance < size)
        seen = torch.ones_like(seen).tril() if size > 0 else seen
        return seen & (distance < WINDOW + size)

    return masked(tiny, sites, change)


def _future(tiny: Tiny, sites: list[int], extra: float) -> Any:
    def change(seen: Tensor) -> Tensor:
        i = torch.arange(seen.shape[2])
        distance = i[:, None] - i[None]
        if extra > 0:
            return seen | ((distance < 0) & (distance >= -extra))
        return seen & ((distance > 0) | (i == 0)[:, None])

    return masked(tiny, sites, change)


def _made_causal(tiny: Tiny, sites: list[int], _: float) -> Any:
    return masked(tiny, sites, lambda seen: seen & torch.ones_like(seen).tril())


def _shown_padding(tiny: Tiny, sites: list[int], _: float) -> Any:
    """Padding is seen as if it were tokens."""

    def change(seen: Tensor) -> Tensor:
        every = torch.ones_like(seen)
        return every.tril() if tiny.causal else every

    return masked(tiny, sites, change)


def _hidden_tokens(tiny: Tiny, sites: list[int], _: float) -> Any:
    """The mask of the other side: as many keys are hidden at the wrong end."""

    def change(seen: Tensor) -> Tensor:
        real = seen.any(2, keepdim=True)
        other = real.flip(-1) & real
        return seen & (other | torch.eye(seen.shape[2], dtype=torch.bool))

    return masked(tiny, sites, change)


def _hidden_documents(tiny: Tiny, sites: list[int], _: float) -> Any:
    """Three documents in a sequence do not see one another."""

    def change(seen: Tensor) -> Tensor:
        number = torch.tensor([0, 1, 2]).repeat_interleave(torch.tensor([30, 35, seen.shape[2] - 65]))
        return seen & (number[:, None] == number[None])

    return masked(tiny, sites, change)


def _permuted(order: Sequence[int]) -> Callable[[Tensor], Tensor]:
    """The first heads in another order."""
    return lambda x: x[..., [*order, *range(len(order), x.shape[-2])], :]


def _tiled_keys(tiny: Tiny, sites: list[int], _: float) -> Any:
    """Query head h reads key head h mod G."""
    home = sys.modules[type(tiny.attentions[0]).__module__]
    return attributes([home], "repeat_kv", lambda _: lambda x, n: x.repeat(1, n, 1, 1))


def _eager_grouped(tiny: Tiny) -> bool:
    return tiny.model.config._attn_implementation == "eager" and tiny.name in ("llama", "qwen2", "mistral", "olmo2")


FAULTS: tuple[Fault, ...] = (
    Fault("scale", "of the call", (1.02, 0.5, 2**0.5), _scaled, _has("scaling"), lambda _, c: c),
    Fault("scale", "one head", (1.05, 1.3), _one_head, _no_norm, lambda _, c: c, heads=lambda *_: (1,)),
    Fault(
        "scale",
        "magnitude of rotary",
        (1.1, 1.2079),
        lambda t, s, m: turned(t, s, lambda f: f, m),
        lambda t: t.rotary and t.name not in ("gemma3", "phi"),
        lambda _, m: m * m,
    ),
    Fault(
        "softcap",
        "left out",
        (0.0,),
        lambda t, s, _: attributes([t.attentions[i] for i in s], "attn_logit_softcapping", lambda _: None),
        lambda t: bool(getattr(t.attentions[0], "attn_logit_softcapping", None)),
    ),
    Fault(
        "softcap",
        "another",
        (30.0, 5.0),
        lambda t, s, c: attributes([t.attentions[i] for i in s], "attn_logit_softcapping", lambda _: c),
        lambda t: bool(getattr(t.attentions[0], "attn_logit_softcapping", None)),
        lambda _, c: c,
    ),
    Fault("logn", "on queries", (16.0, 40.0), _logn, _no_norm, lambda _, n: n),
    Fault(
        "key_shift",
        "one key",
        (0.5, 2.0),
        lambda t, s, x: biased(t, s, lambda n: (torch.arange(n) == 0).float()[None, None] * x + torch.zeros(1, n, 1)),
        value=lambda _, x: x,
    ),
    Fault(
        "distance_bias",
        "ALiBi",
        (0.02, 0.2),
        lambda t, s, x: biased(
            t, s, lambda n: -x * (torch.arange(n)[:, None] - torch.arange(n)[None]).abs().float()[None]
        ),
        value=lambda _, x: -x,
    ),
    Fault("window", "off by one", (-1.0, 1.0), _windowed, value=lambda _, x: WINDOW + x, at=_own_window),
    Fault(
        "window",
        "one that should not be",
        (32.0,),
        _windowed,
        _is_causal,
        lambda _, x: x,
        at=lambda t, site: not _own_window(t, site),
    ),
    Fault("causality", "one key ahead", (1.0, -1.0), _future, _is_causal),
    Fault("causality", "of an encoder", (0.0,), _made_causal, lambda t: not t.causal),
    Fault("padding", "seen", (0.0,), _shown_padding, lambda t: t.name != "gpt2", padding=True),
    Fault("padding", "wrong side", (0.0,), _hidden_tokens, lambda t: not t.causal, padding=True),
    Fault(
        "sink",
        "left out",
        (0.0,),
        lambda t, s, _: changed([t.attentions[i].sinks for i in s], lambda x: x * 0 - 1e4),
        _has("sinks"),
    ),
    Fault(
        "sink",
        "shifted",
        (0.5,),
        lambda t, s, x: changed([t.attentions[i].sinks for i in s], lambda y: y + x),
        _has("sinks"),
        lambda _, x: x,
    ),
    Fault(
        "rotary",
        "base",
        (500_000.0, 1_000.0),
        lambda t, s, b: turned(t, s, lambda f: b ** (-torch.arange(len(f)).float() / len(f))),
        _is_rotary,
        lambda _, b: b,
    ),
    Fault(
        "rotary",
        "factor",
        (2.0, 1.1, 8.0),
        lambda t, s, x: turned(t, s, lambda f: f / x),
        _is_rotary,
        lambda _, x: x,
    ),
    Fault(
        "rotary",
        "layout",
        (0.0,),
        interleaved,
        lambda t: t.rotary and t.name not in ("gpt_oss",),
        everywhere=True,
    ),
    Fault("head_order", "of queries", (0.0,), lambda t, s, _: projected(t, s, "q", _permuted((2, 0, 3, 1)))),
    Fault(
        "head_order",
        "two queries swapped",
        (0.0,),
        lambda t, s, _: projected(t, s, "q", _permuted((1, 0, 2, 3))),
        heads=lambda *_: (0, 1),
    ),
    Fault("grouping", "tiled", (0.0,), _tiled_keys, _eager_grouped, everywhere=True),
    Fault(
        "key_rounding",
        "stored keys",
        (3.0, 4.0, 6.0, 8.0),
        lambda t, s, b: stored(t, s, lambda k, v: (grid(k, b), v)),
        value=lambda _, b: b,
    ),
    Fault(
        "bias",
        "of queries",
        (0.1, 1.0),
        lambda t, s, x: projected(
            t, s, "q", lambda q: q + (torch.randn(q.shape[-2:], generator=torch.Generator().manual_seed(5)) * x).to(q)
        ),
        _no_norm,
    ),
    Fault(
        "weights",
        "of queries",
        (0.1, 0.5),
        lambda t, s, x: changed(_weights(t, s, "q_proj", "query"), lambda w: noise(w, x)),
        lambda t: t.name != "gpt2",
    ),
    Fault(
        "weights",
        "of keys",
        (0.3,),
        lambda t, s, x: changed(_weights(t, s, "k_proj", "key"), lambda w: noise(w, x)),
        lambda t: t.name != "gpt2",
    ),
    Fault(
        "values",
        "of values",
        (0.1, 0.5),
        lambda t, s, x: projected(t, s, "v", lambda v: noise(v, x)),
        heads=lambda heads, _: tuple(range(heads)),
    ),
    Fault(
        "values",
        "one head",
        (0.1, 0.5),
        lambda t, s, x: projected(t, s, "v", lambda v: torch.cat((v[..., :-1, :], noise(v[..., -1:, :], x)), -2)),
        heads=lambda heads, groups: tuple(range(heads - heads // groups, heads)),
    ),
    Fault(
        "input",
        "norm",
        (0.1, 0.5),
        lambda t, s, x: changed(_norms(t, s), lambda w: noise(w, x)),
        lambda t: bool(_norms(t, [0])),
    ),
    Fault(
        "input",
        "block before",
        (0.3,),
        lambda t, s, x: changed(_mlps(t, s), lambda w: noise(w, x)),
        lambda t: bool(_mlps(t, [0])),
        shift=1,
    ),
    Fault("swapped", "queries and keys", (0.0,), lambda t, s, _: swapped(t, s, "qk"), _is_square),
    Fault("not_loaded", "keys are queries", (0.0,), lambda t, s, _: tied(t, s, "kq"), _is_square),
    Fault("rotary", "order of features", (0.0,), lambda t, s, _: permuted_features(t, s, "qk"), _can_be_permuted),
    Fault(
        "rotary", "order of features of keys", (0.0,), lambda t, s, _: permuted_features(t, s, "k"), _can_be_permuted
    ),
    Fault("head_order", "groups of keys and values", (0.0,), lambda t, s, _: reordered_groups(t, s, "kv")),
    Fault("not_loaded", "queries", (0.02,), lambda t, s, x: initialised(t, s, "q", x)),
    Fault("not_loaded", "queries and keys", (0.02,), lambda t, s, x: initialised(t, s, "qk", x)),
    Fault("not_loaded", "values", (0.02,), lambda t, s, x: initialised(t, s, "v", x)),
    Fault("not_loaded", "outputs", (0.02,), lambda t, s, x: initialised(t, s, "o", x)),
    Fault("not_loaded", "values are keys", (0.0,), lambda t, s, _: tied(t, s, "vk")),
    Fault("swapped", "keys and values", (0.0,), lambda t, s, _: swapped(t, s, "kv")),
    Fault("transposed", "queries", (0.0,), lambda t, s, _: transposed(t, s, "q"), _is_square),
    Fault("transposed", "outputs", (0.0,), lambda t, s, _: transposed(t, s, "o"), _is_square),
    Fault("order_of_layers", "of attention", (0.0,), lambda t, s, _: exchanged(t, s, 0.0), at=lambda _, site: site < 3),
    Fault("order_of_layers", "whole", (0.0,), lambda t, s, _: exchanged(t, s, 1.0), at=lambda _, site: site < 3),
    Fault("documents", "hidden", (0.0,), _hidden_documents),
)
