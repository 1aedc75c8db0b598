"""Which attention modules of a model are acted on, and which models cannot be any more."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from attemper.errors import InputError
from attemper.sites import find
from attemper.sites.compiled import compiled_parts
from attemper.sites.names import class_name, unwrapped
from attemper.sites.sharded import is_dtensor
from attemper.sites.wanted import checked_sites, is_wanted


@dataclass(frozen=True)
class Site:
    """An attention module."""

    name: str
    module: nn.Module
    way: str
    """How it attends: one of ``sites.find``."""


def chosen_sites(where: str, model: nn.Module, sites: Iterable[str] | None) -> list[Site]:
    """The attention modules of ``model`` that ``sites`` names, in its order; None for all.

    Raises:
        InputError: the model is compiled; nothing of it attends in a way that is known; a name matches nothing; or one
            module attends inside another, so that a call could not be told to be one's or the other's.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"{where}(model) must be an nn.Module, got {type(model).__name__}.")
    if isinstance(model, nn.DataParallel):
        raise InputError(
            f"{where}: nn.DataParallel runs copies of the model, which would act on the original. Take "
            "DistributedDataParallel, or the model inside."
        )
    wanted = checked_sites(where, sites)
    compiled = compiled_parts(model)
    if compiled:
        name, reason = next(iter(compiled.items()))
        raise InputError(f"{where}: {name or class_name(unwrapped(model))}: {reason}. Call {where} before compiling.")
    found = [Site(name, *entry) for name, entry in find.callers(model).items()]
    if not found:
        raise InputError(
            f"{where} found no attention in {class_name(unwrapped(model))} that it can act on. It acts on models of "
            "transformers' attention registry, on modules that call F.scaled_dot_product_attention, on "
            "nn.MultiheadAttention and on attemper.nn; attention that is softmaxed by hand, or a compiled kernel of "
            "another package, is out of its reach."
        )
    kept = [site for site in found if is_wanted(site.name, wanted)]
    for name in wanted or ():
        if not any(is_wanted(site.name, (name,)) for site in found):
            raise InputError(
                f"{where}(sites=[{name!r}]) matches no attention. They are: {', '.join(site.name for site in found)}."
            )
    _refuse_nested(where, kept)
    return kept


def _refuse_nested(where: str, sites: list[Site]) -> None:
    for outer in sites:
        inside = {id(part) for part in outer.module.modules()} - {id(outer.module)}
        for inner in sites:
            if id(inner.module) in inside and find.SDPA in (outer.way, inner.way):
                raise InputError(
                    f"{where}: {outer.name} attends, and so does {inner.name} inside of it: their calls cannot be told "
                    f"apart. Name one of them with sites=."
                )


def refuse_wrapped(where: str, model: nn.Module) -> None:
    """Refuses a model whose parameters are known to somebody already, who would not know new ones.

    Raises:
        InputError: it is wrapped by DistributedDataParallel or the like, or its parameters are split by FSDP.
    """
    if unwrapped(model) is not model or any(is_dtensor(parameter) for parameter in model.parameters()):
        raise InputError(
            f"{where} adds parameters, and {type(model).__name__} would not train them: call {where} on the model "
            "before it is wrapped (DistributedDataParallel, fully_shard, torch.compile)."
        )
