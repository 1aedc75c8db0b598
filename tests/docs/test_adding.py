"""``docs/adding.md`` lists the files that name an example of each thing that can be added: they are counted here."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "attemper"
PAGE = ROOT / "docs" / "adding.md"
COUNTED = {
    "A statistic": 3,
    "A state column": 5,
    "A normalizer": 9,
    "A way into a model": 1,
    "An alarm": 1,
    "A backend": 2,
}
"""Section -> at most so many files name its example."""


def sections() -> dict[str, tuple[str, list[str]]]:
    """Heading -> (the example, the files of its table)."""
    found = {}
    for part in PAGE.read_text("utf-8").split("\n## ")[1:]:
        heading, _, text = part.partition("\n")
        example = re.search(r"Example: `(\w+)`", text)
        assert example, heading
        found[heading] = (example[1], re.findall(r"^\| `([\w/.]+)` \|", text, re.MULTILINE))
    return found


@cache
def words_of(path: Path) -> set[str]:
    """What the code of a file names: strings, attributes, fields of records; no docstring, no comment."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        match node:
            case ast.Constant(value=str(word)) | ast.Attribute(attr=word) | ast.AnnAssign(target=ast.Name(id=word)):
                found.add(word)
            case ast.Name(id=word, ctx=ast.Store()) if word.isupper():
                found.add(word)
    return found


@pytest.mark.parametrize("heading", COUNTED)
def test_the_files_that_name_the_example_are_those_of_the_page(heading: str):
    example, listed = sections()[heading]
    files = {path.relative_to(PACKAGE): path for path in PACKAGE.rglob("*.py")}
    others = {place: path for place, path in files.items() if example not in place.parts[:-1]}  # not its own folder
    naming = sorted(place.as_posix() for place, path in others.items() if example in words_of(path))
    assert naming == sorted(listed)
    assert len(naming) <= COUNTED[heading]


def test_every_section_of_the_page_is_counted():
    assert list(sections()) == list(COUNTED)
