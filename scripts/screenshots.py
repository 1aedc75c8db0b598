"""The pictures of the page in docs/pictures, taken in Chromium: of the model that ships and of a pretrained encoder.

    .venv/bin/python scripts/screenshots.py [--all FOLDER]

``--all`` takes every kind of page, whole, on a wide and a narrow screen, in English and Chinese, light and dark, into
a folder to look through: scans, a training that collapses, comparisons of runs and of models, two pages of the lab.
They look best where the font Inter is installed (Debian: fonts-inter): the page takes it if it is there.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # for the encoder that the tests use

from tests.support import encoder  # noqa: E402

PICTURES = ROOT / "docs" / "pictures"
LARGEST_BYTES = 300_000
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip


def picture(
    browser: Browser,
    page: Path,
    path: Path,
    screen: tuple[int, int],
    *,
    dark: bool = False,
    locale: str = "en-US",
    whole: bool = False,
) -> None:
    """The top of ``page``, or all of it, as a person with such a screen sees it: width and height; a narrow one is of
    a phone.
    """
    width, height = screen
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if dark else "light",
        locale=locale,
        device_scale_factor=2 if width < 500 else 1,
        has_touch=width < 500,
    )
    tab = context.new_page()
    tab.goto(page.as_uri())
    tab.locator("canvas, svg").first.wait_for()
    tab.wait_for_timeout(500)  # until the history is unpacked
    path.parent.mkdir(parents=True, exist_ok=True)
    tab.screenshot(path=path, full_page=whole)
    context.close()
    print(f"{path}: {path.stat().st_size:,} bytes")


def written(folder: Path, name: str, *command: str | Path) -> Path:
    """The page that ``attemper COMMAND --html`` writes; what else it writes is in ``folder``, too."""
    page = folder / f"{name}.html"
    called = [sys.executable, "-m", "attemper", *map(str, command), "--html", str(page)]
    subprocess.run(called, check=True, stdout=subprocess.DEVNULL, cwd=folder)
    return page


def other_pages(folder: Path) -> dict[str, Path]:
    """Pages of every other kind."""
    model = encoder.folder()
    return {
        "collapse": written(
            folder, "collapse", "demo", "--inject", "collapse", "--steps", "240", "--store", "collapse"
        ),
        "healthy": written(folder, "healthy", "demo", "--steps", "240", "--store", "healthy"),
        "runs": written(folder, "runs", "compare", "healthy", "collapse"),
        "models": written(folder, "models", "compare", model, model, "--picture", "--dtype", "bfloat16"),
        "temperature": written(folder, "temperature", "lab", "temperature"),
        "scaling": written(folder, "scaling", "lab", "scaling"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        pages = {
            "shipped": written(Path(folder), "shipped", "scan"),
            "page": written(Path(folder), "minilm", "scan", encoder.folder()),
        }
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=list(FLAGS))
        if options.all:
            every(browser, pages | other_pages(Path(folder)), options.all)
        else:
            picture(browser, pages["shipped"], PICTURES / "shipped-light.png", (1440, 1120))
            picture(browser, pages["page"], PICTURES / "page-light.png", (1440, 1320))
            picture(browser, pages["page"], PICTURES / "page-dark.png", (1440, 1320), dark=True)
            picture(browser, pages["page"], PICTURES / "page-phone.png", (390, 1120))
            too_large = [path.name for path in PICTURES.glob("*.png") if path.stat().st_size > LARGEST_BYTES]
            assert not too_large, f"too large to be shown on the web: {too_large}"
        browser.close()


def every(browser: Browser, pages: dict[str, Path], folder: Path) -> None:
    """Each page at 1440 and 390 pixels, in both languages, light and dark."""
    for name, page in pages.items():
        for screen, locale, dark in product(((1440, 1320), (390, 1600)), ("en-US", "zh-CN"), (False, True)):
            target = folder / f"{name}-{screen[0]}-{locale[:2]}-{'dark' if dark else 'light'}.png"
            picture(browser, page, target, screen, dark=dark, locale=locale, whole=True)


if __name__ == "__main__":
    main()
