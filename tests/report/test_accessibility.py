"""axe-core finds nothing on any page, in either language and theme."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import attemper
from attemper.report.check import check_page
from attemper.report.comparison import comparison_page
from attemper.report.explanation import explanation_page
from attemper.report.run_page import run_page
from attemper.report.runs import runs_page
from attemper.results.run import Run
from tests.report import readings, test_check, test_comparison, test_patterns
from tests.report.conftest import Open
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


PAGES: dict[str, Callable[[Any], Any]] = {
    "scan": lambda runs: readings.minilm(),
    "broken": lambda runs: readings.encoder_decoder(),
    "run": lambda runs: run_page(runs[0]),
    "comparison": lambda runs: comparison_page(test_comparison.sharpened().to_dict()),
    "explanation": lambda runs: explained(),
    "check": lambda runs: check_page(test_check.certificate()),
    "runs": runs_page,
    "heads": lambda runs: test_patterns.heads(12, 12),
    "one head": lambda runs: test_patterns.heads(12, 12)[:1],
}


@pytest.mark.slow("axe-core, which --all installs")
@pytest.mark.skipif(not FOLDERS, reason="axe-core is not in build/axe: `bash scripts/test.sh --all` installs it there")
@pytest.mark.parametrize(("locale", "scheme", "width"), [("en", "light", 1440), ("zh-CN", "dark", 390)])
@pytest.mark.parametrize("kind", PAGES)
def test_nothing_is_found(open_page: Open, runs: list[Run], kind: str, locale: str, scheme: str, width: int) -> None:
    page = open_page(PAGES[kind](runs), width=width, locale=locale, color_scheme=scheme)
    page.wait_for_timeout(300)
    page.evaluate(FOLDERS[-1].read_text("utf-8"))
    assert page.evaluate(FOUND) == []
