"""What may be wrong with a file, drawn from a seed: bits, bytes, lengths, values of JSON, types of tensors, cells."""

from __future__ import annotations

import json
import random
import sqlite3
import struct
from contextlib import closing, suppress
from pathlib import Path

DEEP = "[" * 20_000 + "]" * 20_000
VALUES = (
    "null", "true", "-1", "1.5", "-0.0", "1e400", "NaN", "Infinity", "-Infinity", str(2**63), str(-(2**63)), "9" * 5000,
    '"x"', '""', '"\\ud800"', "[]", "{}", "[1, 2, 3]", '{"a": 1, "a": 2}', '{"a": {"b": [null]}}', DEEP,
    "0", "150000000",
)  # fmt: skip
"""JSON that takes the place of a value."""
CELLS = (
    *(None, -1, 0, 1, 1.5, -2.5, 2**62, -(2**62), float("inf"), 1e300, "x", "", b"", b"\xff\xfe", "[]", "{}", DEEP),
    *('{"a": NaN}', '"\\ud800"', "[1e400]", "9" * 5000, "\x00", "[-1]", '["x"]', "[[1]]", '{"1": {}}', "true"),
)
"""What takes the place of a cell of a table."""


def of_bytes(data: bytes, draw: random.Random) -> bytes:
    """Flipped bits, other bytes, a piece that is missing or stands twice."""
    found = bytearray(data)
    place, many = draw.randrange(len(found)), draw.randint(1, 64)
    match draw.randrange(5):
        case 0:
            found[place] ^= 1 << draw.randrange(8)
        case 1:
            found[place : place + many] = draw.randbytes(len(found[place : place + many]))
        case 2:
            del found[place:]
        case 3:
            del found[place : place + many]
        case _:
            found[place:place] = found[place : place + many]
    return bytes(found)


def of_json(text: str, draw: random.Random) -> str:
    """A document with one value, at any depth, that is another, missing, or there twice."""
    document = json.loads(text)
    inner, places = document, []
    while isinstance(inner, dict | list) and inner:
        name = draw.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
        places.append((inner, name))
        inner = inner[name]
        if draw.random() < 0.15:
            break
    if not places:
        return draw.choice(VALUES)
    holder, name = draw.choice(places)
    if draw.random() < 0.15:
        del holder[name]
        return json.dumps(document)
    if isinstance(holder, dict) and draw.random() < 0.1:
        holder["\x00twice"] = holder[name]
        return json.dumps(document).replace(json.dumps("\x00twice"), json.dumps(name))
    holder[name] = "\x00here"
    return json.dumps(document).replace(json.dumps("\x00here"), draw.choice(VALUES))


def of_safetensors(data: bytes, draw: random.Random) -> bytes:
    """Other metadata, or a tensor of another type, shape or place."""
    (size,) = struct.unpack("<Q", data[:8])
    header, tail = json.loads(data[8 : 8 + size]), data[8 + size :]
    tensors = [name for name in header if name != "__metadata__"]
    kind = draw.randrange(5)
    if kind < 3 and "attemper" in header.get("__metadata__", {}):
        header["__metadata__"]["attemper"] = of_json(header["__metadata__"]["attemper"], draw)
    elif tensors and kind == 3:
        one = header[draw.choice(tensors)]
        width = (one["data_offsets"][1] - one["data_offsets"][0]) // max(1, _many(one["shape"]))
        same = {8: ("I64", "F64", "U64"), 4: ("I32", "F32", "U32"), 2: ("I16", "F16", "BF16", "U16")}
        one["dtype"] = draw.choice(same.get(width, ("F8_E4M3", "F8_E5M2", "BOOL", "U8", "I8")))
    elif tensors and kind == 4:
        one = header[draw.choice(tensors)]
        match draw.randrange(4):
            case 0:
                one["shape"] = one["shape"][::-1]
            case 1:
                one["shape"] = [_many(one["shape"])]
            case 2:
                one["shape"] = [*one["shape"], 1]
            case _:
                ends = one["data_offsets"]
                part = bytearray(tail)
                part[ends[0] : ends[1]] = draw.choice((b"\xff", b"\x00", b"\x7f")) * (ends[1] - ends[0])
                tail = bytes(part)
    else:
        name = draw.choice(tensors)
        header[draw.choice(("x", "0.0", f"{name}.exponent", name + "x"))] = header.pop(name)
    text = json.dumps(header, ensure_ascii=False).encode("utf-8", "replace")
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + tail


def _many(shape: list[int]) -> int:
    found = 1
    for size in shape:
        found *= size
    return found


def of_cells(path: Path, draw: random.Random) -> None:
    """One cell of a table, a column of it, or its rows."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        filled = [one for one in tables if connection.execute(f"SELECT count(*) FROM {one}").fetchone()[0]]
        table = draw.choice(filled)
        columns = connection.execute(f"PRAGMA table_info({table})").fetchall()
        connection.execute("PRAGMA ignore_check_constraints = 1")
        chosen = draw.choice(columns)[1]
        order = "ORDER BY random() LIMIT 1" if draw.random() < 0.6 else ""
        with suppress(sqlite3.Error, OverflowError):  # what the table itself refuses is no mutation
            if draw.random() < 0.15:
                connection.execute(f"DELETE FROM {table} WHERE ({chosen}) IN (SELECT {chosen} FROM {table} {order})")
            else:
                cell = draw.choice(CELLS)
                old = connection.execute(f"SELECT {chosen} FROM {table} {order or 'LIMIT 1'}").fetchone()[0]
                if isinstance(old, str) and old[:1] in ("{", "[") and draw.random() < 0.7:
                    cell = of_json(old, draw)
                elif isinstance(old, bytes) and old and draw.random() < 0.7:
                    cell = of_bytes(old, draw)
                where = f"WHERE {chosen} IS ?" if order else ""
                connection.execute(f"UPDATE {table} SET {chosen} = ? {where}", (cell, *([old] if order else [])))


def mutate(path: Path, draw: random.Random) -> None:
    """Damages one file in place."""
    if draw.random() < 0.75:
        with suppress(ValueError, KeyError, TypeError, IndexError, RecursionError, struct.error, sqlite3.Error):
            if path.suffix == ".sqlite":
                of_cells(path, draw)
            elif path.suffix == ".json":
                path.write_bytes(of_json(path.read_text(), draw).encode())
            else:
                path.write_bytes(of_safetensors(path.read_bytes(), draw))
            return
    # So is a file whose form an earlier mutation has broken.
    path.write_bytes(of_bytes(path.read_bytes(), draw))
