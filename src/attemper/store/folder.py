"""Folders of runs: which files are of a run, how it is opened, found and deleted."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from math import inf
from pathlib import Path, PurePosixPath
from typing import TypeAlias, TypeVar

from attemper.checks import did_you_mean
from attemper.errors import InputError, MissingExtraError
from attemper.store.checksum import UNCHECKED
from attemper.store.parts import NAME as PART
from attemper.store.parts import OURS, PART_SECONDS, FolderTarget, Target, live_until, open_target, parts, restore
from attemper.store.process import UNNOTED, is_held, lost_beside
from attemper.store.ranks import Ranks
from attemper.store.run import StoredRun
from attemper.store.schema import is_ours, not_a_run, open_to_read
from attemper.store.series import FragmentReader
from attemper.text import clean_name, count

FRAGMENT = re.compile(r"fragment-(\d{1,9})\.sqlite")
Kind = TypeVar("Kind", bound=StoredRun)

DEEPEST = 4
"""How many folders below a given one runs are looked for."""


def open_stored(path: str | os.PathLike[str], kind: type[Kind]) -> Kind:
    """The run in a folder, a file or at a URL, as a ``kind`` of stored run. Nothing in it is changed."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise InputError(f"open(path) must be the path of a folder, got {path!r}.")
    if "://" in os.fspath(path):
        try:
            target = open_target(path)
        except OSError as error:
            raise InputError(f"there is no run at {clean_name(path)}: {error}.") from error
        readers, where = {}, PurePosixPath(path)
        remarks = [*_add_parts(readers, target)]
    else:
        folder = Path(path)
        readers, failures = _of_files(folder)
        where = (folder.parent if folder.is_file() else folder).absolute()
        remarks = [str(error) for error in failures]
        if folder.is_dir():
            remarks += _add_parts(readers, FolderTarget(folder))
        if failures and not readers:
            raise failures[0]
    if not readers:
        if lost := sum(samples for _, samples in lost_beside(Path(path) / "fragment-*.lock")):
            raise InputError(
                f"there is no sample in {clean_name(path)}: {count(lost, 'sample was', 'samples were')} lost, since "
                f"{UNNOTED}."
            )
        if "://" not in os.fspath(path) and (Path(path) / "config.json").is_file():
            name = clean_name(path)
            raise InputError(f"there is no run at {name}. This is a model: attemper scan {name}")
        raise InputError(
            f"there is no run at {clean_name(path)}. A run has files such as fragment-0.sqlite, which "
            "attemper.watch(model, store=...) writes."
        )
    return kind(Ranks([readers[rank] for rank in sorted(readers)]), where, remarks)


def _of_files(folder: Path) -> tuple[dict[int, FragmentReader], list[InputError]]:
    """What each rank wrote into a file of its own, and why others cannot be read."""
    readers, failures = {}, []
    for rank, file in _files(folder).items():
        try:
            readers[rank] = FragmentReader(open_to_read(file), rank, file.with_suffix(".lock"))
        except InputError as error:
            failures.append(error)
    return readers, failures


def _add_parts(readers: dict[int, FragmentReader], target: Target) -> Iterator[str]:
    """Adds what ranks published as Parquet; remarks on ranks that have a file, too, and on parts that cannot be read.
    ``InputError``, ``MissingExtraError``: parts cannot be read, and nothing else could.
    """
    for rank in sorted(set(parts(target).values())):
        try:
            restored = restore(target, rank)
            published = FragmentReader(restored.tables(), rank, until=live_until(target, rank))
        except (InputError, MissingExtraError) as error:
            if not readers:
                raise
            yield f"the Parquet parts of rank {rank} are not read: {error}"
            continue
        if restored.unchecked:
            yield f"Parquet parts of rank {rank}, {UNCHECKED}"
        if rank in readers:
            of_file, of_parts = _reach(readers[rank]), _reach(published)
            read = "parts" if of_parts > of_file else "file"
            yield (
                f"rank {rank} has a file of {_extent(of_file)} and Parquet parts of {_extent(of_parts)}: the {read} "
                f"{'are' if read == 'parts' else 'is'} read"
            )
            published = published if read == "parts" else readers[rank]
        readers[rank] = published


Reach: TypeAlias = tuple[float, int, int]
"""Time of the last sample, samples, last step."""


def _reach(reader: FragmentReader) -> Reach:
    """How far a reader goes: the larger, the further. A damaged file goes nowhere."""
    try:
        moments = reader.moments
    except InputError:
        return -inf, 0, -1
    return (float(moments["time"][-1]), len(moments), int(moments["step"][-1])) if len(moments) else (-inf, 0, -1)


