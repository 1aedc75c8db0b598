"""Temperatures folded into the weights that make queries, so that the model needs nothing of ours any more."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attemper.call.request import DTYPES
from attemper.control.query_key_weights import QUERY_NORMS, HeadRows, owners_of, queries_of
from attemper.errors import InputError
from attemper.nn.temperature import FixedTemperature, LearnedTemperature, ProductTemperature, Temperature
from attemper.sites.find import Site, chosen_sites, used_names
from attemper.sites.sharded import is_dtensor

_TOLD_BY_NAME = ("normalize", "rms_norm", "layer_norm", "rel_pos", "relative_position")
"""In the names that an attention module's code uses: its queries may be normalised, or make more than scores."""


def constant(temperature: Temperature) -> Tensor | None:
    """The temperatures [heads or 1] of a module that gives the same to every query: fixed, learned, their products."""
    if isinstance(temperature, FixedTemperature):
        return temperature.value.detach()
    if isinstance(temperature, LearnedTemperature):
        return temperature.value().detach()
    if isinstance(temperature, ProductTemperature):
        parts = [constant(part) for part in temperature.factors if isinstance(part, Temperature)]
        product = torch.ones(1)
        for part in parts:
            if part is None:
                return None
            product = product.to(part.device) * part
        return product
    return None


def fold_(where: str, model: nn.Module, temperatures: Mapping[str, Tensor]) -> None:
    """Multiplies what makes each head's queries by 1/T, in place; all sites or, where one is refused, none.
    ``temperatures``: [heads or 1] by the name of an attention module.
    """
    acting = {name: value for name, value in temperatures.items() if bool((value != 1).any())}
    if not acting:
        return
    sites = {site.name: site for site in chosen_sites(where, model, tuple(acting))}
    owners = owners_of(model)
    steps: list[Callable[[], None]] = []
    for name, value in acting.items():
        if name not in sites:
            raise InputError(f"{where}: {name} is not an attention site of the model. They are: {', '.join(sites)}.")
        for fold in _folds(where, sites[name], value):
            for parameter in fold.parameters():
                if len(owners.get(id(parameter), ())) > 1:
                    raise InputError(
                        f"{where}: a weight that makes the queries of {name} is shared: "
                        f"{', '.join(owners[id(parameter)])}. Folding for one of them would change the others."
                    )
            steps.append(fold.apply)
    for step in steps:
        step()


@dataclass(frozen=True)
class _RowFold:
    """Into rows of a projection."""

    rows: HeadRows
    factors: Tensor

    def parameters(self) -> Iterator[Tensor]:
        for name in (self.rows.weight, self.rows.bias):
            if name is not None:
                yield getattr(self.rows.module, name)

    def apply(self) -> None:
        self.rows.scale_(self.factors)


@dataclass(frozen=True)
class _GainFold:
    """Into the gain of a norm."""

    norm: nn.Module
    factors: Tensor
    """Broadcastable to the gain."""
    offset: float
    """Added to the weight by the norm: 1 where the gain is 1 + weight."""

    def parameters(self) -> Iterator[Tensor]:
        yield from self.norm.parameters(recurse=False)

    def apply(self) -> None:
        with torch.no_grad():
            for name, parameter in self.norm.named_parameters(recurse=False):
                offset = self.offset if name == "weight" else 0.0
                factors = self.factors.to(parameter.device)
                parameter.copy_((parameter.double() + offset) * factors - offset)


def _folds(where: str, site: Site, temperature: Tensor) -> Sequence[_RowFold | _GainFold]:
    module = site.module
    query, query_alone = queries_of(module)
    heads = query.heads
    if len(temperature) not in (1, heads):
        raise InputError(f"{where}: {site.name} takes a temperature a head, {heads} in all; got {len(temperature)}.")
    factors = temperature.detach().double().reciprocal().expand(heads)
    _refuse_told_by_name(where, site)
    norms = {name: part for name, part in module.named_children() if name in QUERY_NORMS}
    norms = {name: part for name, part in norms.items() if not isinstance(part, nn.Identity)}
    if norms:
        return [_into_gain(where, site, query, norms, factors)]
    if query_alone is None:
        _refuse_other_features(where, site, query)
    _refuse_clipped(where, site)
    folds = [_RowFold(rows, factors) for rows in (query, query_alone) if rows is not None]
    for fold in folds:
        _check_rows(where, site, fold.rows)
    return folds


