"""The short way past the dispatcher: the same numbers as the operator, and only where nobody stands between."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import attemper
from attemper import BackendError
from attemper.call import operator as _ops
from attemper.call import transforms
from attemper.call.formulas import OF_SINK, LazyStatistics
from attemper.call.state import LazyState, state_of
from attemper.statistics import ONE_PASS, STATISTICS, state_columns
from tests.support.calls import PRESENT, attended, known

pytestmark = pytest.mark.skipif("native" not in PRESENT, reason="native is not built")

COLUMNS = state_columns(("entropy", "effective_tokens"))
ULP = 2.0**-23
"""The last place of float32, relative to the number at most."""
APART = {"max_weight": 2 * ULP, "normalized_entropy": 2.5 * ULP}
"""How far the statistics of the C++ library may be from PyTorch's formulas, relative to themselves; 0 for the rest.

``max_weight``: exp of the C library and of PyTorch, each within one last place. ``normalized_entropy``: log of PyTorch
within one, that of C++ within half of one (it is rounded from float64), and two quotients of half of one each. Which of
them a processor rounds the other way is its own affair.
"""


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What went by the operator instead."""
    seen, operator = [], _ops.attention
    monkeypatch.setattr(_ops, "attention", lambda problem: seen.append(problem.backend) or operator(problem))
    return seen


def leaves(graph: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    shapes = {
        "query": (2, 4, 40, 16), "key": (2, 2, 50, 16), "value": (2, 2, 50, 8), "attn_mask": (1, 4, 40, 50),
        "sink_logits": (4,), "temperature": (4, 1),
    }  # fmt: skip
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    tensors["temperature"] = tensors["temperature"].abs() + 0.5
    return {name: tensor.requires_grad_(graph) for name, tensor in tensors.items()}


def results(graph: bool) -> list[Tensor]:
    given = leaves(graph)
    output, stats = attended("native", **given, softcap=20.0, enable_gqa=True)
    found = [output, *(stats[name] for name in stats)]
    if not graph:
        return found
    floating = [tensor for tensor in found if tensor.requires_grad]
    assert len(floating) == 1 + len(ONE_PASS) - 1  # all but visible_keys
    above = [torch.linspace(-1, 1, tensor.numel()).view(tensor.shape) for tensor in floating]
    return [*found, *torch.autograd.grad(floating, list(given.values()), above)]


@pytest.mark.parametrize("graph", [False, True])
def test_results_and_gradients_are_those_of_the_operator(
    graph: bool, monkeypatch: pytest.MonkeyPatch, dispatched: list[str]
):
    short = results(graph)
    assert not dispatched
    monkeypatch.setattr(transforms, "is_undisturbed", lambda: False)
    long = results(graph)
    assert dispatched == ["native"]
    names = ["output", *ONE_PASS, *leaves(False)]
    for name, one, two in zip(names, short, long, strict=False):
        torch.testing.assert_close(one, two, rtol=APART.get(name, 0.0), atol=0, msg=name)


def test_a_gradient_of_a_gradient_is_refused_here_too(dispatched: list[str]):
    query = torch.randn(1, 1, 5, 4, requires_grad=True)
    output = attemper.attention(query, query, query, backend="native").output
    (first,) = torch.autograd.grad(output.square().sum(), query, create_graph=True)
    assert not dispatched
    with pytest.raises(BackendError, match="second derivative"):
        first.sum().backward()


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Wrapped(Tensor):
    """A subclass."""


LISTENERS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "a mode of functions": Functions,
    "a mode of dispatch": Dispatches,
    "forward differentiation": forward_ad.dual_level,
}


@pytest.mark.parametrize("listener", LISTENERS)
def test_whoever_listens_gets_the_operator(listener: str, dispatched: list[str]):
    query = torch.randn(1, 1, 5, 4)
    with LISTENERS[listener]() as found:
        attemper.attention(query, query, query, backend="native")
    assert dispatched == ["native"]
    if isinstance(found, Dispatches):
        assert "attemper.attention.default" in found.seen
    attemper.attention(query, query, query, backend="native")
    assert dispatched == ["native"]


def test_tensor_subclasses_and_fake_tensors_get_the_operator(dispatched: list[str]):
    query = torch.randn(1, 1, 5, 4)
    attemper.attention(query, query.as_subclass(Wrapped), query, backend="native")
    with FakeTensorMode():
        fake = torch.randn(1, 1, 5, 4)
    with contextlib.suppress(Exception):  # PyTorch may or may not mix them with the multiplier, which is real
        attemper.attention(fake, fake, fake, backend="native")
    assert dispatched == ["native"] * 2


def test_a_transform_of_functions_gets_the_operator(dispatched: list[str]):
    query = torch.randn(1, 1, 5, 4)

    def loss(query: Tensor) -> Tensor:
        return attemper.attention(query, query, query, backend="native").output.sum()

    leaf = query.clone().requires_grad_()
    (want,) = torch.autograd.grad(loss(leaf), leaf)
    assert not dispatched
    assert torch.equal(torch.func.grad(loss)(query), want)
    assert dispatched


