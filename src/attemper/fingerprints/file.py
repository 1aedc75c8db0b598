"""Fingerprints as files: numbers in safetensors, everything else as JSON in its metadata. docs/fingerprints.md has the
names, encoding.py how arrays are packed. A file holds no text, no token and no path.

What follows from other arrays is left out: ``final`` (from ``raw``, ``multiplier`` and softcap, with ``hidden`` 1 where
a pair's key is hidden), ``lse`` where it is ``lse_keys``, ``tiled`` where outputs follow from queries, keys and values.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attemper.errors import InputError
from attemper.file_schema import COUNT, check_document, fields_of, load_record, read_own, schema_of, write_own
from attemper.fingerprints.encoding import EXPONENT, pack, unpack, wide
from attemper.fingerprints.site import (
    ANCHORS,
    COUNTS,
    GRAMS,
    PAIRS,
    PROJECTIONS,
    SIDE,
    STATISTICS,
    ModelOutput,
    SiteFingerprint,
    final_scores,
    key_numbers,
    weight_shape,
)
from attemper.text import clean_name, count

if TYPE_CHECKING:
    import numpy as np

FORMAT, VERSION = "attemper-fingerprint", 3
PLAIN, SITES_ALONE = 1, 2
"""Versions before, which are read, and no longer written: of the first, arrays as they are, counts and statistics
stacked; neither has ``LATER`` or what the model gives.
"""
AGAIN = "Make it again with the command that wrote it"
_ROOM, _RATIO = 1 << 26, 16
"""Bytes of arrays that any file may ask for, and more for each byte that it has: an array that is the same along heads
and rows is stored once, and is made as large as the header says.
"""

_ARRAYS = [one.name for one in fields(SiteFingerprint) if "ndarray" in str(one.type)]
"""Fields of a site that do not stand in the header."""
_WHOLE = ("rows", "pair_keys")
LATER = ("attended", "change", "grams")
"""Fields that files have from version 3 on."""
_NUMBERS = ("raw", "final", "residual", "input", "output", "recomputed", "tiled", *LATER)
_VECTORS = ("query", "key")
"""Fields in the run's own type."""
_HIDDEN = "hidden"
"""Stands in place of ``final`` where that follows from ``raw``: 1 where a pair's key is hidden."""
_WEIGHTS = "weights."
"""How the names of weights begin."""
_FOLLOWING = ("final", "lse")
"""Fields that are left out where they follow from others."""
_OUTPUT_SHAPES = {"rows": (2,), "sketch": (1 + PROJECTIONS,)}
"""Arrays of what the model gives -> their shape behind the rows."""
_HEADER = {
    "model": str,
    "tokens": (str, None),
    "lengths": [COUNT],
    "skipped": {str: str},
    "about": {str: object},
    "sites": [schema_of(SiteFingerprint, *_ARRAYS)],
    "output?": (schema_of(ModelOutput, *_OUTPUT_SHAPES), None),
}
"""Of the metadata of a file."""


def save(
    path: str | os.PathLike[str], sites: Sequence[SiteFingerprint], output: ModelOutput | None, facts: Mapping[str, Any]
) -> Path:
    """Writes a fingerprint, whole or not at all. ``facts``: its other fields."""
    arrays: dict[str, Any] = {}
    told = []
    for number, site in enumerate(sites):
        arrays |= _pack_site(site, f"{number}.")
        told.append(fields_of(site, *_ARRAYS))
    header = {**facts, "sites": told, "output": None}
    if output is not None:
        header["output"] = fields_of(output, *_OUTPUT_SHAPES)
        for name in _OUTPUT_SHAPES:
            arrays |= pack(f"output.{name}", getattr(output, name), once=name != "rows")
    return write_own(path, FORMAT, VERSION, header, arrays)