def _check_rows(where: str, site: Site, rows: HeadRows) -> None:
    """A parameter of its own that is all there is of the projection: no adapter, no parametrization, not quantised."""
    weight = rows.module._parameters.get(rows.weight)
    if is_dtensor(weight):
        raise InputError(
            f"{where}: the weights of {site.name} are split over processes (DTensor), which is not supported: fold "
            "before the model is split."
        )
    if weight is None or weight.dtype not in DTYPES or hasattr(rows.module, "base_layer"):
        raise InputError(
            f"{where}: the query projection of {site.name} is a {type(rows.module).__name__}, whose weight is "
            "quantised, parametrised or has an adapter: multiplying it would not multiply the queries. Merge adapters, "
            "remove parametrizations, fold before quantising."
        )


def _refuse_other_features(where: str, site: Site, query: HeadRows) -> None:
    """A projection that makes gates beside queries."""
    size, own = query.index.shape[1], getattr(site.module, "head_dim", None)
    if isinstance(own, int) and own != size:
        raise InputError(
            f"{where}: the query projection of {site.name} makes a size of {size} a head, whose own is {own}: not all "
            "of them are queries. Keep the temperatures with Calibration.apply."
        )


def _refuse_clipped(where: str, site: Site) -> None:
    for holder in (site.module, getattr(site.module, "config", None)):
        if getattr(holder, "clip_qkv", None) is not None:
            raise InputError(
                f"{where}: {site.name} clips its queries (clip_qkv) after their projection: folding would not be "
                "exact. Keep the temperatures with Calibration.apply."
            )


def _refuse_told_by_name(where: str, site: Site) -> None:
    """Code that normalises by a function, or makes position scores of queries that the temperature leaves alone."""
    if type(site.module).__module__.startswith("torch."):
        return
    for used in sorted(used_names(type(site.module))):
        if any(word in used for word in _TOLD_BY_NAME) and used not in QUERY_NORMS:
            raise InputError(
                f"{where}: the code of {site.name} ({type(site.module).__name__}) uses {used}: its queries may be "
                "normalised after their projection or used for more than the scores, and folding would not be exact. "
                "Keep the temperatures with attemper.temper or Calibration.apply."
            )


def _into_gain(where: str, site: Site, query: HeadRows, norms: Mapping[str, nn.Module], factors: Tensor) -> _GainFold:
    name, norm = next(iter(norms.items()))
    said = f"{where}: {site.name} normalises its queries after their projection ({', '.join(norms)})"
    gain = norm._parameters.get("weight")
    if len(norms) > 1 or name == "qk_norm" or gain is None:
        raise InputError(f"{said}, without a learned gain of the queries alone: there is no weight to fold into.")
    if is_dtensor(gain):
        raise InputError(f"{said}, by a gain that is split over processes (DTensor), which is not supported.")
    _refuse_clipped(where, site)
    heads, size = query.index.shape
    own = getattr(site.module, "head_dim", None)
    size = own if isinstance(own, int) else size
    each = _factors_of_gain(said, gain.shape, factors, size)
    for offset in (0.0, 1.0):
        fold = _GainFold(norm, each, offset)
        if _does(fold, (heads * size,) if each.shape == (heads * size,) else (heads, size)):
            return fold
    raise InputError(f"{said}, and its gain ({type(norm).__name__}) does not multiply its output: it cannot be folded.")


def _factors_of_gain(said: str, gain: torch.Size, factors: Tensor, size: int) -> Tensor:
    """The factors of heads [heads], each of ``size`` features, broadcastable to a norm's gain of this shape."""
    heads = len(factors)
    if gain == (heads, size):
        return factors[:, None]
    if gain == (heads * size,):  # one norm over all heads (OLMo 2): each head has its slice of the gain
        return factors.repeat_interleave(size)
    if gain == (size,) and bool((factors == factors[0]).all()):
        return factors[:1]
    if gain == (size,):
        raise InputError(
            f"{said}, by a gain that its heads share, and their temperatures differ: they cannot be folded. Calibrate "
            "with per='layer' or per='model', or keep the temperatures with Calibration.apply."
        )
    raise InputError(
        f"{said}, by a gain of shape {list(gain)}, which is neither one head's ({size}) nor all heads' ([{heads}, "
        f"{size}] or {heads * size}): folding into it is not supported. Keep the temperatures with Calibration.apply."
    )


def _does(fold: _GainFold, shape: tuple[int, ...]) -> bool:
    """Whether the norm with such a fold gives what it gave, times the factors; tried on a copy.

    The copy gets queries [2, *shape], and factors of its own, not those to fold: near 1, one form could not be told
    from the other.
    """
    norm = copy.deepcopy(fold.norm).float()
    factors = torch.linspace(0.5, 2.0, len(fold.factors)).view_as(fold.factors)
    probe = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    probe = probe.to(next(norm.parameters()).device)
    with torch.no_grad():
        wanted = norm(probe) * factors.to(probe)
        _GainFold(norm, factors, fold.offset).apply()
        return bool(torch.allclose(norm(probe), wanted, rtol=1e-4, atol=1e-5))
