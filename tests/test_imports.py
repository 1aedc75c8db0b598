"""Who may import whom: every import in src/attemper against the table, and the checker against wrong sources."""

from __future__ import annotations

import ast
import importlib
import pickle
import re
from pathlib import Path

import pytest
from scripts import structure

import attemper
from tests.support.import_table import (
    FACADE,
    LATE,
    MAY_IMPORT,
    RESEARCH_INTERNALS,
    WITHOUT_TORCH,
    imports_of,
    violations,
)

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs" / "design" / "0001-architecture.md"


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


def test_research_imports_public_names_the_lab_and_a_short_list():
    allowed = {f"{FACADE}.{name}" for name in (*attemper.__all__, "lab")}
    found = {
        (path.relative_to(ROOT).as_posix(), imported.line, imported.target)
        for path in sorted((ROOT / "research").rglob("*.py"))
        for imported in imports_of(path.relative_to(ROOT).as_posix(), path.read_text("utf-8"), {})
        if imported.target.split(".")[0] == FACADE
    }
    assert len(found) > 50
    others = {one for one in found if one[2] not in allowed and not one[2].startswith(f"{FACADE}.lab.")}
    assert {target for *_, target in others} == RESEARCH_INTERNALS, sorted(others)


def test_the_table_in_the_design_note_is_the_one_enforced_here():
    rows = re.findall(r"^\| `([\w.]+)` \| (.*) \|$", TABLE.read_text("utf-8"), re.MULTILINE)
    written = {layer: set(re.findall(r"`([\w.]+)`", cells)) for layer, cells in rows}
    assert written == MAY_IMPORT | {"cli": set()}  # what the command line may import is said in words


def test_the_drawing_in_the_design_note_is_that_of_the_imports():
    drawn = structure.diagram(structure.sources_of()) + "\n"
    (written,) = re.findall(r"^```mermaid\n(.*?)^```$", TABLE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert written == drawn, "put what `python scripts/structure.py --diagram` prints there"


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
            case ast.Expr(value=ast.Constant()):
                pass
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
            assert (alias.asname == alias.name) == (alias.name in attemper._FORMER)
    assert written == attemper._HOMES | {name: home for name, (home, _) in attemper._FORMER.items()}


def test_every_public_name_loads_from_its_home():
    for name in attemper.__all__:
        assert getattr(attemper, name) is not None
        assert name in dir(attemper)


@pytest.mark.parametrize("name", attemper._FORMER)
def test_every_former_name_works_and_says_what_to_write_instead(name):
    home, line = attemper._FORMER[name]
    with pytest.warns(DeprecationWarning, match=re.escape(f"attemper.{name} goes in attemper 0.4; write {line}.")):
        found = getattr(attemper, name)
    with pytest.warns(DeprecationWarning, match=name):
        exec(f"from attemper import {name} as again", names := {})
    assert names["again"] is found is getattr(importlib.import_module(home), name)
    assert name not in {*dir(attemper), *attemper.__all__}
    if line.startswith("attemper.types."):
        assert getattr(attemper.types, name) is found


@pytest.mark.parametrize(
    "name",
    [
        *("attemper.readings.scan.Scan", "attemper.readings.comparison.Comparison", "attemper.monitor.pattern.Pattern"),
        *("attemper.readings.comparison.HeadChange", "attemper.fingerprints.record.Fingerprint"),
        *("attemper.fingerprints.record.SiteFingerprint", "attemper.fingerprints.record.ModelOutput"),
    ],
)
def test_pickles_of_earlier_versions_find_their_classes(name: str):
    module, _, attribute = name.rpartition(".")
    # What a pickle of 0.2 holds of a class: its module and its name.
    assert isinstance(pickle.loads(f"c{module}\n{attribute}\n.".encode()), type)


def test_no_files_import_each_other_in_functions_either():
    sources = structure.sources_of()
    assert structure.circles(sources) == []
    late = {"a": "def f():\n    from attemper import b\n", "b": "from attemper.a import f\n"}
    late = {f"attemper.{name}": source for name, source in late.items()}
    assert structure.circles(late) == [{"attemper.a", "attemper.b"}]


def test_imports_inside_functions_have_a_reason():
    late = {module.partition(".")[2] for module in structure.late_imports(structure.sources_of())}
    assert {name for name in late if not name.startswith("cli.") and name != "cli"} == {*LATE}


def test_dir_holds_public_names_alone():
    shown = [name for name in dir(attemper) if not name.startswith("__")]
    assert shown == sorted(attemper.__all__)
    assert len(shown) <= 34


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
            "attemper/store/a.py",
            "import os\nimport attemper.monitor.scan\n",
            2,
            "layer 'store' imports layer 'monitor'",
        ),
        ("attemper/store/a.py", "from attemper.monitor import scan\n", 1, "layer 'store' imports layer 'monitor'"),
        ("attemper/store/__init__.py", "from attemper import monitor\n", 1, "layer 'store' imports layer 'monitor'"),
        ("attemper/backends/blocked.py", "from attemper import attention\n", 1, "imports layer 'functional'"),
        ("attemper/backends/blocked.py", "import attemper\n", 1, "layer 'backends' imports layer 'attemper'"),
        (
            "attemper/backends/reference/softmax.py",
            "from attemper.call.operator import run\n",
            1,
            "it may import checks, errors, file_schema, files, former, statistics, text",
        ),
        ("attemper/functional/a.py", "def f():\n    from attemper.nn import Softmax\n", 2, "imports layer 'nn'"),
        ("attemper/functional/a.py", "x = import_module('attemper.nn')\n", 1, "imports layer 'nn'"),
        ("attemper/functional/a.py", "x = importlib.import_module('attemper.nn')\n", 1, "imports layer 'nn'"),
        ("attemper/nn/a.py", "import attemper.backends.blocked as b\n", 1, "imports layer 'backends'"),
        ("attemper/checks.py", "from attemper.readings import a\n", 1, "layer 'checks' imports layer 'readings'"),
        ("attemper/errors.py", "import attemper.checks\n", 1, "layer 'errors' imports layer 'checks'"),
        ("attemper/__init__.py", "from attemper.functional import attention\n", 1, "imports layer 'functional'"),
        ("attemper/utils.py", "import os\n", 1, "layer 'utils' is not in the table"),
        ("attemper/utils/text.py", "import os\n", 1, "layer 'utils' is not in the table"),
        ("attemper/nn/softmax.py", "from attemper import helpers\n", 1, "layer 'helpers' is not in the table"),
        ("attemper/nn/softmax.py", "from attemper import *\n", 1, "layer 'nn' imports layer 'attemper'"),
        ("attemper/lab/a.py", "from research import length\n", 1, "research, which stands beside the package"),
    ],
)
def test_an_import_outside_the_table_is_told_with_its_line_and_both_layers(path, source, line, message):
    (found,) = found_in(path, source)
    assert found.startswith(f"src/{path}:{line}: ")
    assert message in found


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("attemper/functional/a.py", "from attemper.call import names\nfrom attemper.call.operator import run\n"),
        ("attemper/functional/__init__.py", "from attemper.functional.a import f\n"),
        ("attemper/functional/a.py", "from attemper import attention, __version__\n"),
        ("attemper/backends/blocked.py", "import torch\nfrom attemper.errors import InputError\n"),
        ("attemper/backends/blocked.py", "from attemper import checks\n"),
        ("attemper/lab/scaling.py", "from attemper.report import page\nfrom attemper.schedules import constant\n"),
        ("attemper/call/operator.py", "from attemper.backends import blocked\n"),
        ("attemper/__init__.py", "from importlib import import_module\nx = import_module(name)\n"),
        ("attemper/results/scan.py", "def to_html(self):\n    from attemper.report import page\n"),
    ],
)
def test_what_the_table_allows_passes(path, source):
    assert found_in(path, source) == []


