"""A fault in every function of ours that runs inside a training step, one by one: training goes on bit for bit."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, cast

import pytest
import torch
from torch import nn

import attemper
from attemper.sites import tap, torch_functions
from attemper.sites.observation import present
from attemper.sites.padding import CallContext
from attemper.store import writer
from attemper.store.writer import open_writer
from tests.monitor.test_watch_failures import model, run
from tests.support.samples import sample

ROOT = os.path.dirname(attemper.__file__)
DOORS = {
    "Door.__call__", "Watch.step", "Watch.close", "AttentionMode.__torch_function__", "_reporting.<locals>.wrapper",
    "beside", "CallContext.guard.<locals>.safe", "_tap", "tap", "tap_call",
    "_with_wraps.<locals>.get_interface", "_Reporting.__call__", "_in_place",
}  # fmt: skip
"""What torch, transformers or the user calls of ours. What they run is inside of a try; that they are entered at all is
taken for granted."""
MODELS_OWN = {"attention", "output_and_statistics"}
"""The model's own attention, where that is ours: nothing else could take its place."""


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
    return None if found in (None, names[0]) or not MODELS_OWN.isdisjoint(names) else found


def tempered_model() -> Any:
    one = model()
    for layer in one.layers:
        layer.inner = Same()  # of nn.MultiheadAttention the normalizer cannot be changed
    attemper.temper(one, normalizer="sparsemax", sites=["layers.0"])
    return one


class Same(nn.Module):
    def forward(self, x: torch.Tensor, *_: object, **__: object) -> tuple[torch.Tensor]:
        return (x,)


class Registry(nn.Module):
    """A model of transformers, called as ``run`` calls its model."""

    def __init__(self, implementation: str) -> None:
        super().__init__()
        pytest.importorskip("transformers")
        from attemper.sites.transformers import register
        from tests.monitor.tiny_models import TINY

        register()
        torch.manual_seed(0)
        self.inner = TINY["llama"].build().train()
        self.inner.set_attn_implementation(implementation)

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.inner(x[..., 0].mul(1000).long().remainder(100), attention_mask=attention_mask).logits


MODELS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "own": (model, {}),
    "stored": (model, {"on_alarm": print}),
    "tempered": (tempered_model, {}),
    "registry": (partial(Registry, "sdpa"), {}),
    "replaced": (partial(Registry, "sdpa"), {"observe": "replace"}),
    "taps": (partial(Registry, "attemper"), {}),
}
"""How a model attends, and how it is watched."""


class Numbered:
    """A watch whose steps have the loop's numbers."""

    def __init__(self, watch: attemper.types.Watch) -> None:
        self.watch, self.number = watch, 0

    def step(self) -> None:
        self.watch.step(self.number)
        self.number += 1


def train(case: str, profile: Any, folder: Path) -> tuple[Any, attemper.types.Watch, list[torch.Tensor]]:
    build, options = MODELS[case]
    one = build()
    store = folder / str(len(list(folder.iterdir()))) if case == "stored" else None
    watch = attemper.watch(one, every=2, rows=4, store=store, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sys.setprofile(profile)
        try:
            found = run(one, cast(Any, Numbered(watch) if store else watch))
            watch.close()
        finally:
            sys.setprofile(None)
    return one, watch, found


def functions_in_a_step(case: str, folder: Path) -> list[CodeType]:
    found: dict[CodeType, None] = {}

    def collect(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and is_ours(frame.f_code) and frame.f_code not in found and door_of(frame):
            found[frame.f_code] = None

    train(case, collect, folder)
    return list(found)


def hooks(one: nn.Module) -> int:
    return sum(len(part._forward_pre_hooks) + len(part._forward_hooks) for part in one.modules())


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long("faults in every function"))])
@pytest.mark.parametrize("case", MODELS)
def test_a_fault_in_any_function_of_ours_stops_no_training_and_changes_no_bit(
    case: str, every: bool, full_size: bool, tmp_path: Path
) -> None:
    build, codes = MODELS[case][0], functions_in_a_step(case, tmp_path)
    before = build()
    plain, kept = run(before, None), hooks(before)
    assert len(codes) > 250
    files = ("hooks.py", "watch.py", "passes.py", "sampled_steps.py", "observation.py")
    doors = [code for code in codes if code.co_filename.endswith(files)]
    ways = [
        code
        for code in codes
        if code.co_filename.endswith(("sites/transformers.py", "sites/tap.py", "sites/actions.py"))
    ]
    more = 6 if full_size else 1
    far = 120 if case == "stored" else 32
    some = [*doors[:: 48 // more], *codes[:: 320 // more]] if case == "own" else ways[:: far // more]
    chosen, faults = list(codes if every else dict.fromkeys(some)), 0
    for code in chosen:
        name = f"{os.path.relpath(code.co_filename, ROOT)}: {code.co_qualname}"

        def inject(frame: FrameType, event: str, _: object, code: CodeType = code) -> None:
            nonlocal faults
            if event == "call" and frame.f_code is code and door_of(frame):
                faults += 1
                sys.setprofile(None)
                raise Fault

        one, _, found = train(case, inject, tmp_path)
        # A kernel of ours in the place of the model's rounds otherwise.
        assert case == "replaced" or all(map(torch.equal, found, plain)), name
        assert hooks(one) == kept, name
        assert (present(), torch_functions._active.get()) == ((), False), name
    print(f"{case}: {len(codes)} functions, {faults} faults, 0 stops")
    assert faults > 0.8 * len(chosen), "what is kept after its first call runs once in a process"


def test_a_tap_that_fails_without_a_watch_is_told_once_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise Fault("no operands")

    monkeypatch.setattr(tap, "operands_of", fail)
    for _ in range(2):
        attemper.tap(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), name="a")
    (record,) = caplog.records
    assert record.message == "attemper: not measured: Fault: no operands. Training goes on."


def test_a_tap_with_an_option_that_is_none_still_raises() -> None:
    with pytest.raises(TypeError, match=r"tap\(\) got an unexpected keyword argument 'softcaps'"):
        attemper.tap(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), name="a", softcaps=1.0)  # pyright: ignore


def test_a_failure_in_a_hook_whose_report_fails_goes_to_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise Fault("no report")

    one, plain = model(), run(model(), None)
    monkeypatch.setattr(attemper.types.Watch, "note_failure", fail)
    monkeypatch.setattr(CallContext, "leave_module", fail)
    with attemper.watch(one) as watch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = run(one, watch)
    assert all(map(torch.equal, found, plain))
    assert [record.message for record in caplog.records] == [
        "attemper: not measured: Fault: no report. Training goes on."
    ]


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
    assert [len(attemper.open(tmp_path / name)) for name in "ab"] == [1, 2]
    assert len(caplog.records) == 2
    assert "can't start new thread. Training goes on" in caplog.records[0].message
