"""Who may import whom: the table of docs/design/0001-architecture.md, held against every import in src/attemper.

A layer is a first part of a module's name: ``attemper.functional.stats`` belongs to ``functional``. Imports inside
functions count, and so do those for type checkers; only an ``__init__.py`` may import anything under ``TYPE_CHECKING``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import attemper

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs" / "design" / "0001-architecture.md"

ANYWHERE = {"errors", "_checks"}
"""May be imported by every layer above them; of the two, ``_checks`` may import ``errors``."""

MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "_checks": {"errors"},
    "records": set(),
    "schedules": set(),
    "_backends": set(),
    "_reference": set(),
    "kernels": set(),
    "_ops": {"kernels"},
    "functional": {"_ops", "_reference", "_backends"},
    "nn": {"functional", "schedules"},
    "sites": {"functional", "nn"},
    "store": {"records"},
    "monitor": {"sites", "functional", "store", "records", "report"},
    "control": {"monitor", "sites", "nn", "functional", "schedules"},
    "integrations": {"control", "monitor", "sites", "store", "nn", "functional"},
    "report": {"store", "records"},
    "lab": {"report", "control", "monitor", "sites", "nn", "functional", "schedules"},
}
MAY_IMPORT["cli"] = set(MAY_IMPORT)
FACADE = "attemper"
"""The package itself: its ``__init__.py`` imports nothing of ours before it is asked for a name."""

ONLY_INSIDE = {("monitor", "report"): "to_html"}
"""(importer, imported) -> the one function that may hold the import."""

WITHOUT_TORCH = {"errors", "_checks", "records", "store", "report"}
"""Never import torch: it costs seconds. The command line loads nothing else before a verb runs."""


@dataclass(frozen=True)
class Import:
    """One imported module, and where the import stands."""

    line: int
    target: str
    functions: tuple[str, ...]
    for_type_checkers: bool


@dataclass
class Imports(ast.NodeVisitor):
    """Collects every import of a module: statements, and ``import_module`` or ``__import__`` of a literal name."""

    package: str
    """What a relative import starts from."""
    homes: Mapping[str, str]
    """Public name -> the module it comes from: ``from attemper import attention`` is an import of that module."""
    found: list[Import] = field(default_factory=list)
    functions: tuple[str, ...] = ()
    for_type_checkers: bool = False

    def add(self, node: ast.AST, target: str) -> None:
        self.found.append(Import(getattr(node, "lineno", 0), target, self.functions, self.for_type_checkers))

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.add(node, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        if node.level:
            start = self.package.split(".")[: len(self.package.split(".")) - node.level + 1]
            module = ".".join([*start, module] if module else start)
        if module != FACADE:
            self.add(node, module)
            return
        for alias in node.names:
            if alias.name == "__version__":
                continue
            self.add(node, FACADE if alias.name == "*" else self.homes.get(alias.name, f"{FACADE}.{alias.name}"))

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in ("import_module", "__import__") and node.args and isinstance(node.args[0], ast.Constant):
            self.add(node, str(node.args[0].value))
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        # Decorators and defaults run where the function is defined, not when it is called.
        for outside in (*node.decorator_list, node.args):
            self.visit(outside)
        self.functions = (*self.functions, node.name)
        for statement in node.body:
            self.visit(statement)
        self.functions = self.functions[:-1]

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_If(self, node: ast.If) -> None:
        before = self.for_type_checkers
        self.visit(node.test)
        self.for_type_checkers = before or ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for statement in node.body:
            self.visit(statement)
        self.for_type_checkers = before
        for statement in node.orelse:
            self.visit(statement)


def imports_of(path: str, source: str, homes: Mapping[str, str]) -> list[Import]:
    """Imports of the file ``path`` (relative to src), but for those that an ``__init__.py`` keeps for type checkers."""
    place = Path(path)
    visitor = Imports(".".join(place.parent.parts), homes)
    visitor.visit(ast.parse(source))
    is_init = place.name == "__init__.py"
    return [found for found in visitor.found if not (is_init and found.for_type_checkers)]


def layer_of(module: str) -> str:
    """``functional`` for ``attemper.functional.stats``; ``attemper`` for the package itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else FACADE


def violations(sources: Mapping[str, str], homes: Mapping[str, str]) -> Iterator[str]:
    """One line for each import that the table does not allow: file, line, both layers, what is allowed instead."""
    for path, source in sources.items():
        layer = layer_of(".".join(Path(path).with_suffix("").parts))
        layer = FACADE if path == f"{FACADE}/__init__.py" else layer
        if layer not in MAY_IMPORT and layer != FACADE:
            yield f"src/{path}:1: layer {layer!r} is not in the table of docs/design/0001-architecture.md"
            continue
        for found in imports_of(path, source, homes):
            reason = _refused(layer, found)
            if reason:
                yield f"src/{path}:{found.line}: {reason}"


