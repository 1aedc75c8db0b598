"""Folders of runs: which files are of a run, how it is opened, found and deleted."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from attemper.checks import did_you_mean
from attemper.errors import InputError
from attemper.store.lock import is_held
from attemper.store.parts import NAME as PART
from attemper.store.parts import parts, restore
from attemper.store.ranks import Ranks
from attemper.store.run import Run
from attemper.store.schema import open_to_read
from attemper.store.series import FragmentReader
from attemper.store.target import FolderTarget, Target, open_target
from attemper.text import clean_name, count

FRAGMENT = re.compile(r"fragment-(\d{1,9})\.sqlite")
OURS = re.compile(r"fragment-\d{1,9}(\.(sqlite(-wal|-shm|-journal)?|lock|token)|-\d+-\d+\.parquet)")
"""Files of a run's folder that attemper wrote."""
DEEPEST = 4
"""How many folders below a given one runs are looked for."""


def open_run(path: str | os.PathLike[str]) -> Run:
    """A run that ``attemper.watch(model, store=path)`` or a callback wrote, or writes now. Nothing in it is changed.

    ::

        run = attemper.open_run("runs/a")
        run.history("entropy", site="layers.3.attention", head=2).values
        run.alarms()

    Args:
        path: the folder of the run, one file of it, or a URL (``s3://bucket/run``).

    Returns:
        A :class:`Run`. What a live run writes later is in later answers; of Parquet parts, what is there now.

    Raises:
        InputError: there is no run at ``path``, or none of its files can be read: not of attemper, damaged, or written
            by a newer version.
        MissingExtraError: the run is of Parquet parts, or at a URL, and pyarrow or fsspec is not installed.
    """
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise InputError(f"open_run(path) must be the path of a folder, got {path!r}.")
    if "://" in os.fspath(path):
        try:
            target = open_target(path)
        except OSError as error:
            raise InputError(f"there is no run at {clean_name(path)}: {error}.") from error
        return Run(Ranks(_of_parts(target, path)), PurePosixPath(path))
    folder = Path(path)
    readers, failures = [], []
    for rank, file in _files(folder).items():
        try:
            readers.append(FragmentReader(open_to_read(file), rank, file.with_suffix(".lock")))
        except InputError as error:
            failures.append(error)
    if not readers and not failures:
        readers = _of_parts(FolderTarget(folder), folder)
    if not readers:
        raise failures[0]
    where = folder.parent if folder.is_file() else folder
    return Run(Ranks(readers), where.absolute(), [str(error) for error in failures])


def _of_parts(target: Target, path: str | os.PathLike[str]) -> list[FragmentReader]:
    """What each rank published as Parquet.

    Raises:
        InputError: nothing is there, or a part cannot be read.
    """
    ranks = sorted(set(parts(target).values()))
    if not ranks:
        raise InputError(
            f"there is no run at {clean_name(path)}. A run has files such as fragment-0.sqlite, which "
            "attemper.watch(model, store=...) writes."
        )
    return [FragmentReader(restore(target, rank).tables(), rank) for rank in ranks]


def _files(path: Path) -> dict[int, Path]:
    """Rank -> fragment; none where a run has only Parquet parts. A file is taken as it is: what it holds is found out
    when it is opened.

    Raises:
        InputError: there is nothing, or no run.
    """
    if path.is_file():
        name = FRAGMENT.fullmatch(path.name)
        return {int(name[1]) if name else 0: path}
    if not path.is_dir():
        near = [entry.name for entry in _entries(path.parent) if entry.is_dir()]
        raise InputError(f"there is no run {clean_name(path)}.{did_you_mean(path.name, near)}")
    if not is_run(path) and (inside := [run.name for run in runs_below(path)]):
        listed = ", ".join(map(clean_name, inside[:5])) + (" and more" if len(inside) > 5 else "")
        raise InputError(f"{clean_name(path)} is a folder of {count(len(inside), 'run')}: {listed}. Name one of them.")
    return fragments(path)


def is_run(folder: Path) -> bool:
    """Whether a folder has a file of a run."""
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


def delete_run(folder: Path) -> None:
    """Deletes the files of a run, and its folder if nothing else is in it.

    Raises:
        InputError: a process writes it, or a file cannot be deleted.
    """
    if any(is_held(file.with_suffix(".lock")) for file in fragments(folder).values()):
        raise InputError(f"{clean_name(folder)} is written to at this moment. End its training first.")
    try:
        for file in files_of(folder).paths:
            file.unlink(missing_ok=True)
        if not any(folder.iterdir()):
            folder.rmdir()
    except OSError as error:
        raise InputError(f"{clean_name(folder)} cannot be deleted: {error.strerror or error}.") from error


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        return list(os.scandir(folder))
    except OSError:
        return []
