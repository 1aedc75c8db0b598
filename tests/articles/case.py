"""What a case holds: a snippet of a source document, how it is driven, what is said of it, the line that does it here.

One table for the tests and for both pages. A sentence stands in English and in Chinese, side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SNIPPETS = Path(__file__).parent / "snippets"


@dataclass(frozen=True)
class Text:
    """The same sentence in both languages of the pages."""

    en: str
    zh: str

    def of(self, language: str) -> str:
        return {"en": self.en, "zh": self.zh}[language]


@dataclass(frozen=True)
class Step:
    """Code that a reader may paste, and the sentence before it."""

    say: Text | None
    """None: a check that only tests run."""
    code: str
    expected: str = ""
    """What such a check gives."""


@dataclass(frozen=True)
class Missing:
    """Something of an article that this version does not have, and the public names that would offer it."""

    say: Text
    names: tuple[str, ...]
    """Of ``attemper``, or with a dot of one of its classes: the day one is there, the sentence is wrong."""


@dataclass(frozen=True)
class Case:
    """One snippet; without a file of its own (``snippet=False``), a table or vectors that a document prints."""

    name: str
    title: Text
    verdict: Text
    """Whether it works and is right, in one line."""
    steps: tuple[Step, ...]
    here: Step
    """The library's way."""
    line: str
    """The library's name for it."""
    snippet: bool = True
    builds_on: tuple[str, ...] = ()
    """Snippets that stand before it in its document."""
    inputs: str = ""
    """Code that makes what the snippet takes for granted."""
    needs_model: bool = False
    slow: bool = False
    missing: Missing | None = None
    """A part of it that the library's way does not have; said at the end."""

    @property
    def file(self) -> Path:
        return SNIPPETS / f"{self.name}.txt"

    @property
    def restored(self) -> Path | None:
        """The snippet with its lost line breaks, where the document prints it on one line."""
        path = self.file.with_suffix(".restored.txt")
        return path if path.exists() else None

    @property
    def source(self) -> str:
        return (self.restored or self.file).read_text(encoding="utf-8")


@dataclass(frozen=True)
class Document:
    """A source document, and its cases in the order of its text."""

    number: str
    title: Text
    about: Text
    cases: tuple[Case, ...]
