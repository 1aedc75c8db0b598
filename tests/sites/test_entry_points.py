"""A new entry point is one row of ``sites/entry_points.py`` and one file that reads and acts: shown with a made-up one.

It is a function ``echo_attention`` that models call. Everything between the two lines below would be its file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attemper
from attemper.call.request import Options
from attemper.sites import entry_points
from attemper.sites.actions import Actions, ModelCall, attend
from attemper.sites.entry_points import EntryPoint
from attemper.sites.observation import AttentionCall, current, mark_reported, report

# --- the file of the entry point ---

_reading: ContextVar[bool] = ContextVar("reading", default=False)
_acting: ContextVar[nn.Module | None] = ContextVar("acting", default=None)


def weighted(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.transpose(-2, -1)).softmax(-1) @ value


def echo_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    module = _acting.get()
    if module is None:
        return _read(query, key, value)
    return attend(_Echo(module, query, value, 0.0, True, key))


def _read(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with mark_reported():
        output = weighted(query, key, value)
    if _reading.get() and current():
        report(lambda module: AttentionCall(query, key, None, Options(scale=1.0)), (), {})
    return output


@contextmanager
def echo_reading(_: nn.Module) -> Iterator[None]:
    token = _reading.set(True)
    try:
        yield
    finally:
        _reading.reset(token)


@dataclass
class _Echo(ModelCall):
    key: Tensor

    def read(self, query: Tensor) -> AttentionCall:
        return AttentionCall(query, self.key, None, Options(scale=1.0))

    def run(self, query: Tensor) -> Tensor:
        return _read(query, self.key, self.value)

    def result_of(self, output: Tensor) -> Tensor:
        return output

    def map_output(self, function: Callable[[Tensor], Tensor], result: Tensor) -> Tensor:
        return function(result)


class EchoActions(Actions):
    def run(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        token = _acting.set(module)
        try:
            return forward(*args, **kwargs)
        finally:
            _acting.reset(token)


# --- its row ---

ECHO = EntryPoint("models that call echo_attention", echo_reading, EchoActions, function="echo_attention")


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    monkeypatch.setattr(entry_points, "ENTRY_POINTS", (*entry_points.ENTRY_POINTS, ECHO))
    monkeypatch.setitem(entry_points.FUNCTIONS, "echo_attention", ECHO)

    class Layer(nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            heads = tokens.unflatten(-1, (2, -1)).transpose(1, 2)
            return echo_attention(heads, heads, heads).transpose(1, 2).flatten(2)

    return nn.Sequential(Layer(), Layer()).eval()


def test_without_the_row_it_is_out_of_reach() -> None:
    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return echo_attention(x, x, x)

    with pytest.raises(attemper.InputError, match=r"registry, on modules .* and on attemper\.nn; attention that is"):
        attemper.temper(Layer(), temperature=2.0)


def test_a_watch_and_a_scan_read_it(model: nn.Module) -> None:
    x = torch.randn(3, 7, 8)
    heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
    expected = attemper.attention_statistics(heads, heads, scale=1.0, stats="entropy").entropy.mean((0, 2))
    with attemper.watch(model) as watch:
        model(x)
    for reading in (watch.table(), attemper.scan(model, [x])):
        assert [site.name for site in reading.sites] == ["0", "1"]
        found = torch.tensor([head.entropy_nats for head in reading.sites[0].heads])
        torch.testing.assert_close(found, expected.float())


def test_it_is_tempered_and_measured_as_it_is_tempered(model: nn.Module) -> None:
    x = torch.randn(3, 7, 8)
    heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
    with attemper.temper(model[0], temperature=2.0) as handle:  # pyright: ignore[reportIndexIssue]
        assert handle.sites == ("Layer",)
        torch.testing.assert_close(
            model[0](x),  # pyright: ignore[reportIndexIssue]
            weighted(heads / 2, heads, heads).transpose(1, 2).flatten(2),
        )


def test_a_penalty_on_it_has_a_gradient(model: nn.Module) -> None:
    x = torch.randn(3, 7, 8, requires_grad=True)
    penalty = attemper.regularize(model, attemper.EntropyTarget(0.6, coef=0.1, unit="normalized"))
    (plain,) = torch.autograd.grad(model(x).sum(), x)
    penalty.attach(model.train()(x).sum()).backward()
    penalty.remove()
    assert x.grad is not None
    assert not torch.equal(x.grad, plain)
