"""Folders and object stores that take whole files: what stands under a name is never changed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol

from attemper.errors import MissingExtraError
from attemper.files import replacement

OBJECT_STORES = frozenset(("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "memory"))
"""An object appears whole or not at all; to rename it is to copy it."""


class Target(Protocol):
    """Where files of a run are published."""

    def names(self) -> list[str]:
        """Of all files, sorted."""
        ...

    def read(self, name: str) -> bytes: ...

    def write(self, name: str, data: bytes) -> None:
        """Whole or not at all."""


def open_target(path: str | os.PathLike[str]) -> Target:
    """The target that a path or a URL names; a relative path is of the folder in which the process stands now.

    Raises:
        MissingExtraError: a URL needs fsspec.
        OSError: the folder cannot be made.
    """
    return UrlTarget(str(path)) if "://" in os.fspath(path) else FolderTarget(Path(path).absolute())


class FolderTarget:
    """A folder on any file system: files come by a temporary name and a rename."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def names(self) -> list[str]:
        return sorted(path.name for path in self._folder.iterdir())

    def read(self, name: str) -> bytes:
        return (self._folder / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        with replacement(self._folder / name) as part:
            part.write_bytes(data)


class UrlTarget:
    """What fsspec reaches by a URL."""

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise MissingExtraError(f"a run at {url.split('://')[0]}://", "fsspec", "parquet") from error
        self._system, self._root = _open(url_to_fs, url)
        self._whole = url.split("://")[0] in OBJECT_STORES

    def names(self) -> list[str]:
        try:
            listed = self._system.ls(self._root, detail=False, refresh=True)
        except FileNotFoundError:
            return []
        return sorted(str(path).rstrip("/").rsplit("/", 1)[-1] for path in listed)

    def read(self, name: str) -> bytes:
        return self._system.cat_file(f"{self._root}/{name}")

    def write(self, name: str, data: bytes) -> None:
        final = f"{self._root}/{name}"
        if self._whole:
            self._system.pipe_file(final, data)
            return
        self._system.makedirs(self._root, exist_ok=True)
        self._system.pipe_file(f"{final}.tmp", data)
        self._system.mv(f"{final}.tmp", final)


def _open(url_to_fs: Any, url: str) -> tuple[Any, str]:
    try:
        system, root = url_to_fs(url)
    except (ImportError, ValueError) as error:  # the package of this protocol is missing, or there is no such protocol
        raise OSError(f"{url.split('://')[0]}:// cannot be reached: {error}") from error
    return system, root.rstrip("/")