def _extent(reach: Reach) -> str:
    _, samples, step = reach
    return f"{count(samples, 'sample')} up to step {step:,}" if samples else "no sample that can be read"


def part_names(path: str | os.PathLike[str]) -> list[str]:
    """The Parquet parts of a run, which are never changed: with a new one, the run is worth opening again."""
    if "://" not in os.fspath(path) and not os.path.isdir(path):
        return []
    return sorted(parts(open_target(path)))


def _files(path: Path) -> dict[int, Path]:
    """Rank -> fragment; none where a run has only Parquet parts. A file is taken as it is: what it holds is found out
    when it is opened.
    """
    if path.is_file():
        name = FRAGMENT.fullmatch(path.name)
        return {int(name[1]) if name else 0: path}
    if not path.is_dir():
        near = [entry.name for entry in _entries(path.parent) if entry.is_dir()]
        meant = did_you_mean(path.name, near) or " `attemper runs FOLDER` lists the runs below a folder."
        raise InputError(f"there is no run {clean_name(path)}.{meant}")
    if not is_run(path) and (inside := [run.name for run in runs_below(path)]):
        listed = ", ".join(map(clean_name, inside[:5])) + (" and more" if len(inside) > 5 else "")
        raise InputError(f"{clean_name(path)} is a folder of {count(len(inside), 'run')}: {listed}. Name one of them.")
    return fragments(path)


def is_run(folder: Path) -> bool:
    return any(FRAGMENT.fullmatch(entry.name) or PART.fullmatch(entry.name) for entry in _entries(folder))


def fragments(folder: Path) -> dict[int, Path]:
    """Rank -> fragment of the run in a folder, by rank; empty where there is none."""
    found = ((FRAGMENT.fullmatch(entry.name), entry) for entry in _entries(folder))
    return dict(sorted((int(name[1]), Path(entry.path)) for name, entry in found if name and entry.is_file()))


def runs_below(folder: Path, depth: int = DEEPEST) -> Iterator[Path]:
    """Folders of runs: ``folder`` itself, or what lies below it. Links and hidden folders are not followed."""
    if is_run(folder):
        yield folder
    elif depth:
        for entry in sorted(_entries(folder), key=lambda entry: entry.name):
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                yield from runs_below(Path(entry.path), depth - 1)


@dataclass(frozen=True)
class Files:
    """What a run takes of a disk."""

    paths: tuple[Path, ...]
    bytes: int
    written: float
    """When one of them was written last: seconds since 1970, UTC."""


def files_of(folder: Path) -> Files:
    """The files in a run's folder that are attemper's."""
    entries = [entry for entry in _entries(folder) if OURS.fullmatch(entry.name) and entry.is_file()]
    found = [entry.stat() for entry in entries]
    written = max((one.st_mtime for one in found), default=0.0)
    return Files(tuple(Path(entry.path) for entry in entries), sum(one.st_size for one in found), written)


def check_deletable(folder: Path) -> None:
    """Raises InputError if a file of the folder has the name of a fragment and is none, if a process writes the run, or
    if one may write it: its newest Parquet part is too new.
    """
    for file in fragments(folder).values():
        if file.stat().st_size and not is_ours(file):
            raise InputError(f"{not_a_run(file)} Nothing was deleted.")
    if any(is_held(file.with_suffix(".lock")) for file in fragments(folder).values()):
        raise InputError(f"{clean_name(folder)} is written to at this moment. End its training first.")
    if (until := _parts_live_until(folder)) > time.time():
        raise InputError(
            f"{clean_name(folder)} may be written to on some machine: a new Parquet part may come until "
            f"{datetime.fromtimestamp(until, UTC):%H:%M:%S} UTC. End its training first, and delete it after that."
        )


def delete_run(folder: Path) -> None:
    """Deletes the files of a run, and its folder if nothing else is in it."""
    check_deletable(folder)
    try:
        for file in files_of(folder).paths:
            file.unlink(missing_ok=True)
        if not any(folder.iterdir()):
            folder.rmdir()
    except OSError as error:
        raise InputError(f"{clean_name(folder)} cannot be deleted: {error.strerror or error}.") from error


def _parts_live_until(folder: Path) -> float:
    """When no more parts are to be expected; 0 where there are none. Parts that cannot be read tell it by their age."""
    target = FolderTarget(folder)
    ranks = set(parts(target).values())
    try:
        return max((live_until(target, rank) for rank in ranks), default=0.0)
    except (InputError, MissingExtraError):
        return files_of(folder).written + 2 * PART_SECONDS


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        return list(os.scandir(folder))
    except OSError:
        return []
