"""The file of one run: signals as float32 with 11 significant bits, and plain values as JSON. No pickle.

A ``.npz`` archive. Its member ``about`` is UTF-8 JSON as uint8: ``{"schema", "trial", "corpus", "environment",
"held_out", "diverged_at", "seconds"}``. All others are signals [T, ...]; ``trial.py`` says at which steps. A signal is
stored as the bytes of its numbers in planes, most significant first, which pack to less.
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from attemper import InputError
from attemper.files import replacement
from attemper.lab.corpus import Corpus
from attemper.lab.trained.runs import digest, environment, plain
from research.early_warning.encoder import EncoderConfig
from research.early_warning.grid import Trial
from research.early_warning.trial import Array

SCHEMA = 1
SUFFIX = ".npz"
BITS = 10
"""Of mantissa that are kept, beside the leading one: as in float16, without its bounds."""
ABOUT = "about"


@dataclass(frozen=True)
class RunFile:
    """What a file says."""

    about: dict[str, Any]
    signals: dict[str, Array]


def identity(trial: Trial, corpus: Corpus, **more: Any) -> dict[str, Any]:
    """What must agree for a file to stand for a run, as plain values; ``more`` of a run that branches off."""
    return {"schema": SCHEMA, "trial": plain(asdict(trial)), "corpus": corpus.digest, **more}


def file_name(trial: Trial, corpus: Corpus, **more: Any) -> str:
    """A name to read, and a hash of everything that the run follows from."""
    run, config = trial.run, trial.run.config
    fault = trial.fault.kind.replace(" ", "-") if trial.fault else "healthy"
    sizes = f"{config.layers}x{config.width}x{config.context}{'-qknorm' if config.qk_norm else ''}"
    if isinstance(config, EncoderConfig):
        sizes = f"{config.model.lower()}-{sizes}"
    return f"{sizes}-{run.rate:g}-seed{run.seed}-{fault}-{digest(identity(trial, corpus, **more))}{SUFFIX}"


def write(path: Path, known: dict[str, Any], values: dict[str, Any], signals: dict[str, Array]) -> None:
    """Writes the file of the run whose :func:`identity` is ``known``, whole or not at all."""
    about = {**known, "environment": environment(), **plain(values)}
    text = np.frombuffer(json.dumps(about, allow_nan=False).encode(), np.uint8)
    packed = io.BytesIO()
    members: dict[str, Any] = {ABOUT: text, **{name: _planes(array) for name, array in signals.items()}}
    np.savez_compressed(packed, **members)
    with replacement(path) as part:
        part.write_bytes(packed.getvalue())


def read(path: Path) -> RunFile:
    """The run of a file that :func:`write` wrote.

    Raises:
        InputError: it is missing, damaged, or of another schema.
    """
    try:
        return parse(path.read_bytes())
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise InputError(
            f"lab early-warning: {str(path)!r} is no file of a run: {error}. Delete it, and call the command again: it "
            "trains what is missing."
        ) from error


def read_packed(path: Path) -> list[RunFile]:
    """The runs of a file that ``packed.py`` wrote, in the order of their names."""
    with zipfile.ZipFile(path) as archive:
        return [parse(archive.read(name)) for name in archive.namelist() if name.endswith(SUFFIX)]


def parse(data: bytes) -> RunFile:
    """The run of a file's bytes."""
    with np.load(io.BytesIO(data), allow_pickle=False) as archive:
        members = {name: archive[name] for name in archive.files}
    about = json.loads(members.pop(ABOUT).tobytes())
    signals = {name: _values(planes) for name, planes in members.items()}
    if about["schema"] != SCHEMA:
        raise ValueError(f"schema {about['schema']!r}, expected {SCHEMA}")
    return RunFile(about, signals)


def _planes(array: Array) -> npt.NDArray[np.uint8]:
    """[T, ...] -> [4, T, ...]: the bytes of each number once it is rounded to ``BITS`` of mantissa."""
    kept = np.ascontiguousarray(array, np.float32)
    bits = kept.view(np.uint32)
    half = np.uint32(1 << (22 - BITS))
    cut = np.where(np.isfinite(kept), (bits + half) & np.uint32(~(2 * int(half) - 1) & 0xFFFFFFFF), bits)
    return np.moveaxis(cut.astype(">u4").view(np.uint8).reshape(*kept.shape, 4), -1, 0)


def _values(planes: npt.NDArray[np.uint8]) -> Array:
    whole = np.ascontiguousarray(np.moveaxis(planes, 0, -1))
    return whole.view(">u4")[..., 0].astype(np.uint32).view(np.float32)
