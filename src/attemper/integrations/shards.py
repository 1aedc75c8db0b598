"""The index of a checkpoint in shards: which files it names, checked before anything opens them."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from attemper.errors import InputError


def check_shards(folder: Path) -> None:
    """Refuses an index of ``folder`` that names what is no safetensors file inside the folder.

    By name: a file of the folder that is a link, as in the hub's cache, was put there by whoever owns the machine.

    Raises:
        InputError: an index is no JSON with a ``weight_map`` of names, or a name is absolute, climbs out of the folder
            or is not a safetensors file's.
    """
    for path in sorted(folder.glob("*.safetensors.index*.json")):
        for shard in sorted(_shards(path)):
            if not shard.endswith(".safetensors") or not _is_inside(shard):
                raise InputError(
                    f"{path} names the shard {shard!r}, which is not a safetensors file inside {folder}. Nothing of it "
                    "was read: do not use this folder unless you know who made it."
                )


def _shards(path: Path) -> set[str]:
    try:
        index: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read as the index of a checkpoint: {error}.") from error
    named = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(named, dict) or not all(isinstance(shard, str) for shard in named.values()):
        raise InputError(f"{path} is no index of a checkpoint: it has no weight_map from parameters to files.")
    return set(named.values())


def _is_inside(name: str) -> bool:
    """Whether a name stays in its folder, read as any system may read it."""
    ways = PurePosixPath(name), PureWindowsPath(name)
    return not any(way.is_absolute() or way.drive or way.root or ".." in way.parts for way in ways)
