"""The README's animated picture: a training whose heads collapse, the alarm, and the line that held it.

    .venv/bin/python scripts/animated_picture.py [--steps 400] [--runs FILE]

Two runs of ``attemper demo --inject collapse`` with the same seed, the second with a ``Thermostat``: about a minute
each on a free core. What they found is written to ``--runs``, and read from there if it is there. Frames are drawn
in Chromium and put together as a GIF, which GitHub shows. The font Inter is taken if it is installed.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from attemper.lab.trained.demo import DemoRun, Progress, run_demo
from attemper.report.notebook import ink_on, viridis

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "pictures" / "collapse.gif"
LARGEST_BYTES = 1_000_000
WIDTH, HEIGHT = 880, 424
COLOURS = 96
FLAT = ("#ffffff", "#f3f1f6", "#fdece9", "#e6f3ec", "#c4361f", "#8f1d10", "#14523a", "#201c28")
"""Colours of STYLE."""
LINE = 'thermostat = attemper.Thermostat(model, target_entropy=(0.25, 0.75), unit="normalized")'
STYLE = """
* { box-sizing: border-box; margin: 0; }
body { width: 880px; height: 424px; padding: 18px 26px; background: #fff; color: #201c28; overflow: hidden;
       font: 15px/1.4 Inter, "DejaVu Sans", sans-serif; }
code { font: 13px/1.4 "DejaVu Sans Mono", monospace; }
.top { display: flex; justify-content: space-between; align-items: baseline; height: 26px; }
.top b { font-variant-numeric: tabular-nums; font-weight: 600; }
.two { display: grid; grid-template-columns: 1fr 1fr; gap: 34px; margin-top: 14px; }
h2 { font-size: 16px; font-weight: 700; height: 24px; }
.waiting { opacity: 0.25; }
.row { display: flex; gap: 16px; margin-top: 6px; }
.row svg { display: block; margin-bottom: -5px; }
.map { display: grid; grid-template-columns: repeat(4, 43px); gap: 3px; }
.map i { position: relative; height: 43px; border-radius: 5px; text-align: center;
         font: 600 13px/43px Inter, "DejaVu Sans", sans-serif; }