def _pack_site(site: SiteFingerprint, before: str) -> dict[str, np.ndarray]:
    import numpy as np

    whole = {"pair_keys": site.pair_keys, **site.counts}
    numbers = {name: getattr(site, name) for name in _NUMBERS} | dict(site.statistics)
    hidden = np.isneginf(site.final)
    if np.array_equal(_final(numbers, site.softcap, hidden), site.final, equal_nan=True):
        del numbers["final"]
        whole[_HIDDEN] = hidden.astype(np.int32)
    if np.array_equal(numbers["lse"], numbers["lse_keys"], equal_nan=True):
        del numbers["lse"]
    arrays: dict[str, np.ndarray] = {}
    for name, values in (whole | numbers).items():
        arrays |= pack(before + name, values)
    for name in ("rows", *_VECTORS):
        arrays |= pack(before + name, getattr(site, name), once=False)
    for name, values in site.weights.items():
        arrays |= pack(f"{before}{_WEIGHTS}{name}", values, once=False)
    return arrays


def _final(numbers: Mapping[str, np.ndarray], softcap: float | None, hidden: np.ndarray) -> np.ndarray:
    return final_scores(numbers["raw"], numbers["multiplier"], softcap, None, hidden)


def is_of_fingerprint(metadata: Mapping[str, str]) -> bool:
    return f'"format": "{FORMAT}"' in metadata.get("attemper", "")


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The fields of a fingerprint from its file. ``InputError``: the file cannot be read, is cut off, is of a newer
    version, or is something else.
    """
    path = Path(path)
    header, arrays = read_own(
        *(path, FORMAT, PLAIN, SITES_ALONE, VERSION), what="fingerprint", writer="`attemper fingerprint`", again=AGAIN
    )
    room = [_ROOM + _RATIO * sum(part.nbytes for part in arrays.values())]
    version = header["version"]
    try:
        check_document(header, _HEADER, "")
        sites = tuple(
            _plain_site(one, number, header, arrays) if version == PLAIN else _site(one, number, arrays, version, room)
            for number, one in enumerate(header["sites"])
        )
        return {
            **{name: header[name] for name in ("model", "tokens", "skipped", "about")},
            "lengths": tuple(header["lengths"]),
            "sites": sites,
            "output": None if version < VERSION or header["output"] is None else _output(header["output"], arrays),
        }
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise InputError(
            f"{clean_name(path.name)} is damaged: its header does not fit its numbers ({error}). {AGAIN}."
        ) from error


def _output(facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> ModelOutput:
    rows = len(arrays["output.rows"])
    shaped = {name: (rows, *shape) for name, shape in _OUTPUT_SHAPES.items()}
    found = {name: unpack(f"output.{name}", arrays, shape, whole=name == "rows") for name, shape in shaped.items()}
    return load_record(ModelOutput, facts, "", **found)


def _later(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """What files of before version 3 do not tell."""
    import numpy as np

    return {name: np.full(shapes[name], np.nan, np.float32) for name in LATER}


def _site(
    facts: Mapping[str, Any], number: int, arrays: Mapping[str, np.ndarray], version: int, room: list[int]
) -> SiteFingerprint:
    """``room``: bytes that this and later sites may take, in a list of one."""
    import numpy as np

    before = f"{number}."
    rows, (held, places) = len(arrays[before + "rows"]), arrays[before + "query"].shape[:2]
    heads = len(_kept_heads(facts))
    if held != heads:  # before anything is made as large as the header says
        raise ValueError(f"{before}query holds {count(held, 'head')}, expected {heads}")
    shapes = _shapes(facts, rows, places)
    room[0] -= sum(4 * math.prod(shape) for shape in shapes.values())
    if room[0] < 0:
        raise ValueError(f"its sites take more than a file of this size can hold: {-room[0]:,} B")
    given: dict[str, Any] = {
        name: unpack(before + name, arrays, shapes[name], whole=True) for name in (*_WHOLE, *COUNTS)
    }
    absent = (*_FOLLOWING, *(LATER if version < VERSION else ()))
    kept = [name for name in (*_NUMBERS, *STATISTICS, *_VECTORS) if name not in absent or before + name in arrays]
    numbers = _later(shapes) | {name: unpack(before + name, arrays, shapes[name]) for name in kept}
    numbers.setdefault("lse", np.copy(numbers["lse_keys"]))
    if "final" not in numbers:
        hidden = unpack(before + _HIDDEN, arrays, shapes["final"], whole=True) > 0
        numbers["final"] = _final(numbers, facts["softcap"], hidden)
    given |= numbers
    given["counts"] = {name: given.pop(name) for name in COUNTS}
    given["statistics"] = {name: given.pop(name) for name in STATISTICS}
    start = before + _WEIGHTS
    for key in (key for key in arrays if key.startswith(start) and not key.endswith(EXPONENT)):
        name, shape = clean_name(key.removeprefix(start)), (len(arrays[key]), 1 + SIDE**2)
        weight_shape(name)  # refuses another name
        given.setdefault("weights", {})[name] = unpack(key, arrays, shape)
    return _load_site(facts, given)


def _plain_site(
    facts: Mapping[str, Any], number: int, header: Mapping[str, Any], arrays: Mapping[str, Any]
) -> SiteFingerprint:
    """Of a file of version 1."""
    given = {name: arrays[f"{number}.{name}"] for name in (*_WHOLE, *_NUMBERS) if name not in LATER}
    given |= {name: wide(arrays[f"{number}.{name}"]) for name in _VECTORS}
    for name, known in (("counts", COUNTS), ("statistics", STATISTICS)):
        stacked = dict(zip(header[name], arrays[f"{number}.{name}"], strict=True))
        given[name] = {key: stacked[key] for key in known}
    wanted = _shapes(facts, len(given["rows"]), given["query"].shape[1])
    site = _load_site(facts, given | _later(wanted))
    shapes = {name: getattr(site, name).shape for name in (*_WHOLE, *_NUMBERS, *_VECTORS)}
    shapes |= {name: part.shape for name, part in (*site.counts.items(), *site.statistics.items())}
    for name, shape in wanted.items():
        if shapes[name] != shape:
            raise ValueError(f"{name} of site {site.order} is {list(shapes[name])}, expected {list(shape)}")
    return site


def _load_site(facts: Mapping[str, Any], given: dict[str, Any]) -> SiteFingerprint:
    site = load_record(SiteFingerprint, facts, "", **{"weights": {}, **given})
    if not set(site.numbers) <= set(range(site.heads)):
        raise ValueError(f"kept heads of site {site.order} are {list(site.numbers)}, it has {site.heads}")
    return site


def _kept_heads(facts: Mapping[str, Any]) -> Sequence[int]:
    """Files of before 0.2.0 keep all heads."""
    return range(facts["heads"]) if facts.get("kept_heads") is None else facts["kept_heads"]


def _shapes(facts: Mapping[str, Any], rows: int, places: int) -> dict[str, tuple[int, ...]]:
    """The shape of each array of a site."""
    total, groups, size, kept = facts["heads"], facts["kv_heads"], facts["head_dim"], _kept_heads(facts)
    heads, read, sketch = len(kept), len(key_numbers(kept, total, groups)), 1 + PROJECTIONS
    return {
        "rows": (rows, 2),
        "pair_keys": (rows, PAIRS),
        **dict.fromkeys((*COUNTS, *STATISTICS), (heads, rows)),
        **dict.fromkeys(("raw", "final"), (heads, rows, PAIRS)),
        **dict.fromkeys(("residual", "input", "attended", "change"), (rows, sketch)),
        "grams": (rows, len(GRAMS), 2, 1 + ANCHORS),
        **dict.fromkeys(("output", "recomputed", "tiled"), (heads, rows, sketch)),
        "query": (heads, places, size),
        "key": (read, places, size),
    }
