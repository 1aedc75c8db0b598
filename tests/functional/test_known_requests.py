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
from attemper.backends import native
from attemper.call import known_requests
from attemper.call.request import Options
from tests.support.calls import PRESENT, known

pytestmark = pytest.mark.each

needs_native = pytest.mark.skipif("native" not in PRESENT, reason="native is not built")

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
    for _ in range(2):
        attemper.attention(Q, KV, KV)
    (kept,) = known_requests.KNOWN._known.values()
    tensors = (part for part in vars(kept.request.problem).values() if isinstance(part, Tensor))
    assert [part.numel() for part in tensors] == [0, 0, 0, 1]  # the last one is the multiplier


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch, checked: list[str]) -> list[int]:
    """The calls that were not even described again, from here on, each as its number of tokens."""
    seen, run = [], native.Again.run

    def counted(self: native.Again, *tensors: Any) -> Any:
        seen.append(tensors[0].shape[2])
        return run(self, *tensors)

    monkeypatch.setattr(native.Again, "run", counted)
    return seen


STATISTICS = ["all", ("entropy",), ("lse", "support_size"), ("max_weight", "mean_distance"), ()]


@needs_native
@pytest.mark.parametrize("tokens", [1, 6, 300])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("stats", STATISTICS, ids=str)
def test_a_call_that_is_repeated_gives_the_same_bits(stats: Any, causal: bool, tokens: int, repeated: list[int]):
    options: dict[str, Any] = {"stats": stats, "is_causal": causal, "enable_gqa": True, "backend": "native"}
    for number in range(3):
        query, key = torch.randn(2, 4, tokens, 8), torch.randn(2, 2, 310, 8)
        value = torch.randn(2, 2, 310, 40)
        got = attemper.attention(query, key, value, **options)
        assert len(repeated) == number
        # A mask that hides nothing: every call with one is checked and described.
        whole = torch.ones(1, 1, 1, 310, dtype=torch.bool)
        want = attemper.attention(query, key, value, whole, **options)
        assert torch.equal(got.output, want.output)
        assert got.output.stride() == want.output.stride()
        if stats:
            assert known(got.stats).names == known(want.stats).names
            for name in known(got.stats):
                assert torch.equal(known(got.stats)[name], known(want.stats)[name]), name


@needs_native
def test_a_statistic_that_is_kept_of_a_repeated_call_keeps_no_other(repeated: list[int]):
    attemper.attention(Q, KV, KV, stats="all", backend="native")
    stats = known(attemper.attention(Q, KV, KV, stats="all", backend="native").stats)
    assert repeated
    for name in stats:
        assert stats[name].untyped_storage().nbytes() == stats[name].nbytes, name


@needs_native
def test_rows_that_see_nothing_or_are_not_finite_are_told_by_repeated_calls_too(repeated: list[int]):
    query, key = torch.randn(1, 2, 40, 8), torch.randn(1, 2, 20, 8)
    query[0, 1, 30] = torch.inf
    # Rows from 20 on see no key.
    options: dict[str, Any] = {"window_size": (0, 0), "stats": "all", "backend": "native"}
    for _ in range(2):
        got = known(attemper.attention(query, key, key, **options).stats)
    query[0, 0, 3] = torch.nan
    got = known(attemper.attention(query, key, key, **options).stats)
    want = known(attemper.attention(query, key, key, torch.ones(1, 1, 40, 1, dtype=torch.bool), **options).stats)
    assert repeated == [40, 40]
    for name in got:
        torch.testing.assert_close(got[name], want[name], rtol=0, atol=0, equal_nan=True)
    assert got.empty.sum() == 40
    assert got.nonfinite.sum() == 1
    assert torch.isnan(got.mass[0, 0, 3])


@needs_native
def test_each_layout_of_a_call_in_memory_is_described_for_itself(repeated: list[int]):
    query = torch.randn(1, 6, 2, 4).transpose(1, 2)
    for _ in range(2):
        for part in (query, query.contiguous()):
            got, want = (
                attemper.attention(part, KV, KV, backend=backend).output for backend in ("native", "reference")
            )
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert len(repeated) == 2


@needs_native
def test_who_wants_a_gradient_gets_it_also_of_a_repeated_call(repeated: list[int]):
    for _ in range(2):
        attemper.attention(Q, KV, KV, backend="native", stats="all")
    leaf = Q.clone().requires_grad_()
    for part in ("query", "key", "value"):
        given: dict[str, Any] = {"query": Q, "key": KV, "value": KV}
        given[part] = leaf if part == "query" else KV.clone().requires_grad_()
        result = attemper.attention(**given, backend="native", stats="all")
        (result.output.sum() + known(result.stats).entropy.sum()).backward()
        assert given[part].grad is not None
    assert repeated == [6]
    with torch.no_grad():
        assert not attemper.attention(leaf, KV, KV, backend="native").output.requires_grad


@needs_native
def test_a_tensor_whose_sign_is_yet_to_be_written_is_read_as_it_is_meant(repeated: list[int]):
    complex_query = torch.randn(1, 2, 6, 4, dtype=torch.complex64)
    negative = complex_query.conj().imag
    assert negative.is_neg()
    for part in (complex_query.imag, complex_query.imag, negative):
        got, want = (
            attemper.attention(part, KV, KV, backend="native").output,
            attemper.attention(part.clone(), KV, KV, backend="reference").output,
        )
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert repeated == [6]


@needs_native
def test_a_repeated_call_that_the_library_refuses_is_told(monkeypatch: pytest.MonkeyPatch, repeated: list[int]):
    for _ in range(2):
        attemper.attention(Q, KV, KV, backend="native")
    (kept,) = known_requests.KNOWN._known.values()
    monkeypatch.setattr(kept._again, "_run", lambda *_: 2)
    with pytest.raises(MemoryError, match="backend='blocked'"):
        attemper.attention(Q, KV, KV, backend="native")


def test_requests_that_keep_nothing_hold_no_number_of_a_call():
    """What is made while a CUDA graph is recorded lies in the memory of the graph."""
    kept = known_requests.KnownRequests(keeps=False)
    for _ in range(2):
        request = kept.request("tap", Q, KV, None, None, Options(scale=0.5, temperature=2.0))
        assert request.problem.multiplier.flatten().tolist() == [0.25]
        assert request.problem.query is Q
    (one,) = kept._known.values()
    tensors = [value for value in vars(one.request.problem).values() if isinstance(value, Tensor)]
    assert [tensor.numel() for tensor in tensors] == [0] * len(tensors)