.map .rings { outline: 3px solid #c4361f; outline-offset: 1px; z-index: 1; }
.hint { color: #5c5766; font-size: 12.5px; margin-top: 7px; }
svg text { font: 12px Inter, "DejaVu Sans", sans-serif; fill: #5c5766; }
.foot { display: grid; align-content: center; height: 92px; margin-top: 14px; padding: 8px 16px; border-radius: 10px;
        background: #f3f1f6; }
.alarm { background: #fdece9; color: #8f1d10; }
.held { background: #e6f3ec; color: #14523a; }
.foot b { font-weight: 700; }
"""


@dataclass
class Told:
    """What one run showed: a list each of steps, losses (mean of the steps since) and entropies [layers, heads]."""

    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    entropies: list[list[list[float]]] = field(default_factory=list)
    loss: float = 0.0
    alarm: dict[str, Any] | None = None
    loss_alarm: int | None = None


def told(steps: int, intervention: str) -> Told:
    """Runs the demo, and keeps what it showed."""
    found, since = Told(), []

    def see(progress: Progress) -> None:
        since.append(progress.loss)
        if progress.scan is not None:
            found.steps.append(progress.step)
            found.losses.append(sum(since) / len(since))
            sites = progress.scan.sites
            found.entropies.append([[head.normalized_entropy or 0.0 for head in site.heads] for site in sites])
            since.clear()

    outcome = run_demo(DemoRun(steps=steps, inject="collapse", intervention=intervention), see)
    found.loss = outcome.loss
    if (alarm := outcome.attention_alarm) is not None:
        found.alarm = {"step": alarm.since, "head": alarm.head, "site": alarm.site, "message": alarm.message}
    found.loss_alarm = None if outcome.loss_alarm is None else outcome.loss_alarm.since
    return found


def runs(steps: int, file: Path) -> list[Told]:
    """The plain run and the held one; kept in ``file``."""
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps([asdict(told(steps, name)) for name in ("plain", "Thermostat")]), "utf-8")
    return [Told(**one) for one in json.loads(file.read_text("utf-8"))]


def head_map(run: Told, place: int) -> str:
    """A cell for each head, by layers; the head that the alarm names has a ring once it rang."""
    alarm = run.alarm if run.alarm is not None and run.steps[place] >= run.alarm["step"] else None
    cells = []
    for layer, heads in enumerate(run.entropies[place]):
        for head, value in enumerate(heads):
            colour = viridis(value)
            rings = alarm is not None and alarm["head"] == head and f".{layer}." in alarm["site"]
            cells.append(
                f'<i class="{"rings" if rings else ""}" style="background:rgb{colour};color:{ink_on(colour)}">'
                f"{100 * value:.0f}</i>"
            )
    return f'<div class="map">{"".join(cells)}</div>'


def curve(values: Sequence[float], low: float, high: float, steps: int, colour: str, every: int) -> str:
    """A line in a picture of 190 x 84."""
    points = " ".join(
        f"{190 * every * i / steps:.1f},{80 - 76 * (min(max(value, low), high) - low) / (high - low):.1f}"
        for i, value in enumerate(values)
    )
    return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'


def charts(run: Told, place: int) -> str:
    """The least mean entropy of a layer, and the loss, up to a sample; a line at the alarm."""
    last, every = run.steps[-1], run.steps[1]
    least = [min(sum(heads) / len(heads) for heads in layers) for layers in run.entropies[: place + 1]]
    parts = (
        ("sharpest layer, entropy", curve(least, 0, 1, last, "#472f7d", every), f"{least[-1]:.2f}"),
        ("loss", curve(run.losses[: place + 1], 2, 4, last, "#807a8b", every), f"{run.losses[place]:.2f}"),
    )
    drawn = []
    for name, line, number in parts:
        mark = ""
        if run.alarm is not None and run.steps[place] >= run.alarm["step"]:
            x = 190 * run.alarm["step"] / last
            dashed = 'stroke="#c4361f" stroke-width="1.5" stroke-dasharray="3 3"'
            mark = f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="82" {dashed}/>'
        drawn.append(
            f'<svg width="192" height="99"><line x1="0" x2="192" y1="82" y2="82" stroke="#dedae4"/>{mark}{line}'
            f'<text x="0" y="96">{name}</text><text x="192" y="96" text-anchor="end">{number}</text></svg>'
        )
    return f"<div>{''.join(drawn)}</div>"


def panel(title: str, run: Told, place: int | None) -> str:
    waiting = "" if place is not None else "waiting"
    body = f'<div class="row">{head_map(run, place or 0)}{charts(run, place or 0)}</div>'
    return f'<section class="{waiting}"><h2>{title}</h2>{body}</section>'


def frame(both: Sequence[Told], places: tuple[int, int | None]) -> str:
    """The body of one frame."""
    plain, held = both
    now = places[0] if places[1] is None else places[1]
    step, last = both[places[1] is not None].steps[now], plain.steps[-1]
    left, right = panel("as it was", plain, places[0]), panel("with one line", held, places[1])
    return (
        f'<div class="top"><span>A training. Half way, its learning rate goes wrong.</span>'
        f"<b>step {step} of {last + plain.steps[1]}</b></div>"
        f'<div class="two">{left}{right}</div>'
        '<p class="hint">Each cell is a head: 100 = looks at every key alike (yellow), 0 = at one key (violet).</p>'
        f"{foot(both, places)}"
    )


def foot(both: Sequence[Told], places: tuple[int, int | None]) -> str:
    """What is said below: nothing, the alarm, the line, and how it ended."""
    plain, held = both
    if places[1] is not None:
        end = places[1] == len(held.steps) - 1
        rang = "No alarm" if held.alarm is None else f"An alarm at step {held.alarm['step']}"
        said = (
            f"<b>Held.</b> {rang}; loss {held.loss:.2f} instead of {plain.loss:.2f} nats a byte."
            if end
            else "The same training, to the seed, with one line more (and thermostat.step() in the loop):"
        )
        return f'<div class="foot held"><p>{said}</p><code>{escape(LINE)}</code></div>'
    alarm = plain.alarm
    if alarm is None or plain.steps[places[0]] < alarm["step"]:
        command = f"$ attemper demo --inject collapse --steps {plain.steps[-1] + plain.steps[1]}"
        return f'<div class="foot"><code>{command}</code></div>'
    loss = "The loss rang no alarm." if plain.loss_alarm is None else f"The loss rang at step {plain.loss_alarm}."
    later = "" if places[0] < len(plain.steps) - 1 else f" {loss}"
    return (
        f'<div class="foot alarm"><p><b>Alarm at step {alarm["step"]}.</b>{later}</p>'
        f"<code>{escape(alarm['message'])}</code></div>"
    )


def story(both: Sequence[Told]) -> Iterator[tuple[tuple[int, int | None], int]]:
    """Places in both runs, and how long each is shown, in ms."""
    plain, held = both
    ends = len(plain.steps) - 1, len(held.steps) - 1
    rang = plain.steps.index(plain.alarm["step"]) if plain.alarm else ends[0]
    for place in sorted({*range(0, ends[0], 2), rang, ends[0]}):
        yield (place, None), 2600 if place == rang else 2200 if place == ends[0] else 90
    yield (ends[0], 0), 2000
    for place in sorted({*range(2, ends[1], 3), ends[1]}):
        yield (ends[0], place), 4500 if place == ends[1] else 90


def shot(tab: Page, body: str) -> Image.Image:
    tab.set_content(f"<style>{STYLE}</style>{body}")
    return Image.open(io.BytesIO(tab.screenshot())).convert("RGB")


def drawn(both: Sequence[Told]) -> tuple[list[Image.Image], list[int]]:
    """Every frame and its time, in one palette."""
    with sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        tab = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        frames, times = zip(*((shot(tab, frame(both, places)), time) for places, time in story(both)), strict=True)
        browser.close()
    # The palette is that of a few frames, in which every flat colour has room enough to be counted.
    told = [one for one, time in zip(frames, times, strict=True) if time > 1000]
    flat = [*FLAT, *(viridis(share / 15) for share in range(16))]
    sheet = Image.new("RGB", (WIDTH, len(told) * HEIGHT + 40 * len(flat)))
    for row, one in enumerate(told):
        sheet.paste(one, (0, row * HEIGHT))
    for row, colour in enumerate(flat):
        sheet.paste(colour, (0, len(told) * HEIGHT + 40 * row, WIDTH, len(told) * HEIGHT + 40 * row + 40))
    palette = sheet.quantize(COLOURS, dither=Image.Dither.NONE)
    return [one.quantize(palette=palette, dither=Image.Dither.NONE) for one in frames], list(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--runs", type=Path, default=ROOT / "build" / "animated-picture.json")
    parser.add_argument("--out", type=Path, default=PICTURE)
    given = parser.parse_args()
    frames, times = drawn(runs(given.steps, given.runs))
    frames[0].save(
        given.out, save_all=True, append_images=frames[1:], duration=times, loop=0, optimize=False, disposal=1
    )
    size = given.out.stat().st_size
    print(f"{given.out}: {len(frames)} frames, {sum(times) / 1000:.0f} s, {size:,} bytes")
    if size > LARGEST_BYTES:
        raise SystemExit(f"more than {LARGEST_BYTES:,} bytes: take fewer frames or colours")


if __name__ == "__main__":
    main()
