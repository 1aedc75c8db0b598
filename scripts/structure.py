"""Prints the counts by which docs/design/0010-one-house.md is judged: python scripts/structure.py [FOLDER]

Files and lines of Python, circles of imports between files, files that name a statistic, places that ask for softmax
by name, imports of another file's private names, short files, signatures that the formatter may not touch.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

PACKAGE = "attemper"
SHORT = 60
STATISTIC = "effective_tokens"
BY_NAME = re.compile(r"""[!=]= ?"softmax"|"softmax" [!=]=|in ROW_NORMALIZERS""")
SKIP = re.compile(r"# fmt: skip$", re.MULTILINE)


def main(arguments: list[str]) -> int:
    folder = Path(arguments[0]) if arguments else Path(__file__).parents[1] / "src" / PACKAGE
    sources = {module_of(path, folder): path.read_text("utf-8") for path in sorted(folder.rglob("*.py"))}
    if not sources:
        print(f"no Python files below {folder}", file=sys.stderr)
        return 2
    for name, value in counts(sources).items():
        print(f"{value:>7,}  {name}")
    return 0


def module_of(path: Path, folder: Path) -> str:
    """``attemper.call.result`` for its file; a package for its ``__init__.py``."""
    parts = path.relative_to(folder).with_suffix("").parts
    return ".".join((PACKAGE, *(parts[:-1] if parts[-1] == "__init__" else parts)))


def counts(sources: Mapping[str, str]) -> dict[str, int]:
    by_name = {module: len(BY_NAME.findall(source)) for module, source in sources.items()}
    return {
        "files": len(sources),
        "lines": sum(source.count("\n") for source in sources.values()),
        "circles of imports, in groups of files": len(circles(sources)),
        f"files that name {STATISTIC}": sum(STATISTIC in source for source in sources.values()),
        "places that ask for softmax by name": sum(by_name.values()),
        "files that ask for softmax by name": sum(map(bool, by_name.values())),
        "imports of another file's private name": sum(1 for _ in private_imports(sources)),
        f"files under {SHORT} lines": sum(source.count("\n") < SHORT for source in sources.values()),
        "fmt: skip": sum(len(SKIP.findall(source)) for source in sources.values()),
    }


def imported(module: str, source: str, known: Mapping[str, str]) -> set[str]:
    """Files of the package that a file imports when it loads."""
    found: set[str] = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in known}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            inside = names & known.keys()
            found |= inside or ({node.module} & known.keys())
    return found - {module}


def circles(sources: Mapping[str, str]) -> list[set[str]]:
    """Groups of files that import each other, each of at least two."""
    below = {module: imported(module, source, sources) for module, source in sources.items()}
    reach = {module: reached(module, below) for module in below}
    groups = {frozenset(other for other in reach[module] if module in reach[other]) | {module} for module in below}
    return [set(group) for group in groups if len(group) > 1]


def reached(start: str, below: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = list(below[start])
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting += below[module]
    return found


def private_imports(sources: Mapping[str, str]) -> Iterator[str]:
    for module, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
                yield from (f"{module}: {alias.name}" for alias in node.names if re.match(r"_[^_]", alias.name))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
