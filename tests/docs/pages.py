"""The code of pages: what a section holds, and what it defines when it runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def code(page: str, section: str = "") -> list[str]:
    """Blocks of Python, of the whole page or of the section with this title."""
    text = (ROOT / page).read_text("utf-8")
    return BLOCK.findall(text.split(f"\n## {section}\n")[1].split("\n## ")[0] if section else text)


def run_code(page: str, names: dict[str, Any] | None = None, section: str = "") -> dict[str, Any]:
    """The names that blocks define, beside those that they take for granted. Errors have the lines of the page."""
    names = {"__name__": Path(page).stem} if names is None else names
    text = (ROOT / page).read_text("utf-8")
    for block in code(page, section):
        line = text[: text.index(block)].count("\n")
        exec(compile("\n" * line + block, page, "exec"), names)
    return names
