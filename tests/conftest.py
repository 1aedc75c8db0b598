"""Seeds, the ``--all`` option, and counts printed at the end: a skipped or missing test should not go unseen."""

from __future__ import annotations

import gc
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
# Triton reads it when a kernel is defined: here its kernels run on the CPU.
os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
from hypothesis import HealthCheck, settings

from attemper.backends import contract
from attemper.call import options
from attemper.lab import run
from attemper.sites import tap, tap_buffers
from tests.support import interpreter, models_seen
from tests.support.calls import PRESENT
from tests.support.cover import HELD_BACK, held_back
from tests.support.experiments import Run, kept_in
from tests.support.identical_training import FEW_STEPS, STEPS

# Thousands of tiny operations: threads would only wait for one another, for seconds where the machine is busy.
torch.set_num_threads(1)
for profile, examples in {"default": 20, "all": 40, "nightly": 1500}.items():
    settings.register_profile(
        profile,
        deadline=None,
        derandomize=True,
        max_examples=examples,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )

NATIVE = ("native",) if "native" in PRESENT else ()
"""Tests run on the native kernels, too; where a compiler is and they are not, test_native_build.py fails."""
BACKENDS = ("reference", "blocked", *NATIVE)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run what a default run holds back, too")
    parser.addoption("--fuzz", type=int, default=200, help="random calls of tests/fuzz (200)")
    parser.addoption("--fuzz-from", type=int, default=0, help="the first seed of tests/fuzz")
    parser.addoption("--write-models", action="store_true", help="write docs/models.md from what the tests found")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "hostile(backend): a case of the table of hostile inputs; counted per backend")
    config.addinivalue_line("markers", "slow(why): only --all runs it, for this reason")
    config.addinivalue_line("markers", "quick(*words): by default only cases with one of these words in their ids")
    config.addinivalue_line("markers", "grid: a pairwise cover of its parameters by default, all with --all")
    config.stash[HELD_BACK] = {}
    if not config.getoption("--hypothesis-profile"):
        settings.load_profile("all" if config.getoption("--all") else "default")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Holds back what only ``--all`` runs; what is named by itself (``file::test``) or by ``-m slow`` runs, too."""
    named = any("::" in argument for argument in config.args) or "slow" in (config.getoption("markexpr") or "")
    if config.getoption("--all") or named:
        return
    reasons = held_back(items)
    config.hook.pytest_deselected(items=list(reasons))
    items[:] = [item for item in items if item not in reasons]
    config.stash[HELD_BACK] = dict(Counter(reasons.values()))
    if hasattr(config, "workeroutput"):
        config.workeroutput["held back"] = config.stash[HELD_BACK]  # pyright: ignore[reportAttributeAccessIssue]


def pytest_collection() -> None:
    """Loads modules and makes cases that stay: until they are there, no collection of garbage looks at them."""
    gc.disable()


def pytest_collection_finish() -> None:
    """What is loaded by now stays: no collection of garbage needs to look at it again."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # triton's bindings tell of leaks where they are not let go in order


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    """Every worker of xdist collects the same cases."""
    node.config.stash[HELD_BACK] = getattr(node, "workeroutput", {}).get("held back", {})


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("hostile")
    if marker:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        item.user_properties.append(
            ("hostile", parameters.get("backend", marker.args[0] if marker.args else "measures"))
        )


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    cases: Counter[str] = Counter()
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            if report.when == "call":
                cases.update(backend for name, backend in report.user_properties if name == "hostile")
    if cases:
        counts = ", ".join(
            f"{cases[name]} on {name}" for name in ("reference", "blocked", "native", "triton", "measures")
        )
        terminalreporter.write_line(f"hostile cases: {counts}")
    held = config.stash[HELD_BACK]
    for why, number in sorted(held.items(), key=lambda one: -one[1]):
        terminalreporter.write_line(f"left to --all: {number:5d} {why}")
    skipped = len(terminalreporter.stats.get("skipped", []))
    terminalreporter.write_line(f"left to --all: {sum(held.values())} in all; skipped (reasons above): {skipped}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A whole run holds docs/models.md against what its tests found, or writes it."""
    config = session.config
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if hasattr(config, "workerinput") or reporter is None:
        return
    rows = models_seen.joined(
        models_seen.Seen(*given)
        for report in reporter.stats.get("passed", [])
        if report.when == "call"
        for name, given in report.user_properties
        if name == models_seen.PROPERTY
    )
    if config.getoption("--write-models"):
        models_seen.write(rows)
        reporter.write_line(f"\ndocs/models.md written: {len(rows)} rows")
    elif _whole_run(config) and session.exitstatus == 0:
        if any("build/vision" in str(report.longrepr) for report in reporter.stats.get("skipped", [])):
            reporter.write_line("\ndocs/models.md was not checked: some of its models are not installed")
            return
        differences = models_seen.differences(rows, models_seen.rows_of_page())
        for line in differences:
            reporter.write_line(f"\ndocs/models.md: {line}")
        if differences:
            reporter.write_line("write it anew: pytest --all --write-models")
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _whole_run(config: pytest.Config) -> bool:
    chosen = config.getoption("keyword") or config.getoption("markexpr") or config.getoption("deselect")
    chosen = chosen or config.getoption("collectonly")
    return bool(config.getoption("--all")) and not chosen and config.args == config.getini("testpaths")


@pytest.fixture
def seen(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """``seen(library, model, way, error_nats=, identical_steps=, skipped=)``: a row of docs/models.md."""
    return models_seen.recorder(record_property)


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    # torch.manual_seed takes a stack trace for a GPU that is not in use yet: 1 ms, ten thousand times.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True)
def _no_watch_is_left() -> Iterator[None]:
    """A watch that is left open sees the taps of every later test of the process."""
    yield
    if not (tap._listeners or tap_buffers._receivers):
        return
    gc.collect()  # those that somebody dropped without closing them
    left = len(tap._listeners), len(tap_buffers._receivers)
    tap._listeners.clear()
    tap_buffers._receivers.clear()
    tap_buffers._up.clear()
    assert left == (0, 0), "this test left a watch open"


@pytest.fixture(scope="session")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """``experiment(name, seed=0)``: what ``lab.run`` gives, computed once for all tests and workers.

    Not for a test that changes what the experiment reads.
    """
    folder = tmp_path_factory.getbasetemp()
    return kept_in(folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder, run)


@pytest.fixture
def full_size(request: pytest.FixtureRequest) -> bool:
    """Whether a test that has a smaller and a larger size runs the larger: with ``--all``."""
    return bool(request.config.getoption("--all"))


@pytest.fixture
def derivatives_agree(full_size: bool) -> Callable[..., bool]:
    """``derivatives_agree(function, inputs)``: the first and second ones are those of differences.

    PyTorch's gradcheck and gradgradcheck: along random directions by default, with ``--all`` of every entry.
    """

    def agree(function: Callable[..., Any], inputs: Any, **options: Any) -> bool:
        first, second = torch.autograd.gradcheck, torch.autograd.gradgradcheck
        return all(check(function, inputs, fast_mode=not full_size, **options) for check in (first, second))

    return agree


@pytest.fixture
def steps(full_size: bool) -> int:
    """How many steps a model is trained with and without a watch."""
    return STEPS if full_size else FEW_STEPS


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def interpreted():
    """Triton's kernels run in its interpreter."""
    with interpreter.interpreting():
        yield


@pytest.fixture
def tiled(monkeypatch: pytest.MonkeyPatch):
    """``tiled(rows, keys, scores)``: the public functions cut their tiles so, from here to the end of the test."""

    def cut(*tile: int) -> None:
        sizes = dict(zip(("tile_rows", "tile_keys", "tile_elements"), tile, strict=False))
        monkeypatch.setattr(options, "Problem", partial(contract.Problem, **sizes))

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
