"""Both pages say what the snippets do, and the snippets are those of the articles."""

from __future__ import annotations

import re

import pytest

import attemper
from attemper import functional, lab
from tests.articles import pages
from tests.articles.case import SNIPPETS, Case, Step, Text
from tests.articles.cases import DOCUMENTS
from tests.articles.runner import require_empty_weights, run_of
from tests.support.experiments import Run as Experiments

CASES = [case for document in DOCUMENTS for case in document.cases]
SLOW = [pytest.mark.slow("takes many seconds")]
MARKED = [pytest.param(case, id=case.name, marks=SLOW if case.slow else []) for case in CASES]
FENCE = re.compile(r"^```(\w+)\n(.*?)\n```$", re.MULTILINE | re.DOTALL)


def on_disk(language: str) -> str:
    return pages.PAGES[language].read_text(encoding="utf-8")


def section_on_disk(case: Case) -> str:
    """From the heading of the case to the next heading; both pages hold the same (docs/test_chinese.py)."""
    sections = re.split(r"^(?=###? )", on_disk("en"), flags=re.MULTILINE)
    return [part for part in sections if part.startswith("### ")][CASES.index(case)]


@pytest.mark.parametrize("case", MARKED)
def test_every_output_on_a_page_is_what_its_snippet_does_now(
    case: Case, experiment: Experiments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lab, "run", experiment)
    run = run_of(case)
    if "TypeError: 'NoneType' object is not iterable" in run.outputs:
        require_empty_weights()
    printed = [output for kind, output in FENCE.findall(section_on_disk(case)) if kind == "text"]
    shown = run.printed if case.snippet and run.printed.count("\n") <= pages.LONGEST_OUTPUT else ""
    failure = run.failure if run.complaints else ""
    steps = list(zip(case.steps, run.outputs, strict=True))
    outputs = [output for step, output in steps if step.say]
    for step, output in steps:
        assert step.say or pages.same(step.expected, output.strip("\n")), f"{case.name}: a check gives\n{output}"
    expected = [output.strip("\n") for output in (shown, failure, *outputs, run.here) if output]
    assert len(printed) == len(expected)
    for stands, now in zip(printed, expected, strict=True):
        assert pages.same(stands, now), f"{case.name}: the page has\n{stands}\nthe run gives\n{now}"


@pytest.mark.slow("takes many seconds")
@pytest.mark.parametrize("language", pages.PAGES)
def test_a_page_is_what_the_script_would_write(language: str) -> None:
    assert pages.differences(language) == []


def test_what_a_page_says_is_missing_is_no_public_name() -> None:
    for missing in (case.missing for case in CASES if case.missing):
        assert missing.names
        for name in missing.names:
            owner, _, attribute = name.rpartition(".")
            home = getattr(attemper, owner) if owner else attemper
            assert not hasattr(home, attribute), f"{name} is there: the sentence {missing.say.en!r} is wrong"


@pytest.mark.parametrize(("language", "phrase"), [("en", "in this version"), ("zh", "当前版本")])
def test_a_page_says_of_nothing_else_that_it_is_missing(language: str, phrase: str) -> None:
    page = " ".join(on_disk(language).split())
    for sentence in (case.missing.say.of(language) for case in CASES if case.missing):
        assert phrase in sentence
        assert sentence in page
        page = page.replace(sentence, "")
    assert phrase not in page


def test_every_snippet_on_disk_is_run_by_a_case() -> None:
    assert pages.unused_snippets() == set()
    assert all(case.file.exists() for case in CASES if case.snippet)


def test_a_restored_snippet_differs_from_the_printed_one_in_white_space_alone() -> None:
    for path in SNIPPETS.glob("*.restored.txt"):
        printed = path.with_name(path.name.replace(".restored", ""))
        assert "".join(path.read_text().split()) == "".join(printed.read_text().split()), path
        assert printed.read_text().count("\n") == 1


def texts(case: Case) -> list[Text]:
    steps: list[Step] = [*case.steps, case.here]
    says = [step.say for step in steps if step.say]
    return [case.verdict, *says, *([case.missing.say] if case.missing else [])]


def test_every_sentence_stands_in_both_languages() -> None:
    for text in (text for case in CASES for text in texts(case)):
        assert re.search("[一-鿿]", text.zh), text.zh
        assert not re.search("[一-鿿]", text.en), text.en


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_line_named_in_a_table_is_a_public_name_and_its_code_uses_it(case: Case) -> None:
    if case.line.startswith("attemper lab "):
        experiment = case.line.removeprefix("attemper lab ")
        assert experiment in lab.EXPERIMENTS
        assert f'lab.run("{experiment}")' in case.here.code or f"attemper.lab.{experiment} import" in case.here.code
        return
    for name in re.findall(r"^\w+", case.line) if "(" in case.line else case.line.split(", "):
        assert name in attemper.__all__ or name in functional.__all__
        assert name in case.here.code


def test_two_outputs_are_the_same_up_to_the_last_printed_digit_of_a_number() -> None:
    assert pages.same("H 0.5901 nats", "H 0.5902 nats")
    assert pages.same("1.9287498933537385e-22", "1.9287501e-22")
    assert not pages.same("H 0.5901 nats", "H 0.5903 nats")
    assert not pages.same("H 0.5901 nats", "H 0.5901 bits")
    assert not pages.same("7 keys", "8 keys")
    assert not pages.same("0.1309", "-0.1309")
