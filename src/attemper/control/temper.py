"""``attemper.temper``: a temperature, or another normalizer than softmax, on the attention of an existing model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from attemper.call.normalizer import normalization
from attemper.control.fold import constant, fold_
from attemper.control.handle import Handle
from attemper.control.one_call import OneCall, end_pass
from attemper.control.saved_model import accompany, read_temperatures, unaccompany, write_temperatures
from attemper.errors import InputError
from attemper.nn.normalizers import MODULES, Normalizer
from attemper.nn.temperature import (
    ACTIONS,
    ADDED,
    FixedTemperature,
    ProductTemperature,
    ScheduledTemperature,
    Temperature,
)
from attemper.sites.actions import actions_of, release
from attemper.sites.find import Site, call_site, chosen_sites, refuse_wrapped
from attemper.sites.names import class_name, is_wanted, unwrap
from attemper.text import count

ADDED_NORMALIZER = "attemper_normalizer"
"""Name, or its beginning, of the child that is a normalizer given to an attention module."""
TemperatureArgument = Temperature | float | Tensor
"""A temperature as it is given: a module, a number, or a tensor [heads]."""
_SHOWN = 16
"""Heads whose numbers are written out."""
_PER_HEAD = ("alpha", "value")
"""Attributes of a module that are its number, or its tensor [heads]."""
_originals: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Parameters of modules that were copied, each with a warning for the user who trains it. They live as long as the user
holds them
"""
Part = TypeVar("Part", bound=nn.Module)


def temper(
    model: nn.Module,
    *,
    temperature: TemperatureArgument | Sequence[TemperatureArgument] | Mapping[str, TemperatureArgument] | None = None,
    normalizer: str | Normalizer | None = None,
    sites: Iterable[str] | None = None,
) -> Tempered:
    r"""Gives a model's attention a temperature, or another normalizer from scores to weights. The temperature
    multiplies the model's own.

    .. math:: \mathrm{softmax}(\mathrm{softcap}(\tfrac{scale}{T}\, q \cdot k) + bias)

    With a temperature alone the model's own attention runs, whatever its kernel, on queries divided by T: the bits stay
    where T is 1. With a ``normalizer`` ours takes its place (within 1e-5 of softmax, where that is the normalizer). The
    temperatures become children of the attention modules (``attemper_temperature``): they are in ``state_dict()``, move
    and copy with the model, in float64 if it is, and what is learned is trained by an optimizer that is made
    afterwards, or gets ``handle.parameters()`` as a group. ``print(handle)`` shows what stands where. Right under both
    kinds of activation checkpointing, gradient accumulation, autocast, DDP and torch.compile, if it is called before
    them. ``save_pretrained`` of a model that is tempered writes what stands where, for :func:`attemper.load`: temper
    the model that you save, not a part of it.

    ::

        handle = attemper.temper(model, temperature=attemper.nn.LearnedTemperature(num_heads=8))
        handle = attemper.temper(model, temperature=attemper.schedules.layerwise(12, 0.8, 1.2))   # one per layer
        handle.remove()

    Args:
        model: models of transformers' registry, modules that call ``F.scaled_dot_product_attention``,
            ``nn.MultiheadAttention``, layers of ``attemper.nn``, and any mixture of them.
        temperature: a number or a tensor [heads] for every site; a module of ``attemper.nn``; a list with one of these
            per site, in the order of the model; or a mapping from names (of modules, for all below them) to them. None
            for 1. A module that is given for one site stands there itself. One that is given for several is copied:
            each site learns its own, which ``handle.temperatures`` has, and an optimizer that steps with the
            original's parameters is told by a warning. A :class:`~attemper.nn.ScheduledTemperature` is not copied: its
            ``step()`` moves all its sites.
        normalizer: a name ("entmax15", "sparsemax", ...) or a module of ``attemper.nn`` (``TopK(64)``,
            ``Entmax(1.3, learned=True)``), for one site itself and for several copied, as a temperature is: the child
            ``attemper_normalizer``. None to leave the model's own attention where it is. A model was trained with
            softmax: what another normalizer does to its loss is for you to measure, or to train.
        sites: names of modules whose attention to temper, with all below them, and of single calls of modules that run
            several times in a pass of ``model`` (``layer#2``; ``layer#1`` for the first alone); None for all that are
            found. The same names are taken as keys of a mapping. A single call takes a temperature and no normalizer,
            and is refused in the backward pass of activation checkpointing.

    Returns:
        A handle with ``.sites``, ``.temperatures``, ``.remove()``, ``.save()`` and ``.load()``; also a context manager.

    Raises:
        InputError: nothing of the model attends in a way that is known; a name of ``sites`` matches nothing; a list of
            another length than there are sites; a temperature that is not above 0; an unknown normalizer, or one for
            ``nn.MultiheadAttention``; or a model that is compiled or wrapped for data-parallel training already.

    Note:
        Queries of float16 or bfloat16 are rounded once more after the division, which moves entropies by up to 1e-3
        nats where scores have a standard deviation of 1 (the modules of ``attemper.nn`` do not round). Attention
        that is softmaxed by hand (Bloom, GPT-J, DeBERTa, timm's Swin) cannot be tempered from outside. Where a
        normalizer takes the place of an eager attention, ``output_attentions`` finds no weights:
        ``attemper.functional.dense_weights`` has them.
    """
    chosen = None if normalizer is None else _normalizer(normalizer)
    found = chosen_sites("temper", model, sites, calls=True)
    for name in temperature if isinstance(temperature, Mapping) else ():
        call = call_site(name, found)
        found += [] if call is None or any(site.name == name for site in found) else [call]
    if chosen is not None:
        _refuse_normalizer(found)
    given = 1.0 if temperature is None and chosen is None else temperature
    each = {} if given is None else _each(given, found)
    if any(parameter.requires_grad for part in (*each.values(), chosen) if part for parameter in part.parameters()):
        refuse_wrapped("temper", model)
    normalizers = [] if chosen is None else _copies(chosen, len(found))
    return Tempered(model, found, each, {site.name: part for site, part in zip(found, normalizers, strict=False)})


