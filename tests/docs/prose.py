"""Finds text that a mechanical re-wrap has cut: single words left on a line, and messages broken inside a phrase."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

FULL = 95
"""A line from this column on was broken for its length; a shorter one by choice."""
SHORT = 70
"""A line that ends before this column, between two lines of its paragraph, is a leftover."""
PIECE = 30
"""Characters of a piece of a message, below which a break inside it has a reason only at its end."""
LONGEST_WORD = 40
"""Characters; what is longer is a name, and may need a line."""
_ENTRY = re.compile(r"^[\w, ]+: ")
"""An argument and what is said of it."""
_ASSIGNMENT = re.compile(r"^[\w.,\[\] ]+ = ")
_STRUCTURE = (">>>", "...", "- ", ".. ", "|", "=", "::")
_COMMENTS = re.compile(r"^\s*#.*\n\s*#", re.MULTILINE)
"""Two lines of a comment: one alone has nothing to be wrapped."""
_STATEMENTS = ("body", "orelse", "finalbody", "handlers", "cases")
"""Where statements stand inside another."""
_ONLY_A_STRING = re.compile(r"""^\s*(?:raise \w+\(|\w+\(|return |\()?[frb]*"(?P<text>.*)"$""")
_BEGINS_WITH_A_STRING = re.compile(r"""^\s*[frb]*\"""")


@dataclass(frozen=True)
class Line:
    number: int
    text: str
    indent: int

    @property
    def end(self) -> int:
        return self.indent + len(self.text)


def findings(source: str) -> list[str]:
    """``line: what`` for every orphan and cut phrase of a Python file."""
    lines = source.split("\n")
    docstrings = list(_docstrings(source, lines))
    found = [finding for block in [*docstrings, *_comments(source)] for finding in _orphans(block)]
    inside = {line.number for block in docstrings for line in block}
    return [f"{number}: {what}" for number, what in sorted([*found, *_cut_messages(lines, inside)])]


def findings_in(folder: Path) -> list[str]:
    """The same, with file names, of every Python file below ``folder``."""
    files = sorted(folder.rglob("*.py"))
    return [f"{path}:{finding}" for path in files for finding in findings(path.read_text(encoding="utf-8"))]


def _docstrings(source: str, lines: list[str]) -> Iterator[list[Line]]:
    nodes: list[ast.AST] = [ast.parse(source)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield [_line(number, lines[number - 1]) for number in range(node.lineno, (node.end_lineno or 0) + 1)]
        nodes += [statement for name in _STATEMENTS for statement in getattr(node, name, ())]


def _comments(source: str) -> Iterator[list[Line]]:
    """Runs of lines that hold a comment and nothing else."""
    if not _COMMENTS.search(source):
        return
    block: list[Line] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or token.line.strip() != token.string:
            continue
        if block and token.start[0] != block[-1].number + 1:
            yield block
            block = []
        block.append(Line(token.start[0], token.string.lstrip("# "), token.start[1] + 2))
    if block:
        yield block


def _line(number: int, raw: str) -> Line:
    text = raw.strip()
    return Line(number, text.removesuffix('"""').strip(), len(raw) - len(text))


def _orphans(block: list[Line]) -> Iterator[tuple[int, str]]:
    for paragraph in _paragraphs(block):
        for before, line in pairwise(paragraph):
            if before.end >= FULL and len(line.text.split()) == 1 and len(line.text) <= LONGEST_WORD:
                yield line.number, f"one word on a line: {line.text!r}"
        for before, line, _ in zip(paragraph, paragraph[1:], paragraph[2:], strict=False):
            words = len(line.text.split())
            if before.end >= FULL and line.end < SHORT and words > 1 and line.text[-1] not in ".:;,)":
                yield line.number, f"a leftover of a line: {line.text!r}"


def _paragraphs(block: list[Line]) -> Iterator[list[Line]]:
    """Runs of lines at one indentation, an argument's entry with its continuation, without lists, code and formulas."""
    paragraph: list[Line] = []
    for line in block:
        entry = _ENTRY.match(line.text) is not None
        structure = line.text.startswith(_STRUCTURE) or "   " in line.text
        structure = structure or _ASSIGNMENT.match(line.text) is not None or (" = " in line.text and line.end < FULL)
        if paragraph and (not line.text or structure or entry or not _goes_on(paragraph, line)):
            yield paragraph
            paragraph = []
        if line.text and not structure:
            paragraph.append(line)
    if paragraph:
        yield paragraph


def _goes_on(paragraph: list[Line], line: Line) -> bool:
    """At the indentation of the line before, or one step inside the entry that the paragraph begins with."""
    before = paragraph[-1]
    continues = len(paragraph) == 1 and _ENTRY.match(before.text) is not None and line.indent == before.indent + 4
    return continues or line.indent == before.indent


def _cut_messages(lines: list[str], inside: set[int]) -> Iterator[tuple[int, str]]:
    for number, (line, following) in enumerate(pairwise(lines), 1):
        piece = None if number in inside else _ONLY_A_STRING.match(line)
        if piece and _BEGINS_WITH_A_STRING.match(following):
            text = piece["text"]
            if re.search(r"\w", text) and len(text) < PIECE and not text.endswith("\\n"):
                yield number, f"a phrase cut after {text!r}"
