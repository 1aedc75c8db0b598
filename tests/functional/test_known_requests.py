"""Calls that were checked before are not checked again, and nothing that has to be checked is taken for one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import attemper
from attemper import InputError
from attemper.call import known_requests
from tests.support.calls import known

Q, KV = torch.randn(1, 2, 6, 4), torch.randn(1, 2, 9, 4)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls that were checked, from here on."""
    seen, check = [], known_requests.request_of
    monkeypatch.setattr(known_requests, "KNOWN", known_requests.KnownRequests())
    monkeypatch.setattr(known_requests, "request_of", lambda where, *args: seen.append(where) or check(where, *args))
    return seen


def test_a_call_is_checked_once_and_computes_with_its_own_tensors(checked: list[str]):
    for scale in (1.0, 2.0):
        got = attemper.attention(Q * scale, KV, KV * scale, stats="all")
        want = attemper.attention(Q * scale, KV, KV * scale, stats="all", backend="reference")
        torch.testing.assert_close(got.output, want.output, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(known(got.stats).entropy, known(want.stats).entropy, rtol=1e-5, atol=1e-5)
    assert checked == ["attention"] * 2  # with "auto" and with "reference"
    attemper.attention_statistics(Q, KV)
    attemper.attention_statistics(Q, KV)
    assert checked[2:] == ["attention_statistics"]


OTHERS: dict[str, Callable[[], Any]] = {
    "other lengths": lambda: attemper.attention(Q[:, :, 1:], KV, KV),
    "another type": lambda: attemper.attention(Q.double(), KV.double(), KV.double()),
    "another scale": lambda: attemper.attention(Q, KV, KV, scale=0.5),
    "an int that equals a float": lambda: attemper.attention(Q, KV, KV, temperature=1),
    "inference mode": lambda: torch.inference_mode()(lambda: attemper.attention(Q, KV, KV))(),
    "a mask": lambda: attemper.attention(Q, KV, KV, torch.ones(6, 9, dtype=torch.bool)),
    "a tensor among the options": lambda: attemper.attention(Q, KV, KV, temperature=torch.ones(2, 1)),
    "an object": lambda: attemper.attention(Q, KV, KV, normalizer=attemper.nn.TopK(2)),
    "spans": lambda: attemper.attention(Q, KV, KV, stats="span_mass", spans=[(0, 1)]),
    "a generator of names": lambda: attemper.attention(Q, KV, KV, stats=(name for name in ("entropy",))),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_differs_in_anything_is_checked(name: str, checked: list[str]):
    attemper.attention(Q, KV, KV)
    OTHERS[name]()
    assert len(checked) == 2


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a scale of True": ({"scale": 1.0}, {"scale": True}),
    "a temperature of True": ({"temperature": 1}, {"temperature": True}),
    "a window of True": ({"window_size": (1, 0)}, {"window_size": (True, 0)}),
    "a window of floats": ({"window_size": (1, 0)}, {"window_size": (1.0, 0)}),
    "no window": ({}, {"window_size": None}),
    "no names": ({}, {"stats": None}),
    "dropout of True": ({"dropout_p": 1}, {"dropout_p": True}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_equals_an_option_is_still_refused(name: str, checked: list[str]):
    allowed, refused = REFUSED[name]
    attemper.attention(Q, KV, KV, **allowed)
    with pytest.raises(InputError):
        attemper.attention(Q, KV, KV, **refused)
    assert len(checked) == 2


def test_what_was_refused_is_refused_again(checked: list[str]):
    for _ in range(2):
        with pytest.raises(InputError, match="must be a multiple"):
            attemper.attention(Q[:, :1], KV, KV)
    assert len(checked) == 2


def test_what_was_known_in_inference_mode_is_of_use_to_autograd(checked: list[str]):
    with torch.inference_mode():
        attemper.attention(Q, KV, KV)
    leaf = Q.clone().requires_grad_()
    attemper.attention(leaf, KV, KV).output.sum().backward()
    assert leaf.grad is not None


class Wrapped(Tensor):
    """A subclass."""


def test_whoever_listens_sees_the_call_checked(checked: list[str]):
    class Functions(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    attemper.attention(Q, KV, KV)
    with Functions():
        attemper.attention(Q, KV, KV)
    attemper.attention(Q, KV.as_subclass(Wrapped), KV)
    assert len(checked) == 3


def test_few_requests_are_kept(monkeypatch: pytest.MonkeyPatch, checked: list[str]):
    monkeypatch.setattr(known_requests.KnownRequests, "MOST", 4)
    for number in range(10):
        attemper.attention(Q, KV, KV, scale=1.0 + number)
        assert len(known_requests.KNOWN._known) <= 4
    attemper.attention(Q, KV, KV, scale=10.0)
    assert len(checked) == 10


def test_what_is_kept_holds_no_tensor_of_a_call(checked: list[str]):
    attemper.attention(Q, KV, KV)
    (request,) = known_requests.KNOWN._known.values()
    tensors = (part for part in vars(request.problem).values() if isinstance(part, Tensor))
    assert [part.numel() for part in tensors] == [0, 0, 0, 1]  # the last one is the multiplier
