"""Whatever a model, a run or a text brings along stands on every page as text: each string at each place.

One page has many places. Each takes another string of the corpus; with ``--all`` every place takes every string.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import attemper
from attemper import compare
from attemper.readings.reading import Reading, Skipped
from attemper.readings.sample import Sample, SiteLabel
from attemper.report.comparison import comparison_page
from attemper.report.live import Look
from attemper.report.page import message_page
from attemper.results.run import Run
from attemper.store.fragment import Fragment
from attemper.store.store import sentence
from attemper.text import clean
from tests.monitor.test_heat_map import Parsed
from tests.report import readings
from tests.report.conftest import Open
from tests.report.test_picture import causal
from tests.support.runs import collapsing

if TYPE_CHECKING:
    from playwright.sync_api import Page

CORPUS = tuple(text.encode("utf-8", "replace").decode() for text in readings.HOSTILE)
TURNS = range(len(CORPUS))
PLACES = (
    "name", "tag", "notes", "model", "software", "version", "dtype", "revision", "site", "kind", "mode", "skipped",
    "reason", "lost",
)  # fmt: skip
FOREIGN = "img, iframe, object, embed, main script, a[href^=javascript], [onerror], [onfocus], [autofocus]"
SEEN = 30
"""Letters by which a text is known where it is cut."""


def placed(turn: int) -> dict[str, str]:
    return {place: CORPUS[(at + turn) % len(CORPUS)] for at, place in enumerate(PLACES)}


def written(folder: Path, texts: dict[str, str], *, falls: int = 5) -> Path:
    """A run with a text at every place, whose second layer collapses, and whose first has large logits."""
    labels = tuple(
        SiteLabel(f"layers.{layer}.{texts['site']}", texts["kind"], texts["mode"], layer, "full", "softmax", 3)
        for layer in range(2)
    )
    folder.mkdir()
    fragment = Fragment(folder / "fragment-0.sqlite")
    told: dict[str, object] = {
        "versions": {texts["software"]: texts["version"]},
        "name": texts["name"],
        "tags": [texts["tag"]],
        "notes": texts["notes"],
        "model": texts["model"],
    }
    fragment.describe(told | {name: texts[name] for name in ("dtype", "revision")})
    for one in collapsing(120, falls=falls):
        fragment.append(Sample(one.step, one.time, labels, one.quantities, one.values))
        fragment.fold()
    fragment.cover({label.key: None for label in labels} | {(texts["skipped"], "self", "train"): texts["reason"]})
    fragment.lose(2, 7, texts["lost"])
    fragment.close()
    return folder


@contextmanager
def opened(folder: Path, texts: dict[str, str], **options: int) -> Iterator[Run]:
    with attemper.open(written(folder, texts, **options)) as run:
        yield run


def is_inert(page: Page, drawn: str = "canvas") -> None:
    """Nothing but the page's own elements is there; what else happened, the fixture tells."""
    assert page.locator(FOREIGN).count() == 0
    assert page.locator("svg:not([role=img])").count() == 0
    assert page.title().strip()
    assert "\u202e" not in page.content()
    assert page.locator(drawn).count()


def shows(page: Page, texts: dict[str, str]) -> None:
    """Each as it is, but for what cannot be seen, which is written out."""
    body = " ".join(" ".join(page.locator("header, main").all_text_contents()).split())
    for place, text in texts.items():
        if not (place == "version" and len(texts["software"]) > 100):  # behind a name that is cut
            seen = clean(text)[: 12 if place == "revision" else SEEN]
            assert " ".join(seen.split()) in body, place


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.quick("2")
def test_texts_of_a_run_are_shown_as_text_at_every_place(open_page: Open, tmp_path: Path, turn: int) -> None:
    texts = placed(turn)
    with opened(tmp_path / "run", texts) as run:
        page = open_page(run)
    page.locator("html[data-ready]").wait_for(state="attached")
    page.locator(".map .cells").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.locator("#multiples-box").hover(position={"x": 60, "y": 20})
    assert "layer" in (page.text_content("#tip") or "")
    page.click("#all summary")
    page.locator("#all-table tbody tr").first.wait_for()
    page.click("#language")
    said = {place: sentence(texts[place]) for place in ("reason", "lost")}  # without folders, as the store keeps them
    named = page.text_content("#panel-site code")
    assert named in [clean(f"layers.{layer}.{texts['site']}") for layer in range(2)]
    del texts["site"]
    shows(page, texts | said)
    is_inert(page)


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.quick("5")
def test_texts_of_two_runs_are_shown_as_text_where_they_are_compared(
    open_page: Open, tmp_path: Path, turn: int
) -> None:
    texts = placed(turn)
    with opened(tmp_path / "a", texts) as one, opened(tmp_path / "b", texts, falls=10_000) as two:
        found = compare(one, two, names=(texts["name"], texts["tag"]))
        tokens = tuple(CORPUS)
        site = f"layers.0.{texts['site']}"
        patterns = [replace(causal(tokens, head=1), site=site)]
        page = open_page(comparison_page(found, (patterns, patterns)))
    page.locator("#before-keys .token").first.wait_for()
    page.locator("#after-map").hover(position={"x": 9, "y": 9})
    page.click("#language")
    shows(page, {name: texts[name] for name in ("name", "tag", "mode")} | {"site": site})
    assert page.locator("#after-keys .token").count() == len(CORPUS)
    is_inert(page, drawn=".pairs svg")


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.quick("8")
def test_texts_of_a_scan_are_shown_as_text_at_every_place(open_page: Open, turn: int) -> None:
    texts = placed(turn)
    reading: Reading = replace(
        readings.hostile(), model=texts["name"], backend=texts["model"], text=texts["tag"], dtype=texts["dtype"],
        revision=texts["revision"], date=texts["notes"], versions={texts["software"]: texts["version"]},
        skipped=(Skipped(texts["skipped"], texts["reason"]), Skipped("a", f"its qkv is {texts['lost']}")),
    )  # fmt: skip
    site = reading.sites[0].name
    page = open_page(reading, patterns=[replace(causal(CORPUS, head=0), site=site)])
    page.locator("#picture .place").click()
    page.locator("#picture-keys .token").first.wait_for()
    page.locator("#picture-map").hover(position={"x": 9, "y": 9})
    page.click("#language")
    del texts["site"], texts["kind"], texts["mode"]
    shows(page, texts)
    is_inert(page)


def test_why_a_live_run_is_gone_stays_text_and_a_value_of_its_attribute() -> None:
    for text in map(clean, CORPUS):
        live = Parsed(message_page(text, asdict(Look(1, 2, live=False, gone=text))))
        tags = {"html", "head", "meta", "title", "link", "style", "body", "main", "p", "script"}
        assert {tag for tag, _ in live.tags} == tags, text
        (script,) = (attributes for tag, attributes in live.tags if tag == "script")
        assert script.keys() == {"data-look", "data-texts"}, text
        assert json.loads(script["data-look"] or "")["gone"] == text
        assert text in live.text
