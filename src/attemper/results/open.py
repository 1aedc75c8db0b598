"""``attemper.open``: whatever attemper wrote, told by its content."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from attemper.errors import InputError
from attemper.fingerprints.file import is_of_fingerprint
from attemper.fingerprints.record import load_fingerprint
from attemper.readings.part_file import is_json
from attemper.results.run import open_run
from attemper.results.scan import load_scan
from attemper.text import clean_name

KINDS = (
    "a run (its folder, one file of it, or a URL), the JSON of a scan, the sums of a scan or of a part of one, "
    "or a fingerprint"
)


def open(path: str | os.PathLike[str]) -> Any:
    """Opens any file or run that attemper wrote, without changing it. It looks at the content, not at the name.

    ::

        run = attemper.open("runs/a")
        run.history("entropy", site="layers.3.attention", head=2).values
        run.alarms()

    Args:
        path: of a run: its folder, one file of it, or a URL (``s3://bucket/run``); or a file of
            ``attemper.watch(model, store=...)``, of :meth:`attemper.Scan.save`, of ``attemper scan --json`` or
            ``--out``, of ``attemper merge --out``, of :meth:`attemper.types.Fingerprint.save`.

    Returns:
        :class:`attemper.types.Run`, with histories, alarms and a page; what a live run writes later is in later
        answers. :class:`attemper.Scan`; one of JSON has means of heads and does not merge, and neither has statistics
        of rows. :class:`attemper.types.Fingerprint`.

    Raises:
        InputError: nothing is there, it cannot be read, is damaged, is of a newer version, or is something else.
        MissingExtraError: a run is of Parquet parts, or at a URL, and pyarrow or fsspec is not installed.
    """
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise InputError(f"open(path) must be a path, got {path!r}. It opens {KINDS}.")
    place = Path(path)
    if "://" in os.fspath(path) or place.is_dir():
        return open_run(path)
    if not place.exists():
        raise InputError(f"there is nothing at {clean_name(path)}. attemper.open opens {KINDS}.")
    if is_json(place):
        return load_scan(place)
    with place.open("rb") as file:
        start = file.read(16)
    if start.startswith((b"SQLite format 3\0", b"PAR1")):
        return open_run(place)
    return load_fingerprint(place) if is_of_fingerprint(_metadata(place)) else load_scan(place)


def _metadata(path: Path) -> dict[str, str]:
    """What a file of safetensors says of itself."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np") as file:
            return file.metadata() or {}
    except (OSError, ValueError, SafetensorError) as error:
        raise InputError(
            f"{clean_name(path)} is cut off, or nothing that attemper wrote ({error}). Make it again with the command "
            f"that wrote it. attemper.open opens {KINDS}; attemper.load loads the folder of a model."
        ) from error
