"""Temperatures in a safetensors file beside the model's own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from attemper.documents import parse_json, read_safetensors
from attemper.errors import InputError
from attemper.files import replacement

FILE = "attemper.safetensors"
TEMPERATURES = "attemper-temperatures"
"""The kind of a file with the tensors of temperatures and normalizers."""


def place(path: str | Path) -> Path:
    """The file itself, or ``attemper.safetensors`` in a folder."""
    path = Path(path)
    return path / FILE if path.is_dir() else path


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
