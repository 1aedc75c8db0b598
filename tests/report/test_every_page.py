"""Every page: the same each time, nothing that others wrote runs, fits the screen, and axe-core finds nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import attemper
from attemper.report.check import check_page
from attemper.report.comparison import comparison_page
from attemper.report.explanation import explanation_page
from attemper.report.page import ECHARTS, LARGEST_BYTES, scan_page
from attemper.report.run_page import run_page
from attemper.report.runs import runs_page
from attemper.results.run import Run
from tests.report import readings, test_check, test_comparison, test_patterns
from tests.report.conftest import Open, check_policy
from tests.support.engine_models import tiny, tokens

FOLDERS = sorted((Path(__file__).parents[2] / "build" / "axe").glob("*/axe.min.js"))
FOUND = """
async () => (await axe.run(document, { resultTypes: ["violations"] })).violations.map(
  ({ id, nodes }) => `${id}: ${nodes.length}, the first ${nodes[0].html.slice(0, 200)}`)
"""


@pytest.fixture
def runs(collapsed: Callable[[str, int], Run]) -> list[Run]:
    return [collapsed("run", 250), collapsed("run", 120)]


def explained() -> str:
    model = tiny("mistral").model
    a, b = (attemper.fingerprint(model, [tokens()], name=name) for name in ("right", "engine"))
    return explanation_page(attemper.explain(a, b))


Made = Callable[[list[Run], Path], str]
PAGES: dict[str, Made] = {
    "scan": lambda runs, folder: scan_page(readings.minilm()),
    "broken": lambda runs, folder: scan_page(readings.encoder_decoder()),
    "run": lambda runs, folder: run_page(runs[0]),
    "comparison": lambda runs, folder: comparison_page(test_comparison.sharpened()),
    "explanation": lambda runs, folder: explained(),
    "check": lambda runs, folder: check_page(test_check.certificate()),
    "runs": lambda runs, folder: runs_page(runs),
    "heads": lambda runs, folder: test_patterns.page(test_patterns.heads(12, 12), folder),
    "one head": lambda runs, folder: test_patterns.page(test_patterns.heads(12, 12)[:1], folder),
}
LARGE: dict[str, Made] = {
    "hostile": lambda runs, folder: scan_page(readings.hostile()),
    "huge": lambda runs, folder: scan_page(readings.huge()),
}


@pytest.mark.parametrize("kind", [*PAGES, "hostile"])
def test_a_page_is_the_same_each_time_allows_its_own_scripts_and_style_alone_and_has_at_most_2_mb(
    runs: list[Run], tmp_path: Path, kind: str
) -> None:
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        found.append((PAGES | LARGE)[kind](runs, tmp_path))
    html, library = found[0], ECHARTS.read_text("utf-8")
    assert html == found[1]
    assert len(html.encode()) <= LARGEST_BYTES
    check_policy(html, inline=3 if library in html else 2)
    own = html.replace(library, "")
    assert " style=" not in own
    assert not re.search(r'\b(src|href)="(?!#|data:,)', own)
    assert "<script>alert" not in own


@pytest.mark.parametrize("kind", PAGES | LARGE)
@pytest.mark.parametrize("width", [390, 768, 1440])
@pytest.mark.quick("390-broken")
def test_nothing_is_wider_than_the_screen(
    open_page: Open, runs: list[Run], tmp_path: Path, kind: str, width: int
) -> None:
    page = open_page((PAGES | LARGE)[kind](runs, tmp_path), width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.slow("axe-core, which --all installs")
@pytest.mark.skipif(not FOLDERS, reason="axe-core is not in build/axe: `bash scripts/test.sh --all` installs it there")
@pytest.mark.parametrize(("locale", "scheme", "width"), [("en", "light", 1440), ("zh-CN", "dark", 390)])
@pytest.mark.parametrize("kind", PAGES)
def test_axe_finds_nothing(
    open_page: Open, runs: list[Run], tmp_path: Path, kind: str, locale: str, scheme: str, width: int
) -> None:
    page = open_page(PAGES[kind](runs, tmp_path), width=width, locale=locale, color_scheme=scheme)
    page.wait_for_timeout(300)
    page.evaluate(FOLDERS[-1].read_text("utf-8"))
    assert page.evaluate(FOUND) == []
