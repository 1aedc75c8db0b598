"""The text of training experiments: the sources of Python's standard library, with their documentation strings."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from attemper.errors import InputError

LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and bytes that are held out, uint8 [n] each; every file ends with a zero byte."""

    training: Tensor
    held_out: Tensor
    digest: str
    """Of both: experiments on another Python's library are other experiments."""


@cache
def standard_library(root: Path | None = None) -> Corpus:
    """The ``*.py`` files of this interpreter's library, but for tests, tables and files written when it was built.

    One file in twenty, by the SHA-256 of its path, is held out, as it was for the model that ships.

    Raises:
        InputError: this Python came without the sources of its library.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for path in sorted(_sources(root)):
        below = path.relative_to(root)
        if not below.parts[0].startswith(("config-", "_sysconfigdata")):
            held = int(hashlib.sha256(below.as_posix().encode()).hexdigest(), 16) % 20 == 0
            parts[held].append(path.read_bytes() + b"\0")
    training, held_out = (b"".join(part) for part in parts)
    if len(training) < 1_000_000 or len(held_out) < 50_000:
        raise InputError(
            f"standard_library({str(root)!r}): {len(training)} and {len(held_out)} bytes of Python sources are too few "
            "to train on. This Python came without the sources of its library: use one that has them."
        )
    digest = hashlib.sha256(training + held_out).hexdigest()[:16]
    return Corpus(_bytes(training), _bytes(held_out), digest)


def _sources(root: Path) -> Iterator[Path]:
    for folder, below, files in os.walk(root):
        below[:] = set(below) - LEFT_OUT  # they may hold all that was ever installed
        yield from (Path(folder, file) for file in files if file.endswith(".py"))


def _bytes(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


def drawn_windows(ids: Tensor, count: int, length: int, seed: int) -> Tensor:
    """``count`` windows [count, length] of ``ids`` [n] at places drawn by ``seed``, as int64."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(ids) - length + 1, (count, 1), generator=generator)
    return ids[starts + torch.arange(length)].long()