class Tempered(Handle):
    """Temperatures and normalizers on a model, made by :func:`temper`."""

    def __init__(
        self,
        model: nn.Module,
        sites: list[Site],
        temperatures: Mapping[str, Temperature],
        normalizers: Mapping[str, Normalizer] | None = None,
    ) -> None:
        self.model = model
        self.temperatures: dict[str, Temperature] = dict(temperatures)
        """The temperature that stands at each site that got one, by its name."""
        self.normalizers: dict[str, Normalizer] = dict(normalizers or {})
        """The normalizer that stands at each site that got one, by its name."""
        self._children: list[tuple[Site, str, nn.Module]] = []
        for site in sites:
            if site.name in self.temperatures:
                self._add(site, ADDED, self.temperatures[site.name])
            if site.name in self.normalizers:
                self._add(site, ADDED_NORMALIZER, self.normalizers[site.name])
        self._hook = model.register_forward_hook(end_pass, always_call=True) if self._calls else None
        accompany(model)

    @property
    def _calls(self) -> list[str]:
        return [site.name for site, _, _ in self._children if site.call is not None]

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of the tempered modules, in the order of the model."""
        return tuple(dict.fromkeys((*self.temperatures, *self.normalizers)))

    def parameters(self) -> Iterator[nn.Parameter]:
        """Learned parameters, for an optimizer. Parameters that sites share come once."""
        parts = (*self.temperatures.values(), *self.normalizers.values())
        yield from dict.fromkeys(parameter for part in parts for parameter in part.parameters())

    def step(self) -> None:
        """Advances scheduled temperatures by one optimizer step. Each schedule moves once for all its sites."""
        factors = (factor for part in self.temperatures.values() for factor in part.modules())
        for schedule in dict.fromkeys(factor for factor in factors if isinstance(factor, ScheduledTemperature)):
            schedule.step()

    def values(self) -> dict[str, Tensor]:
        """The temperatures [heads or 1] of each site that has one for every query, by name."""
        known = {name: _number_of(part) for name, part in self.temperatures.items()}
        return {name: value.detach().clone().reshape(-1) for name, value in known.items() if isinstance(value, Tensor)}

    def save(self, path: str | Path) -> None:
        """Writes the temperatures, and what normalizers learn, as safetensors: into the file, or as
        ``attemper.safetensors`` into the folder.

        For ``load``, into a model that was tempered alike. ``save_pretrained`` of the model writes the same and more
        beside its weights, from which :func:`attemper.load` restores the tempered model.
        """
        write_temperatures(path, self._parts())

    def load(self, path: str | Path) -> None:
        """Reads what ``save`` wrote, into a model that was tempered in the same way.

        Raises:
            InputError: the file is missing or another kind of file, or its sites or numbers of heads are not these.
        """
        read_temperatures(path, self._parts())

    def fold(self) -> None:
        """Multiplies what makes each head's queries by 1/T, in place, and takes the temperatures off.

        The model gives what it gave, but for one rounding of the weights, and needs nothing of ours:
        see :meth:`attemper.types.Calibration.fold`.

        Raises:
            InputError: a temperature is scheduled, or follows the length or the input; or what ``Calibration.fold``
                raises. Nothing is changed then.
        """
        if self.normalizers:
            raise InputError("Tempered.fold: another normalizer than softmax cannot be folded into weights.")
        if self._calls:
            raise InputError(f"Tempered.fold: {self._calls[0]} is one call of a module, whose weights all calls share.")
        found: dict[str, Tensor] = {}
        for name, part in self.temperatures.items():
            value = constant(part)
            if value is None:
                raise InputError(
                    f"Tempered.fold: the temperature of {name} ({type(part).__name__}) is not the same for every query "
                    "for good. Folded are FixedTemperature, LearnedTemperature and products of them."
                )
            found[name] = value
        fold_("Tempered.fold", self.model, found if self._children else {})
        self.remove()

    def remove(self) -> None:
        """Removes every temperature and normalizer, which restores the model. You may call it again."""
        for site, child, part in self._children:
            actions = getattr(site.module, ACTIONS, None)
            for names in () if actions is None else (actions.temperatures, actions.normalizers):
                if child in names:
                    names.remove(child)
            if getattr(site.module, child, None) is part:
                delattr(site.module, child)
            release(site.module)
        self._children.clear()
        if self._hook is not None:
            self._hook.remove()
        unaccompany(self.model)

    def __repr__(self) -> str:
        """What stands where, with its numbers as they are now."""
        found = f"{class_name(unwrap(self.model))}, {'tempered at' if self._children else 'no more tempered at'}"
        shown = _lines(self.temperatures, self.normalizers)
        return "\n".join((f"{found} {count(len(shown), 'site')}", *shown))

    def _parts(self) -> dict[str, nn.Module]:
        return {**self.temperatures, **{f"{site}.normalizer": part for site, part in self.normalizers.items()}}

    def _add(self, site: Site, beginning: str, part: Temperature | Normalizer) -> None:
        if site.call is not None and isinstance(part, Temperature):
            part = OneCall(part, site.name, site.call)
        actions = actions_of(site)
        names = actions.temperatures if isinstance(part, Temperature) else actions.normalizers
        free = (beginning, *(f"{beginning}_{number}" for number in range(2, len(names) + 3)))
        # Another one may have been removed before: the first name that is free.
        child = next(name for name in free if not hasattr(site.module, name))
        weights = chain(site.module.parameters(), self.model.parameters())
        weight = next((one for one in weights if not one.is_meta), None)  # of a model whose layers are on disk
        if weight is not None:
            part.to(weight.device, torch.float64 if weight.dtype == torch.float64 else torch.float32)
        site.module.add_module(child, part)
        part.train(site.module.training)
        names.append(child)
        self._children.append((site, child, part))


def _normalizer(given: Any) -> Normalizer:
    if isinstance(given, Normalizer):
        return given
    meant = normalization("temper", given if isinstance(given, str) else repr(given)).name
    for module in MODULES:
        if module.name == meant:
            return module()
    raise InputError(
        f"temper(normalizer={given!r}): no module of attemper.nn computes it. There are modules of "
        f"{', '.join(module.name for module in MODULES)}; for another, pass an object of your own subclass of "
        "attemper.nn.Normalizer."
    )


def _refuse_normalizer(sites: list[Site]) -> None:
    calls = [site.name for site in sites if site.call is not None]
    if calls:
        raise InputError(f"temper(normalizer=...) stands at all calls of a module, and {calls[0]} is one of them.")
    refused = [site.name for site in sites if not site.entry.normalizes]
    if refused:
        raise InputError(
            f"temper(normalizer=...): {', '.join(refused)} is torch's nn.MultiheadAttention, which has no place for "
            "another normalizer: put attemper.nn.MultiheadAttention(..., normalizer=...) there, which loads its "
            "weights, or leave it out with sites=."
        )


def _each(given: Any, sites: list[Site]) -> dict[str, Temperature]:
    """The temperature of each site; what a mapping does not name gets none."""
    if isinstance(given, Sequence) and not isinstance(given, str):
        if len(given) != len(sites):
            raise InputError(
                f"temper(temperature=[...]) has {count(len(given), 'entry')} and the model "
                f"{count(len(sites), 'attention site')}: {', '.join(site.name for site in sites)}."
            )
        return {site.name: _modules(part, 1)[0] for site, part in zip(sites, given, strict=True)}
    found: dict[str, Temperature] = {}
    for name, part in given.items() if isinstance(given, Mapping) else [(None, given)]:
        below = [site.name for site in sites if is_wanted(site.name, None if name is None else (name,))]
        if not below:
            raise InputError(
                f"temper(temperature=...) names {name!r}, which is not an attention site. The sites are: "
                f"{', '.join(site.name for site in sites)}."
            )
        found |= zip(below, _modules(part, len(below)), strict=True)
    return found


def _modules(given: Any, count: int) -> list[Temperature]:
    if isinstance(given, Temperature):
        return _copies(given, count)
    if isinstance(given, nn.Module) or not isinstance(given, (int, float, Tensor)) or isinstance(given, bool):
        raise InputError(
            f"temper(temperature=...) must be a number above 0, a tensor [heads] or a module of attemper.nn, got "
            f"{type(given).__name__}."
        )
    return [FixedTemperature(given) for _ in range(count)]


def _copies(given: Part, count: int) -> list[Part]:
    """A module for each of ``count`` sites: itself for one; copies for several, each of which learns for itself.

    A schedule is not copied: all sites follow the one whose ``step()`` the user calls.
    """
    if count == 1:
        return [given]
    shared = {id(part): part for part in given.modules() if isinstance(part, ScheduledTemperature)}
    learned = {name: part for name, part in given.named_parameters() if part.requires_grad}
    for name, parameter in learned.items():
        _originals[parameter] = (
            f"an optimizer holds {name} of the {type(given).__name__} that attemper.temper was given for several "
            "sites, and it has no gradient: each site learns its own copy. Give the optimizer "
            "handle.parameters(), or give temper a list with a module for each site."
        )
    if learned:
        _watch_optimizers()
    return [copy.deepcopy(given, dict(shared)) for _ in range(count)]


@lru_cache(1)
def _watch_optimizers() -> None:
    # It stays: taken off inside of a step, it would break the loop over the hooks of others.
    register_optimizer_step_post_hook(_warn_of_originals)


def _warn_of_originals(optimizer: Optimizer, *_: Any) -> None:
    """After a step of any optimizer: warns once of each copied original in it that has no gradient."""
    if torch.compiler.is_compiling() or not len(_originals):
        return
    held = [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.grad is None]
    for message in {_originals.pop(parameter, None): None for parameter in held}:
        if message is not None:
            warnings.warn(message, UserWarning, stacklevel=3)


def _lines(temperatures: Mapping[str, Temperature], normalizers: Mapping[str, Normalizer]) -> list[str]:
    """A line for each site: its name, its temperature, its normalizer."""
    names = list(dict.fromkeys((*temperatures, *normalizers)))
    width = max(map(len, names), default=0)
    found = []
    for name in names:
        parts = [part for part in (temperatures.get(name), normalizers.get(name)) if part is not None]
        found.append(f"  {name:{width}}  {'; '.join(_description(part) for part in parts)}")
    return found


def _description(part: nn.Module) -> str:
    """A temperature or normalizer with its numbers as they are now."""
    if isinstance(part, ProductTemperature):
        return " x ".join(_description(factor) for factor in part.factors)
    name, given = type(part).__name__, _number_of(part)
    if not isinstance(given, Tensor):
        more = part.extra_repr()
        return f"{name}({more})" if more else name
    if isinstance(part, ScheduledTemperature):
        return f"{name} {_numbers(given)} at step {int(part.steps)} of {part.total_steps}"
    quantity = "alpha " if hasattr(part, "alpha") else ""
    return f"{name} {quantity}{_numbers(given)}"


def _number_of(part: nn.Module) -> Any:
    """The tensor that a module holds, whether it is an attribute or a method's result; None for one of another kind."""
    given: Any = next((getattr(part, name) for name in _PER_HEAD if hasattr(part, name)), None)
    return given() if callable(given) and not isinstance(given, Tensor) else given


def _numbers(given: Tensor) -> str:
    values = given.detach().double().flatten().tolist()
    if len(values) > 1 and len(set(values)) == 1:
        return f"{values[0]:.4g} ({count(len(values), 'head')})"
    first = " ".join(f"{value:.4g}" for value in values[:_SHOWN])
    if len(values) <= _SHOWN:
        return first
    return f"{first} ... ({count(len(values), 'head')}, {min(values):.4g} to {max(values):.4g})"
