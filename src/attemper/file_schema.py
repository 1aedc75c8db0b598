"""Files that somebody else may have written: JSON that is parsed strictly and held against a schema, records that are
made of it, and safetensors.

Every reader of a file of ours goes through here, so that a damaged file is one ``InputError``, whatever is wrong in it.
A schema is written as what it describes: ``str``, ``int``, ``float``, ``bool`` and ``None``; ``COUNT``, a whole number
from 0 on; ``[of]``, a list; ``{str: of}``, an object with any names; ``{"name": of, "other?": of}``, one with these,
the second of which may be missing (others are let through: newer writers add some); ``(this, that)``, either;
``Row(this, that)``, a list of these; ``object``, anything.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from attemper.errors import InputError
from attemper.files import write_whole
from attemper.text import clean_name

if TYPE_CHECKING:
    import numpy as np

Record = TypeVar("Record")

COUNT = "a whole number from 0 on"
LARGEST = 2**63 - 1
"""Whole numbers that a file may hold are at most so large."""
_WORDS: dict[Any, str] = {
    str: "text",
    int: "a whole number",
    COUNT: "a whole number",
    float: "a number",
    bool: "true or false",
    None: "null",
    list: "a list",
    dict: "an object",
}


class AbsentError(InputError):
    """A field that must be there is not."""


class Row(tuple[Any, ...]):
    """A list of so many entries, each with a schema."""

    __slots__ = ()

    def __new__(cls, *schemas: Any) -> Row:
        return super().__new__(cls, schemas)


def parse_json(text: str | bytes, what: str) -> Any:
    """The value of a JSON text: without NaN, infinite numbers, and names that stand twice."""
    try:
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text.removeprefix("\ufeff")
        found = json.loads(
            text, parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_object_of_pairs
        )
    except (ValueError, RecursionError) as error:
        raise InputError(f"{what} is not JSON: {error}.") from error
    return found


def read_foreign(path: Path, schema: Mapping[Any, Any] | None = None) -> dict[str, Any]:
    """The object in a JSON file that other software wrote, such as a config.json: it may hold infinite numbers."""
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read: it is not JSON ({error}).") from error
    return check_document(found, schema or {}, f"{path} cannot be read: it")


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is not a JSON number; write a missing value as null")


def _finite(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        raise ValueError(f"{digits:.20} is beyond what a number can be")
    return number


def _object_of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r:.60} stands twice")
    return found


def check_document(value: Any, schema: Any, where: str) -> Any:
    """``value`` if it is what ``schema`` says."""
    if isinstance(schema, Row):
        if not isinstance(value, list | tuple) or len(value) != len(schema):
            raise _refusal(where, f"a list of {len(schema)}", value)
        for number, (entry, of) in enumerate(zip(value, schema, strict=True)):
            check_document(entry, of, f"{where}[{number}]")
    elif isinstance(schema, tuple):
        # What is plain is tried first, so that the message of a list or an object tells what is wrong inside of it.
        if not any(_is_plain(value, one) for one in schema):
            kinds = (dict,) if isinstance(value, Mapping) else (list, Row) if isinstance(value, list | tuple) else ()
            deep = [one for one in schema if isinstance(one, kinds)]
            if not deep:
                raise _refusal(where, " or ".join(_words(one) for one in schema), value)
            check_document(value, deep[0], where)
    elif isinstance(schema, list):
        if not isinstance(value, list | tuple):
            raise _refusal(where, "a list", value)
        for number, entry in enumerate(value):
            check_document(entry, schema[0], f"{where}[{number}]")
    elif isinstance(schema, dict):
        _check_object(value, schema, where)
    elif not _is_plain(value, schema):
        raise _refusal(where, _words(schema), value)
    return value


def _check_object(value: Any, schema: Mapping[Any, Any], where: str) -> None:
    if not isinstance(value, Mapping):
        raise _refusal(where, "an object", value)
    if str in schema:
        for name, entry in value.items():
            check_document(entry, schema[str], f"{where}.{name:.40}")
        return
    for name, of in schema.items():
        plain = name.removesuffix("?")
        if plain in value:
            check_document(value[plain], of, f"{where}.{plain}")
        elif plain == name:
            raise AbsentError(f"{where.lstrip('.') or 'the document'} has no {name!r}.")


def _is_plain(value: Any, schema: Any) -> bool:
    """Whether a value is what a schema without parts says."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    whole = number and isinstance(value, int) and -LARGEST <= value <= LARGEST
    match schema:
        case _ if schema is COUNT:
            return whole and value >= 0
        case None:
            return value is None
        case _ if schema is object:
            return True
        case _ if schema is int:
            return whole
        case _ if schema is float:
            return whole or (isinstance(value, float) and math.isfinite(value))
        case _:
            return isinstance(schema, type) and isinstance(value, schema)


