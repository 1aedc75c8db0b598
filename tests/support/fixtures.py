"""What every test may ask for: seeds, backends, sizes by ``--all``, Triton's interpreter."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from attemper.backends import contract
from attemper.call import known_requests
from attemper.call import request as call_request
from attemper.lab import run
from attemper.sites import tap_buffers
from tests.support import interpreter, models_seen
from tests.support.calls import PRESENT
from tests.support.chromium import browser as browser
from tests.support.experiments import Run, kept_in, shared_folder
from tests.support.identical_training import FEW_STEPS, STEPS

# Thousands of tiny operations: threads would only wait for one another, for seconds where the machine is busy.
torch.set_num_threads(1)

NATIVE = ("native",) if "native" in PRESENT else ()
"""Tests run on the native kernels, too; where a compiler is and they are not, test_native_build.py fails."""
BACKENDS = ("reference", "blocked", *NATIVE)


@pytest.fixture
def seen(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """``seen(library, model, way, error_nats=, identical_steps=, skipped=)``: a row of docs/models.md."""
    return models_seen.recorder(record_property)


# Around every test, and not fixtures: twelve thousand times two of those are seconds.
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Every test begins with the same seeds."""
    random.seed(0)
    np.random.seed(0)
    # torch.manual_seed takes a stack trace for a GPU that is not in use yet: 1 ms, ten thousand times.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)


FEW_OBJECTS = 50_000


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """A watch that is left open sees the taps of every later test of the process."""
    if nextitem is not None and nextitem.path != item.path and len(gc.get_objects()) > FEW_OBJECTS:
        # What a file has loaded and compiled stays. Each watch looks through all that is not frozen.
        gc.collect()
        gc.freeze()
    if not tap_buffers.has_receivers():
        return
    gc.collect()  # those that somebody dropped without closing them
    left = len(tap_buffers._receivers)
    tap_buffers._receivers.clear()
    tap_buffers._up.clear()
    assert left == 0, "this test left a watch open"


@pytest.fixture(scope="session")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """``experiment(name, seed=0)``: what ``lab.run`` gives, computed once for all tests and workers.

    Not for a test that changes what the experiment reads.
    """
    return kept_in(shared_folder(tmp_path_factory), run)


@pytest.fixture
def full_size(request: pytest.FixtureRequest) -> bool:
    """Whether a test that has a smaller and a larger size runs the larger: with ``--all`` or ``--long``."""
    return any(request.config.getoption(lane) for lane in ("--all", "--long"))


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
def fresh_compiler() -> Iterator[None]:
    """Nothing is compiled before and after."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


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
        monkeypatch.setattr(call_request, "Problem", partial(contract.Problem, **sizes))
        monkeypatch.setattr(known_requests, "KNOWN", known_requests.KnownRequests())

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
