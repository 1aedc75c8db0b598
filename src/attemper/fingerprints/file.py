"""Fingerprints as files: numbers in safetensors, everything else as JSON in its metadata. docs/fingerprints.md has the
format. A file holds no text, no token and no path.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attemper.errors import InputError
from attemper.files import check_header, write_whole
from attemper.fingerprints.record import COUNTS, PAIRS, PROJECTIONS, STATISTICS, Fingerprint, SiteFingerprint
from attemper.text import clean_name

if TYPE_CHECKING:
    import numpy as np

FORMAT, VERSION = "attemper-fingerprint", 1
AGAIN = "Make it again with the command that wrote it"

_FACTS = tuple(one.name for one in fields(SiteFingerprint) if "ndarray" not in str(one.type))
"""Fields of a site that stand in the header."""
_ARRAYS = ("rows", "pair_keys", "raw", "final", "residual", "input", "output", "recomputed", "tiled")
_VECTORS = ("query", "key")
"""Fields that are kept in the run's own type."""


def save(found: Fingerprint, path: str | os.PathLike[str]) -> Path:
    """Writes a fingerprint, whole or not at all.

    Raises:
        InputError: no file can be written there.
    """
    import numpy as np
    from safetensors.numpy import save as to_bytes

    arrays: dict[str, Any] = {}
    sites = []
    for number, site in enumerate(found.sites):
        arrays |= {f"{number}.{name}": getattr(site, name) for name in _ARRAYS}
        arrays |= {f"{number}.{name}": _narrow(getattr(site, name), site.dtype) for name in _VECTORS}
        arrays[f"{number}.counts"] = np.stack([site.counts[name] for name in COUNTS])
        arrays[f"{number}.statistics"] = np.stack([site.statistics[name] for name in STATISTICS])
        sites.append({name: getattr(site, name) for name in _FACTS})
    header = {
        "format": FORMAT,
        "version": VERSION,
        "counts": COUNTS,
        "statistics": STATISTICS,
        "model": found.model,
        "tokens": found.tokens,
        "lengths": found.lengths,
        "skipped": dict(found.skipped),
        "about": dict(found.about),
        "sites": sites,
    }
    text = json.dumps(header, allow_nan=False, ensure_ascii=False)
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    return write_whole(path, to_bytes(arrays, metadata={"attemper": text}), "reading")


def is_fingerprint(path: str | os.PathLike[str]) -> bool:
    """Whether a file is a fingerprint, of any version."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np") as file:
            return f'"format": "{FORMAT}"' in (file.metadata() or {}).get("attemper", "")
    except (OSError, ValueError, SafetensorError):
        return False


def load_fingerprint(path: str | os.PathLike[str]) -> Fingerprint:
    """A fingerprint from a file of :meth:`Fingerprint.save` or of ``attemper fingerprint --out``.

    Raises:
        InputError: the file cannot be read, is cut off, is of a newer version, or is something else.
    """
    path = Path(path)
    header, arrays = _read(path)
    name = clean_name(path.name)
    header = check_header(name, header, FORMAT, VERSION, what="fingerprint", writer="`attemper fingerprint`")
    try:
        sites = tuple(_site(one, number, header, arrays) for number, one in enumerate(header["sites"]))
        tokens = header["tokens"]
        return Fingerprint(
            str(header["model"]),
            None if tokens is None else str(tokens),
            tuple(map(int, header["lengths"])),
            sites,
            {str(key): str(reason) for key, reason in header["skipped"].items()},
            dict(header["about"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise InputError(f"{name} is damaged: its header does not fit its numbers ({error}). {AGAIN}.") from error


def _read(path: Path) -> tuple[Any, dict[str, np.ndarray]]:
    from safetensors import SafetensorError, safe_open

    name = clean_name(path.name)
    try:
        with safe_open(path, "np") as file:
            header = json.loads((file.metadata() or {}).get("attemper", "{}"))
            known = isinstance(header, dict) and header.get("format") == FORMAT
            # The tensors of a checkpoint may have types that NumPy does not know, and nobody asked for them.
            return header, {key: file.get_tensor(key) for key in file.keys()} if known else {}  # noqa: SIM118
    except OSError as error:
        raise InputError(f"{name} cannot be read: {error.strerror or error}.") from error
    except (ValueError, SafetensorError) as error:
        raise InputError(f"{name} is cut off or no fingerprint ({error}). {AGAIN}.") from error


def _site(facts: Mapping[str, Any], number: int, header: Mapping[str, Any], arrays: Mapping[str, Any]) -> Any:
    given: dict[str, Any] = {name: facts[name] for name in _FACTS if name != "kept_heads"}
    kept = facts.get("kept_heads")  # files of before 0.2.0 keep all heads
    given["kept_heads"] = None if kept is None else tuple(map(int, kept))
    given["inv_freq"] = None if facts["inv_freq"] is None else tuple(map(float, facts["inv_freq"]))
    given |= {name: arrays[f"{number}.{name}"] for name in _ARRAYS}
    given |= {name: _wide(arrays[f"{number}.{name}"], facts["dtype"]) for name in _VECTORS}
    for name, known in (("counts", COUNTS), ("statistics", STATISTICS)):
        stacked = dict(zip(header[name], arrays[f"{number}.{name}"], strict=True))
        given[name] = {key: stacked[key] for key in known}
    site = SiteFingerprint(**given)
    _check_shapes(site)
    return site


def _check_shapes(site: SiteFingerprint) -> None:
    heads, rows, sketch = len(site.numbers), len(site.rows), 1 + PROJECTIONS
    wanted = {
        "rows": (rows, 2),
        "pair_keys": (rows, PAIRS),
        "raw": (heads, rows, PAIRS),
        "final": (heads, rows, PAIRS),
        "residual": (rows, sketch),
        "input": (rows, sketch),
        **dict.fromkeys(("output", "recomputed", "tiled"), (heads, rows, sketch)),
        "query": (heads, site.query.shape[1], site.head_dim),
        "key": (len(site.key_numbers), site.query.shape[1], site.head_dim),
    }
    shapes = {name: getattr(site, name).shape for name in wanted}
    wanted |= dict.fromkeys((*site.counts, *site.statistics), (heads, rows))
    shapes |= {name: part.shape for name, part in (*site.counts.items(), *site.statistics.items())}
    if not set(site.numbers) <= set(range(site.heads)):
        raise ValueError(f"kept heads of site {site.order} are {list(site.numbers)}, it has {site.heads}")
    for name, shape in shapes.items():
        if shape != wanted[name]:
            raise ValueError(f"{name} of site {site.order} is {list(shape)}, expected {list(wanted[name])}")


def _narrow(values: np.ndarray, dtype: str) -> np.ndarray:
    """Float32 numbers in the type that they came in. NumPy has no bfloat16: its upper 16 bits are those of float32."""
    import numpy as np

    if dtype == "bfloat16":
        return (np.ascontiguousarray(values).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(np.float16) if dtype == "float16" else values


def _wide(values: np.ndarray, dtype: str) -> np.ndarray:
    import numpy as np

    if dtype == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)
