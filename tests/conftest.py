"""The lanes ``--all`` and ``--long``, and counts printed at the end: a skipped or missing test should not go unseen."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
# Triton reads it when a kernel is defined: here its kernels run on the CPU.
os.environ.setdefault("TRITON_INTERPRET", "1")

from hypothesis import HealthCheck, settings

from tests.support import models_seen
from tests.support.cover import HELD_BACK, held_back, left_to

for profile, examples in {"default": 12, "all": 40, "nightly": 1500}.items():
    settings.register_profile(
        profile,
        deadline=None,
        derandomize=True,
        max_examples=examples,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )

MEMORY, ROOM_BYTES = "/dev/shm", 4 << 30


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run what a default run holds back, too")
    parser.addoption("--long", action="store_true", help="run what --all leaves out, alone, or with --all every test")
    parser.addoption("--fuzz", type=int, help="random calls of tests/fuzz (40, with --all 1,000)")
    parser.addoption("--fuzz-from", type=int, default=0, help="the first seed of tests/fuzz")
    parser.addoption("--write-models", action="store_true", help="write docs/models.md from what the tests found")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "hostile(backend): a case of the table of hostile inputs; counted per backend")
    config.addinivalue_line("markers", "slow(why): only --all runs it, for this reason")
    config.addinivalue_line("markers", "long(why): only --long runs it, for this reason: a case takes minutes")
    config.addinivalue_line("markers", "quick(*words): by default only cases with one of these words in their ids")
    config.addinivalue_line("markers", "each: by default each value of its parameters stands in a case at least once")
    config.addinivalue_line("markers", "turns(n): by default one in n of its cases, others in other tests of the table")
    config.addinivalue_line("markers", "grid: a pairwise cover of its parameters by default, all with --all")
    config.stash[HELD_BACK] = {}
    # A commit waits for a disk, and tests make a thousand stored runs: where there is room, their files are in memory.
    if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ROOM_BYTES:
        os.environ.setdefault("TMPDIR", MEMORY)
        tempfile.tempdir = None  # pytest has asked for it already
    # The process that only hands cases out to workers loads no torch: it would take seconds, and no worker begin.
    if config.getoption("dist", "no") == "no":
        from tests.support import fixtures

        config.pluginmanager.register(fixtures)
    if not config.getoption("--hypothesis-profile"):
        settings.load_profile("all" if config.getoption("--all") or config.getoption("--long") else "default")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps the cases of this lane; what is named by itself (``file::test``) or by ``-m slow`` runs in any."""
    named = any("::" in argument for argument in config.args) or "slow" in (config.getoption("markexpr") or "")
    lanes = config.getoption("--all"), config.getoption("--long")
    if named or all(lanes):
        return
    long = {item: marker.args[0] for item in items if (marker := item.get_closest_marker("long"))}
    others = [item for item in items if item not in long]
    if config.getoption("--long"):
        config.hook.pytest_deselected(items=others)
        items[:] = long
        return
    some = {} if config.getoption("--all") else held_back(others)
    config.hook.pytest_deselected(items=[*some, *long])
    items[:] = [item for item in others if item not in some]
    config.stash[HELD_BACK] = left_to("--all", some) | left_to("--long", long)
    if hasattr(config, "workeroutput"):
        config.workeroutput["held back"] = config.stash[HELD_BACK]  # pyright: ignore[reportAttributeAccessIssue]


def pytest_collection() -> None:
    """Loads modules and makes cases that stay: until they are there, no collection of garbage looks at them."""
    gc.disable()


def pytest_collection_finish() -> None:
    """What is loaded by now stays: no collection of garbage needs to look at it again, nor pytest's own at the end."""
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)  # tests that ask what is left collect by themselves
    gc.enable()
    atexit.register(gc.unfreeze)  # triton's bindings tell of leaks where they are not let go in order


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Files of tests have no doctests: to look for them in each takes seconds."""
    return [one for one in (yield) if type(one) is pytest.Module]


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
    for (lane, why), number in sorted(held.items(), key=lambda one: -one[1]):
        terminalreporter.write_line(f"left to {lane}: {number:5d} {why}")
    skipped = len(terminalreporter.stats.get("skipped", []))
    left = Counter[str]({"--all": 0})
    for (lane, _), number in held.items():
        left[lane] += number
    counts = ", ".join(f"left to {lane}: {number} in all" for lane, number in left.items())
    terminalreporter.write_line(f"{counts}; skipped (reasons above): {skipped}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A whole run compares models_seen.jsonl with what its tests found, or writes it and docs/models.md."""
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
            reporter.write_line("\nmodels_seen.jsonl was not checked: some of its models are not installed")
            return
        differences = models_seen.differences(rows, models_seen.load())
        for line in differences:
            reporter.write_line(f"\ntests/support/models_seen.jsonl: {line}")
        if differences:
            reporter.write_line("write it anew: pytest --all --write-models")
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _whole_run(config: pytest.Config) -> bool:
    chosen = config.getoption("keyword") or config.getoption("markexpr") or config.getoption("deselect")
    chosen = chosen or config.getoption("collectonly")
    lane = config.getoption("--all") and not config.getoption("--long")
    return bool(lane) and not chosen and config.args == config.getini("testpaths")
