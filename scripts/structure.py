"""Prints the counts by which docs/design/0010-one-house.md is judged: python scripts/structure.py [FOLDER]

Files and lines of Python, of them code, docstrings and imports; circles of imports between files, those inside
functions counted, and how many stand there; public names of the root; files that name a statistic, places that ask for
softmax by name, imports of another file's private names, short files, signatures that the formatter may not touch;
words of prose by kind, lines of tests, and files in git.

``python scripts/structure.py --diagram`` prints the rooms and who imports whom, as docs/design/0001-architecture.md
shows them: a Mermaid drawing of the imports that stand, without those that follow from others.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

PACKAGE = "attemper"
SHORT = 60
STATISTIC = "effective_tokens"
BY_NAME = re.compile(r"""[!=]= ?"softmax"|"softmax" [!=]=|in ROW_NORMALIZERS""")
SKIP = re.compile(r"# fmt: skip$", re.MULTILINE)


EVERYWHERE = (
    "checks",
    "file_schema",
    "errors",
    "files",
    "former",
    "text",
    "statistics",
    "__init__",
    "__main__",
    "conftest",
)
"""Not drawn: every room may import them, or they only start another."""
UPPER = ("fingerprints.taking", "monitor.watch", "results.pattern")
"""Upper floors of rooms: layers of their own."""


def main(arguments: list[str]) -> int:
    folders = [Path(argument) for argument in arguments if argument != "--diagram"]
    sources = sources_of(*folders)
    if not sources:
        print(f"no Python files below {folders[0]}", file=sys.stderr)
        return 2
    if "--diagram" in arguments:
        print(diagram(sources))
        return 0
    for name, value in (counts(sources) | ({} if folders else beside())).items():
        print(f"{value:>7,}  {name}")
    return 0


def sources_of(folder: Path = Path(__file__).parents[1] / "src" / PACKAGE) -> dict[str, str]:
    """Module -> its text, for every file of the package."""
    return {module_of(path, folder): path.read_text("utf-8") for path in sorted(folder.rglob("*.py"))}


def diagram(sources: Mapping[str, str]) -> str:
    """Rooms as a Mermaid graph: an arrow from each to those that it imports, but for what those import already."""
    below = rooms(sources)
    lines = ["graph TD"]
    for room in sorted(below):
        further = set[str]().union(*(reached(other, below) for other in below[room]))
        lines += [f"    {room} --> {other}" for other in sorted(below[room] - further)]
    return "\n".join(lines)


def rooms(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Room -> the rooms that its files import, at once or inside a function."""
    below: dict[str, set[str]] = {}
    for module, source in sources.items():
        room = room_of(module)
        if room in EVERYWHERE:
            continue
        found = {room_of(other) for other in imported(source, sources, inside=True)}
        below[room] = below.get(room, set()) | (found - {room, *EVERYWHERE})
    return below


def room_of(module: str) -> str:
    """``call`` for ``attemper.call.result``; the package itself is its ``__init__``."""
    name = module.partition(".")[2]
    return next((floor for floor in UPPER if f"{name}.".startswith(f"{floor}.")), name.partition(".")[0] or "__init__")


def module_of(path: Path, folder: Path) -> str:
    """``attemper.call.result`` for its file; a package for its ``__init__.py``."""
    parts = path.relative_to(folder).with_suffix("").parts
    return ".".join((PACKAGE, *(parts[:-1] if parts[-1] == "__init__" else parts)))


def counts(sources: Mapping[str, str]) -> dict[str, int]:
    by_name = {module: len(BY_NAME.findall(source)) for module, source in sources.items()}
    late = late_imports(sources)
    in_commands = sum(len(found) for module, found in late.items() if room_of(module) == "cli")
    return {
        "files": len(sources),
        "lines": sum(source.count("\n") for source in sources.values()),
        "of them docstrings": sum(map(docstring_lines, sources.values())),
        "of them imports": sum(map(import_lines, sources.values())),
        "circles of imports, late ones counted, in groups of files": len(circles(sources)),
        "imports inside functions, outside cli/": sum(map(len, late.values())) - in_commands,
        "imports inside functions, in cli/": in_commands,
        "public names of the root": public_names(sources),
        f"files that name {STATISTIC}": sum(STATISTIC in source for source in sources.values()),
        "places that ask for softmax by name": sum(by_name.values()),
        "files that ask for softmax by name": sum(map(bool, by_name.values())),
        "imports of another file's private name": sum(1 for _ in private_imports(sources)),
        f"files under {SHORT} lines": sum(source.count("\n") < SHORT for source in sources.values()),
        "fmt: skip": sum(len(SKIP.findall(source)) for source in sources.values()),
    }


def late_imports(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Module -> the files that only its functions import."""
    found = {module: imported(text, sources, inside=True) - imported(text, sources) for module, text in sources.items()}
    return {module: late for module, late in found.items() if late}


def imported(source: str, known: Mapping[str, str], inside: bool = False) -> set[str]:
    """Files of the package that a file imports when it loads; with ``inside``, in its functions too. Those for type
    checkers alone never run, and do not count.
    """
    found: set[str] = set()
    tree = parsed(source)
    for node in statements(tree) if inside else tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in known}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & known.keys() or {node.module} & known.keys()
    return found


@functools.cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """The statements in ``node`` that run."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if not isinstance(child, ast.expr):  # no statement stands in one
            yield child
            yield from statements(child)


def docstring_lines(source: str) -> int:
    """Lines of strings that stand alone: of modules, classes, functions, and below names."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr)]
    texts = [node for node in nodes if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)]
    return sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in texts)


def import_lines(source: str) -> int:
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    return sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in nodes)


def public_names(sources: Mapping[str, str]) -> int:
    """How many names the package's ``__all__`` has."""
    for node in ast.parse(sources.get(PACKAGE, "")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return len(ast.literal_eval(node.value))
    return 0


def beside() -> dict[str, int]:
    """What stands beside the code: words of prose by kind, lines of tests, files in git."""
    root = Path(__file__).parents[1]
    kept = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True).stdout.splitlines()
    words = Counter[str]()
    for name in kept:
        if name.endswith(".md"):
            kind = "docs/design" if name.startswith("docs/design/") else "docs" if name.startswith("docs/") else "root"
            words[f"words of {kind}, in {'Chinese' if '.zh-' in name else 'English'}"] += len(prose(root / name))
    tests = [root / name for name in kept if re.fullmatch(r"tests/.*\.py", name)]
    lines = sum(path.read_text("utf-8").count("\n") for path in tests)
    return {**dict(sorted(words.items())), "lines of tests": lines, "files in git": len(kept)}


def prose(path: Path) -> list[str]:
    """The words of a page, without code that stands apart and tables."""
    text = re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [word for line in text.splitlines() if not line.startswith("|") for word in line.split()]


def circles(sources: Mapping[str, str]) -> list[set[str]]:
    """Groups of files that import each other, at once or inside a function, each of at least two."""
    below = {module: imported(source, sources, inside=True) - {module} for module, source in sources.items()}
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
