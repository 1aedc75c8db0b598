"""Readings as JSON documents: the schemas that are known, and the checks that every field passes when it is loaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from attemper.documents import load_record, parse_json, schema_of
from attemper.errors import InputError

SCHEMA = 2
READABLE = (1, SCHEMA)
"""Schemas that ``Reading.from_dict`` loads."""

Entry = TypeVar("Entry")


def parse(source: str | os.PathLike[str]) -> Any:
    """The JSON of a text that begins with ``{``, or of the file of this path."""
    if not isinstance(source, str | os.PathLike):
        raise InputError(f"from_json(source) must be JSON text or the path of a file, got {type(source).__name__}.")
    if isinstance(source, str) and source.lstrip("\ufeff \t\r\n").startswith("{"):
        what, text = "this text", source
    else:
        what = f"the file {os.fspath(source)!r}"
        try:
            text = Path(source).read_text("utf-8")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"{what} cannot be read: {reason}. Name one that `attemper scan --json` wrote.") from error
    return parse_json(text, what)


def check_schema(document: Any) -> int:
    if not isinstance(document, Mapping) or not {"schema", "sites"} <= set(document):
        given = f"fields {', '.join(map(str, document))}" if isinstance(document, Mapping) else type(document).__name__
        raise InputError(
            f"a scan is an object with 'schema' and 'sites', as `attemper scan --json` prints it; got {given:.200}."
        )
    schema = document["schema"]
    if isinstance(schema, bool) or schema not in READABLE:
        known = " and ".join(map(str, READABLE))
        raise InputError(
            f"this scan is of schema {schema!r:.60}; this version of attemper reads {known}, a newer one may read it."
        )
    return schema


def _present(document: Any, name: str, where: str) -> Any:
    if not isinstance(document, Mapping):
        raise InputError(f"{where or 'the document'} must be an object, got {document!r:.60}.")
    if name not in document:
        raise InputError(f"{where or 'the document'} has no {name!r}: it is not what `attemper scan --json` prints.")
    return document[name]


def each(document: Any, name: str, where: str, load: Callable[[Any, str], Entry]) -> tuple[Entry, ...]:
    """The entries of the list ``document[name]``, each loaded by ``load(entry, where)``."""
    entries, place = _present(document, name, where), f"{where}.{name}".removeprefix(".")
    if not isinstance(entries, list | tuple):
        raise InputError(f"{place} must be a list, got {entries!r:.60}.")
    return tuple(load(entry, f"{place}[{number}]") for number, entry in enumerate(entries))


def load(record: type[Entry], document: Any, where: str, **given: Any) -> Entry:
    """As ``load_record``, of a part of a scan."""
    for name in schema_of(record, *given):
        if not name.endswith("?"):
            _present(document, name, where)
    return load_record(record, document, where, **given)