def _refused(layer: str, found: Import) -> str | None:
    """Why a module of ``layer`` may not hold this import, or None."""
    top = found.target.split(".")[0]
    early = layer == "cli" and not found.functions and not found.for_type_checkers
    if top == "torch" and (layer in WITHOUT_TORCH or early):
        return f"layer {layer!r} imports torch, which it must never do" + (" outside a verb" if early else "")
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
    scope = ONLY_INSIDE.get((layer, target))
    if scope and scope not in found.functions:
        return f"layer {layer!r} may import layer {target!r} ({found.target}) only inside {scope}()"
    if early and target not in WITHOUT_TORCH | {"cli", FACADE}:
        return f"layer 'cli' imports layer {target!r} ({found.target}) outside a verb, where it would slow every start"
    return None


def package_sources() -> dict[str, str]:
    """Path relative to src -> source, for every file of the package."""
    src = ROOT / "src"
    return {path.relative_to(src).as_posix(): path.read_text("utf-8") for path in sorted(src.glob("attemper/**/*.py"))}


# --- the package itself ---


def test_every_import_is_one_that_the_table_allows():
    sources = package_sources()
    assert "attemper/functional/attention.py" in sources
    found = list(violations(sources, attemper._HOMES))
    assert not found, "\n" + "\n".join(found)


def test_the_table_in_the_design_note_is_the_one_enforced_here():
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", TABLE.read_text("utf-8"), re.MULTILINE)
    written = {layer: set(re.findall(r"`(\w+)`", cells)) for layer, cells in rows}
    assert written == MAY_IMPORT | {"cli": set()}  # what the command line may import is said in words


def test_the_package_init_holds_no_logic():
    tree = ast.parse(package_sources()["attemper/__init__.py"])
    docstring, *statements = tree.body
    assert isinstance(docstring, ast.Expr)
    for statement in statements:
        match statement:
            case ast.Import() | ast.ImportFrom():
                pass
            case ast.If(test=ast.Name(id="TYPE_CHECKING"), body=body, orelse=[]):
                assert all(isinstance(inner, ast.ImportFrom) for inner in body)
            case ast.Assign(value=value):
                ast.literal_eval(value)
            case ast.FunctionDef(name=name):
                assert name in ("__getattr__", "__dir__")
            case _:
                pytest.fail(f"src/attemper/__init__.py:{statement.lineno}: {ast.unparse(statement)}")


def test_public_names_are_written_once_for_users_and_once_for_type_checkers():
    assert list(attemper.__all__) == sorted(attemper._HOMES)
    tree = ast.parse(package_sources()["attemper/__init__.py"])
    block = next(statement for statement in tree.body if isinstance(statement, ast.If))
    written = {}
    for statement in block.body:
        assert isinstance(statement, ast.ImportFrom)
        for alias in statement.names:
            module = str(statement.module)
            written[alias.name] = f"{FACADE}.{alias.name}" if module == FACADE else module
    assert written == attemper._HOMES


@pytest.mark.parametrize("name", attemper.__all__)
def test_every_public_name_loads_from_its_home(name):
    assert getattr(attemper, name) is not None
    assert name in dir(attemper)


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'attemper' has no attribute 'attenuate'"):
        _ = attemper.attenuate  # pyright: ignore[reportAttributeAccessIssue]


# --- the checker, on sources that are wrong on purpose ---

HOMES = {"attention": "attemper.functional.attention", "errors": "attemper.errors"}


def found_in(path: str, source: str) -> list[str]:
    return list(violations({path: source}, HOMES))


