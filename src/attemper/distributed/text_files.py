"""Many texts in files, one after another: lines of text, records of JSON, rows of Parquet. Streamed, without torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from attemper.checks import did_you_mean
from attemper.errors import InputError, needs
from attemper.readings.part import BLOCK
from attemper.text import clean_name

FIELD = "text"


@dataclass(frozen=True)
class Survey:
    """What one pass over the texts tells, before a model is loaded."""

    texts: int
    digest: str
    """Of all texts in their order: the same whatever the files that they stand in."""

    def texts_of(self, shard: int, of: int) -> int:
        blocks, rest = divmod(self.texts, BLOCK)
        mine = len(range(shard, blocks, of)) * BLOCK
        return mine + (rest if rest and blocks % of == shard else 0)


@dataclass(frozen=True)
class Texts:
    """The texts of a file, or of the files of a folder by name. Blank ones are skipped.

    Files end in .txt (a text each line), .jsonl (a record each line) or .parquet (a record each row).
    """

    path: Path
    field: str = FIELD
    """The field of a record, or the column, that holds its text."""

    @property
    def name(self) -> str:
        return self.path.resolve().name

    def files(self) -> list[Path]:
        if self.path.is_dir():
            found = sorted(file for file in self.path.iterdir() if file.suffix.lower() in _READERS and file.is_file())
            if found:
                return found
            raise InputError(f"the folder {clean_name(self.path)} has no file that ends in {_ENDINGS}.")
        if not self.path.exists():
            raise InputError(f"there is no file or folder {clean_name(self.path)}.")
        if self.path.suffix.lower() not in _READERS:
            raise InputError(f"{clean_name(self.path)} does not end in {_ENDINGS}, by which its texts are read.")
        return [self.path]

    def __iter__(self) -> Iterator[str]:
        """The texts."""
        for file in self.files():
            try:
                for text in _READERS[file.suffix.lower()](file, self.field):
                    if text.strip():
                        yield text
            except OSError as error:
                raise InputError(f"{clean_name(file.name)} cannot be read: {error.strerror or error}.") from error

    def survey(self) -> Survey:
        """Counts and digests all texts, and so finds whatever is wrong with them."""
        digest, texts = _digest(), 0
        for text in self:
            _add(digest, text)
            texts += 1
        if not texts:
            raise InputError(f"{clean_name(self.name)} holds no text: every line or record is blank.")
        return Survey(texts, digest.hexdigest())

    def blocks(self, shard: int, of: int, known: Survey) -> Iterator[list[str]]:
        """The blocks of a shard. All texts are read, whatever the shard."""
        digest, texts, number = _digest(), iter(self), 0
        while block := list(islice(texts, BLOCK)):
            for text in block:
                _add(digest, text)
            if number % of == shard:
                yield block
            number += 1
        if digest.hexdigest() != known.digest:
            raise InputError(f"the texts of {clean_name(self.name)} changed while they were read: scan them again.")


def _digest() -> Any:
    return hashlib.blake2b(digest_size=16)


def _add(digest: Any, text: str) -> None:
    data = text.encode()
    digest.update(len(data).to_bytes(8, "little"))
    digest.update(data)


def _lines(file: Path) -> Iterator[tuple[str, str]]:
    """Lines with their places, ``file:line``."""
    with file.open("rb") as opened:
        for number, line in enumerate(opened, 1):
            place = f"{clean_name(file.name)}:{number}"
            try:
                yield place, line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise InputError(f"{place} is not UTF-8 text: {error.reason} at byte {error.start} of it.") from error


def _text_lines(file: Path, field: str) -> Iterator[str]:
    for _, line in _lines(file):
        yield line


def _json_lines(file: Path, field: str) -> Iterator[str]:
    for place, line in _lines(file):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{place} is not JSON: {error}. Each line of .jsonl is one record.") from error
        if not isinstance(record, dict):
            raise InputError(f"{place} is {type(record).__name__}, not an object such as {{{FIELD!r}: ...}}.")
        if field not in record:
            raise InputError(f"{place} has no field {field!r}. {_advice(field, list(record))}")
        yield _check_text(place, field, record[field])


def _rows(file: Path, field: str) -> Iterator[str]:
    with needs("Reading .parquet", "pyarrow", "parquet"):
        import pyarrow
        from pyarrow import parquet
    try:
        with parquet.ParquetFile(file) as opened:
            names = opened.schema_arrow.names
            if field not in names:
                raise InputError(f"{clean_name(file.name)} has no column {field!r}. {_advice(field, names)}")
            columns = (batch.column(0) for batch in opened.iter_batches(batch_size=1024, columns=[field]))
            for number, text in enumerate((text for column in columns for text in column.to_pylist()), 1):
                yield _check_text(f"{clean_name(file.name)}:{number}", field, text)
    except pyarrow.ArrowException as error:
        raise InputError(f"{clean_name(file.name)} cannot be read as a Parquet file: {error}.") from error


def _check_text(place: str, field: str, text: Any) -> str:
    if isinstance(text, str):
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise InputError(f"{place}: its field {field!r} has half of a surrogate pair, which no text can hold.")
        return text
    kind = "null" if text is None else type(text).__name__
    raise InputError(f"{place}: its field {field!r} is {kind}, not text. Name another one with --field, or mend it.")


def _advice(field: str, names: list[str]) -> str:
    listed = ", ".join(clean_name(name) for name in names[:12]) or "none"
    return f"It has {listed}: name one with --field.{did_you_mean(field, names)}"


_READERS: dict[str, Callable[[Path, str], Iterator[str]]] = {
    ".txt": _text_lines,
    ".jsonl": _json_lines,
    ".parquet": _rows,
}
"""How a file's name ends -> its texts."""
_ENDINGS = ".txt, .jsonl or .parquet"
