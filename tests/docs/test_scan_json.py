"""The page on a scan's JSON names every field that a scan writes, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from tests.readings.test_reading import reading

PAGE = Path(__file__).parents[2] / "docs" / "scan-json.md"


def fields_of(section: str) -> set[str]:
    """Names in the first column of the table of a section."""
    text = PAGE.read_text("utf-8").split("\n## ")
    part = next(part for part in text if part.startswith(section))
    cells = [line.split("|")[1] for line in part.splitlines() if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


def test_every_field_of_the_document_is_described() -> None:
    document = reading().to_dict()
    assert fields_of("# The JSON") == {*document, "unknown_roles"}  # not there where roles were not read
    site, alarm = document["sites"][0], document["alarms"][0]
    assert fields_of("A site") == set(site)
    sometimes = {"role", "roles", "batches", "standard_errors"}  # not there where they are not known
    assert fields_of("A head") - sometimes == set(site["heads"][0]) - sometimes
    assert sometimes <= fields_of("A head")
    assert fields_of("An alarm") == set(alarm)
    (line,) = (line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| `by_visible_keys`"))
    bucket = site["heads"][0]["by_visible_keys"][0]
    assert set(re.findall(r"`(\w+)`", line.split("|")[3])) - {"fewest_keys"} == set(bucket)
    assert f"**schema {document['schema']}**" in PAGE.read_text("utf-8")
