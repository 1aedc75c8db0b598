"""Parts as files: sums in safetensors, everything else as JSON in its metadata. docs/reading-file.md has the format.

A file holds no text, no token and no path.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attemper.errors import InputError
from attemper.file_schema import (
    COUNT,
    LARGEST,
    Row,
    check_document,
    fields_of,
    load_record,
    read_own,
    schema_of,
    write_own,
)
from attemper.readings.part import Part, Segment, Shard, label_list, merge
from attemper.readings.reading import Skipped
from attemper.readings.sample import SiteLabel
from attemper.readings.sums import SPREAD, SiteTotals, places
from attemper.statistics import COUNTED
from attemper.text import clean_name

if TYPE_CHECKING:
    import numpy as np

FORMAT, VERSION = "attemper-reading", 1
SUFFIX = ".safetensors"
MOST_SHARDS = 1 << 20
"""Of a whole. A header that says more is damaged: those that are missing are listed by name."""
AGAIN = "Make it again with the command that wrote it"


def save(part: Part, path: str | os.PathLike[str], *, unfinished: bool = False) -> Path:
    """Writes a part, whole or not at all. ``unfinished``: it holds the first blocks of a shard, from which a later scan
    goes on.
    """
    columns = [[name, place.stop - place.start] for name, place in places(int(part.law["fewest_keys"])).items()]
    arrays, segments = {}, []
    for number, segment in enumerate(part.segments):
        sites = []
        for place, site in enumerate(segment.sites.values()):
            arrays[f"{number}.{place}"] = site.sums
            about = {"label": asdict(site.label), "queries": site.queries, "keys": site.keys, "order": list(site.order)}
            sites.append(about | ({"roles": site.roles} if site.roles else {}))
        segments.append({"shards": [asdict(shard) for shard in segment.shards], "sites": sites})
    header = {
        "unfinished": unfinished,
        "columns": columns,
        **fields_of(part, *_OTHERS),
        "skipped": [asdict(skip) for skip in part.skipped],
        "dropped": [[*key, why] for key, why in part.dropped.items()],
        "segments": segments,
    }
    return write_own(path, FORMAT, VERSION, header, arrays)


_OTHERS = ("segments", "skipped", "dropped")
"""Fields of ``Part`` that do not stand in the header as they are."""
_SITE = {
    "label": {},
    "queries": COUNT,
    "keys": COUNT,
    "order": Row(COUNT, COUNT),
    "roles?": {str: [(float, None)]},
}
_HEADER: dict[str, Any] = {
    **schema_of(Part, *_OTHERS),
    "law": {"fewest_keys": COUNT, "shards?": (COUNT, None)},
    "columns": [Row(str, COUNT)],
    "skipped": [schema_of(Skipped)],
    "dropped": [Row(str, str, str, str)],
    "segments": [{"sites": [_SITE]}],
}
"""Of the metadata of a file."""


def load(path: Path, *, unfinished: bool = False) -> Part:
    """The part in a file. ``unfinished``: whether it may be a shard under way.

    Raises:
        InputError: the file cannot be read, is cut off, is of a newer version, or is something else,
            such as JSON, which has no sums.
    """

    def damage(error: Exception) -> InputError:
        return InputError(f"{_name(path)} is damaged: its header does not fit its numbers ({error}). {AGAIN}.")

    header, arrays = _read(path)
    if header.get("unfinished") and not unfinished:
        raise InputError(f"{_name(path)} is an unfinished shard. Run the command that started it again to finish it.")
    try:
        check_document(header, _HEADER, "")
    except InputError as error:
        raise damage(error) from error
    try:
        return _part(header, arrays)
    except InputError as error:
        raise InputError(f"{_name(path)}: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise damage(error) from error


def merge_files(paths: Iterable[Path]) -> Part:
    """One part of all files. They are read one after another in the order of their shards: memory does not grow with
    their number.
    """
    headers = [(path, _read(path, header_alone=True)[0]) for path in paths]
    if not headers:
        raise InputError("there is nothing to merge: no file was named.")
    owners: dict[tuple[str, object], Path] = {}
    for path, header in headers:
        for shard in header["shards"]:
            owned = shard.label, header.get("model_hash")  # of another model they are refused for that
            if owned in owners:
                first = owners[owned]
                both = " and ".join(clean_name(one if first.name == path.name else one.name) for one in (first, path))
                raise InputError(
                    f"shard {clean_name(shard.label)} is there twice, in {both}: its texts would count double. Leave "
                    "one of them out."
                )
            owners[owned] = path
    headers.sort(key=lambda one: one[1]["shards"][0].order)
    whole = load(headers[0][0])
    for path, _ in headers[1:]:
        name = _name(path)
        try:
            whole = merge([whole, load(path)])
        except InputError as error:
            raise error if str(error).startswith(name) else InputError(f"{name}: {error}") from error
    return whole


def part_name(index: int, of: int) -> str:
    """The name of a shard's file."""
    return f"part-{index:05d}-of-{of:05d}{SUFFIX}"


def part_files(folder: Path) -> list[Path]:
    found = sorted(folder.glob(f"*{SUFFIX}"))
    if not found:
        raise InputError(
            f"there is no part in the folder {_name(folder)}: `attemper scan MODEL --texts FILE --out FOLDER` writes "
            f"them, as {part_name(0, 64)}."
        )
    return found


