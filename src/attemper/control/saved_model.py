"""A tempered model in a folder: ``save_pretrained`` writes what stands at its sites beside the weights.

``attemper.json`` says what stands where, ``attemper.safetensors`` holds its tensors (as ``handle.save`` writes them),
and the field ``attemper`` of config.json says that they are there. Neither file can name code: see ``part_form``.
"""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

from torch import Tensor, nn

from attemper.control.one_call import OneCall
from attemper.control.part_form import form_of, part_of
from attemper.control.temperature_file import read_tensors, write_tensors
from attemper.documents import check_document, parse_json, read_foreign
from attemper.errors import InputError
from attemper.files import replacement
from attemper.nn.normalizers import Normalizer
from attemper.nn.temperature import ACTIONS, Temperature
from attemper.sites.act import normalizer_of, temperatures
from attemper.sites.find import all_sites
from attemper.sites.names import names_of
from attemper.sites.sharded import is_dtensor

FILE = "attemper.json"
FIELD = "attemper"
"""In config.json."""
_FORMAT, _VERSION = "attemper-tempered-model", 1
_LARGEST = 1 << 24
"""Bytes of an attemper.json that is read: 16 MiB are tens of thousands of sites."""

Parts = dict[str, list[Temperature | Normalizer]]
"""Temperatures of each site, then its normalizer if it has one."""


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
        write_tensors(folder, tensors)
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
            child = _child(part, number)
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


def _child(part: nn.Module, number: int) -> str:
    """The name under which ``temper`` put a part into its site, where handles came in order."""
    beginning = "attemper_normalizer" if isinstance(part, Normalizer) else "attemper_temperature"
    return beginning if isinstance(part, Normalizer) or number == 0 else f"{beginning}_{number + 1}"


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
    """Whether a folder holds a tempered model.

    Raises:
        InputError: its config.json says so and ``attemper.json`` does not, or the other way round.
    """
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
    """What a folder says of the sites of its model.

    Raises:
        InputError: a file is missing, damaged or of another kind, or names what is not attemper's.
    """
    sites, tensors = _sites(folder / FILE), read_tensors(folder)
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
