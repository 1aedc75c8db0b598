"""The pictures of the page in docs/pictures, taken of a real reading in Chromium.

    .venv/bin/python scripts/screenshots.py

They look best where the font Inter is installed (Debian: fonts-inter): the page takes it if it is there.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from attemper import report

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # for the readings that the tests use

from tests.report import readings  # noqa: E402

PICTURES = ROOT / "docs" / "pictures"
LARGEST_BYTES = 300_000
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip


def picture(browser: Browser, page: Path, name: str, screen: tuple[int, int], *, dark: bool = False) -> None:
    """The top of ``page`` as a person with a screen of this width and height sees it; a narrow one is a phone's."""
    width, height = screen
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if dark else "light",
        device_scale_factor=2 if width < 500 else 1,
        has_touch=width < 500,
    )
    tab = context.new_page()
    tab.goto(page.as_uri())
    tab.locator(".map canvas").first.wait_for()
    path = PICTURES / name
    tab.screenshot(path=path)
    context.close()
    size = path.stat().st_size
    print(f"{path.relative_to(ROOT)}: {size:,} bytes")
    assert size < LARGEST_BYTES, f"{name} is too large to be shown on the web: {size:,} bytes"


def main() -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page = report.write(readings.minilm(), Path(folder) / "page.html")
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=list(FLAGS))
        picture(browser, page, "page-light.png", (1440, 1320))
        picture(browser, page, "page-dark.png", (1440, 1320), dark=True)
        picture(browser, page, "page-phone.png", (390, 1120))
        browser.close()


if __name__ == "__main__":
    main()
