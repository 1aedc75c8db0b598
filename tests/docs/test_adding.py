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
    "A role of heads": 1,
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
def sources() -> dict[Path, str]:
    """Place in the package -> the text of a file."""
    return {path.relative_to(PACKAGE): path.read_text("utf-8") for path in PACKAGE.rglob("*.py")}


ELSEWHERE = {"rules/perturbation.py"}
"""It replaces ``torch.topk`` during a check: the same word for something else."""


def names(text: str, word: str) -> bool:
    """Whether code names a word: as a string, an attribute, a field; not in a docstring or a comment alone."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Constant(value=str(own)) | ast.Attribute(attr=own) | ast.AnnAssign(target=ast.Name(id=own)):
                found = own == word
            case ast.Name(id=own, ctx=ast.Store()):
                found = own == word and own.isupper()
            case _:
                found = False
        if found:
            return True
    return False


@pytest.mark.parametrize("heading", COUNTED)
def test_the_files_that_name_the_example_are_those_of_the_page(heading: str):
    example, listed = sections()[heading]
    naming = sorted(
        place.as_posix()
        for place, text in sources().items()
        if place.as_posix() not in ELSEWHERE and example in text and example not in place.parts[:-1] and names(text, example)  # not its own folder
    )
    assert naming == sorted(listed)
    assert len(naming) <= COUNTED[heading]


def test_every_section_of_the_page_is_counted():
    assert list(sections()) == list(COUNTED)