def _words(schema: Any) -> str:
    return _WORDS[list if isinstance(schema, list) else dict if isinstance(schema, dict) else schema]


def _refusal(where: str, words: str, value: Any) -> InputError:
    place, more = where.lstrip(".") or "the document", ""
    if isinstance(value, int) and abs(value) > LARGEST:
        return InputError(f"{place} is beyond what a number can be.")
    if isinstance(value, float) and not math.isfinite(value):
        more = ": a missing value is null"
    elif isinstance(value, int) and value < 0 and _WORDS[COUNT] in words:
        more = ": it cannot be below 0"
    shown = f"{type(value).__name__} of {len(value)}" if value and isinstance(value, list | dict) else f"{value!r:.60}"
    return InputError(f"{place} must be {words}, got {shown}{more}.")


_FIELDS: dict[str, Any] = {
    "str": str,
    "str | None": (str, None),
    "int": COUNT,
    "int | None": (COUNT, None),
    "float": float,
    "float | None": (float, None),
    "bool": bool,
    "tuple[float, float]": Row(float, float),
    "tuple[str, ...]": [str],
    "tuple[int, ...]": [COUNT],
    "tuple[int, ...] | None": ([COUNT], None),
    "tuple[float, ...] | None": ([float], None),
    "Mapping[str, Any]": {str: object},
    "Mapping[str, str] | None": ({str: str}, None),
    "Mapping[str, float] | None": ({str: float}, None),
    "Mapping[str, float | None] | None": ({str: (float, None)}, None),
}
"""What a field of a record may hold, by its annotation. No whole number of a record is below 0."""


class _Part(NamedTuple):
    """A field of a record, as documents have it."""

    attribute: str
    name: str
    kind: str
    """Its annotation."""
    inner: Any
    """The class of the records that it is a tuple of; None where it is something else."""
    optional: bool


@cache
def _parts(record: type[Any]) -> tuple[_Part, ...]:
    found = []
    for part in fields(record):
        kind = str(part.type)
        of = kind.removeprefix("tuple[").removesuffix(", ...]")
        inner = None if of == kind else vars(sys.modules[record.__module__]).get(of)
        inner = inner if is_dataclass(inner) else None
        optional = inner is None and part.default is not MISSING
        found.append(_Part(part.name, part.metadata.get("name", part.name), kind, inner, optional))
    return tuple(found)


@cache
def schema_of(record: type[Any], *others: str) -> dict[str, Any]:
    """What an object has of a dataclass: every field but ``others``. One with a default may be missing, but for lists
    of records. Where the metadata of a field has a ``name``, that is its name in documents.
    """
    return {
        part.name + "?" * part.optional: _FIELDS[part.kind] if part.inner is None else [schema_of(part.inner)]
        for part in _parts(record)
        if part.attribute not in others
    }


def fields_of(record: Any, *others: str) -> dict[str, Any]:
    """Name -> value of the fields that ``schema_of`` has of a record's class."""
    own = (part for part in _parts(type(record)) if part.attribute not in others)
    return {part.name: getattr(record, part.attribute) for part in own}