def _read(path: Path, *, header_alone: bool = False) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The header of a file, with its shards as records, and its arrays."""
    if is_json(path):
        raise InputError(
            f"{_name(path)} is the JSON of a scan: its numbers are means, which do not add up. Merge files of "
            "Scan.save or `attemper scan --out`; attemper.open reads the JSON, and attemper.compare compares it."
        )
    header, arrays = read_own(
        path, FORMAT, VERSION, what="reading", writer="Scan.save", again=AGAIN, header_alone=header_alone
    )
    try:
        for segment in header["segments"]:
            segment["shards"] = tuple(map(_shard, segment["shards"]))
        header["shards"] = tuple(shard for segment in header["segments"] for shard in segment["shards"])
        assert header["shards"]
    except (AssertionError, KeyError, TypeError, InputError) as error:
        raise InputError(f"{_name(path)} is damaged: its header names no shards ({error}). {AGAIN}.") from error
    return header, arrays


def _part(fields: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Part:
    fewest_keys = fields["law"]["fewest_keys"]
    order = _column_order(fields["columns"], fewest_keys)
    width = sum(width for _, width in fields["columns"])
    if any(sums.shape[1:] != (width,) for sums in arrays.values()):
        raise ValueError(f"its columns are {width:,}, which its sums are not")
    if (fields["law"].get("shards") or 0) > MOST_SHARDS:
        raise ValueError(f"a whole of {fields['law']['shards']:,} shards")
    segments = []
    for number, segment in enumerate(fields["segments"]):
        sites = [
            _site(one, arrays[f"{number}.{place}"], order, fewest_keys) for place, one in enumerate(segment["sites"])
        ]
        segments.append(Segment(segment["shards"], {site.key: site for site in sites}))
    return load_record(
        Part,
        fields,
        "",
        segments=tuple(segments),
        skipped=tuple(load_record(Skipped, one, "") for one in fields["skipped"]),
        dropped={(name, kind, mode): why for name, kind, mode, why in fields["dropped"]},
    )


LATER = (*(part for name in ("missed_mass", *COUNTED) for part in (name, f"rows_of_{name}")), *SPREAD)
"""Columns that files of earlier versions do not have, and that are 0 there."""


def _column_order(columns: Sequence[Sequence[Any]], fewest_keys: int) -> list[int]:
    """Where the columns of this version stand among those of a file; behind its last where it has none of ``LATER``."""
    stands, start = {}, 0
    for name, width in columns:
        stands[name] = range(start, start + width)  # no list: a header may claim any width
        start += width
    found = []
    for name, place in places(fewest_keys).items():
        if name in LATER and name not in stands:
            found.append(start)
            continue
        if len(stands.get(name, ())) != place.stop - place.start:
            raise InputError(
                f"it has no sums of {name}, which this version shows: read it with the attemper that wrote it."
            )
        found += stands[name]
    return found


def _counts(fewest_keys: int) -> list[int]:
    """Columns that are numbers of rows."""
    named = (place for name, place in places(fewest_keys).items() if "rows" in name or name in _COUNTED)
    return [column for place in named for column in range(place.start, place.stop)]


_COUNTED = ("empty", "nonfinite", "histogram", "batches")


def _site(fields: Mapping[str, Any], sums: np.ndarray, order: list[int], fewest_keys: int) -> SiteTotals:
    import numpy as np

    label = load_record(SiteLabel, fields["label"], "label")
    if sums.dtype != "float64" or len(sums) != label.heads:
        raise ValueError(f"sums {sums.shape} {sums.dtype} of {clean_name(label.name)}, whose heads are {label.heads}")
    module, call = fields["order"]
    if sums.shape[1] in order:
        sums = np.pad(sums, ((0, 0), (0, 1)))
    sums = sums[:, order]
    rows = sums[:, _counts(fewest_keys)]
    if not ((rows >= 0) & (rows < LARGEST) & (rows == np.floor(rows))).all():
        raise ValueError(f"{clean_name(label.name)} has numbers of rows that are no whole numbers from 0 on")
    if (sums[:, places(fewest_keys)["logit_variance"]] < 0).any():
        raise ValueError(f"{clean_name(label.name)} has variances below 0")
    roles = {name: tuple(scores) for name, scores in fields.get("roles", {}).items()}
    if any(len(scores) != label.heads for scores in roles.values()):
        raise ValueError(f"{clean_name(label.name)} has scores of roles that are not one for each head")
    return SiteTotals(label, fields["queries"], fields["keys"], (module, call), sums, roles)


def _shard(fields: Mapping[str, Any]) -> Shard:
    shard = load_record(Shard, fields, "shard")
    if shard.digest is not None and not re.fullmatch("[0-9a-f]{16}", shard.digest):
        raise InputError(f"shard.digest must be 16 hexadecimal digits, got {shard.digest!r:.60}")
    return shard


def is_json(path: Path) -> bool:
    """Whether a file is a JSON document. That of safetensors has one as well, behind its length in eight bytes."""
    try:
        with path.open("rb") as file:
            start = file.read(64)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{_name(path)} cannot be read: {reason}. Name a file of Scan.save.") from error
    return start[8:9] != b"{" and start.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{")


def _name(path: Path) -> str:
    return clean_name(path.name)


def missing_line(part: Part) -> str:
    """Which shards are not there, in a sentence; empty where none is missing."""
    missing = part.missing
    verb = "is" if len(missing) == 1 else "are"
    return f"{len(missing)} of {part.of} shards {verb} missing: {label_list(missing)}" if missing else ""
