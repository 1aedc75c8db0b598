"""Where a run is stored, under which name, how much of it, and what it tells of itself."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attemper.checks import MOST, index_of
from attemper.errors import InputError

FEWEST_BYTES = 1 << 20
MANTISSA = 23
"""Bits that a float32 stores of its mantissa."""
DEFAULT_BITS = 15
"""How many of them a run keeps: a relative error of 2^-16 at most, 1.5e-5."""


@dataclass(frozen=True)
class Store:
    """Options of a stored run, for ``attemper.watch(model, store=...)``.

    A plain path does the same with everything else as it stands here. Readings are stored: no text, no token ids, and
    of a path in the model's configuration only its last name.

    Args:
        path: folder of one run; it is made. A URL (``s3://bucket/run``) needs ``pip install 'attemper[parquet]'``.
        name: of the run, for people; the folder's if None.
        tags, notes: for people.
        bits: mantissa bits of what is kept, 1 to 23; 15 are a relative error of 1.5e-5. None keeps all: exact, and
            takes half as much room again. Counts are always exact.
        max_bytes: the size at which the oldest samples are thinned, at least 1 MiB; None for no bound. Least, mean and
            largest of what goes are kept. docs/history.md says by what a file can be larger.
        new: whether this is a new training: a run that is there does not go on. Its files are moved beside its folder,
            to ``<path>-1`` (or -2, ...), where they are a run of their own.

    Raises:
        InputError: one of them has no meaning.

    Example:
        >>> Store("runs/a", name="warm-up 2,000", tags=("lr 3e-4",)).bits
        15
    """

    path: str | os.PathLike[str]
    name: str | None = None
    tags: Sequence[str] = ()
    notes: str = ""
    bits: int | None = DEFAULT_BITS
    max_bytes: int | None = None
    new: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.path, str | os.PathLike) or not os.fspath(self.path):
            raise InputError(f"Store(path=...) must be the path of a folder, got {self.path!r}. Name one: 'runs/a'.")
        if isinstance(self.tags, str) or not all(isinstance(tag, str) for tag in self.tags):
            raise InputError(f"Store(tags=...) must be names, got {self.tags!r}. Write tags=('one', 'two').")
        object.__setattr__(self, "tags", tuple(self.tags))
        if self.new and self.is_url:
            raise InputError(f"Store(new=True) moves files of this machine: name another place than {self.path}.")
        _check_whole("bits", self.bits, 1, MANTISSA, "None keeps all bits")
        _check_whole("max_bytes", self.max_bytes, FEWEST_BYTES, None, "None sets no bound")

    @property
    def is_url(self) -> bool:
        """Whether the run goes to an object store."""
        return "://" in os.fspath(self.path)

    @property
    def last_name(self) -> str:
        """Of the folder, for people."""
        return (
            os.path.basename(os.path.abspath(self.path))
            if not self.is_url
            else str(self.path).rstrip("/").split("/")[-1]
        )


def _check_whole(name: str, value: object, least: int, most: int | None, none: str) -> None:
    if value is None:
        return
    number = index_of(value)
    if number is None or not least <= number <= (MOST if most is None else most):
        expected = f"at least {least:,}" if most is None else f"from {least} to {most}"
        raise InputError(f"Store({name}=...) must be a whole number {expected}, got {value!r}; {none}.")


_ABSOLUTE = re.compile(r"^(file:/|/|~|[A-Za-z]:[\\/]|\\\\)")
"""How a path begins that tells of somebody's machine."""
_ROOT = r"(?:file:/+|~\w*/|/|[A-Za-z]:[\\/]|\\\\)(?=[\w.-])"
_FOLDERS = re.compile(rf"""(?<=['"]){_ROOT}(?:[^'"\n]*[\\/])?|(?<![\w.:/\\~'"]){_ROOT}(?:[^\s'",;()]*[\\/])?""")
"""Of absolute paths within a sentence, all but the last name. In quotes it may hold spaces."""
UNMEASURED = "unmeasured"
"""Under which name a run keeps why its watch saw nothing."""
UNNUMBERED = "unnumbered"
"""Of segments whose numbers the loop did not give: their first steps."""
SHADOWED = "shadowed"
"""From which steps on samples are of shadow passes, or of the training's own passes again."""
WORDS = ("name", "tags", "notes")
"""What people say of a run: kept as it is."""


def to_json(value: object, *, folders: bool = False) -> str:
    """``value`` as JSON; what JSON has no word for as text. Of an absolute path only the last name
    is kept, unless ``folders``.

    Example:
        >>> to_json({"model": "/home/ada/models/tiny", "layers": 2})
        '{"model": "tiny", "layers": 2}'
    """
    if folders:
        return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace").decode("utf-8")
    return json.dumps(_plain(value), ensure_ascii=False)


def sentence(text: str) -> str:
    """What somebody's error says, without the folders of its paths.

    Example:
        >>> sentence("[Errno 28] No space left on device: '/home/ada l/runs/x.sqlite' (1/2)")
        "[Errno 28] No space left on device: 'x.sqlite' (1/2)"
    """
    return _FOLDERS.sub("", _encodable(text))


def _plain(value: object) -> Any:
    match value:
        case None | bool() | int():
            return value
        case float():
            return value if abs(value) < float("inf") else str(value)
        case str():
            return _without_folders(value)
        case Mapping():
            return {_without_folders(str(key)): _plain(inner) for key, inner in value.items()}
        case list() | tuple() | set() | frozenset():
            return [_plain(inner) for inner in value]
        case _:
            return _without_folders(str(value))


def _without_folders(text: str) -> str:
    text = _encodable(text)
    return re.split(r"[\\/]", text.rstrip("\\/"))[-1] if _ABSOLUTE.match(text) else text


def _encodable(text: str) -> str:
    """A lone surrogate has no place in a file."""
    return text.encode("utf-8", "replace").decode("utf-8")
