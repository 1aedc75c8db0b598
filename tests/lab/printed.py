"""A number that an article prints, or that its printed code computes, and what the lab says of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attemper.lab.experiment import Table


@dataclass(frozen=True)
class Printed:
    """``printed`` and ``correction`` as text, with the digits that count; no correction: the article is right."""

    document: str
    what: str
    printed: str
    ours: float
    correction: str | None = None

    def __str__(self) -> str:
        return f"{self.document}: {self.what}: {self.printed}"

    def check(self) -> None:
        """Fails unless ours has the printed digits, or those of the correction and not the printed ones."""
        if self.correction is None:
            assert shown(self.ours, self.printed) == self.printed
        else:
            assert shown(self.ours, self.correction) == self.correction
            assert shown(self.ours, self.printed) != self.printed


@dataclass(frozen=True)
class FromItsCode:
    """A number that an article does not print, but that its code gives: ``theirs`` is from the code as printed."""

    document: str
    what: str
    theirs: float
    ours: float
    right: bool

    def __str__(self) -> str:
        return f"{self.document}: {self.what}"

    def check(self) -> None:
        """Fails unless both are the same, or, where the code is wrong, unless they are far apart."""
        assert (abs(self.theirs - self.ours) < 1e-9) == self.right
        assert self.right or abs(self.theirs - self.ours) > 0.01


def column(table: Table, name: str) -> list[Any]:
    """A column that holds one kind of cell, for which a test knows the kind."""
    return list(table.column(name))


def rows(table: Table) -> list[Any]:
    return list(table.rows)


def shown(number: float, like: str) -> str:
    """``number`` rounded to the digits of ``like``, in its notation.

    >>> shown(2.8284, "2.8"), shown(1 / 262144, "3.8e-6"), shown(-4.0, "-4"), shown(0.13090753555297852, "0.1309")
    ('2.8', '3.8e-6', '-4', '0.1309')
    """
    mantissa, exponent, power = like.partition("e")
    decimals = len(mantissa.partition(".")[2])
    if not exponent:
        return f"{number:.{decimals}f}"
    digits, _, places = f"{number:.{decimals}e}".partition("e")
    padded = len(power.lstrip("+-"))
    sign = "+" if power.startswith("+") else ""
    value = int(places)
    return f"{digits}e{'-' if value < 0 else sign}{abs(value):0{padded}d}"