@pytest.mark.parametrize(
    ("path", "source", "line", "message"),
    [
        (
            "attemper/store/runs.py",
            "import os\nimport attemper.monitor.scan\n",
            2,
            "layer 'store' imports layer 'monitor'",
        ),
        ("attemper/store/runs.py", "from attemper.monitor import scan\n", 1, "layer 'store' imports layer 'monitor'"),
        ("attemper/store/runs.py", "from attemper import monitor\n", 1, "layer 'store' imports layer 'monitor'"),
        ("attemper/store/runs.py", "from ..monitor import scan\n", 1, "layer 'store' imports layer 'monitor'"),
        ("attemper/store/__init__.py", "from ..monitor import scan\n", 1, "layer 'store' imports layer 'monitor'"),
        (
            "attemper/kernels/__init__.py",
            "from .. import functional\n",
            1,
            "layer 'kernels' imports layer 'functional'",
        ),
        ("attemper/kernels/blocked.py", "from attemper import attention\n", 1, "imports layer 'functional'"),
        ("attemper/kernels/blocked.py", "import attemper\n", 1, "layer 'kernels' imports layer 'attemper'"),
        ("attemper/_reference.py", "from attemper._ops import run\n", 1, "it may import _checks, errors"),
        ("attemper/functional/a.py", "def f():\n    from attemper.nn import Softmax\n", 2, "imports layer 'nn'"),
        ("attemper/functional/a.py", "x = import_module('attemper.nn')\n", 1, "imports layer 'nn'"),
        ("attemper/functional/a.py", "x = importlib.import_module('attemper.nn')\n", 1, "imports layer 'nn'"),
        ("attemper/functional/a.py", "import attemper.kernels.blocked as b\n", 1, "imports layer 'kernels'"),
        ("attemper/_checks.py", "from attemper.records import Head\n", 1, "layer '_checks' imports layer 'records'"),
        ("attemper/errors.py", "import attemper._checks\n", 1, "layer 'errors' imports layer '_checks'"),
        ("attemper/__init__.py", "from attemper.functional import attention\n", 1, "imports layer 'functional'"),
        ("attemper/utils.py", "import os\n", 1, "layer 'utils' is not in the table"),
        ("attemper/utils/text.py", "import os\n", 1, "layer 'utils' is not in the table"),
        ("attemper/nn/softmax.py", "from attemper import helpers\n", 1, "layer 'helpers' is not in the table"),
        ("attemper/nn/softmax.py", "from attemper import *\n", 1, "layer 'nn' imports layer 'attemper'"),
    ],
)
def test_an_import_outside_the_table_is_told_with_its_line_and_both_layers(path, source, line, message):
    (found,) = found_in(path, source)
    assert found.startswith(f"src/{path}:{line}: ")
    assert message in found


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("attemper/functional/a.py", "from attemper import _backends\nfrom attemper._ops import run\n"),
        ("attemper/functional/__init__.py", "from attemper.functional.a import f\nfrom .b import g\n"),
        ("attemper/functional/a.py", "from attemper import attention, __version__\n"),
        (
            "attemper/kernels/blocked.py",
            "import torch\nfrom attemper.errors import InputError\nfrom attemper import _checks\n",
        ),
        ("attemper/lab/scaling.py", "from attemper.report import page\nfrom attemper.schedules import constant\n"),
        ("attemper/_ops.py", "from attemper.kernels import blocked\n"),
        ("attemper/__init__.py", "from importlib import import_module\nx = import_module(name)\n"),
        ("attemper/monitor/result.py", "def to_html(self):\n    from attemper.report import page\n"),
    ],
)
def test_what_the_table_allows_passes(path, source):
    assert found_in(path, source) == []


def test_imports_for_type_checkers_are_free_in_an_init_only():
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from attemper.lab import model\n"
    assert found_in("attemper/nn/__init__.py", source) == []
    assert len(found_in("attemper/nn/attention.py", source)) == 1
    assert len(found_in("attemper/nn/__init__.py", source.replace("if TYPE", "if not TYPE"))) == 1
    assert (
        len(found_in("attemper/nn/__init__.py", "if TYPE_CHECKING:\n    pass\nelse:\n    import attemper.lab\n")) == 1
    )


def test_monitor_imports_the_report_inside_to_html_only():
    (found,) = found_in("attemper/monitor/result.py", "def table(self):\n    from attemper.report import page\n")
    assert found.endswith("only inside to_html()")
    assert len(found_in("attemper/monitor/result.py", "import attemper.report\n")) == 1
    assert len(found_in("attemper/monitor/result.py", "def to_html(x=import_module('attemper.report')): ...\n")) == 1


@pytest.mark.parametrize("layer", sorted(WITHOUT_TORCH))
@pytest.mark.parametrize(
    "source", ["import torch", "from torch.nn import Module", "def f():\n    import torch.nn as nn"]
)
def test_a_layer_without_torch_never_imports_it(layer, source):
    (found,) = found_in(f"attemper/{layer}.py", source)
    assert f"layer '{layer}' imports torch" in found


def test_layers_without_torch_reach_only_each_other():
    for layer in WITHOUT_TORCH:
        assert MAY_IMPORT[layer] <= WITHOUT_TORCH


def test_the_command_line_loads_heavy_layers_inside_its_verbs():
    inside = "def scan():\n    import torch\n    from attemper.monitor.scan import scan\n"
    assert found_in("attemper/cli/scan.py", inside) == []
    assert (
        found_in("attemper/cli/scan.py", "import attemper\nfrom attemper import errors\nimport attemper.cli.app\n")
        == []
    )
    assert found_in("attemper/cli/scan.py", "if TYPE_CHECKING:\n    from attemper.monitor.scan import Scan\n") == []
    (found,) = found_in("attemper/cli/scan.py", "from attemper import attention\n")
    assert "layer 'functional' (attemper.functional.attention) outside a verb" in found
    (found,) = found_in("attemper/cli/scan.py", "import torch\n")
    assert found.endswith("imports torch, which it must never do outside a verb")


def test_the_table_has_no_circle():
    """The layers have an order: no chain of permitted imports comes back to where it began."""
    order: list[str] = []

    def visit(layer: str, path: tuple[str, ...]) -> None:
        assert layer not in path, f"circle: {' -> '.join((*path, layer))}"
        if layer in order:
            return
        for below in sorted(MAY_IMPORT[layer] - {layer}):
            visit(below, (*path, layer))
        order.append(layer)

    for layer in MAY_IMPORT:
        visit(layer, ())
    assert set(order) == set(MAY_IMPORT)