def test_imports_for_type_checkers_are_free_in_an_init_only():
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from attemper.lab import model\n"
    assert found_in("attemper/nn/__init__.py", source) == []
    assert len(found_in("attemper/nn/attention.py", source)) == 1
    assert len(found_in("attemper/nn/__init__.py", source.replace("if TYPE", "if not TYPE"))) == 1
    otherwise = "if TYPE_CHECKING:\n    pass\nelse:\n    import attemper.lab\n"
    assert len(found_in("attemper/nn/__init__.py", otherwise)) == 1


@pytest.mark.parametrize("layer", sorted(WITHOUT_TORCH))
def test_a_layer_without_torch_never_imports_it_and_reaches_only_others_without_it(layer: str):
    for source in ("import torch", "from torch.nn import Module", "def f():\n    import torch.nn as nn"):
        (found,) = found_in(f"attemper/{layer}.py", source)
        assert f"layer '{layer}' imports torch" in found
    assert MAY_IMPORT[layer] <= WITHOUT_TORCH


def test_the_command_line_loads_torch_inside_its_verbs_only():
    package = {
        "attemper/__init__.py": "",
        "attemper/monitor/__init__.py": "",
        "attemper/readings/__init__.py": "",
        "attemper/readings/alarms.py": "from attemper.readings.reading import Alarm\n",
        "attemper/monitor/scan.py": "from attemper.call import result\n",
        "attemper/readings/reading.py": "import json\n",
        "attemper/call/__init__.py": "",
        "attemper/call/result.py": "import torch\n",
    }

    def found(source: str) -> list[str]:
        return list(violations({"attemper/cli/scan.py": source} | package, HOMES))

    assert found("def scan():\n    import torch\n    from attemper.monitor.scan import scan\n") == []
    assert found("import attemper\nfrom attemper.readings.alarms import limits\nimport attemper.cli.app\n") == []
    assert found("if TYPE_CHECKING:\n    from attemper.monitor.scan import Scan\n") == []
    (line,) = found("import torch.nn\n")
    assert line.endswith("scan.py:1: layer 'cli' loads torch.nn outside a verb, where it slows every start")
    for source in ("from attemper.monitor import scan\n", "from attemper.monitor.scan import Scan\n"):
        (line,) = found(source)
        chain = "attemper.monitor.scan -> attemper.call.result -> torch outside a verb"
        assert chain in line.replace("scan.Scan", "scan")


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
