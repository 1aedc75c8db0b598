"""``attemper doctor``: versions, backends, and what each can do on this machine."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from attemper import __version__
from attemper._backends import BACKENDS, FEATURES
from attemper.errors import BackendError

_PACKAGES = {
    "torch": None,
    "numpy": None,
    "transformers": "transformers",
    "pandas": "pandas",
    "matplotlib": "plot",
    "triton": "triton",
}
"""Package -> the extra that brings it; None: every install has it."""


def doctor() -> None:
    """Versions, backends, and what each can do here."""
    console = Console()
    console.print(
        f"attemper {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    )
    for package, extra in _PACKAGES.items():
        console.print(f"  {package} {_version(package, extra)}", highlight=False)
    console.print(_devices(), highlight=False)
    for backend in BACKENDS:
        if backend.missing:
            console.print(f"  {backend.name}: {backend.missing}", highlight=False, markup=False, soft_wrap=True)
        elif backend.name == "native":
            console.print(f"  native: {_native()}", highlight=False, markup=False, soft_wrap=True)
    console.print(_backends())


def _version(package: str, extra: str | None) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing" if extra is None else f"not installed (pip install 'attemper\\[{extra}]')"


def _devices() -> str:
    try:
        import torch
    except ImportError as error:
        return f"  torch cannot be imported: {error}"
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    threads = torch.get_num_threads()
    return f"  devices: cpu ({threads} threads)" + "".join(f", cuda:{i} ({name})" for i, name in enumerate(gpus))


def _native() -> str:
    """The library that this processor gets, or why it cannot be loaded."""
    from attemper.kernels.native.library import library

    try:
        return f"built, {Path(library()._name).name}"
    except (BackendError, ImportError) as error:
        return str(error)


def _backends() -> Table:
    """Backends x features; auto takes the first that can do what a call needs."""
    title = "attention backends; auto takes the first that can, those made for the tensors' device before the others"
    table = Table(title=title, title_justify="left")
    table.add_column("can do")
    for backend in BACKENDS:
        table.add_column(backend.name, justify="center")
    table.add_row("here", *("no" if backend.missing else "yes" for backend in BACKENDS))
    table.add_row("taken by auto", *("-" if backend.by_name_only else "yes" for backend in BACKENDS))
    for feature in FEATURES:
        table.add_row(
            feature.replace("_", " "), *("yes" if feature in backend.features else "-" for backend in BACKENDS)
        )
    table.add_row("devices", *(backend.devices for backend in BACKENDS))
    return table
