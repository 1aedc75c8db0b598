"""One bit of a stored run is turned over: it shows the same, or an error. Never another number, step or name."""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import attemper
from attemper.errors import InputError
from attemper.readings.sample import SiteLabel
from attemper.store import parts, schema
from attemper.store.checksum import CHECKED_VERSION, UNCHECKED, WHOLE, get
from attemper.store.fragment import Fragment
from attemper.store.ranks import columns
from tests.support.runs import change
from tests.support.samples import sample, samples_of, sites

RUNS = {
    "short": (range(40), None),
    "resumed": ([*range(300), *range(250, 380)], None),
    "thinned": (range(1100), 60_000),
}
"""Name -> steps and the room that it may take."""


def write(path: Path, steps: Iterable[int], room: int | None = None) -> Path:
    """A run whose steps may go back, as after a restart."""
    fragment = Fragment(path, max_bytes=room)
    fragment.describe({"name": "of a test", "model": "Tiny", "limits": {"max_logit": 40.0}})
    fragment.cover({sites()[0].key: None, ("layers.9.attn", "self", "train"): "it was not called"})
    fragment.lose(2, 1, "the disk was full")
    for step in steps:
        fragment.append(sample(step))
        fragment.fold()
    fragment.close()
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The file of a run of this name, written when it is first asked for."""
    folder = tmp_path_factory.mktemp("runs")

    def of(kind: str) -> Path:
        path = folder / f"{kind}.sqlite"
        return path if path.exists() else write(path, *RUNS[kind])

    return of


@pytest.fixture
def run(runs, tmp_path) -> Path:
    return Path(shutil.copy(runs("resumed"), tmp_path / "fragment-0.sqlite"))


def shown(path: Path) -> dict[str, Any]:
    with attemper.open(path) as run:
        return everything(run)


def everything(run: attemper.types.Run) -> dict[str, Any]:
    """All that a run shows of what it holds, and from what everything else follows."""
    with run.ranks.snapshot():
        coarse = [columns(run.ranks, name, key, 8) for key in run.ranks.sites for name in run.statistics]
        return {
            "facts": (dict(run.about), run.sites, run.segments, run.coverage, run.lost, run.remarks),
            "steps": run.steps.tolist(),
            "histories": {name: run.history(name).values.tobytes() for name in run.statistics},
            "columns": [part.tobytes() for one in coarse for part in (one.steps, one.least, one.mean, one.largest)],
            "samples": [
                (one.step, one.time, one.tokens, one.sites, one.quantities, one.values.tobytes())
                for one in samples_of(run)
            ],
        }


@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.quick("short", "resumed")
def test_no_flipped_bit_changes_what_a_run_shows_without_an_error(runs, kind, request):
    path = runs(kind)
    whole_file, expected = path.read_bytes(), shown(path)
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}, {kind}, {len(whole_file):,} bytes")
    draw, found = random.Random(seed), Counter()
    few = 500 if request.config.getoption("--all") else 20 if kind == "short" else 8
    for place in range(max(few, 60)):
        if place >= few and found["error"]:  # two of three bits are in free pages: 8 may all be
            break
        bit = draw.randrange(8 * len(whole_file))
        changed = bytearray(whole_file)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        try:
            assert shown(path) == expected, f"bit {bit} of seed {seed}"
            found["same"] += 1
        except InputError:
            found["error"] += 1
    path.write_bytes(whole_file)
    print(dict(found))
    assert found["error"]


@pytest.mark.parametrize("table", ["sample", "hot", "chunk", "cold", "pyramid", *WHOLE])
@pytest.mark.quick("hot", "cold", "lost", "site")
def test_a_row_that_is_gone_is_an_error(run, table):
    change(run, f"DELETE FROM {table} WHERE rowid = (SELECT max(rowid) FROM {table})")
    with pytest.raises(InputError, match="its file is damaged"):
        shown(run)


@pytest.mark.parametrize(
    ("table", "new"),
    [
        ("sample", "step = step + 1"),
        ("hot", "numbers = zeroblob(length(numbers))"),
        ("chunk", "moments = zeroblob(length(moments))"),
        ("cold", "first = first + 0, statistic = statistic + 9"),
        ("pyramid", "level = level + 20"),
        ("about", "value = '1'"),
        ("segment", "began = began + 1"),
        ("statistic", "name = name || 'x'"),
        ("site", "name = name || 'x'"),
        ("layout", "sites = '[2, 1]'"),
        ("coverage", "reason = 'another'"),
        ("lost", "samples = samples + 1"),
    ],
)
@pytest.mark.quick("cold", "pyramid", "segment", "lost")
def test_a_row_that_was_changed_is_an_error_each_time_it_is_asked_for(run, table, new):
    change(run, f"UPDATE {table} SET {new} WHERE rowid = (SELECT max(rowid) FROM {table})")
    with attemper.open(run) as opened:
        for _ in range(2):
            with pytest.raises(InputError, match="its file is damaged"):
                everything(opened)


def test_summaries_have_checksums_too(tmp_path):
    path = write(tmp_path / "fragment-0.sqlite", range(3))
    tables = schema.open_to_read(path)
    assert len(get(tables.rows, "summary", "")) == 6
    change(path, "UPDATE summary SET max_logit = max_logit + 1 WHERE sample = 1")
    with pytest.raises(InputError, match="a row of its table summary does not fit its checksum"):
        get(tables.rows, "summary", "")


def earlier(path: Path, to: Path, version: int) -> Path:
    """The same run as an earlier version wrote it."""
    connection = sqlite3.connect(to)
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    for statements in schema.MIGRATIONS[:version]:
        connection.executescript(statements)
    connection.execute(f"ATTACH '{path}' AS now")
    for (table,) in connection.execute("SELECT name FROM main.sqlite_master WHERE type = 'table'").fetchall():
        names = ", ".join(name for _, name, *_ in connection.execute(f"PRAGMA main.table_info({table})"))
        connection.execute(f"INSERT INTO main.{table} SELECT {names} FROM now.{table}")
    connection.commit()
    connection.execute(f"PRAGMA application_id = {schema.APPLICATION}")
    connection.execute(f"PRAGMA user_version = {version}")
    connection.close()
    return to


@pytest.mark.parametrize("version", range(1, schema.VERSION))
def test_a_file_of_an_earlier_version_is_read_as_it_is_and_brought_up_to_date_by_its_next_writer(
    run, tmp_path, version
):
    old = earlier(run, tmp_path / "fragment-1.sqlite", version)
    before, unchecked = old.read_bytes(), version < CHECKED_VERSION
    now, then = shown(run), shown(old)
    assert (UNCHECKED in then["facts"][-1]) == unchecked
    assert UNCHECKED not in now["facts"][-1]
    assert {**now, "facts": now["facts"][:-1]} == {**then, "facts": then["facts"][:-1]}
    assert str(attemper.open(old).alarms()) == str(attemper.open(run).alarms())
    assert old.read_bytes() == before
    fragment = Fragment(old)
    fragment.append(sample(380))
    fragment.keep_scalars([(380, {"loss": 1.0})])
    fragment.close()
    with attemper.open(old) as opened:
        assert opened.steps.tolist() == [*range(381)]
        assert opened.history("loss").values.tolist() == [1.0]
        assert (UNCHECKED in opened.remarks) == unchecked
        rows = opened.ranks.readers[0].tables.rows
        assert rows("PRAGMA user_version") == [(schema.VERSION,)]
        assert rows("SELECT count(crc), count(*) FROM hot") == [(1 if unchecked else 47, 47)]
        assert {name for (name,) in rows("SELECT name FROM checksum")} == set(WHOLE)
        assert [name for _, name, *_ in rows("PRAGMA table_info(site)")][1:] == [
            part.name for part in fields(SiteLabel)
        ]
    change(old, "UPDATE hot SET numbers = zeroblob(length(numbers)) WHERE sample = 430")
    with pytest.raises(InputError, match="a row of its table hot does not fit its checksum"):
        shown(old)


def test_a_flipped_bit_of_any_byte_of_a_part_is_seen():
    data = b"PAR1 numbers" + parts.CHECKSUM + b"00000000 more PAR1"
    good = parts.with_checksum(data)
    parts.check_bytes(good)
    old = b"PAR1 of an earlier version PAR1"
    parts.check_bytes(old)
    assert parts.with_checksum(old) == old
    mark = good.index(parts.CHECKSUM)
    for place in range(len(good)):
        changed = bytearray(good)
        changed[place] ^= 1 << place % 8
        if not mark <= place < mark + len(parts.CHECKSUM):  # without its mark it is as one of an earlier version
            with pytest.raises(InputError, match="its bytes do not fit their checksum"):
                parts.check_bytes(bytes(changed))
