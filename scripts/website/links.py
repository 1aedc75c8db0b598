"""Whether every link of the site leads to a page, and every part of one that it names; and which leave it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = ("script", "img", "iframe", "source")
"""Elements that a browser loads without being asked; so it does a stylesheet."""


@dataclass
class Links(HTMLParser):
    """What a page links to, what it loads, and the parts of it that can be linked to."""

    targets: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    parts: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value}
        self.parts |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.targets.append(given["href"])
        elif tag == "link" and given.get("rel") not in ("alternate", "canonical") and "href" in given:
            self.loads.append(given["href"])
        elif tag in LOADED and "src" in given:
            self.loads.append(given["src"])


def read(site: Path) -> dict[Path, Links]:
    """Every page of the site, without those of the gallery, which are not ours to write here."""
    found = {}
    for path in sorted(site.rglob("*.html")):
        if "gallery" not in path.relative_to(site).parts[:-1]:
            found[path] = Links()
            found[path].feed(path.read_text("utf-8"))
    return found


def broken(pages: dict[Path, Links]) -> Iterator[str]:
    """``page: link``, of links inside the site that lead nowhere, and of files from elsewhere that a page loads."""
    for path, links in pages.items():
        for target in [*links.targets, *links.loads]:
            if not is_outside(target) and not leads(path, target, pages):
                yield f"{path}: {target} leads nowhere"
        yield from (f"{path}: loads {target} from elsewhere" for target in links.loads if is_outside(target))


def is_outside(target: str) -> bool:
    parts = urlsplit(target)
    return bool(parts.scheme or parts.netloc)


def leads(path: Path, target: str, pages: dict[Path, Links]) -> bool:
    parts = urlsplit(target)
    file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if parts.fragment and file in pages:
        return unquote(parts.fragment) in pages[file].parts
    return file.is_file()


def outside(pages: dict[Path, Links]) -> list[str]:
    """Addresses on other sites, each once. They are listed, not asked: a build needs no network."""
    return sorted({target for links in pages.values() for target in links.targets if is_outside(target)})
