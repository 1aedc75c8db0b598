"""Where the weights that make queries and keys lie in an attention module, head by head; and all linear weights of a
model, with the features of each that belong together.

Known are ``nn.MultiheadAttention`` and the common layouts of transformers and timm: separate projections, one packed
projection whose thirds (or grouped parts) follow one another, one whose heads do, and multi-head latent attention
(DeepSeek, Kimi).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attemper.errors import InputError
from attemper.sites.names import class_name, is_wanted, is_within, names_of
from attemper.sites.observation import HEAD_COUNTS, stated_heads
from attemper.sites.sharded import is_dtensor, local_places
from attemper.text import count


class HeadsError(InputError):
    """The layout of an attention's projections is known, and the number of its heads is not, or does not fit."""


@dataclass(frozen=True)
class HeadRows:
    """The output features of each head in one projection.

    ``module.weight`` (and ``module.bias``) have them along ``dim``; ``index`` [heads, size] says at which places.
    """

    module: nn.Module
    weight: str
    bias: str | None
    dim: int
    index: Tensor

    @property
    def heads(self) -> int:
        return self.index.shape[0]

    @property
    def is_split(self) -> bool:
        """Whether this rank has a part of the weight."""
        return is_dtensor(getattr(self.module, self.weight))

    def scale_(self, factors: Tensor) -> None:
        """Multiplies the features of each head by its factor [heads], in place and off the graph.

        Of a weight that is split over ranks, each multiplies what it has: all must be given the same factors.
        """
        weight = getattr(self.module, self.weight)
        # Half-precision weights are multiplied by the exact factor and rounded once, not by a rounded one.
        wide = torch.promote_types(weight.dtype, torch.float32)
        each = torch.ones(weight.shape[self.dim], dtype=wide, device=weight.device)
        places = self.index.to(weight.device)
        each[places.flatten()] = factors.to(weight.device, wide).repeat_interleave(places.shape[1])
        _multiply_(weight, each, self.dim)
        bias = None if self.bias is None else getattr(self.module, self.bias)
        if bias is not None:
            _multiply_(bias, each, 0)


@dataclass(frozen=True)
class Projections:
    """What makes the queries and keys of one attention module."""

    query: HeadRows
    key: HeadRows
    query_alone: HeadRows | None = None
    """Latent attention: features of the queries that meet a key which all heads share, and no head's to scale."""

    @property
    def repeats(self) -> int:
        return self.query.heads // self.key.heads

    @property
    def size(self) -> int:
        """Features of the queries of a head."""
        return sum(part.index.shape[1] for part in (self.query, self.query_alone) if part is not None)


QUERY_NORMS = ("q_norm", "query_norm", "q_layernorm", "q_ln", "qk_norm", "norm_q", "query_layernorm")
"""Names under which attention modules keep a norm of their queries."""
_KEY_NORMS = ("k_norm", "key_norm", "k_layernorm", "k_ln", "norm_k", "key_layernorm")
_SEPARATE = (("q_proj", "k_proj"), ("query", "key"), ("q", "k"), ("q_lin", "k_lin"), ("to_q", "to_k"), ("wq", "wk"))
_THIRDS = ("c_attn", "qkv_proj", "qkv", "Wqkv", "in_proj")
_BY_HEAD = ("query_key_value",)


def projections_of(module: nn.Module, heads: int | None = None) -> Projections:
    """The projections of an attention module.

    Args:
        heads: how many it has; None for what an attribute of it, or of its config, says.

    Raises:
        InputError: the layout is not one that is known.
        HeadsError: the number of heads is not to be found, or does not divide the projections.
    """
    for find in (_torch, _latent, _separate, _thirds, _by_head):
        found = find(module, heads)
        if found is not None:
            return found
    raise InputError(
        f"{type(module).__name__}: the layout of its query and key projections is not known. Known are "
        f"nn.MultiheadAttention, separate projections ({', '.join(f'{q}/{k}' for q, k in _SEPARATE)}), packed ones "
        f"({', '.join((*_THIRDS, *_BY_HEAD))}) and DeepSeek's latent attention."
    )


def queries_of(module: nn.Module) -> tuple[HeadRows, HeadRows | None]:
    """``query`` and ``query_alone`` of an attention module's projections.

    Also of a module that makes queries only, for the keys of another layer (Gemma 4's last ones).

    Raises:
        InputError: as ``projections_of``.
    """
    try:
        found = projections_of(module)
    except InputError:
        alone = [part for names in _SEPARATE if (part := _projection(module, names[0])) is not None]
        if len(alone) != 1:
            raise
        return _separate_rows(module, alone[0], None), None
    return found.query, found.query_alone


