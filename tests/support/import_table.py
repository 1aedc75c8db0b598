"""The import table of docs/design/0001-architecture.md as data, and a checker that holds sources against it.

A layer is the part of a name after the package: ``attemper.call.result`` is of ``call``. A room with two floors has a
row for the upper one, by its longer name: ``attemper.monitor.watch`` is of ``monitor.watch``. Imports inside functions
count, and so do those for type checkers; only an ``__init__.py`` may import anything under ``TYPE_CHECKING``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from scripts.structure import parsed, room_of

ANYWHERE = {"errors", "checks", "file_schema", "files", "former", "text", "statistics"}
"""May be imported by every layer above them; among themselves as the table says."""

MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "checks": {"errors"},
    "statistics": {"checks", "errors"},
    "text": set(),
    "files": {"errors", "text"},
    "former": set(),
    "file_schema": {"errors", "files", "text"},
    "schedules": set(),
    "backends": set(),
    "call": {"backends"},
    "functional": {"call"},
    "nn": {"functional", "schedules", "call"},
    "sites": {"functional", "nn", "call", "backends"},
    "readings": set(),
    "fingerprints": set(),
    "store": {"readings"},
    "report": {"store", "readings", "fingerprints"},
    "results": {"report", "fingerprints", "store", "readings"},
    "results.pattern": {"report", "readings"},
    "monitor": {
        *("sites", "functional", "results", "results.pattern", "fingerprints", "store", "readings", "call", "backends"),
    },
    "fingerprints.taking": {"monitor", "sites", "fingerprints", "readings", "call", "backends"},
    "rules": {"monitor", "sites", "results", "readings", "call", "backends"},
    "distributed": {"monitor", "sites", "results", "readings"},
    "monitor.watch": {"distributed", "monitor", "sites", "results", "store", "readings", "backends"},
    "control": {"monitor.watch", "distributed", "monitor", "sites", "nn", "functional", "schedules", "call"},
    "integrations": {
        *("control", "monitor.watch", "distributed", "monitor", "sites", "nn"),
        *("results", "report", "store", "readings"),
    },
    "bench": {"monitor.watch", "monitor", "functional", "call", "backends"},
    "lab": {
        *("bench", "control", "monitor.watch", "distributed", "monitor", "nn", "functional", "schedules", "call"),
        *("sites", "results", "report", "readings"),
    },
}
MAY_IMPORT["cli"] = set(MAY_IMPORT)
MAY_IMPORT["__main__"] = {"cli"}
MAY_IMPORT["types"] = {"call", "control", "fingerprints", "monitor.watch", "results", "results.pattern"}
FACADE = "attemper"
"""The package itself: its ``__init__.py`` imports nothing of ours before it is asked for a name."""

WITHOUT_TORCH = {
    "errors",
    "checks",
    "file_schema",
    "files",
    "former",
    "text",
    "statistics",
    "fingerprints",
    "readings",
    "store",
    "report",
    "results",
}
"""Never import torch: it costs seconds."""

LATE = {
    "__main__": "Ctrl-C while the command line loads ends with one line",
    "backends.native.library": "an install has no build.py",
    "fingerprints.record": "explaining fingerprints needs no code of files",
    "integrations.checkpoint": "SQLite loads where a folder may be a stored run",
    "lab": "the names of experiments are listed without torch",
    "lab.pages": "pages are listed without the models behind their numbers",
    "lab.trained.interventions": "an intervention loads what it acts with, in the process that trains",
    "monitor.compare": "of two files, neither a scan nor explain is loaded",
    "monitor.kept_run": "SQLite loads for a stored run alone",
    "monitor.recorder": "a run is judged anew only where it is continued",
    "readings.alarms": "a list of alarms is read without NumPy",
    "report.comparison": "curves load where runs are compared",
    "results.check": "code of pages loads where a page is written; so the next",
    "results.comparison": "pages, tables, floors",
    "results.explanation": "pages",
    "results.pattern": "pages",
    "results.run": "pages",
    "results.scan": "pages, tables, files of parts",
}
"""Modules outside ``cli`` that import inside functions, and why."""

BESIDE = {"benchmarks", "research", "scripts", "tests"}
"""In the repository, and not in the wheel."""

RESEARCH_INTERNALS = {
    "attemper.cli.lab",  # tables in the terminal
    "attemper.cli.output",  # lines on stderr
    "attemper.files",  # files that are written whole or not at all
    "attemper.readings.alarms",  # the list of alarms, which is judged
    "attemper.readings.judge",  # the judge of alarms
    "attemper.readings.alarm_laws",  # the laws by which detectors are what a watch computes
    "attemper.readings.reading",  # the fewest keys of a row that counts
    "attemper.readings.run_judge",  # the same of a whole run
    "attemper.readings.sample",  # what the judge is given
    "attemper.readings.visible_keys",  # what it is told of masks
}
"""What ``research/`` may import of the package, beside public names and ``attemper.lab``."""

HEAVY = {"torch", "numpy", "transformers", "safetensors"}
"""What the command line may load inside a verb only, directly or by way of our own modules."""


@dataclass(frozen=True)
class Import:
    """One imported module, and where the import stands."""

    line: int
    target: str
    in_function: bool
    for_type_checkers: bool
    members: tuple[str, ...] = ()
    """What is taken from the target: names in it, or modules of a package."""

    @property
    def early(self) -> bool:
        """Whether it runs as soon as its module loads."""
        return not self.in_function and not self.for_type_checkers


def imports_of(path: str, source: str, homes: Mapping[str, str]) -> list[Import]:
    """Imports of the file ``path`` (relative to src), but for those that an ``__init__.py`` keeps for type checkers:
    statements, and ``import_module`` or ``__import__`` of a literal name. Ruff refuses relative ones.

    Args:
        homes: public name -> the module it comes from: ``from attemper import attention`` is an import of that module.
    """
    by_call = "import_module" in source or "__import__" in source  # else expressions are not looked through
    found = _found(parsed(source), homes, by_call, False, False)
    is_init = Path(path).name == "__init__.py"
    return [one for one in found if not (is_init and one.for_type_checkers)]


def _found(
    node: ast.AST, homes: Mapping[str, str], by_call: bool, in_function: bool, for_type_checkers: bool
) -> Iterator[Import]:
    where = in_function, for_type_checkers
    match node:
        case ast.Import():
            yield from (Import(node.lineno, alias.name, *where) for alias in node.names)
        case ast.ImportFrom(module=str(module)) if module != FACADE:
            yield Import(node.lineno, module, *where, tuple(alias.name for alias in node.names))
        case ast.ImportFrom():
            names = [alias.name for alias in node.names if alias.name != "__version__"]
            targets = (FACADE if name == "*" else homes.get(name, f"{FACADE}.{name}") for name in names)
            yield from (Import(node.lineno, target, *where) for target in targets)
        case ast.Call(args=[ast.Constant(value=str(target)), *_]):
            if ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
                yield Import(node.lineno, target, *where)
    inside, typed = (), ()
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        inside = node.body  # decorators and defaults run where the function is defined, not when it is called
    elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        typed = node.body
    for child in ast.iter_child_nodes(node):
        if by_call or not isinstance(child, ast.expr):
            late, only_typed = in_function or child in inside, for_type_checkers or child in typed
            yield from _found(child, homes, by_call, late, only_typed)


def layer_of(module: str) -> str:
    """``call`` for ``attemper.call.result``; ``attemper`` for the package itself."""
    room = room_of(module)
    return FACADE if room == "__init__" else room


def violations(sources: Mapping[str, str], homes: Mapping[str, str]) -> Iterator[str]:
    """One line for each import that the table does not allow: file, line, both layers, what is allowed instead."""
    imports = {path: imports_of(path, source, homes) for path, source in sources.items()}
    for path in sources:
        layer = layer_of(".".join(Path(path).with_suffix("").parts))
        layer = FACADE if path == f"{FACADE}/__init__.py" else layer
        if layer not in MAY_IMPORT and layer != FACADE:
            yield f"src/{path}:1: layer {layer!r} is not in the table of docs/design/0001-architecture.md"
            continue
        for found in imports[path]:
            reason = _refused(layer, found) or _slow_start(layer, found, imports)
            if reason:
                yield f"src/{path}:{found.line}: {reason}"


def _refused(layer: str, found: Import) -> str | None:
    """Why a module of ``layer`` may not hold this import at all, or None."""
    top = found.target.split(".")[0]
    if top == "torch" and layer in WITHOUT_TORCH:
        return f"layer {layer!r} imports torch, which it must never do"
    if top in BESIDE:
        return f"layer {layer!r} imports {top}, which stands beside the package"
    if top != FACADE:
        return None
    target = layer_of(found.target)
    if target not in MAY_IMPORT and target != FACADE:
        return f"layer {layer!r} imports {found.target}, whose layer {target!r} is not in the table"
    allowed = MAY_IMPORT.get(layer, set()) | (set() if layer in ANYWHERE | {FACADE} else ANYWHERE)
    if layer == "cli":
        allowed = allowed | {FACADE}
    if target != layer and target not in allowed:
        names = ", ".join(sorted(allowed)) or "nothing of ours"
        return f"layer {layer!r} imports layer {target!r} ({found.target}); it may import {names}"
    return None


def _slow_start(layer: str, found: Import, imports: Mapping[str, list[Import]]) -> str | None:
    """Why this import of the command line must wait until a verb runs, or None."""
    if layer != "cli" or not found.early:
        return None
    chain = chain_to_heavy(found, imports)
    if chain is None:
        return None
    return f"layer 'cli' loads {' -> '.join(chain)} outside a verb, where it slows every start"


def chain_to_heavy(found: Import, imports: Mapping[str, list[Import]]) -> list[str] | None:
    """Modules from this import to one of ``HEAVY``, each loading the next; None if it loads none of them.

    ``imports``: those of every file, by its path.
    """
    chains = [[name] for name in (found.target, *(f"{found.target}.{member}" for member in found.members))]
    seen: set[str] = set()
    while chains:
        chain = chains.pop(0)
        if chain[-1].split(".")[0] in HEAVY:
            return chain
        for path in _files_loaded(chain[-1], imports):
            if path in seen:
                continue
            seen.add(path)
            for inner in imports[path]:
                if inner.early:
                    names = (inner.target, *(f"{inner.target}.{member}" for member in inner.members))
                    chains += [[*chain, name] for name in names if name.split(".")[0] in (FACADE, *HEAVY)]
    return None


def _files_loaded(module: str, sources: Mapping[str, object]) -> list[str]:
    """The files of ours that run when ``module`` is imported: its packages first, then itself."""
    parts = module.split(".")
    stems = ["/".join(parts[: i + 1]) for i in range(len(parts))]
    return [path for stem in stems for path in (f"{stem}/__init__.py", f"{stem}.py") if path in sources]
