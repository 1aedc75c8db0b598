"""Releases of torch without one of the private names by which a watch meets compiled code."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo import eval_frame

import attemper
from tests.sites.own_models import Own, Tapped

X = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(0))
Break = Callable[[pytest.MonkeyPatch], None]


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def without_compiled_call(patch: pytest.MonkeyPatch) -> None:
    """Torch itself reads it in each call of a module."""
    patch.setattr(nn.Module, "__call__", nn.Module._call_impl)
    patch.delattr(nn.Module, "_compiled_call_impl")


def without_wrapper_kind(patch: pytest.MonkeyPatch) -> None:
    patch.delattr(eval_frame, "OptimizedModule")


def without_lazy_check(patch: pytest.MonkeyPatch) -> None:
    """Torch does not ask whether a module has lazy parameters, and has no method for it."""
    own = eval_frame.OptimizedModule._initialize

    def initialize(wrapper: Any) -> None:
        fields = vars(wrapper._orig_mod)
        asked = {name: fields.pop(name) for name in ("_initialize_hook",) if name in fields}
        own(wrapper)
        fields |= asked

    patch.setattr(eval_frame.OptimizedModule, "_initialize", initialize)
    patch.delattr(eval_frame.OptimizedModule, "_call_lazy_check")


def without_question(patch: pytest.MonkeyPatch) -> None:
    """Torch has the method, and does not ask."""

    def ask(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper._forward(*args, **kwargs)

    patch.setattr(eval_frame.OptimizedModule, "_call_lazy_check", ask)


def without_kept_forward(patch: pytest.MonkeyPatch) -> None:
    """Torch keeps its compiled forward under another name."""
    own = eval_frame.OptimizedModule._initialize

    def initialize(wrapper: Any) -> None:
        own(wrapper)
        forward = vars(wrapper).pop("_forward", None)
        if forward is None:  # nobody watches
            return

        def _call_lazy_check(self: Any, *args: Any, **kwargs: Any) -> Any:
            self._orig_mod._infer_parameters(self._orig_mod, args, kwargs)
            return forward(*args, **kwargs)

        wrapper.forward = partial(_call_lazy_check, wrapper)

    patch.setattr(eval_frame.OptimizedModule, "_initialize", initialize)


def told(model: nn.Module, called: Callable[[], Any], steps: int = 3) -> tuple[list[str], attemper.types.Watch]:
    """Warnings of a watched training, which runs as without a watch, and the watch."""
    run = called()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        plain = [run(X) for _ in range(steps)]
        watch = attemper.watch(model)
        run = called()
        found = []
        for _ in range(steps):
            found.append(run(X))
            watch.step()
        watch.close()
    assert all(map(torch.equal, plain, found))
    assert watch.failures == 0
    return [str(one.message) for one in said], watch


@pytest.mark.parametrize(
    ("remove", "name"),
    [
        (without_compiled_call, "torch.nn.Module._compiled_call_impl"),
        (without_wrapper_kind, "torch._dynamo.eval_frame.OptimizedModule"),
    ],
)
@pytest.mark.each
@pytest.mark.parametrize("kind", [Own, Tapped])
def test_a_private_name_that_torch_no_longer_has_is_told_in_one_line(
    remove: Break, name: str, kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    if remove is without_compiled_call:
        remove(monkeypatch)
    model: Any = torch.compile(kind(), backend="eager")
    model(X)
    if remove is without_wrapper_kind:  # which torch needs to compile
        remove(monkeypatch)
    said, watch = told(model, lambda: model)
    assert [line.count(f"has no {name}, by which a watch meets compiled code") for line in said] == [1]
    seen = [site.name for site in watch.run.sites] if kind is Tapped else []
    assert seen == (["first"] if kind is Tapped else [])


def test_without_compiled_calls_a_model_that_shows_nothing_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has been compiled in place, in a way that nobody knows, cannot be told from what does not attend."""
    without_compiled_call(monkeypatch)
    model = nn.Linear(32, 32)
    said, _ = told(model, lambda: model)
    assert [line.count("has no torch.nn.Module._compiled_call_impl") for line in said] == [1]


def test_without_compiled_calls_an_eager_model_is_read_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    without_compiled_call(monkeypatch)
    model = Own()
    said, watch = told(model, lambda: model)
    assert (said, watch.sampled) == ([], 3)


WRAPPER = "torch._dynamo.eval_frame.OptimizedModule"


@pytest.mark.parametrize(
    ("remove", "names"),
    [
        (without_lazy_check, [f"{WRAPPER}._call_lazy_check"]),
        (without_kept_forward, [f"{WRAPPER}._forward"]),
        (without_question, []),
    ],
)
def test_a_wrapper_that_does_not_show_itself_is_found_at_the_end_of_the_first_step_and_a_missing_name_told(
    remove: Break, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    remove(monkeypatch)
    model = Own()
    compiled: list[Any] = []

    def compile_once() -> Any:
        compiled[:] = [torch.compile(model, backend="eager")]
        return compiled[0]

    said, watch = told(model, compile_once)
    assert [line.partition(" has no ")[2] for line in said] == [
        f"{name}, by which a watch meets compiled code. The first step was not seen; the second is sampled instead."
        for name in names
    ]
    assert watch.table().sites[0].heads[0].rows == 12
    assert watch.history("entropy_nats", "Own", 0).steps.tolist() == [1, 2]
