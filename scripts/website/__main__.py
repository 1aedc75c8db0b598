"""The steps of scripts/docs.sh around Sphinx.

python -m scripts.website sources SOURCES          # writes the sources: SOURCES/en and SOURCES/zh-CN
python -m scripts.website gallery FOLDER           # writes the pages of the gallery
python -m scripts.website finish SOURCES SITE      # adds llms.txt to the site, and checks its links
"""

from __future__ import annotations

import sys
from pathlib import Path

from scripts.website import gallery, links, llms, sources


def main(arguments: list[str]) -> int:
    if len(arguments) == 2 and arguments[0] == "sources":
        return write_sources(Path(arguments[1]))
    if len(arguments) == 2 and arguments[0] == "gallery":
        gallery.write(Path(arguments[1]).resolve())
        return 0
    if len(arguments) == 3 and arguments[0] == "finish":
        return finish(Path(arguments[1]), Path(arguments[2]).resolve())
    print(__doc__)
    return 2


def write_sources(folder: Path) -> int:
    english = generated()
    for language in sources.LANGUAGES:
        sources.write(folder / language, language)
        (folder / language / "gallery.md").write_text(gallery.page(language), encoding="utf-8")
        for name, text in english.items():
            path = folder / language / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text if language == "en" else sources.with_notice(text, path.suffix), encoding="utf-8")
    return 0


def generated() -> dict[str, str]:
    """Pages that come from the code, in English."""
    from sphinx.ext.autodoc.mock import mock

    with mock(["keras"]):  # 600 MB that only its own page would need
        from scripts.website import api, commands

        return {"commands.md": commands.page(), **{f"api/{name}": text for name, text in api.pages().items()}}


def finish(folder: Path, site: Path) -> int:
    (site / "llms.txt").write_text(llms.text(folder / "en"), encoding="utf-8")
    pages = links.read(site)
    (site.parent / "links.txt").write_text("\n".join(links.outside(pages)) + "\n", encoding="utf-8")
    found = list(links.broken(pages))
    print("\n".join(found) or f"{len(pages)} pages: every link leads somewhere; those that leave are in links.txt")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
