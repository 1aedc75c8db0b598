"""A fault in every function of ours that runs inside a training step, one by one: training goes on bit for bit."""

from __future__ import annotations

import os
import sys
import warnings
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

import attemper
from attemper.sites import torch_functions
from attemper.sites.observation import present
from attemper.store import writer
from attemper.store.writer import open_writer
from tests.monitor.test_watch_failures import model, run
from tests.support.samples import sample

ROOT = os.path.dirname(attemper.__file__)
DOORS = {
    "Door.__call__", "Watch.step", "Watch.close", "AttentionMode.__torch_function__", "_reporting.<locals>.wrapper",
    "beside", "CallContext.guard.<locals>.safe", "_tap", "tap",
}  # fmt: skip
"""What torch or the user calls of ours. What they run is inside of a try; that they are entered at all is taken for
granted. ``tap`` is a line of the model's: it raises where its arguments have no meaning."""


class Fault(RuntimeError):
    pass


def is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(ROOT) and not code.co_name.startswith("<")


def door_of(frame: FrameType) -> str | None:
    """The door by which this call came in; None for a door itself, and for what the model's own attention computes."""
    outer: FrameType | None = frame
    names: list[str] = []
    while outer is not None:
        if is_ours(outer.f_code):
            names.append(outer.f_code.co_qualname)
        outer = outer.f_back
    found = next((name for name in names if name in DOORS), None)
    return None if found in (None, names[0], "tap") or "attention" in names else found


def train(profile: Any) -> tuple[Any, attemper.Watch, list[torch.Tensor]]:
    one = model()
    watch = attemper.watch(one, every=2, rows=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sys.setprofile(profile)
        try:
            found = run(one, watch)
            watch.close()
        finally:
            sys.setprofile(None)
    return one, watch, found


def functions_in_a_step() -> list[CodeType]:
    found: dict[CodeType, None] = {}

    def collect(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and is_ours(frame.f_code) and frame.f_code not in found and door_of(frame):
            found[frame.f_code] = None

    train(collect)
    return list(found)


def test_a_fault_in_any_function_of_ours_stops_no_training_and_changes_no_bit(full_size: bool) -> None:
    plain, codes = run(model(), None), functions_in_a_step()
    assert len(codes) > 250
    doors = [code for code in codes if code.co_filename.endswith(("hooks.py", "watch.py", "observation.py"))]
    chosen, faults = list(codes if full_size else dict.fromkeys([*doors[::4], *codes[::24]])), 0
    for code in chosen:
        name = f"{os.path.relpath(code.co_filename, ROOT)}: {code.co_qualname}"

        def inject(frame: FrameType, event: str, _: object, code: CodeType = code) -> None:
            nonlocal faults
            if event == "call" and frame.f_code is code and door_of(frame):
                faults += 1
                sys.setprofile(None)
                raise Fault

        one, _, found = train(inject)
        assert all(map(torch.equal, found, plain)), name
        assert not any(len(part._forward_pre_hooks) + len(part._forward_hooks) for part in one.modules()), name
        assert (present(), torch_functions._active.get()) == ((), False), name
    assert faults > 0.8 * len(chosen), "what is kept after its first call runs once in a process"


def test_where_no_thread_can_start_training_goes_on_and_the_end_of_the_run_writes_it(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(writer.threading.Thread, "start", refuse)
        first, second = open_writer(tmp_path / "a"), open_writer(tmp_path / "b")
        for one in (first, second):
            assert one.take(sample(0))
            assert not one.flush()
            assert (one.written, one.waiting, one.dropped) == (0, 1, 0)
        first.close()
        first.close()
    assert second.take(sample(1))
    assert second.flush(10)
    second.close()
    assert (first.written, second.written, first.dropped + second.dropped) == (1, 2, 0)
    assert [len(attemper.open_run(tmp_path / name)) for name in "ab"] == [1, 2]
    assert len(caplog.records) == 2
    assert "can't start new thread. Training goes on" in caplog.records[0].message
