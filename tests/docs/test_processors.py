"""The table of processors is that of its results, and README quotes the range of its ratios and the largest of its scans."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NUMBERS = r"([\d.]+) (?:to|到) ([\d.]+).*?(\d+) (?:shapes|种形状).*?MiniLM\D+([\d.]+)"


@pytest.fixture
def processors(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import processors

    yield processors
    sys.modules.pop("processors")


def test_the_table_is_drawn_from_the_results(processors):
    columns = json.loads(processors.RESULTS.read_text("utf-8"))
    page = processors.PAGE.read_text("utf-8")
    assert page.count(processors.BEGIN) == page.count(processors.END) == 1
    assert page.split(processors.BEGIN)[1].split(processors.END)[0].strip() == processors.table(columns)


@pytest.mark.parametrize(("name", "begins"), [("README.md", "What it costs"), ("README.zh-CN.md", "开销：")])
def test_readme_quotes_the_range_of_all_processors(processors, name: str, begins: str):
    columns = json.loads(processors.RESULTS.read_text("utf-8"))
    shapes: dict[str, list[float]] = {}
    scans: list[float] = []
    for column in columns:
        for title, cell in column["cells"].items():
            if ", forward" in title and "window" not in title:  # PyTorch takes it as a mask
                shapes.setdefault(title, []).append(float(cell.split()[0]))
            elif title.startswith("scan of MiniLM"):
                scans.append(float(cell.split()[0]))
    ratios = [ratio for found in shapes.values() for ratio in found]
    said = re.search(begins + ".*?\n\n", (ROOT / name).read_text("utf-8"), re.DOTALL)
    assert said
    found = re.search(NUMBERS, re.sub(r"\s+", " ", said[0]))
    assert found, said[0]
    assert [float(part) for part in found.groups()] == [min(ratios), max(ratios), len(shapes), max(scans)]
