"""A pattern as HTML without scripts, and as a picture."""

from __future__ import annotations

import base64
import builtins
import re
import struct
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from attemper.errors import InputError, MissingExtraError
from attemper.monitor.pattern import Pattern
from attemper.report.notebook import MISSING, VIRIDIS
from attemper.results.pattern import MOST_CELLS

WEIGHTS = torch.tensor([[1.0, 0.0, 0.0], [0.25, 0.75, 0.0]])


def made(rows: tuple[str, ...] = ("a", "b"), columns: tuple[str, ...] = ("a", "b", "c"), **changes: Any) -> Pattern:
    return Pattern(WEIGHTS, rows, "layers.0.attention", 3, columns, **changes)


class Parsed(HTMLParser):
    """Tags, their attributes and the text between them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_each_weight_is_a_cell_with_its_colour_and_its_number() -> None:
    parsed = Parsed(made()._repr_html_())
    cells = [attributes for tag, attributes in parsed.tags if tag == "td" and attributes.get("title")]
    assert [cell["title"] for cell in cells] == [
        "a → a: 1", "a → b: 0", "a → c: 0", "b → a: 0.25", "b → b: 0.75", "b → c: 0",
    ]  # fmt: skip
    colours = [re.findall(r"background:rgb\((\d+),(\d+),(\d+)\)", cell["style"] or "")[0] for cell in cells]
    assert tuple(map(int, colours[0])) == VIRIDIS[-1]
    assert tuple(map(int, colours[1])) == VIRIDIS[0]
    assert "layers.0.attention head 3: 2 queries x 3 keys" in parsed.text


def test_a_weight_that_is_no_number_is_grey() -> None:
    weights = WEIGHTS.clone()
    weights[1, 2] = float("nan")
    html = Pattern(weights, ("a", "b"), "x", 0, ("a", "b", "c"))._repr_html_()
    assert f"background:rgb({','.join(map(str, MISSING))})" in html
    assert "b → c: nan" in html


HOSTILE = ("<script>alert(1)</script>", '" onmouseover="alert(2)', "a\x00\u202eb", "</td></table>", "&lt;", "'")


def test_tokens_are_text_and_never_markup() -> None:
    columns, rows = HOSTILE[:3], HOSTILE[3:5]
    parsed = Parsed(Pattern(WEIGHTS, rows, "<svg onload=alert(3)>", 0, columns)._repr_html_())
    assert {tag for tag, _ in parsed.tags} <= {"div", "table", "thead", "tbody", "tr", "th", "td", "span"}
    assert {name for _, attributes in parsed.tags for name in attributes} <= {"style", "title", "scope"}
    assert "<script>alert(1)</script>"[:20] in parsed.text
    assert "a\\u0000\\u202eb" in parsed.text


def test_a_large_pattern_is_an_image_of_its_weights_that_loads_nothing() -> None:
    size = MOST_CELLS + 1
    weights = torch.zeros(2, size)
    weights[1, 7] = 0.5
    html = Pattern(weights, ("a", "b"), '"<b>', 0, ("k",) * size)._repr_html_()
    [image] = [attributes for tag, attributes in Parsed(html).tags if tag == "img"]
    assert image["alt"] == f'Heat map: "<b> head 0: 2 queries x {size} keys'
    assert len(html) < 3000
    png = base64.b64decode((image["src"] or "").removeprefix("data:image/png;base64,"))
    wide, tall, depth, colour = struct.unpack(">IIBB", png[16:26])
    assert (wide, tall, depth, colour) == (size, 2, 8, 2)
    start = png.index(b"IDAT")
    [length] = struct.unpack(">I", png[start - 4 : start])
    lines = zlib.decompress(png[start + 4 : start + 4 + length])
    pixel = 3 * size + 1 + 1 + 3 * 7
    assert tuple(lines[pixel : pixel + 3]) == VIRIDIS[-1]
    assert lines.count(bytes(VIRIDIS[-1])) == 1


@pytest.mark.parametrize("shape", [(0, 0), (1, 0), (60, 0)])
def test_an_empty_pattern_is_html_and_no_picture(shape: tuple[int, int], tmp_path: Path) -> None:
    pattern = Pattern(torch.zeros(shape), ("a",) * shape[0], "x", 0, ("b",) * shape[1])
    assert "x head 0" in pattern._repr_html_()
    with pytest.raises(InputError, match=f"there is nothing to draw: x head 0: {shape[0]} quer.* x 0 keys"):
        pattern.to_png(tmp_path / "x.png")


def test_a_picture_is_written_with_dollar_signs_as_they_are(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    written = made(columns=("$x^2$", "$", "\\frac"), rows=("$$", "\x00")).to_png(tmp_path / "head.png")
    assert written == tmp_path / "head.png"
    assert written.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["head.png"]


@pytest.mark.slow("draws for a second")
def test_a_picture_of_many_tokens_has_a_label_for_some(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    names = tuple(f"token {place}" for place in range(100))
    pattern = Pattern(torch.eye(100), names, "x", 0, names)
    assert pattern.to_png(tmp_path / "many.png").stat().st_size > 1000


def test_a_picture_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"the picture cannot be written to .* such as picture\.png"):
        made().to_png(tmp_path / "missing" / "head.png")


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain = builtins.__import__

    def missing(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return plain(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(MissingExtraError, match=r"Pattern.to_png needs the package matplotlib.*attemper\[plot\]"):
        made().to_png(tmp_path / "head.png")
    assert list(tmp_path.iterdir()) == []


def test_a_newline_and_a_tab_are_arrows() -> None:
    text = Parsed(made(rows=("a\n", "\t"))._repr_html_()).text
    assert "a↵" in text
    assert "⇥" in text
    assert "u000a" not in text
