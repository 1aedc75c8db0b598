"""What a run tells of itself, as JSON without folders of the machine that wrote it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_ABSOLUTE = re.compile(r"^(file:/|/|~|[A-Za-z]:[\\/]|\\\\)")
"""How a path begins that tells of somebody's machine."""
_ROOT = r"(?:file:/+|~\w*/|/|[A-Za-z]:[\\/]|\\\\)(?=[\w.-])"
_FOLDERS = re.compile(rf"""(?<=['"]){_ROOT}(?:[^'"\n]*[\\/])?|(?<![\w.:/\\~'"]){_ROOT}(?:[^\s'",;()]*[\\/])?""")
"""Of absolute paths within a sentence, all but the last name. In quotes it may hold spaces."""
UNMEASURED = "unmeasured"
"""Under which name a run keeps why its watch saw nothing."""
UNNUMBERED = "unnumbered"
"""Of segments whose numbers the loop did not give: their first steps."""
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
