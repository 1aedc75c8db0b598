"""What a reading came from, apart from its numbers: when, of which weights, by which versions. No text, no paths."""

from __future__ import annotations

import os
import platform
import re
import sys
from datetime import UTC, datetime
from pathlib import PurePath
from typing import Any

import torch
from torch import nn

from attemper import __version__
from attemper.sites.names import class_name, unwrapped

_COMMIT = re.compile(r"[0-9a-f]{7,64}")


def now() -> str:
    """This second in UTC, as readings tell it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def provenance(model: nn.Module, date: str | None) -> dict[str, Any]:
    """Fields of ``Reading``: ``date``, ``dtype``, ``revision`` and ``versions``."""
    commit = getattr(getattr(unwrapped(model), "config", None), "_commit_hash", None)
    dtypes = {
        str(part.dtype).removeprefix("torch."): None for part in model.parameters() if part.dtype.is_floating_point
    }
    return {
        "date": date,
        "dtype": ", ".join(dtypes) or None,
        "revision": commit if isinstance(commit, str) and _COMMIT.fullmatch(commit) else None,
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Of attemper, Python, torch, and of transformers where it is loaded."""
    loaded = {"transformers": sys.modules["transformers"].__version__} if "transformers" in sys.modules else {}
    return {
        "attemper": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        **loaded,
    }


def title(model: nn.Module) -> str:
    """The class of a model and where it was loaded from: a hub id, or the last two names of a folder."""
    model = unwrapped(model)
    source = str(getattr(getattr(model, "config", None), "_name_or_path", None) or "")
    if os.path.isabs(source) or source.startswith("~"):
        source = "/".join(part for part in PurePath(source).parts[-2:] if part != PurePath(source).anchor)
    return f"{class_name(model)} {source}".strip()
