"""Texts of many files: which are read, in what order, how they are cut, and what is refused by file and line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from attemper.distributed.text_files import Survey, Texts
from attemper.errors import InputError, MissingExtraError
from attemper.readings.part import BLOCK


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def records(*values: Any) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def texts(path: Path, **options: Any) -> list[str]:
    return list(Texts(path, **options))


def test_a_text_file_has_a_text_each_line(tmp_path: Path):
    path = write(tmp_path / "a.txt", "\ufeffone\r\n\n  \t\n two \u2028 still two\nlast")
    assert texts(path) == ["one", " two \u2028 still two", "last"]


def test_a_file_of_records_has_a_text_in_a_field(tmp_path: Path):
    path = write(
        tmp_path / "a.jsonl", records({"text": "one", "id": 1}, {"text": " "}) + "\n" + records({"text": "two"})
    )
    assert texts(path) == ["one", "two"]
    path = write(tmp_path / "b.JSONL", records({"body": "three"}))
    assert texts(path, field="body") == ["three"]


def test_a_folder_is_its_files_by_name(tmp_path: Path):
    write(tmp_path / "b.jsonl", records({"text": "two"}))
    write(tmp_path / "a.txt", "one\n")
    write(tmp_path / "c.txt", "three\n")
    write(tmp_path / "README.md", "not a text\n")
    (tmp_path / "d.txt").mkdir()
    assert texts(tmp_path) == ["one", "two", "three"]
    assert Texts(tmp_path).name == tmp_path.name


def test_the_digest_is_of_the_texts_and_not_of_their_files(tmp_path: Path):
    lines = write(tmp_path / "a.txt", "one\n\ntwo\n")
    fields = write(tmp_path / "a.jsonl", records({"text": "one"}, {"text": "two"}))
    assert Texts(lines).survey() == Texts(fields).survey()
    others = {
        Texts(write(tmp_path / "b.txt", content)).survey().digest for content in ("onetwo\n", "two\none\n", "one\n")
    }
    assert len({*others, Texts(lines).survey().digest}) == 4


@pytest.mark.parametrize("many", [1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 5 * BLOCK + 7])
@pytest.mark.parametrize("of", [1, 2, 3, 8])
@pytest.mark.turns(3)
def test_shards_are_whole_blocks_and_together_all_texts(many: int, of: int, tmp_path: Path):
    every = [f"text {n}" for n in range(many)]
    source = Texts(write(tmp_path / "a.txt", "\n".join(every)))
    survey = source.survey()
    assert survey.texts == many
    found = {}
    for shard in range(of):
        blocks = list(source.blocks(shard, of, survey))
        assert sum(map(len, blocks)) == survey.texts_of(shard, of)
        for place, block in enumerate(blocks):
            found[place * of + shard] = block
    assert [text for number in sorted(found) for text in found[number]] == every
    assert all(len(found[number]) == BLOCK for number in range(len(found) - 1))


def test_texts_that_change_while_they_are_read_are_told(tmp_path: Path):
    source = Texts(write(tmp_path / "a.txt", "one\ntwo\n"))
    blocks = source.blocks(0, 1, Survey(2, "other"))
    with pytest.raises(InputError, match=r"the texts of a\.txt changed while they were read"):
        list(blocks)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"one\ntw\xff\n", r"^a\.txt:2 is not UTF-8 text: invalid start byte at byte 2 of it"),
        ("a.txt", b" \n\n", r"^a\.txt holds no text: every line or record is blank"),
        ("a.txt", b"", r"^a\.txt holds no text"),
        (
            "a.jsonl",
            b'{"text": "one"}\n{"test": 1}\n',
            r"^a\.jsonl:2 has no field 'text'\. It has test: name one with --field\. Did",
        ),
        ("a.jsonl", b'{"text": "one"}\n{"text": 1}\n', r"^a\.jsonl:2: its field 'text' is int, not text"),
        ("a.jsonl", b'\n{"text": null}\n', r"^a\.jsonl:2: its field 'text' is null, not text"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', r"^a\.jsonl:1: its field 'text' has half of a surrogate pair"),
        ("a.jsonl", b'["one"]\n', r"^a\.jsonl:1 is list, not an object such as \{'text': \.\.\.\}"),
        ("a.jsonl", b'{"text": "one"\n', r"^a\.jsonl:1 is not JSON"),
        ("a.csv", b"one\n", r"a\.csv does not end in \.txt, \.jsonl or \.parquet"),
    ],
)
def test_what_cannot_be_read_is_named_by_file_and_line(name: str, content: bytes, message: str, tmp_path: Path):
    with pytest.raises(InputError, match=message):
        Texts(write(tmp_path / name, content)).survey()


def test_what_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(InputError, match="there is no file or folder"):
        Texts(tmp_path / "none.txt").survey()
    with pytest.raises(InputError, match=r"has no file that ends in \.txt, \.jsonl or \.parquet"):
        Texts(tmp_path).survey()


def test_parquet_needs_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"Reading \.parquet needs the package pyarrow.*attemper\[parquet\]"):
        Texts(write(tmp_path / "a.parquet", b"")).survey()


def test_rows_of_parquet(tmp_path: Path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": ["one", "", "two"], "more": ["x", None, "y"]}), path)
    assert texts(path) == ["one", "two"]
    with pytest.raises(InputError, match=r"^a\.parquet:2: its field 'more' is null"):
        texts(path, field="more")
    with pytest.raises(InputError, match=r"^a\.parquet has no column 'test'\. It has text, more"):
        texts(path, field="test")
    with pytest.raises(InputError, match=r"^b\.parquet cannot be read as a Parquet file"):
        texts(write(tmp_path / "b.parquet", b"PAR1 no"))
