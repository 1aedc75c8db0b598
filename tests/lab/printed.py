"""Cells of a table, for which a test knows the kind."""

from __future__ import annotations

from typing import Any

from attemper.lab.experiment import Table


def column(table: Table, name: str) -> list[Any]:
    return list(table.column(name))


def rows(table: Table) -> list[Any]:
    return list(table.rows)
