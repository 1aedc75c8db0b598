"""``llms.txt``: the pages of the site with a line on each, for programs that read it, as Markdown (llmstxt.org)."""

from __future__ import annotations

import re
from pathlib import Path

ROW = re.compile(r"^\| \[\]\(/([^)]+)\) \| (.*) \|$")


def text(sources: Path) -> str:
    """From the sources of the site: the tables of its first page, with titles of pages, and where their text is."""
    index = (sources / "index.md").read_text("utf-8")
    summary = index.split("\n\n")[1]
    lines = ["# attemper", "", f"> {' '.join(summary.split())}"]
    for line in index.splitlines():
        if line.startswith("## "):
            lines += ["", line, ""]
        elif row := ROW.match(line):
            lines.append(f"- [{title(sources / row[1])}]({address(row[1])}): {row[2]}")
    return "\n".join(lines) + "\n"


def title(page: Path) -> str:
    return page.read_text("utf-8").splitlines()[0].removeprefix("# ")


def address(page: str) -> str:
    """The Markdown of a page; what is generated from docstrings is read as HTML."""
    return f"_sources/{page}.txt" if page.endswith(".md") else page.removesuffix(".rst") + ".html"
