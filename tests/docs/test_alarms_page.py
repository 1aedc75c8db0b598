"""The page on alarms has every kind of the list, with its law, limit and advice as they are."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import attemper
from attemper.readings import alarm_laws
from attemper.readings.alarms import ALARMS, AlarmKind
from research import RESULTS
from research.early_warning.tables import experiment
from tests.docs.pages import run_code

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "alarms.md").read_text("utf-8")
CHINESE = (DOCS / "alarms.zh-CN.md").read_text("utf-8")
MATHS = (DOCS / "maths.md").read_text("utf-8")


def limit(kind: AlarmKind) -> str:
    """Where it begins and ends, in words."""
    if kind.limit is None:
        return "above 0; ends at 0"
    above = (alarm_laws.LAWS[kind.law].side or kind.side) == "above"
    floor = "" if kind.floor is None else f", where it is {kind.side} {kind.floor:g}"
    return (
        f"{'above' if above else 'below'} {kind.limit:g} {kind.unit}{floor}; ends at {kind.end(kind.limit, above):.4g}"
    )


def row(kind: AlarmKind) -> str:
    statistic = f"`{kind.statistic}`" + (" of all heads of a site" if kind.whole and not kind.of_loss else "")
    return f"| `{kind.name}` | {statistic} | {kind.law.replace('_', ' ')} | {limit(kind)} | {kind.severity} |"


def test_the_table_is_the_list():
    written = [line for line in PAGE.splitlines() if line.startswith("| `")]
    assert written == [row(kind) for kind in ALARMS], "\n".join(map(row, ALARMS))


def test_the_chinese_table_has_the_same_limits():
    rows = [line.split(" | ") for line in CHINESE.splitlines() if line.startswith("| `")]
    numbers = {cells[0].strip("| `"): set(map(float, re.findall(r"[\d.]+", cells[3]))) for cells in rows}
    assert list(numbers) == [kind.name for kind in ALARMS]
    for kind in ALARMS:
        assert numbers[kind.name] >= set(map(float, re.findall(r"(?<!\w)[\d.]+", limit(kind)))) - {0.0}


@pytest.mark.parametrize("page", ["alarms.md", "alarms.zh-CN.md"])
def test_the_counts_are_those_of_the_benchmark(page: str):
    content = json.loads((RESULTS / "early-warning.json").read_text("utf-8"))
    rows = experiment(content).table("the alarms that ship, by their defaults").rows
    found = [[str(count).split(" of ") for count in counts] for _, _, *counts, _, _ in rows]
    told = [
        f"| {name} | {' | '.join(count for count, _ in counts)} | {lead:g} |"
        for (name, *_, lead, _), counts in zip(rows, found, strict=True)
    ]
    text = (DOCS / page).read_text("utf-8")
    assert "\n".join(told) in text, "\n".join(told)
    (wholes,) = {tuple(whole for _, whole in counts) for counts in found}
    head = text.split("\n".join(told))[0].splitlines()[-2]
    assert re.findall(r"\d+", head) == list(wholes)


def test_every_advice_stands_under_its_title():
    written = dict(re.findall(r"^\*\*`(\w+)`\*\* (.+?)(?=\n\n|\Z)", PAGE, re.MULTILINE | re.DOTALL))
    assert {name: " ".join(text.split()) for name, text in written.items()} == {
        kind.name: f"({kind.title}). {kind.advice} {short(line(kind))}".strip() for kind in ALARMS
    }


def line(kind: AlarmKind) -> str:
    return re.sub(r"{\w+}", "N", kind.line)


def short(line: str) -> str:
    """As the page has it, which says once what QKClip's line is, and that no line may help."""
    if "QKClip" in line:
        assert f"*Clip* below is this line: {line}" in " ".join(PAGE.split())
        return "*Clip.*"
    rest = line.removeprefix("attemper has no line that helps: ")
    return rest[:1].upper() + rest[1:]


CONSTANTS = (
    *("RECENT", "FIRST", "MARKS", "SPAN", "LEAST_FALL", "LEAST_SPREAD", "LEAST_SHARE", "LASTING", "STEADY", "LATEST"),
    *("ALONE", "LEAST_NOISE"),
)


def test_laws_and_their_constants_are_those_of_the_page_of_formulas():
    (section,) = re.findall(r"^## Laws of alarms\n(.*?)(?=^## |\Z)", MATHS, re.MULTILINE | re.DOTALL)
    assert [name for name in CONSTANTS if f"{getattr(alarm_laws, name):g} ({name})" not in section] == []
    for law in alarm_laws.LAWS:
        assert f"| {law.replace('_', ' ')} |" in section


def test_the_example_of_limits_runs():
    assert isinstance(run_code("docs/alarms.md", {"attemper": attemper})["limits"], attemper.AlarmLimits)
