"""Writes docs/articles/from-article-to-library.md and its Chinese twin from the cases in tests/articles.

.venv/bin/python scripts/article_pages.py            # run every snippet, write both pages
.venv/bin/python scripts/article_pages.py --check    # say where the pages differ from what the snippets do
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.articles.pages import PAGES, differences, page  # noqa: E402


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print(__doc__)
        return 2
    if arguments:
        found = [line for language in PAGES for line in differences(language)]
        print("\n".join(found) or "both pages are what the snippets do")
        return 1 if found else 0
    for language, path in PAGES.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(page(language), encoding="utf-8")
        print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
