"""What converters of checkpoints get wrong: weights of a small model that are missing, tied, swapped, transposed, at
another layer, or permuted for another rotary embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tests.support.engine_models import Tiny

_NAMES = {
    "q": ("q_proj", "query"),
    "k": ("k_proj", "key"),
    "v": ("v_proj", "value"),
    "o": ("o_proj", "dense", "c_proj"),
}


def projection(tiny: Tiny, site: int, role: str) -> Tensor:
    """The weight of the projection of queries, keys, values or outputs, [out, in]: a view into the model."""
    module = tiny.attentions[site]
    if hasattr(module, "c_attn"):
        return module.c_proj.weight.data.T if role == "o" else module.c_attn.weight.data.T.chunk(3)["qkv".index(role)]
    holders = (module, *(m.output for n, m in tiny.model.named_modules() if n and getattr(m, "self", None) is module))
    found = (getattr(holder, name) for holder in holders for name in _NAMES[role] if hasattr(holder, name))
    return next(found).weight.data


@contextmanager
def rewritten(tiny: Tiny, edit: Callable[[], Any]) -> Iterator[None]:
    """Weights that are edited in place, and put back."""
    saved = [(parameter, parameter.detach().clone()) for parameter in tiny.model.parameters()]
    with torch.no_grad():
        edit()
        yield
        for parameter, before in saved:
            parameter.copy_(before)


def initialised(tiny: Tiny, sites: Sequence[int], roles: str, std: float = 0.02) -> Any:
    """Weights that were not loaded stay as they were drawn."""

    def edit() -> None:
        generator = torch.Generator().manual_seed(11)
        for site in sites:
            for role in roles:
                weight = projection(tiny, site, role)
                weight.copy_(torch.randn(weight.shape, generator=generator) * std)

    return rewritten(tiny, edit)


def _both(tiny: Tiny, site: int, roles: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Weights and biases of two projections."""
    yield projection(tiny, site, roles[0]), projection(tiny, site, roles[1])
    one, two = (_bias(tiny, site, role) for role in roles)
    if one is not None and two is not None:
        yield one, two


def tied(tiny: Tiny, sites: Sequence[int], roles: str) -> Any:
    """The first projection is the second's."""
    return rewritten(tiny, lambda: [one.copy_(two) for site in sites for one, two in _both(tiny, site, roles)])


def swapped(tiny: Tiny, sites: Sequence[int], roles: str) -> Any:
    """Two projections in each other's place."""

    def edit() -> None:
        for site in sites:
            for one, two in _both(tiny, site, roles):
                kept = one.clone()
                one.copy_(two)
                two.copy_(kept)

    return rewritten(tiny, edit)


def transposed(tiny: Tiny, sites: Sequence[int], role: str) -> Any:
    return rewritten(
        tiny, lambda: [projection(tiny, site, role).copy_(projection(tiny, site, role).T.clone()) for site in sites]
    )


def exchanged(tiny: Tiny, sites: Sequence[int], whole: float) -> Any:
    """A layer's weights at the next one and the other way round: of its attention, or (1) of the whole block."""

    def edit() -> None:
        named = dict(tiny.model.named_parameters())
        for name, parameter in named.items():
            parts = name.split(".")
            at = next((place for place, part in enumerate(parts) if part.isdigit()), None)
            if at is None or int(parts[at]) != sites[0] or not (whole or "attn" in name or "attention" in name):
                continue
            other = named[".".join((*parts[:at], str(sites[0] + 1), *parts[at + 1 :]))]
            kept = parameter.clone()
            parameter.copy_(other)
            other.copy_(kept)

    return rewritten(tiny, edit)


def permuted_features(tiny: Tiny, sites: Sequence[int], roles: str) -> Any:
    """Features of each head in the order of the other rotary pairing, as converters do for an engine that has it."""

    def edit() -> None:
        rotated = int(tiny.size * (0.5 if tiny.name == "phi" else 1.0))
        order = torch.arange(rotated).view(2, -1).T.flatten()
        order = torch.cat((order, torch.arange(rotated, tiny.size)))
        for site in sites:
            for role in roles:
                for part in (projection(tiny, site, role), _bias(tiny, site, role)):
                    if part is not None:
                        part.copy_(part.view(-1, tiny.size, *part.shape[1:])[:, order].reshape(part.shape))

    return rewritten(tiny, edit)


def _bias(tiny: Tiny, site: int, role: str) -> Tensor | None:
    module = tiny.attentions[site]
    if hasattr(module, "c_attn"):
        return None if role == "o" else module.c_attn.bias.data.chunk(3)["qkv".index(role)]
    found = next((getattr(module, name) for name in _NAMES[role] if hasattr(module, name)), None)
    return None if found is None or found.bias is None else found.bias.data


def reordered_groups(tiny: Tiny, sites: Sequence[int], roles: str) -> Any:
    """Heads of keys, or of values as well, in reverse order."""

    def edit() -> None:
        for site in sites:
            for role in roles:
                for part in (projection(tiny, site, role), _bias(tiny, site, role)):
                    if part is not None:
                        part.copy_(part.view(-1, tiny.size, *part.shape[1:]).flip(0).reshape(part.shape))

    return rewritten(tiny, edit)
