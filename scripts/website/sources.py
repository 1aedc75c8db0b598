"""The sources of the site, a folder for each language: the Markdown of the repository, as the site shows it.

A page keeps its place below docs/; ``README.md`` becomes ``index.md``, CONTRIBUTING.md and CHANGELOG.md come beside it.
``page.zh-CN.md`` stands for ``page.md`` in the Chinese site, and a page without one is shown in English, and says so.
The tables of a README are the table of contents: every list of pages is written once.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from scripts.website import drawing

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
LANGUAGES = {"en": "English", "zh-CN": "中文"}
"""Language -> its name in it. The first is the language in which every page is written."""
TRANSLATED = ".zh-CN.md"
ENGLISH_ONLY = "本页还没有中文版，以下是英文原文。"
SUFFIXES = {".md", ".png", ".gif"}
FENCE = re.compile(r"^(```.*?^```$)", re.MULTILINE | re.DOTALL)
DIAGRAM = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s:#]+)(#[^()\s]*)?\)")
LANGUAGE_LINE = re.compile(r"^\[(?:English|中文)\]\([\w.-]+\.md\)\n+", re.MULTILINE)
ROW = re.compile(r"^\| \[[^\]]*\]\(([^()\s#]+?)(?:\.zh-CN)?\.md\)", re.MULTILINE)
ON_THE_SITE = re.compile(r"^\| (\w+) ?(?:\(on the site\)|（在网站上）) \|", re.MULTILINE)
"""A row of a page that is generated for the site: ``| name (on the site) | ... |``."""
GENERATED = {"gallery": "gallery.md", "commands": "commands.md", "api": "api/index.rst"}
"""Name in such a row -> the page that is generated."""


def write(folder: Path, language: str) -> None:
    """Writes what is taken from the repository into ``folder``, which must be empty or missing."""
    for path in originals():
        staged = folder / place(path)
        staged.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            staged.write_text(page(path, language, folder), encoding="utf-8")
        else:
            shutil.copyfile(path, staged)


def originals() -> list[Path]:
    """Every English page of the site, and its pictures."""
    found = [path for path in DOCS.rglob("*") if path.suffix in SUFFIXES and not path.name.endswith(TRANSLATED)]
    return sorted([*found, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"])


def place(path: Path) -> Path:
    """Where a file of the repository stands in the sources of the site."""
    inside = path.relative_to(DOCS) if path.is_relative_to(DOCS) else Path(path.name.lower())
    return inside.with_name("index.md") if inside.name == "README.md" else inside


def translation(path: Path, language: str) -> Path:
    """The page in that language; the English one where there is no other."""
    chinese = path.with_name(path.stem + TRANSLATED)
    return chinese if language != "en" and chinese.exists() else path


def page(path: Path, language: str, folder: Path) -> str:
    """The Markdown of a page as the site shows it."""
    source = translation(path, language)
    text = LANGUAGE_LINE.sub("", source.read_text("utf-8"), count=1)
    parts = FENCE.split(text)  # code at odd places
    parts[::2] = [LINK.sub(lambda link: mended(link, path, folder, language), part) for part in parts[::2]]
    text = ON_THE_SITE.sub(lambda row: f"| [](/{GENERATED[row[1]]}) |", "".join(parts))
    text = DIAGRAM.sub(lambda diagram: drawing.svg(diagram[1]), text)
    if path.name == "README.md":
        text += contents(path, source.read_text("utf-8"))
    return with_notice(text) if language != "en" and source == path else text


def mended(link: re.Match[str], path: Path, folder: Path, language: str = "en") -> str:
    """A link of the page ``path`` that leads to the same file from where the page stands in the site.

    A file that is no page of the site is copied to be looked at; a folder is named, without a link.
    """
    named = link[3].replace(TRANSLATED, ".md")
    target = Path(os.path.normpath(path.parent / named))
    if not target.exists():
        raise FileNotFoundError(f"{path.relative_to(ROOT)}: [{link[2]}]({link[3]}) leads to no file")
    if target.is_dir():
        return link[2]
    if target.suffix not in SUFFIXES or not known(target):
        staged = Path("files") / target.relative_to(ROOT)
        (folder / staged).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(target, folder / staged)
        return f"[{link[2]}](path:/{staged.as_posix()})"
    words = "" if link[2].endswith(Path(named).name) else link[2]  # the page's title in the place of its file's name
    return f"{link[1]}[{words}](/{place(target).as_posix()}{part(link[4] or '', target, language)})"


def part(fragment: str, target: Path, language: str) -> str:
    """``#heading`` of the English page, as the heading at the same place is called in that language."""
    read = translation(target, language)
    if not fragment or read == target:
        return fragment
    english, other = (anchors(page.read_text("utf-8")) for page in (target, read))
    return f"#{other[english.index(fragment[1:])]}"


def anchors(text: str) -> list[str]:
    """The anchors of a page's headings, as GitHub and MyST make them."""
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles]


def known(target: Path) -> bool:
    return target.is_relative_to(DOCS) or target.name in ("CONTRIBUTING.md", "CHANGELOG.md")


def contents(readme: Path, text: str) -> str:
    """The hidden tables of contents of a README: a part for each section that lists pages, in their order."""
    return "".join(
        f"\n```{{toctree}}\n:hidden:\n{caption}\n{lines}\n```\n"
        for title, names in sections(readme, text)
        if (lines := "\n".join(names))
        for caption in [f":caption: {title}\n" if title else ""]
    )


def sections(readme: Path, text: str) -> Iterator[tuple[str, list[str]]]:
    """(title, documents) of each section of a README; before the first title, it is empty."""
    for part in re.split(r"^## ", text, flags=re.MULTILINE):
        title = part.split("\n", 1)[0] if not part.startswith("#") else ""
        yield (
            title,
            [document(readme, line) for line in part.splitlines() if ROW.match(line) or ON_THE_SITE.match(line)],
        )


def document(readme: Path, line: str) -> str:
    """The document, from the root of the site, that a row of a table names."""
    if generated := ON_THE_SITE.match(line):
        return "/" + GENERATED[generated[1]].rsplit(".", 1)[0]
    row = ROW.match(line)
    assert row is not None
    return "/" + place(Path(os.path.normpath(readme.parent / f"{row[1]}.md"))).with_suffix("").as_posix()


def with_notice(text: str, suffix: str = ".md") -> str:
    """The page, which is in English, with a line below its title that says so in Chinese."""
    lines = 1 if suffix == ".md" else 2  # a title of reStructuredText is underlined
    note = f":::{{note}}\n{ENGLISH_ONLY}\n:::" if suffix == ".md" else f".. note:: {ENGLISH_ONLY}"
    parts = text.split("\n")
    return "\n".join([*parts[:lines], "", note, *parts[lines:]])
