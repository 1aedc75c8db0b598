"""A page, open in a real browser that tells everything that went wrong in it."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from html import unescape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from attemper.files import write_whole
from attemper.readings.reading import Reading
from attemper.results.run import Run, open_run
from attemper.results.scan import Scan
from attemper.types import Comparison
from tests.support.runs import collapsing, written

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Dialog, Page, ViewportSize

_WATCH = """
window.violations = [];
// Chromium complains in the console about a canvas that is read again and again: a copy of it may be.
window.copy = (canvas) => {
  const copied = document.createElement("canvas");
  [copied.width, copied.height] = [canvas.width, canvas.height];
  const pen = copied.getContext("2d", { willReadFrequently: true });
  pen.drawImage(canvas, 0, 0);
  return pen;
};
document.addEventListener("securitypolicyviolation", (event) => violations.push(event.violatedDirective));
"""


def shown_text(html: str) -> str:
    """What a page shows without scripts: its markup before the data, without tags."""
    body = html.partition("<body>")[2].partition('<script type="application/json"')[0]
    return " ".join(unescape(re.sub(r"<[^>]*>", "", body)).split())


def check_policy(html: str, inline: int) -> str:
    """The policy of a page, after it was seen to allow its so many scripts and styles and nothing else."""
    found = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    assert found
    policy = found.group(1).replace("&#39;", "'")
    own = re.findall(r"<(?:style|script)>(.*?)</(?:style|script)>", html, re.DOTALL)
    assert len(own) == inline
    for text in own:
        assert f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" in policy
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert "http" not in policy
    return policy


@pytest.fixture(scope="session")
def collapsed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, int], Run]]:
    """``collapsed(name, steps)``: a stored run of so many steps whose second layer collapses, to read and to draw."""
    folder, opened = tmp_path_factory.mktemp("collapsed"), ExitStack()

    @cache
    def run(name: str, steps: int) -> Run:
        written(folder / str(steps) / name, collapsing(steps))
        return opened.enter_context(open_run(folder / str(steps) / name))

    with opened:
        yield run


Open = Callable[..., "Page"]


@pytest.fixture(scope="session")
def tabs(browser: Browser) -> Iterator[Callable[..., Page]]:
    """``tabs(width, **context)``: a tab with these options of its context, as if new once a file is opened in it.

    A new context and the process of its tab take 1 CPU second, a file in a tab that is there a third of one.
    """
    kept: dict[tuple[tuple[str, Any], ...], Page] = {}

    def tab(width: int, **options: Any) -> Page:
        given = tuple(sorted(options.items()))
        size: ViewportSize = {"width": width, "height": 900}
        page = kept.get(given)
        if page is None or page.is_closed():
            context = browser.new_context(viewport=size, **options)
            context.add_init_script(_WATCH)
            page = kept[given] = context.new_page()
        else:  # what a test before may have changed, but for the document
            page.mouse.move(0, 0)
            page.set_viewport_size(size)
            page.emulate_media(
                media="null", color_scheme=options.get("color_scheme", "light"), reduced_motion="no-preference"
            )
        return page

    yield tab
    for page in kept.values():
        page.context.close()


@pytest.fixture
def open_page(tabs: Callable[..., Page], tmp_path: Path) -> Iterator[Open]:
    """``open_page(reading, width=..., **context)``, once in a test. At its end: no message in the console, no error, no
    dialog, no violation of the policy, and no request but for the file itself.
    """
    troubles: list[str] = []
    requests: list[str] = []
    opened: list[Page] = []

    def dismiss(dialog: Dialog) -> None:
        troubles.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    heard: dict[Any, Callable[..., None]] = {
        "console": lambda message: troubles.append(f"console: {message.text}"),
        "pageerror": lambda error: troubles.append(f"error: {error}"),
        "dialog": dismiss,
        "request": lambda request: requests.append(request.url),
    }

    def opening(
        shown: Reading | Comparison | Run | str, *, width: int = 1440, patterns: Sequence[Any] = (), **options: Any
    ) -> Page:
        assert not opened, "the tab of the first page would be taken"
        place = tmp_path / "page.html"
        if isinstance(shown, str):
            file = write_whole(place, shown)
        elif isinstance(shown, Reading):
            file = Scan(shown, None).to_html(place, patterns=patterns)
        else:
            file = shown.to_html(place)
        page = tabs(width, **options)
        opened.append(page)
        for event, hear in heard.items():
            page.on(event, hear)
        page.goto(file.as_uri())
        return page

    yield opening
    for page in opened:
        # Without scripts evaluate() still works, but the init script did not run.
        troubles += [f"policy: {directive}" for directive in page.evaluate("window.violations || []")]
        for event, hear in heard.items():
            page.remove_listener(event, hear)
    assert troubles == []
    assert set(requests) <= {(tmp_path / "page.html").as_uri()}