@torch.no_grad()
def _multiply_(tensor: Any, factors: Tensor, dim: int) -> None:
    """Multiplies a weight or bias by a factor for each of its places along ``dim``."""
    if is_dtensor(tensor):
        factors = factors[local_places(tensor, dim).to(factors.device)]
        tensor = tensor.to_local()
    tensor.copy_(tensor * (factors[:, None] if dim == 0 and tensor.dim() == 2 else factors))


def _torch(module: nn.Module, given: int | None) -> Projections | None:
    if not isinstance(module, nn.MultiheadAttention):
        return None
    size, heads = module.embed_dim, module.num_heads
    if given not in (None, heads):
        raise HeadsError(f"{class_name(module)} has {count(heads, 'head')}, not {given}.")
    if module._qkv_same_embed_dim:
        rows = [_block("in_proj_weight", "in_proj_bias", module, start, heads, size // heads) for start in (0, size)]
        return Projections(rows[0], rows[1])
    # The weights are apart, their biases are not: each part is one of its own.
    parts = [_block(f"{name}_proj_weight", None, module, 0, heads, size // heads) for name in ("q", "k")]
    if module.in_proj_bias is not None:
        raise InputError(
            "nn.MultiheadAttention with kdim or vdim keeps weights apart and biases together, which is not supported: "
            "build it with bias=False, or without kdim and vdim."
        )
    return Projections(parts[0], parts[1])


def _latent(module: nn.Module, given: int | None) -> Projections | None:
    if not hasattr(module, "kv_b_proj") or not hasattr(module, "qk_nope_head_dim"):
        return None
    heads, plain = _heads(module, given), int(module.qk_nope_head_dim)  # type: ignore[arg-type]
    query = getattr(module, "q_b_proj", None) or module.q_proj
    assert isinstance(query, nn.Module)
    assert isinstance(module.kv_b_proj, nn.Module)
    of_query = _places(module, query, heads, "queries")
    key = _rows(module.kv_b_proj, _places(module, module.kv_b_proj, heads, "keys and values")[:, :plain])
    return Projections(_rows(query, of_query[:, :plain]), key, _rows(query, of_query[:, plain:]))


def _separate(module: nn.Module, given: int | None) -> Projections | None:
    for names in _SEPARATE:
        query, key = (_projection(module, name) for name in names)
        if query is not None and key is not None:
            rows = _separate_rows(module, query, given)
            size = rows.index.shape[1]
            of_key = _places(module, key, size, "keys", "the size of a head").view(-1, size)
            return Projections(rows, _rows(key, of_key))
    return None


def _projection(module: nn.Module, name: str) -> nn.Module | None:
    part = getattr(module, name, None)
    return part if isinstance(part, nn.Module) and hasattr(part, "weight") else None


def _separate_rows(module: nn.Module, query: nn.Module, given: int | None) -> HeadRows:
    return _rows(query, _places(module, query, _heads(module, given), "queries"))


def _thirds(module: nn.Module, given: int | None) -> Projections | None:
    """One projection: all queries, then all keys (as many or fewer heads), then all values."""

    def rows(part: nn.Module, heads: int) -> tuple[Tensor, Tensor]:
        groups = _key_heads(module) or heads
        each = _places(module, part, heads + 2 * groups, "queries, keys and values", "the heads of all three")
        return each[:heads], each[heads : heads + groups]

    return _one_weight(module, _THIRDS, rows, given)


def _by_head(module: nn.Module, given: int | None) -> Projections | None:
    """One projection: query, key and value of a head, then of the next."""

    def rows(part: nn.Module, heads: int) -> tuple[Tensor, Tensor]:
        features = _features(part)[1]
        if features % (3 * heads) or _key_heads(module) not in (None, heads):
            raise HeadsError(
                f"{type(module).__name__}: its packed projection of size {features} for its heads ({heads}) is "
                "not a query, a key and a value for each: this layout is not known."
            )
        places = torch.arange(features).view(heads, 3, -1)
        return places[:, 0], places[:, 1]

    return _one_weight(module, _BY_HEAD, rows, given)


def _one_weight(
    module: nn.Module,
    names: Sequence[str],
    rows: Callable[[nn.Module, int], tuple[Tensor, Tensor]],
    given: int | None,
) -> Projections | None:
    for part in (found for name in names if (found := _projection(module, name)) is not None):
        of_query, of_key = rows(part, _heads(module, given))
        return Projections(_rows(part, of_query), _rows(part, of_key))
    return None


def _places(module: nn.Module, projection: nn.Module, parts: int, what: str, of: str = "its heads") -> Tensor:
    """The output features of a projection as so many parts [parts, size]."""
    features = _features(projection)[1]
    if features % parts:
        raise HeadsError(f"{type(module).__name__}: its {what} of {features} are no multiple of {of}, {parts}.")
    return torch.arange(features).view(parts, -1)


def _rows(projection: nn.Module, index: Tensor) -> HeadRows:
    """The features of each head, at the places ``index``, of a projection with a weight."""
    bias = "bias" if isinstance(getattr(projection, "bias", None), Tensor) else None
    return HeadRows(projection, "weight", bias, _features(projection)[0], index)


def _block(weight: str, bias: str | None, module: nn.Module, start: int, heads: int, size: int) -> HeadRows:
    index = torch.arange(start, start + heads * size).view(heads, size)
    return HeadRows(module, weight, bias if bias and getattr(module, bias) is not None else None, 0, index)


def _features(projection: nn.Module) -> tuple[int, int]:
    """The dimension of the weight in which output features lie, and how many there are."""
    weight = projection.weight
    assert isinstance(weight, Tensor)
    # transformers' Conv1D, which GPT-2 has, keeps its weight as [in, out].
    dim = 1 if class_name(projection) == "Conv1D" else 0
    if weight.dim() < 2:
        raise InputError(
            f"{type(projection).__name__}: its weight is kept as flat pieces (FullyShardedDataParallel, DeepSpeed "
            "ZeRO-3), which have no heads. Use fully_shard (FSDP2), whose weights keep their shape."
        )
    return dim, weight.shape[dim]


def _heads(module: nn.Module, given: int | None) -> int:
    if (heads := given or stated_heads(module)) is None:
        raise HeadsError(
            f"{type(module).__name__}: the number of heads is not to be found under {', '.join(HEAD_COUNTS)}, in the "
            "module or its config."
        )
    return heads


def _key_heads(module: nn.Module) -> int | None:
    holders = (module, getattr(module, "config", None))
    values = (getattr(one, name, None) for one in holders for name in ("num_key_value_heads", "num_kv_heads"))
    return next((value for value in values if isinstance(value, int)), None)


def normalises(module: nn.Module) -> bool:
    """Whether an attention normalises queries or keys after their projection, so that scaling that does nothing."""
    norms = (getattr(module, name, None) for name in (*QUERY_NORMS, *_KEY_NORMS))
    return any(isinstance(norm, nn.Module) and not isinstance(norm, nn.Identity) for norm in norms)


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
    kept = {module: name for module, name in names_of(model).items() if is_wanted(name, sites)}
    parts = {module: list(those) for module in kept if (those := _parts(module)) is not None}
    if which != "all":
        _refuse_unknown(kept, parts)
    found: dict[tuple[nn.Module, str], LinearWeight] = {}
    for places in parts.values():
        for (module, parameter), (dim, blocks) in _by_weight(places, queries_and_keys=which == "qk").items():
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


def owners_of(model: nn.Module) -> dict[int, list[str]]:
    """Every name of each parameter, by its identity."""
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    return owners


Part = tuple[str, HeadRows]
"""("query", "key" or "value", features)."""


def _parts(module: nn.Module) -> Iterator[Part] | None:
    """What makes queries and keys here; None where the layout is not that of an attention that is known."""
    if isinstance(module, nn.MultiheadAttention):
        return _torch_parts(module)
    try:
        found = projections_of(module)
    except InputError:
        return None
    parts = [("query", found.query), ("key", found.key)]
    if found.query_alone is not None:
        parts.append(("query", found.query_alone))
    return iter(parts)


def _torch_parts(module: nn.MultiheadAttention) -> Iterator[Part]:
    # Whole matrices: unlike QKClip this asks for no heads, so biases that are kept together do not matter.
    packed = module._qkv_same_embed_dim
    for place, name in enumerate(("query", "key", "value")):
        features = torch.arange(module.embed_dim) + (place * module.embed_dim if packed else 0)
        weight = "in_proj_weight" if packed else f"{name[0]}_proj_weight"
        yield name, HeadRows(module, weight, None, 0, features[None])


def _by_weight(places: list[Part], *, queries_and_keys: bool) -> dict[tuple[nn.Module, str], tuple[int, list[Tensor]]]:
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
        around = [other for other, above in kept.items() if _attends(other) and is_within(name, above)]
        tops.add(kept[min(around, key=lambda other: len(kept[other]))] if around else name)
    return [module for module, name in kept.items() if any(is_within(name, top) for top in tops)]


def _refuse_unknown(kept: dict[nn.Module, str], parts: dict[nn.Module, list[Part]]) -> None:
    known = [kept[module] for module in parts]
    for module, name in kept.items():
        if not _attends(module) or not any(_linear(inner) is not None for inner in module.modules()):
            continue
        if not any(is_within(name, other) or is_within(other, name) for other in known):
            projections_of(module)  # says what is known
    if not parts:
        raise InputError(
            "sigma_reparam_ finds no attention whose query and key projections it knows here. which='all' asks for "
            "none; sites= names modules."
        )


def _attends(module: nn.Module) -> bool:
    return "attention" in class_name(module).lower()
