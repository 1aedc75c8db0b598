"""What :func:`attemper.check` found: rule by rule, what is declared, what was observed, and whether it is kept."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attemper.files import write_whole
from attemper.text import clean, count, plain_table, plain_text

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

_MARKS = {"kept": "green", "broken": "bold red", "not declared": "dim", "cannot tell": "yellow"}


@dataclass(frozen=True)
class Rule:
    """One rule, and what became of it.

    Attributes:
        name: "causal", "documents", "padding", "window", "batch", "cache", "repeat" or "scores".
        verdict: "kept", "broken", "not declared" or "cannot tell".
        declared: what is declared, and where; None where nothing is.
        observed: at how many sites it was proved, and by how many exchanges of tokens it was tested.
        site: the first place, in the order in which the model runs, that breaks it.
        rows: how many rows break it there; None where it is not broken, as in the next four.
        keys: forbidden keys that such a row sees, on average; None where no attention shows it.
        weight: the attention weight that goes to them, on average over these rows and the heads.
        moved: how far the model's output moves where it must not, at most, relative to its size.
        message: all of it as one line.
        forwards: forward passes that it took; one more, for all rules, shows the keys, and two or three the noise.
    """

    name: str
    verdict: str
    declared: str | None
    observed: str
    site: str | None = None
    rows: int | None = None
    keys: float | None = None
    weight: float | None = None
    moved: float | None = None
    message: str = ""
    forwards: int = 0


@dataclass(frozen=True)
class Check:
    """Which tokens each token should see, and does see. Prints as a table; ``rules`` has a ``Rule`` for each.

    Attributes:
        model: its name.
        rules: all of them, in a fixed order.
        shape: sequences, and tokens of each.
        forwards: forward passes, all together.
        sites: attention calls whose keys were read.
        unread: layers whose keys cannot be read, and why; what they mix is seen by exchanging tokens alone.
    """

    model: str
    rules: tuple[Rule, ...]
    shape: tuple[int, int]
    forwards: int
    sites: tuple[str, ...] = ()
    unread: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Rule:
        return next(rule for rule in self.rules if rule.name == name)

    @property
    def broken(self) -> tuple[Rule, ...]:
        """The rules that are broken."""
        return tuple(rule for rule in self.rules if rule.verdict == "broken")

    @property
    def unproved(self) -> tuple[Rule, ...]:
        """The rules that are not declared, or that cannot be decided."""
        return tuple(rule for rule in self.rules if rule.verdict in ("not declared", "cannot tell"))

    def raise_if_broken(self) -> None:
        """For a test suite.

        Raises:
            AssertionError: a rule is broken; the message has a line for each.
        """
        if self.broken:
            lines = "\n".join(f"  {rule.name}: {rule.message}" for rule in self.broken)
            raise AssertionError(f"attemper.check: {self.model} breaks what is declared:\n{lines}")

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        rules = [asdict(rule) for rule in self.rules]
        about = {"model": self.model, "sequences": self.shape[0], "tokens": self.shape[1], "forwards": self.forwards}
        return {"schema": 1, **about, "rules": rules, "sites": list(self.sites), "unread": dict(self.unread)}

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """One JSON document, written to ``path`` as well if one is given.

        Raises:
            InputError: no file can be written there.
        """
        text = json.dumps(self.to_dict(), indent=2, allow_nan=False)
        if path is not None:
            write_whole(path, text, "check")
        return text

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Writes one page that opens offline; gives the file's place.

        Raises:
            InputError: no file can be written there.
        """
        from attemper.report.check import check_page

        return write_whole(path, check_page(self.to_dict()))

    def __str__(self) -> str:
        return plain_text(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        size, passes = f"{self.shape[0]} x {self.shape[1]}", count(self.forwards, "forward pass", "forward passes")
        yield Text(f"{clean(self.model)}: tokens {size}, {passes}", style="bold")
        grid = plain_table()
        for title in ("rule", "verdict", "declared", "observed"):
            grid.add_column(title, overflow="fold", no_wrap=title in ("rule", "verdict"))
        for rule in self.rules:
            seen = f"{rule.observed}. " if rule.observed not in ("-", rule.message) else ""
            told = clean(f"{seen}{rule.message}" if rule.verdict != "kept" else rule.observed)
            grid.add_row(rule.name, Text(rule.verdict, _MARKS[rule.verdict]), clean(rule.declared or "-"), Text(told))
        yield grid
