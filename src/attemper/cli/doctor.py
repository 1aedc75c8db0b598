"""``attemper doctor``: versions, backends, and what each can do on this machine."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from attemper import __version__
from attemper.backends.table import BACKENDS, FEATURES, UNUSABLE, Backend, is_interpreted, kernels
from attemper.cli.arguments import AsJson
from attemper.cli.output import open_console
from attemper.text import count

if TYPE_CHECKING:
    from rich.table import Table

_PACKAGES = {
    "torch": None,
    "numpy": None,
    "transformers": "transformers",
    "pandas": "pandas",
    "matplotlib": "plot",
    "triton": "triton",
}
"""Package -> the extra that brings it; None: every install has it."""


@dataclass(frozen=True)
class Devices:
    """What torch sees of this machine; ``failure`` is why it sees nothing."""

    threads: int | None
    gpus: tuple[str, ...]
    failure: str | None = None


@dataclass(frozen=True)
class Usable:
    """Whether a backend can be used here, whether "auto" takes it here, and why not, or what is used."""

    name: str
    here: bool
    auto: bool
    note: str | None


def doctor(
    as_json: AsJson = False,
) -> None:
    """Print versions, backends, and what each can do here."""
    devices = _devices()
    usable = [_usable(backend, devices) for backend in BACKENDS]
    if as_json:
        print(json.dumps(_document(devices, usable), indent=2))
        return
    console = open_console()
    console.print(
        f"attemper {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    )
    for package, extra in _PACKAGES.items():
        advice = "missing" if extra is None else f"not installed (pip install 'attemper[{extra}]')"
        console.print(f"  {package} {_version(package) or advice}")
    console.print(_sentence(devices), soft_wrap=True)
    for backend in usable:
        if backend.note:
            console.print(f"  {backend.name}: {backend.note}", soft_wrap=True)
    console.print("attention backends; auto takes the first that can, those made for the tensors' device before others")
    console.print(_table(usable))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _devices() -> Devices:
    try:
        import torch
    except ImportError as error:
        return Devices(None, (), f"torch cannot be imported: {error}")
    gpus = tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    return Devices(torch.get_num_threads(), gpus)


def _sentence(devices: Devices) -> str:
    if devices.failure:
        return f"  {devices.failure}"
    assert devices.threads is not None
    gpus = "".join(f", cuda:{index} ({name})" for index, name in enumerate(devices.gpus)) or "; no GPU that torch sees"
    return f"  devices: cpu ({count(devices.threads, 'thread')}){gpus}"


def _usable(backend: Backend, devices: Devices) -> Usable:
    """What "auto" would do here: it takes no kernels for a device that this machine does not have."""
    reason, note = backend.missing or UNUSABLE.get(backend.name) or devices.failure, None
    if backend.direct and not reason:
        reason, note = _library(backend)
    if reason:
        return Usable(backend.name, here=False, auto=False, note=reason)
    if backend.devices == "cuda" and not devices.gpus:
        if is_interpreted():
            return Usable(backend.name, here=True, auto=False, note="interpreted, on the CPU: for tests, by name only")
        return Usable(backend.name, here=False, auto=False, note="installed, but there is no GPU that torch sees")
    return Usable(backend.name, here=True, auto=True, note=note)


def _library(backend: Backend) -> tuple[str | None, str | None]:
    """Why the library that is there does not serve this processor, or else which one does."""
    built = kernels(backend.name)
    reason = built.why_unusable()
    return reason, None if reason else f"built, {built.file_name()}"


def _document(devices: Devices, usable: list[Usable]) -> dict[str, Any]:
    """Everything as plain values; a package that is not installed is null."""
    return {
        "schema": 1,
        "attemper": __version__,
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "packages": {package: _version(package) for package in _PACKAGES},
        "devices": asdict(devices),
        "backends": [
            {
                "name": backend.name,
                "summary": backend.summary,
                "here": told.here,
                "auto": told.auto,
                "note": told.note,
                "devices": backend.devices,
                "dtypes": list(backend.dtypes),
                "largest_head_size": backend.largest,
                "features": [feature for feature in FEATURES if feature in backend.features],
            }
            for backend, told in zip(BACKENDS, usable, strict=True)
        ],
    }


def _table(usable: list[Usable]) -> Table:
    """Backends x features."""
    from rich.table import Table

    table = Table("can do")
    for backend in BACKENDS:
        table.add_column(backend.name, justify="center")
    table.add_row("here", *("yes" if told.here else "no" for told in usable))
    table.add_row("taken by auto here", *("yes" if told.auto else "no" for told in usable))
    for feature in FEATURES:
        table.add_row(
            feature.replace("_", " "), *("yes" if feature in backend.features else "-" for backend in BACKENDS)
        )
    table.add_row("devices", *(backend.devices for backend in BACKENDS))
    return table
