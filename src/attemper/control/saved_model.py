"""A tempered model in files: its temperatures alone, and what ``save_pretrained`` writes beside the weights.

``attemper.json`` says what stands where, ``attemper.safetensors`` holds its tensors (as ``handle.save`` writes them),
and the field ``attemper`` of config.json says that they are there. Neither file can name code: a form is of one of
a fixed list of kinds (``KINDS``). It says what a module was made with; what it holds are tensors, and sizes follow from
them, which cannot claim more memory than the file has bytes.
"""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from attemper import nn as kinds
from attemper.control.one_call import OneCall
from attemper.errors import InputError
from attemper.file_schema import check_document, parse_json, read_foreign, read_safetensors
from attemper.files import replacement
from attemper.nn.normalizers import MODULES, Normalizer
from attemper.nn.temperature import ACTIONS, ProductTemperature, Temperature
from attemper.schedules import schedule_form, schedule_of
from attemper.sites.actions import normalizer_of, temperatures
from attemper.sites.find import all_sites
from attemper.sites.names import names_of
from attemper.sites.sharded import is_dtensor

FILE, TENSORS = "attemper.json", "attemper.safetensors"
FIELD = "attemper"
"""In config.json."""
_FORMAT, _VERSION = "attemper-tempered-model", 1
_LARGEST = 1 << 24
"""Bytes of an attemper.json that is read: 16 MiB are tens of thousands of sites."""

Parts = dict[str, list[Temperature | Normalizer]]
"""Temperatures of each site, then its normalizer if it has one."""
TEMPERATURES = "attemper-temperatures"
"""The kind of a file with the tensors of temperatures and normalizers."""


def place(path: str | Path) -> Path:
    """The file itself, or ``attemper.safetensors`` in a folder."""
    path = Path(path)
    return path / TENSORS if path.is_dir() else path


def write(path: str | Path, tensors: Mapping[str, Tensor], kind: str, more: Mapping[str, object] | None = None) -> Path:
    """Writes tensors and the kind of the file. An earlier file is replaced only by a whole one."""
    path = place(path)
    if not path.parent.is_dir():
        raise InputError(f"{path.parent} is not a folder: create it first.")
    about = {"format": kind, "version": 1, **(more or {})}
    # Sites may share a module, and safetensors takes no tensors that share their memory.
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    with replacement(path) as part:
        save_file(copies, part, metadata={"attemper": json.dumps(about)})
    return path


def read(path: str | Path, kind: str) -> tuple[dict[str, Tensor], dict[str, object]]:
    """The tensors of a file of this kind, and the rest of its metadata. ``InputError``: there is no such file, or it is
    not of this kind.
    """
    path = place(path)
    if not path.is_file():
        raise InputError(f"{path} is not a file. `save` writes one.")
    facts, tensors = read_safetensors(path, "pt", what="file of attemper", again="Save it again")
    about = parse_json(facts.get("attemper", "{}"), f"{path.name} is damaged: its metadata")
    version = about.get("version") if isinstance(about, dict) and about.get("format") == kind else None
    if isinstance(version, bool) or version != 1:
        raise InputError(f"{path} is not a file of the kind {kind!r}, version 1: it says {about!r:.200}.")
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() and tensor.dtype not in (torch.bool, torch.int64):
            raise InputError(f"{path.name} is damaged: {name} is of the type {tensor.dtype}. Save it again.")
    return tensors, about


def write_temperatures(path: str | Path, temperatures: Mapping[str, nn.Module]) -> Path:
    """Writes everything that the temperatures of some sites hold."""
    classes = {site: type(part).__name__ for site, part in temperatures.items()}
    return write(path, _states(temperatures), TEMPERATURES, {"sites": classes})


