"""Seeds, the ``--all`` option, and counts printed at the end: a skipped or missing test should not go unseen."""

from __future__ import annotations

import random
import sys
from collections import Counter
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from hypothesis import HealthCheck, settings

from attemper import _ops

# Thousands of tiny operations: threads would only wait for one another, for seconds where the machine is busy.
torch.set_num_threads(1)
settings.register_profile(
    "attemper", deadline=None, derandomize=True, max_examples=40, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
settings.load_profile("attemper")

BACKENDS = ("reference", "blocked")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the tests marked slow, too")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "hostile(backend): a case of the table of hostile inputs; counted per backend")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--all") or "slow" in (config.getoption("markexpr", "") or ""):
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="slow: run with --all"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("hostile")
    if marker:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        item.user_properties.append(
            ("hostile", parameters.get("backend", marker.args[0] if marker.args else "measures"))
        )


def pytest_terminal_summary(terminalreporter) -> None:
    cases: Counter[str] = Counter()
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            if report.when == "call":
                cases.update(backend for name, backend in report.user_properties if name == "hostile")
    skipped = terminalreporter.stats.get("skipped", [])
    slow = sum("slow: run with --all" in str(report.longrepr) for report in skipped)
    if cases:
        counts = ", ".join(f"{cases[name]} on {name}" for name in (*BACKENDS, "measures"))
        terminalreporter.write_line(f"hostile cases: {counts}")
    terminalreporter.write_line(f"skipped tests: {slow} slow (run with --all), {len(skipped) - slow} others")


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def tiled(monkeypatch: pytest.MonkeyPatch):
    """``tiled(rows, keys, scores)``: the public functions cut their tiles so, from here to the end of the test."""

    def cut(*tile: int) -> None:
        # The package's attribute of this name is the function, not the module.
        module = import_module("attemper.functional.attention")
        monkeypatch.setattr(module, "Arguments", partial(_ops.Arguments, tile=tile))

    return cut


@pytest.fixture
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.empty`` and its kin come full of NaN: a kernel that reads what it never wrote is found out."""

    def poisoned(make):
        def filled(*args, **kwargs):
            tensor = make(*args, **kwargs)
            return tensor.fill_(torch.nan) if tensor.dtype.is_floating_point else tensor

        return filled

    for place, name in ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(place, name, poisoned(getattr(place, name)))