def load_record(record: type[Record], document: Any, where: str, **given: Any) -> Record:
    """``document`` as a record, each field checked by its annotation: see ``schema_of``.

    Args:
        record: a dataclass.
        where: the place of ``document`` in the whole, for errors.
        given: fields that are loaded already, such as arrays.
    """
    check_document(document, schema_of(record, *given), where)
    return _record(record, document, given)


def _record(record: type[Record], document: Mapping[str, Any], given: Mapping[str, Any]) -> Record:
    values = dict(given)
    for attribute, name, kind, inner, _ in _parts(record):
        if attribute in given or name not in document:
            continue
        value = values[attribute] = document[name]
        if isinstance(value, list | tuple):
            values[attribute] = tuple(value if inner is None else (_record(inner, one, {}) for one in value))
        elif kind in ("float", "float | None") and value is not None:
            values[attribute] = float(value)
    return record(**values)


def read_safetensors(
    path: Path,
    framework: str,
    *,
    what: str,
    again: str,
    is_wanted: Callable[[Mapping[str, str]], bool] = lambda facts: True,
) -> tuple[dict[str, str], dict[str, Any]]:
    """Metadata and tensors of a file.

    Args:
        framework: "np" or "pt": whose tensors.
        what: it should hold, and ``again`` how it is made again, for messages.
        is_wanted: whether tensors are read, by the metadata: a checkpoint may be large, or of types that NumPy lacks.
    """
    from safetensors import SafetensorError, safe_open

    name = clean_name(path.name)
    try:
        with safe_open(path, framework) as file:
            facts = dict(file.metadata() or {})
            return facts, {key: file.get_tensor(key) for key in file.keys()} if is_wanted(facts) else {}  # noqa: SIM118
    except OSError as error:
        raise InputError(f"{name} cannot be read: {error.strerror or error}.") from error
    # NumPy has no type for F8 and BF16, and says so by a TypeError.
    except (ValueError, TypeError, AttributeError, KeyError, RuntimeError, SafetensorError) as error:
        raise InputError(f"{name} is cut off or no {what} ({error}). {again}.") from error


def write_own(
    path: str | os.PathLike[str], form: str, version: int, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> Path:
    """Writes a safetensors file of ours, whole or not at all: arrays, and a header as JSON in its metadata."""
    import numpy as np
    from safetensors.numpy import save

    text = json.dumps({"format": form, "version": version, **header}, allow_nan=False, ensure_ascii=False)
    # safetensors 0.8 writes the memory of an array as it lies, and that of columns in another order lies by columns.
    whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    return write_whole(path, save(whole, metadata={"attemper": text}), "reading")


def read_own(
    path: Path, form: str, *versions: int, what: str, writer: str, again: str, header_alone: bool = False
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The header and arrays of a file of ``write_own``.

    Args:
        form, versions: what its header may say; the last version is the newest.
        what: such a file holds, ``writer`` what writes it, and ``again`` how it is made again, for messages.
        header_alone: whether its arrays are left where they are.
    """
    name = clean_name(path.name)

    def is_wanted(facts: Mapping[str, str]) -> bool:
        return not header_alone and form in facts.get("attemper", "")

    facts, arrays = read_safetensors(path, "np", what=what, again=again, is_wanted=is_wanted)
    header = parse_json(facts.get("attemper", "{}"), f"{name} is damaged: its header")
    if not isinstance(header, dict) or header.get("format") != form:
        raise InputError(f"{name} is a safetensors file, but no {what}: {writer} writes one.")
    if isinstance(header.get("version"), bool) or header.get("version") not in versions:
        raise InputError(
            f"{name} is of version {header.get('version')!r:.20} of the format; this attemper reads version "
            f"{versions[-1]}. Read it with the attemper that wrote it, or a newer one."
        )
    return header, arrays