def _states(parts: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    return {f"{site}.{name}": tensor for site, part in parts.items() for name, tensor in part.state_dict().items()}


def read_temperatures(path: str | Path, temperatures: Mapping[str, nn.Module]) -> None:
    """Reads into temperatures of the same sites and sizes. Nothing is changed if anything does not fit."""
    tensors, _ = read(path, TEMPERATURES)
    states = _states(temperatures)
    missing, extra = sorted(states.keys() - tensors.keys()), sorted(tensors.keys() - states.keys())
    if missing or extra:
        raise InputError(
            f"{place(path)} holds temperatures of other sites or kinds. Only here: {missing[:4]}; only there: "
            f"{extra[:4]}. Temper the model as it was when they were saved."
        )
    for name, tensor in states.items():
        if tensors[name].shape != tensor.shape:
            raise InputError(
                f"{place(path)}: {name} is {list(tensors[name].shape)} there and {list(tensor.shape)} here: another "
                "number of heads."
            )
    with torch.no_grad():
        for site, part in temperatures.items():
            part.load_state_dict({name: tensors[f"{site}.{name}"] for name in part.state_dict()})


def accompany(model: nn.Module) -> None:
    """Lets every ``save_pretrained`` of a model and of its parts write what they were given."""
    part: Any
    for part in model.modules():
        own = part.__dict__.get("save_pretrained")
        if callable(getattr(part, "save_pretrained", None)) and not _is_ours(own):
            part.save_pretrained = partial(_save, part, own)


def unaccompany(model: nn.Module) -> None:
    """Gives each ``save_pretrained`` back, where nothing is tempered any more."""
    for module in model.modules():
        ours = module.__dict__.get("save_pretrained")
        if _is_ours(ours) and not any(hasattr(part, ACTIONS) and _parts_at(part) for part in module.modules()):
            del module.save_pretrained
            if ours.args[1] is not None:
                module.save_pretrained = ours.args[1]


def _is_ours(given: Any) -> TypeGuard[partial[Any]]:
    return isinstance(given, partial) and given.func is _save


def _save(model: nn.Module, own: Any, *args: Any, **kwargs: Any) -> Any:
    """``save_pretrained`` of a model while it is tempered."""
    run = partial(type(model).save_pretrained, model) if own is None else own  # pyright: ignore[reportAttributeAccessIssue]
    names = list(inspect.signature(run).parameters)
    given = dict(zip(names, args, strict=False)) | kwargs
    parts = _parts_of(model)
    if not parts or not given.get("is_main_process", True):
        return run(*args, **kwargs)
    if given.get("push_to_hub"):
        raise InputError(
            f"save_pretrained(push_to_hub=True) uploads before {FILE} is written, and this model is tempered: call "
            "model.push_to_hub(...), which uploads all of it."
        )
    document, tensors = _document(parts, given.get("state_dict") or {})
    result = run(*args, **kwargs)
    folder = Path(given[names[0]])
    if folder.is_dir():
        write(folder, tensors, TEMPERATURES)
        _write(folder / FILE, document)
        _mark(folder / "config.json")
    return result


def _parts_at(module: nn.Module) -> list[Temperature | Normalizer]:
    normalizer = normalizer_of(module)
    return [*temperatures(module), *([] if normalizer is None else [normalizer])]


def _parts_of(model: nn.Module) -> Parts:
    found: Parts = {}
    for site in all_sites(names_of(model)):
        for part in _parts_at(site.module):
            one = isinstance(part, OneCall)
            name = f"{site.name}#{part.call}" if one else site.name
            found.setdefault(name, []).append(part.temperature if one else part)
    return found


def _document(parts: Parts, state: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What stands at each site, and its tensors; from ``state``, where one was gathered from many processes."""
    sites: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for site, those in parts.items():
        forms = []
        for number, part in enumerate(those):
            kept = part.saved_as() if isinstance(part, Temperature) else part
            forms.append(form_of(kept) or {"kind": None, "class": type(kept).__name__})
            beginning = "attemper_normalizer" if isinstance(part, Normalizer) else "attemper_temperature"
            child = beginning if isinstance(part, Normalizer) or number == 0 else f"{beginning}_{number + 1}"
            for name, tensor in kept.state_dict().items():
                full = state.get(f"{site}.{child}.{name}", tensor) if kept is part else tensor
                _refuse_split(site, full)
                key = f"{_beginning(site, number, isinstance(part, Normalizer))}.{name}"
                if key in tensors:
                    raise InputError(f"save_pretrained: {site} and a second temperature at all its calls share a name.")
                tensors[key] = full
            if forms[-1]["kind"] is None:
                warnings.warn(
                    f"{site}: a {type(kept).__name__} is your own class, which {FILE} cannot name: attemper.load "
                    "will refuse the folder. Load the model, temper it as before, and call handle.load(folder).",
                    UserWarning,
                    stacklevel=4,
                )
        sites[site] = {"temperatures": forms, "normalizer": None}
        if isinstance(those[-1], Normalizer):
            sites[site]["normalizer"] = forms.pop()
    return {"format": _FORMAT, "version": _VERSION, "sites": sites}, tensors


def _beginning(site: str, number: int, is_normalizer: bool) -> str:
    """How a part's names in attemper.safetensors begin: for the first temperature of a site, as in ``handle.save``."""
    return f"{site}.normalizer" if is_normalizer else site if number == 0 else f"{site}#{number + 1}"


def _refuse_split(site: str, tensor: Tensor) -> None:
    if is_dtensor(tensor):
        raise InputError(
            f"save_pretrained: the temperature of {site} is split over processes (DTensor): pass state_dict= with "
            "whole tensors."
        )


def _write(path: Path, document: Mapping[str, Any]) -> None:
    with replacement(path) as part:
        part.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _mark(config: Path) -> None:
    """Says in config.json that the weights are not all: a reader of it meets the field."""
    if config.is_file():
        _write(config, read_foreign(config) | {FIELD: {"version": _VERSION, "restored_by": "attemper.load(folder)"}})


def is_tempered(folder: Path) -> bool:
    """Whether a folder holds a tempered model."""
    there, config = (folder / FILE).is_file(), folder / "config.json"
    if not config.is_file():
        return there
    named = FIELD in read_foreign(config)
    if named and not there:
        raise InputError(
            f"{config} has the field {FIELD!r}: this model was tempered, and {FILE}, which says how, is missing. Copy "
            "it here, with attemper.safetensors; or delete the field, to read the model without its temperatures."
        )
    if there and not named:
        raise InputError(
            f"{folder / FILE} is there and config.json does not name it: a model without temperatures was saved over a "
            f"tempered one. Delete {FILE}, or save the tempered model again."
        )
    return there


def parts_in(folder: Path) -> Parts:
    """What a folder says of the sites of its model."""
    sites, tensors = _sites(folder / FILE), read(folder, TEMPERATURES)[0]
    found: Parts = {}
    for site, given in sites.items():
        forms = [*given["temperatures"], *([] if given["normalizer"] is None else [given["normalizer"]])]
        found[site] = []
        for number, form in enumerate(forms):
            is_normalizer = number == len(given["temperatures"])
            beginning = f"{_beginning(site, number, is_normalizer)}."
            # Not those of the site's normalizer, nor of a site inside of this one.
            inner = [f"{other}." for other in (*sites, f"{site}.normalizer") if other.startswith(beginning)]
            names = [name for name in tensors if name.startswith(beginning) and not name.startswith(tuple(inner))]
            own = {name.removeprefix(beginning): tensors[name] for name in names}
            try:
                part = part_of(form, own)
            except InputError as error:
                raise InputError(f"{folder / FILE}: {site}: {error}") from error
            if isinstance(part, Normalizer) is not is_normalizer:
                raise InputError(f"{folder / FILE}: {site}: a {type(part).__name__} stands in the other's place.")
            found[site].append(part)
    return found


def _sites(path: Path) -> dict[str, Any]:
    if path.stat().st_size > _LARGEST:
        raise InputError(f"{path} has {path.stat().st_size:,} bytes: too many for the description of a model.")
    try:
        document = parse_json(path.read_bytes(), "it")
    except (OSError, InputError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    document = document if isinstance(document, dict) else {}
    version = document.get("version")
    if document.get("format") != _FORMAT or isinstance(version, bool) or version != _VERSION:
        came = {name: document.get(name) for name in ("format", "version")}
        raise InputError(f"{path} is not a description of a tempered model, version {_VERSION}: it says {came!r:.200}.")
    sites = document.get("sites")
    try:
        check_document(sites, {str: {"temperatures": list, "normalizer": object}}, "sites")
    except InputError as error:
        raise InputError(f"{path} is damaged: {error}") from error
    if not sites:
        raise InputError(f"{path} is damaged: it has no sites.")
    return sites


Form = dict[str, Any]
Tensors = Mapping[str, Tensor]
_DEEPEST = 8
"""Products within products."""


class Kind(NamedTuple):
    """How a temperature or normalizer of one class is written and made again."""

    options: tuple[str, ...]
    """Names of the attributes that it was made with. A tensor among them is not part of the form."""
    build: Callable[[Form, Tensors, int], Temperature | Normalizer]
    """From options, tensors and the depth of products around it."""


def form_of(part: nn.Module) -> Form | None:
    """The form of a temperature or normalizer; None for a class that is not attemper's."""
    name = type(part).__name__
    if getattr(kinds, name, None) is not type(part) and not isinstance(part, ProductTemperature):
        return None
    if isinstance(part, ProductTemperature):
        factors = [form_of(factor) for factor in part.factors]
        return None if None in factors else {"kind": "ProductTemperature", "factors": factors}
    given = {option: getattr(part, option) for option in KINDS[name].options}
    if "schedule" in given:
        given["schedule"] = schedule_form(given["schedule"])
    return {"kind": name, **{option: value for option, value in given.items() if not isinstance(value, Tensor)}}


def part_of(form: object, tensors: Tensors, depth: int = 0) -> Temperature | Normalizer:
    """The module of a form.

    Args:
        form: what ``form_of`` gave, or anything else that a file may hold.
        tensors: those of the module, by its own names for them.
    """
    if not isinstance(form, dict) or not isinstance(form.get("kind"), str) or form["kind"] not in KINDS:
        kind = form.get("kind") if isinstance(form, dict) else form
        raise InputError(f"{kind!r:.80} is not a temperature or normalizer of attemper. Known: {', '.join(KINDS)}.")
    name, options = form["kind"], {option: value for option, value in form.items() if option != "kind"}
    if not set(options) <= set(KINDS[name].options) or depth > _DEEPEST:
        raise InputError(f"a {name} with the options {sorted(options)!r:.200} is not known.")
    try:
        part = KINDS[name].build(options, tensors, depth)
        if any(tensor.dtype == torch.float64 for tensor in tensors.values()):
            part.double()
        part.load_state_dict(dict(tensors))
    except (KeyError, IndexError, TypeError, AttributeError, OverflowError, RuntimeError) as error:
        raise InputError(
            f"a {name} cannot be made of {options!r:.200} and {_shapes(tensors)}: {' '.join(str(error).split())}"
        ) from error
    return part


def _product(options: Form, tensors: Tensors, depth: int) -> Temperature:
    factors = []
    for number, form in enumerate(options["factors"]):
        beginning = f"factors.{number}."
        own = {name.removeprefix(beginning): value for name, value in tensors.items() if name.startswith(beginning)}
        factors.append(part_of(form, own, depth + 1))
    return ProductTemperature(factors)


def _learned_temperature(options: Form, tensors: Tensors, _: int) -> Temperature:
    return kinds.LearnedTemperature(len(tensors["log_temperature"]), initial=options["floor"], **options)


def _conditional(options: Form, tensors: Tensors, _: int) -> Temperature:
    heads, dim = tensors["projection.weight"].shape
    return kinds.ConditionalTemperature(dim, heads, initial=options["floor"], **options)


KINDS = {
    "FixedTemperature": Kind((), lambda _, tensors, __: kinds.FixedTemperature(tensors["value"])),
    "LearnedTemperature": Kind(("floor", "ceiling"), _learned_temperature),
    "ConditionalTemperature": Kind(("pool", "floor", "ceiling"), _conditional),
    "LengthTemperature": Kind(("reference", "law"), lambda options, *_: kinds.LengthTemperature(**options)),
    "ScheduledTemperature": Kind(
        ("total_steps", "schedule"),
        lambda options, *_: kinds.ScheduledTemperature(schedule_of(options["schedule"]), options["total_steps"]),
    ),
    "ProductTemperature": Kind(("factors",), _product),
    **{kind.__name__: Kind(kind.options, lambda *given, kind=kind: kind.from_form(*given[:2])) for kind in MODULES},
}
"""Every temperature and normalizer that a file may name."""


def _shapes(tensors: Tensors) -> str:
    return ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in list(tensors.items())[:4]) or "no tensors"
