"""Which weights of a model make linear layers, and which of their features belong together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attemper.control.query_key_weights import HeadRows, projections_of
from attemper.errors import InputError
from attemper.sites.names import class_name, named

WHICH = ("all", "attention", "qk")


@dataclass(frozen=True)
class LinearWeight:
    """One weight, ``getattr(module, parameter)``, and what parts it has."""

    name: str
    """In the model."""
    module: nn.Module
    parameter: str
    dim: int
    """Where output features lie."""
    block_of: Tensor
    """[out features]: to which part each belongs; ``blocks`` for none."""
    blocks: int

    @property
    def tensor(self) -> Tensor:
        return getattr(self.module, self.parameter)


def linear_weights(model: nn.Module, which: str, sites: tuple[str, ...] | None) -> list[LinearWeight]:
    """The weights of "all" linear layers, those of "attention", or those that make queries and keys, "qk".

    Queries, keys and values that share a weight are a part each; all other weights are one.

    Raises:
        InputError: there are none; or, unless all are asked for, the layout of an attention is not known.
    """
    kept = {module: name for module, name in named(model).items() if sites is None or _below(name, sites)}
    parts = {module: list(those) for module in kept if (those := _parts(module)) is not None}
    if which != "all":
        _refuse_unknown(kept, parts)
    found: dict[tuple[nn.Module, str], LinearWeight] = {}
    for places in parts.values():
        for (module, parameter), (dim, blocks) in _joined(places, queries_and_keys=which == "qk").items():
            if module in kept:
                found[module, parameter] = _weight(kept[module], module, parameter, dim, blocks)
    area = kept if which == "all" else _attention_areas(kept, parts) if which == "attention" else ()
    for module in area:
        dim = _linear(module)
        if dim is not None and (module, "weight") not in found:
            if isinstance(module.weight, nn.parameter.UninitializedParameter):
                raise InputError(f"{kept[module]}.weight has no values yet: call the model once, then this.")
            features = torch.arange(module.weight.shape[dim])  # type: ignore[index]
            found[module, "weight"] = _weight(kept[module], module, "weight", dim, [features])
    if not found:
        raise InputError(
            f"{class_name(model)} has no linear layers {'' if sites is None else f'in sites {sites} '}of the kind "
            f"which={which!r}."
        )
    order = {module: place for place, module in enumerate(kept)}
    return sorted(found.values(), key=lambda weight: order[weight.module])


Part = tuple[str, HeadRows]
"""("query", "key" or "value", features)."""


def _parts(module: nn.Module) -> Iterator[Part] | None:
    """What makes queries and keys here; None where the layout is not that of an attention that is known."""
    if isinstance(module, nn.MultiheadAttention):
        return _torch(module)
    try:
        found = projections_of(module)
    except InputError:
        return None
    parts = [("query", found.query), ("key", found.key)]
    if found.query_alone is not None:
        parts.append(("query", found.query_alone))
    return iter(parts)


def _torch(module: nn.MultiheadAttention) -> Iterator[Part]:
    # Whole matrices: unlike QKClip this asks for no heads, so biases that are kept together do not matter.
    names = ("query", "key", "value")
    for place, name in enumerate(names):
        if module._qkv_same_embed_dim:
            features = torch.arange(place * module.embed_dim, (place + 1) * module.embed_dim)
            yield name, HeadRows(module, "in_proj_weight", None, 0, features[None])
        else:
            features = torch.arange(module.embed_dim)
            yield name, HeadRows(module, f"{name[0]}_proj_weight", None, 0, features[None])


def _joined(places: list[Part], *, queries_and_keys: bool) -> dict[tuple[nn.Module, str], tuple[int, list[Tensor]]]:
    """The features of each part of each weight; what is neither query nor key is values, where they are wanted."""
    weights: dict[tuple[nn.Module, str], tuple[int, dict[str, list[Tensor]]]] = {}
    for name, rows in places:
        if name == "value" and queries_and_keys:
            continue
        dim, blocks = weights.setdefault((rows.module, rows.weight), (rows.dim, {}))
        blocks.setdefault(name, []).append(rows.index.flatten())
    joined = {}
    for place, (dim, blocks) in weights.items():
        parts = [torch.cat(indices) for indices in blocks.values()]
        features = torch.arange(getattr(*place).shape[dim])
        rest = features[~torch.isin(features, torch.cat(parts))]
        if len(rest) and not queries_and_keys:
            parts.append(rest)
        joined[place] = (dim, parts)
    return joined


def _weight(name: str, module: nn.Module, parameter: str, dim: int, parts: list[Tensor]) -> LinearWeight:
    block_of = torch.full((getattr(module, parameter).shape[dim],), len(parts))
    for block, features in enumerate(parts):
        block_of[features] = block
    return LinearWeight(f"{name}.{parameter}".removeprefix("."), module, parameter, dim, block_of, len(parts))


def _linear(module: nn.Module) -> int | None:
    """The dimension of output features in the weight of a linear layer; None for other modules."""
    if isinstance(module, nn.Linear):
        return 0
    # transformers' Conv1D, which GPT-2 has, keeps its weight as [in, out].
    return 1 if type(module).__name__ in ("Conv1D", "ParametrizedConv1D") and hasattr(module, "nf") else None


def _attention_areas(kept: dict[nn.Module, str], parts: dict[nn.Module, list[Part]]) -> list[nn.Module]:
    """Everything inside attention: an output projection may lie beside the module that has queries and keys."""
    tops = set()
    for module in parts:
        name = kept[module]
        around = [
            other for other, above in kept.items()
            if _attends(other) and (not above or name.startswith(f"{above}."))
        ]  # fmt: skip
        tops.add(kept[min(around, key=lambda other: len(kept[other]))] if around else name)
    return [module for module, name in kept.items() if _below(name, tuple(tops))]


def _refuse_unknown(kept: dict[nn.Module, str], parts: dict[nn.Module, list[Part]]) -> None:
    known = [kept[module] for module in parts]
    for module, name in kept.items():
        if not _attends(module) or not any(_linear(inner) is not None for inner in module.modules()):
            continue
        if not any(_below(name, (other,)) or _below(other, (name,)) for other in known):
            projections_of(module)  # says what is known
    if not parts:
        raise InputError(
            "sigma_reparam_ finds no attention whose query and key projections it knows here. which='all' asks for "
            "none; sites= names modules."
        )


def _attends(module: nn.Module) -> bool:
    return "attention" in class_name(module).lower()


def _below(name: str, sites: tuple[str, ...]) -> bool:
    return any(not site or name == site or name.startswith(f"{site}.") for site in sites)