def test_a_statistic_is_on_the_graph_of_its_call_whenever_it_is_read():
    query = torch.randn(1, 2, 6, 4, requires_grad=True)
    read = []
    for mode in (contextlib.nullcontext, torch.no_grad, torch.inference_mode):
        stats = attended("native", query, query, query).stats
        with mode():
            entropy = stats.entropy
            read.append(entropy)
        assert entropy.requires_grad
        assert stats.entropy is entropy
    grads = [torch.autograd.grad((entropy * query[..., 0]).sum(), query)[0] for entropy in read]
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[2])
    with torch.no_grad():
        stats = attended("native", query, query, query).stats
    assert not stats.entropy.requires_grad
    with torch.inference_mode():
        mean_logit = stats.mean_logit
    (mean_logit * query[..., 0]).sum().backward()  # a tensor of inference mode could not be kept for this


@pytest.mark.parametrize("graph", [False, True])
def test_a_sink_that_changes_after_the_call_does_not_change_what_was_measured(graph: bool):
    query, sink = torch.randn(1, 2, 6, 4), torch.zeros(2, requires_grad=graph)
    names = ("entropy", *OF_SINK)
    want = {name: attended("native", query, query, query, sink_logits=sink, stats=names).stats[name] for name in names}
    stats = attended("native", query, query, query, sink_logits=sink, stats=names).stats
    detached = stats.detach()
    with torch.no_grad():
        sink.add_(3.0)
    for name in names:
        assert torch.equal(stats[name], want[name]), name
        assert torch.equal(detached[name], want[name]), name
        assert not detached[name].requires_grad


def test_only_what_is_read_is_computed_and_only_once():
    state = torch.rand(4, 1, 2, 3) + 1
    values = LazyStatistics(
        state_of(state_columns(("entropy",)), state), ("lse", "entropy", "max_logit", "max_weight"), None
    )
    assert values["lse"] is values["lse"]
    assert set(values._row.known) == {"lse"}
    torch.testing.assert_close(values["max_weight"], torch.exp(-state[1]))
    assert "entropy" not in values._row.known
    with pytest.raises(KeyError):
        values["gini"]


def rows_of_every_kind() -> Tensor:
    """A state of ``COLUMNS``: many rows, those that see no key, one or two, and those with NaN and infinities."""
    torch.manual_seed(0)
    counts = torch.cat(
        (torch.arange(0, 70), torch.tensor([65535, 65536, 65537, 1 << 24]), torch.randint(1, 999, (446,)))
    )
    n = counts.float()
    z = torch.rand(520) * n.clamp(min=1).log()
    a = (torch.rand(520) * 1.5) * (n.clamp(min=1).log() - z)
    m, c = torch.randn(520) * 50, torch.rand(520) * 0.9 + 0.1
    m[0], z[0], a[0], c[0] = -torch.inf, 0, 0, 0
    m[3], z[4], a[5], c[6] = torch.nan, torch.nan, torch.nan, torch.nan
    m[7] = torch.inf
    z[8], a[8] = n[8].log(), 1e-5  # a rounding above log n
    return torch.stack((m, z, n, a, c)).view(5, 2, 4, 65)


def test_statistics_in_one_pass_are_those_of_the_formulas():
    state = rows_of_every_kind()
    names = tuple(name for name in ONE_PASS if name not in ("logit_variance", "first_token_mass")) + ("support_size",)
    formulas = LazyStatistics(dict(zip(COLUMNS, state, strict=True)), names, None)
    at_once = LazyState(COLUMNS, state, "native").statistics(names)
    assert set(at_once) == set(names)
    for name, value in at_once.items():
        torch.testing.assert_close(value, formulas[name], rtol=APART.get(name, 0.0), atol=0, equal_nan=True, msg=name)
    visible = at_once["visible_keys"].clamp(min=1).double()
    assert not (at_once["entropy"].double() > visible.log()).any()


def test_columns_that_are_statistics_are_copied_in_one_pass():
    of_softmax = ("max_logit", "logit_variance", "first_token_mass", "mean_distance", "gini", "score_variance")
    names = (*of_softmax, "self_weight", "span_mass")
    columns = state_columns(names)
    state = torch.randn(len(columns), 2, 3, 5)
    got = LazyState(columns, state, "native").statistics(names)
    for name in names:
        assert torch.equal(got[name], state[columns.index(STATISTICS[name].column)]), name


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 4001])
def test_the_largest_weight_is_the_float_that_is_nearest(rows: int):
    z = torch.linspace(0, 120, rows)  # down to what is no float but 0
    state = torch.stack((torch.zeros(rows), z, torch.ones(rows))).view(3, 1, 1, rows)
    got = LazyState(state_columns(()), state, "native").statistics(("max_weight",))["max_weight"].view(-1)
    want = (-z.double()).exp().float()
    torch.testing.assert_close(got, want, rtol=1.2e-7, atol=1.5e-45)
    assert (got != want).sum() <= rows // 1000


def test_a_state_with_a_gradient_is_left_to_the_formulas():
    assert LazyState(state_columns(()), torch.rand(3, 1, 1, 2, requires_grad=True), "native").statistics(("lse",)) == {}
    assert known(attended("native", *[torch.randn(1, 1, 3, 4, requires_grad=True)] * 3).stats).lse.requires_grad
