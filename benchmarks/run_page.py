"""Size of the page of a run, and the time until it can be used, in Chromium.

    python benchmarks/run_page.py [--steps 10000] [--layers 25 --heads 40]

Makes a stored run of drifting numbers in a temporary folder, writes its page, opens it in Chromium (playwright) and
prints: bytes, seconds to write, milliseconds from the start of the navigation to the first paint and to the history
that is drawn. Needs the development tools.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from playwright.sync_api import Page, sync_playwright

import attemper
from attemper.bench.hardware import machine
from attemper.readings.sample import Sample, SiteLabel
from attemper.statistics import SHOWN, SHOWN_BY_NAME
from attemper.store.fragment import Fragment

NAMES = tuple(name for name in SHOWN if name not in SHOWN_BY_NAME)
COUNTS = ("rows", "judged_rows", "empty_rows", "nonfinite_rows")
REPEATS = 5
_MARKS = """
() => [performance.getEntriesByName("first-contentful-paint")[0]?.startTime ?? null, window.readyAt]
"""
_WATCH = """
new MutationObserver(() => {
  if (document.documentElement?.dataset.ready && !window.readyAt) {
    requestAnimationFrame(() => requestAnimationFrame(() => (window.readyAt = performance.now())));
  }
}).observe(document, { attributes: true, subtree: true, childList: true });
"""


def samples(layers: int, heads: int, steps: int) -> Iterator[Sample]:
    """Entropies that fall by a third, with noise of 0.03; the rest follows from them."""
    labels = tuple(
        SiteLabel(f"model.layers.{layer}.self_attn", "self", "train", layer, "full", "softmax", heads)
        for layer in range(layers)
    )
    many, draw = layers * heads, np.random.default_rng(0)
    base = draw.uniform(0.2, 0.9, many)
    names = (*NAMES, "judged_normalized_entropy", "judged_first_token_mass", *COUNTS)
    for step in range(steps):
        entropy = np.clip(base * (1 - 0.3 * step / steps) + 0.03 * draw.standard_normal(many), 0.01, 1)
        of = {
            "normalized_entropy": entropy,
            "entropy_nats": 6 * entropy,
            "effective_tokens": np.exp(5 * entropy),
            "max_weight": 1 - 0.9 * entropy,
            "max_logit": 20 * (1 - entropy) + draw.standard_normal(many),
            "logit_std": 3 * (1 - entropy) + 0.1 * draw.standard_normal(many),
            "mass": np.ones(many),
            "first_token_mass": np.clip(0.3 * entropy + 0.02 * draw.standard_normal(many), 0, 1),
            "judged_normalized_entropy": entropy,
            "judged_first_token_mass": 0.3 * entropy,
            "rows": np.full(many, 4096.0),
            "judged_rows": np.full(many, 4000.0),
        }
        values = np.array([of.get(name, np.zeros(many)) for name in names], np.float32)
        yield Sample(step, 1e9 + step, labels, names, values)


def opened(page: Page, file: Path) -> tuple[float, float]:
    """Milliseconds to the first paint, and to the history that is drawn."""
    page.goto(file.as_uri())
    page.locator("html[data-ready]").wait_for(state="attached")
    page.wait_for_timeout(300)
    paint, ready = page.evaluate(_MARKS)
    return float(paint or 0.0), float(ready)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, number in (("layers", 24), ("heads", 16), ("steps", 3000)):
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--run", type=Path, help="a run that is there, in place of a made one")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as api:
        place = given.run or Path(folder)
        if given.run is None:
            fragment = Fragment(place / "fragment-0.sqlite")
            for sample in samples(given.layers, given.heads, given.steps):
                fragment.append(sample)
                fragment.fold()
            fragment.close()
        began = time.perf_counter()
        with attemper.open(place) as run:
            file = run.to_html(Path(folder) / "page.html")
            heads, taken = sum(site.heads for site in run.sites), len(run)
        seconds = time.perf_counter() - began
        browser = api.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.add_init_script(_WATCH)
        times = [opened(page, file) for _ in range(REPEATS)]
        drawn = json.loads(page.text_content("#data") or "{}")["run"]
        browser.close()
        found = {
            "heads": heads,
            "samples": taken,
            "columns": drawn["columns"],
            "statistics": len(drawn["statistics"]),
            "alarmed_courses": len(drawn["exact"]),
            "bytes": file.stat().st_size,
            "write_s": round(seconds, 2),
            "first_paint_ms": round(statistics.median(paint for paint, _ in times)),
            "ready_ms": round(statistics.median(ready for _, ready in times)),
            "slowest_ready_ms": round(max(ready for _, ready in times)),
            "processor": machine().processor,
        }
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
