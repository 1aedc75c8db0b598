"""The one browser of a process: pages of reports and of the site are looked at in it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

CHROMIUM = shutil.which("chromium")
_QUIET = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
    "--disable-software-rasterizer",  # no stand-in for a GPU: a page opens with a quarter less work
)  # fmt: skip


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Chromium. Playwright starts once in a process, so there is no second fixture like it."""
    if CHROMIUM is None:
        pytest.skip("needs chromium (Debian: apt-get install chromium); scripts/test.sh installs it")
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'attemper[dev]'")
    with api.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=CHROMIUM, args=list(_QUIET))
        yield launched
        launched.close()
