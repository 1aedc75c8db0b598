"""The attention picture: exact weights of a few heads, with the tokens of a text."""

from __future__ import annotations

import base64
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from attemper import compare
from attemper.report.comparison import comparison_page
from attemper.report.page import scan_page
from attemper.report.picture import MOST_PAIRS, MOST_PICTURES, interesting_heads
from tests.report import readings
from tests.report.conftest import Open, shown_text
from tests.report.test_page import data_of
from tests.support import encoder
from tests.support.command import run_command


@dataclass(frozen=True)
class Weights:
    """As ``attemper.pattern`` gives them."""

    weights: np.ndarray
    tokens: tuple[str, ...]
    key_tokens: tuple[str, ...]
    site: str = "layer.0"
    head: int = 2


def causal(tokens: tuple[str, ...], head: int = 2) -> Weights:
    scores = np.random.default_rng(0).normal(size=(len(tokens),) * 2)
    weights = np.exp(np.where(np.tri(len(tokens)), scores, -np.inf))
    return Weights(weights / weights.sum(1, keepdims=True), tokens, tokens, head=head)


def test_weights_are_on_the_page_to_16_bits_and_the_first_tokens_alone() -> None:
    tokens = tuple(f"t{place}" for place in range(200))
    html = scan_page(readings.reading(readings.site("layer.0")), [causal(tokens)])
    (found,) = data_of(html)["pictures"]
    assert (found["site"], found["head"], found["keys"]) == (0, 2, None)
    assert found["tokens"] == list(tokens[:128])
    kept = np.frombuffer(zlib.decompress(base64.b64decode(found["packed"])), "<u2").reshape(128, 128) / 65535
    assert np.abs(kept - causal(tokens).weights[:128, :128]).max() <= 0.5 / 65535
    assert "It holds the text of the attention picture" in shown_text(html)
    bare = scan_page(readings.reading(readings.site("layer.0")))
    assert "It holds no text and no token" in shown_text(bare)
    assert data_of(bare)["pictures"] == []


def test_pictures_are_of_the_heads_that_tell_most() -> None:
    found = interesting_heads(readings.minilm())
    assert len(found) == len(set(found)) == MOST_PICTURES
    first = readings.minilm().alarms[0]
    assert found[0] == (first.site, first.head)
    assert interesting_heads(readings.reading()) == []


@pytest.mark.slow("a browser for seconds")
def test_the_picture_says_where_the_weight_of_a_query_goes(open_page: Open) -> None:
    reading = readings.reading(readings.site("layer.0"))
    page = open_page(reading, patterns=[causal(("one", "two", "three", "four"))])
    assert page.locator("#picture-none").is_visible(), "the sharpest head has none"
    page.click("#picture .place")
    assert page.text_content("#picture-head") == "layer 0, head 2"
    assert page.locator("#picture-keys .token").count() == 4
    assert (page.text_content("#picture-said") or "").startswith("Keys are coloured by the weight")
    canvas = page.locator("#picture-map")
    canvas.scroll_into_view_if_needed()
    size = canvas.bounding_box()
    assert size is not None
    canvas.hover(position={"x": 5, "y": 5})
    assert page.text_content("#picture-said") == "Query 0 “one” gives 1 of its weight to key 0 “one”."
    canvas.focus()
    page.keyboard.press("ArrowDown")
    assert (page.text_content("#picture-said") or "").startswith("Query 1 “two” gives 0.")
    page.hover("#picture-queries .token:nth-child(3)")
    assert (page.text_content("#picture-said") or "").startswith("Query 2 “three”")
    page.click("#language")
    assert "此图含有文本" in page.inner_text("#picture")


@pytest.mark.parametrize(("option", "has_text"), [((), True), (("--no-text",), False)])
@pytest.mark.quick("False")
def test_no_text_leaves_the_picture_out(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    option: tuple[str, ...],
    has_text: bool,
) -> None:
    place = tmp_path / "page.html"
    ended = run_command(monkeypatch, capsys, "scan", "--html", place, "--max-length", 64, *option)
    assert ended.code == 0, ended.err
    assert bool(data_of(place.read_text("utf-8"))["pictures"]) is has_text


def compared(first: Weights, second: Weights) -> str:
    both = readings.reading(readings.site("layer.0"))
    return comparison_page(compare(both, both), ([first], [second]))


@pytest.mark.slow("a browser for a second")
def test_pictures_of_two_models_stand_side_by_side_and_point_at_the_same_query(open_page: Open) -> None:
    words = ("one", "two", "three", "four")
    sharp = replace(causal(words), weights=np.eye(4))
    html = compared(causal(words), sharp)
    assert "It holds the text of the attention picture" in shown_text(html)
    page = open_page(html)
    assert page.text_content("#attention-head") == "layer.0, head 2"
    page.locator("#before-map").scroll_into_view_if_needed()
    page.locator("#before-keys .token").nth(3).wait_for()
    page.locator("#before-queries .token").nth(2).hover()
    assert (page.text_content("#before-said") or "").startswith("Query 2 “three” gives 0.")
    assert page.text_content("#after-said") == "Query 2 “three” gives 1 of its weight to key 2 “three”."
    page.locator("#after-map").focus()
    page.keyboard.press("ArrowDown")
    assert (page.text_content("#live") or "").endswith("Query 3 “four” gives 1 of its weight to key 3 “four”.")
    page.click("#language")
    assert "前后对照" in page.inner_text("#attention")
    assert "no text and no token" in shown_text(compared(causal(words), replace(sharp, head=3))), "of one side alone"


@pytest.mark.slow("scans two models")
def test_compare_embeds_text_only_where_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    place, model = tmp_path / "page.html", encoder.folder()
    for option, many in ((), 0), (("--picture",), MOST_PAIRS):
        ended = run_command(monkeypatch, capsys, "compare", model, model, "--html", place, *option)
        assert ended.code == 0, ended.err
        assert len(data_of(place.read_text("utf-8"))["pictures"]) == many


def test_a_picture_of_a_stored_scan_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    stored = readings.FIXTURES / "minilm.json"
    ended = run_command(monkeypatch, capsys, "compare", stored, stored, "--html", tmp_path / "a.html", "--picture")
    assert ended.code == 2
    assert "no file of a scan and no run" in " ".join(ended.err.split())
