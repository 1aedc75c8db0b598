"""A model read at a length that it was not trained at: its loss under several temperatures, and how each was found.

The model scores in windows longer than those it was trained on. A temperature divides its scores, here by way of the
queries: nothing follows their projection in a model without positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attemper import scan
from attemper.lab.corpus import Corpus
from attemper.lab.experiment import one_thread
from attemper.lab.model import Attention, ByteModel, windows
from attemper.lab.trained.interventions import Control
from attemper.lab.trained.training import Run, advance, held_out_loss, held_out_windows, start
from attemper.nn import LengthTemperature

READ = 1024
"""Bytes that are read at once."""
TESTED, CALIBRATED, MATCHED = 64, 16, 4
"""Windows that losses are measured on, that temperatures are calibrated on, and that entropies are matched on."""
BUCKET = 128
"""Places in a window whose losses are averaged, for a curve over places."""
EVALUATIONS = 16
"""Of the loss, at most, that a calibration may take (L-BFGS)."""
HALVINGS = 8
"""Of the interval that an entropy's temperature is searched in."""

FARTHEST = 8.0
"""Temperatures are looked for between 1/8 and 8."""


@one_thread()
def read_at_length(run: Run, corpus: Corpus, read: int = READ) -> dict[str, Any]:
    """Trains one run, then reads held-out text in windows of ``read`` bytes under each way: its record, for JSON.

    ``{"at_home": loss in windows of the trained length, "ways": {way: {"losses": [windows], "by_place": [buckets],
    "temperatures": [layers][heads] or None, "entropy_nats": float}}}``. The windows that calibration sees and those
    that losses are of lie between one another: of the same files, and with no byte in common.
    """
    state, _ = start(run)
    advance(run, corpus, state, Control(), None)
    model = state.model.eval().requires_grad_(False)
    apart = windows(corpus.held_out, read + 1)
    fit, test = (evenly(apart[place::2].long(), count) for place, count in ((0, CALIBRATED), (1, TESTED)))
    ways = factors_of_ways(model, fit, read, run.config.context)
    return {
        "at_home": held_out_loss(model, held_out_windows(run, corpus)),
        "ways": {name: judge(model, test, factors) for name, factors in ways.items()},
    }


def read_quickly(run: Run, corpus: Corpus) -> dict[str, Any]:
    """The same with a few bytes, for a look at whether it works."""
    return read_at_length(
        run, Corpus(corpus.training, corpus.held_out[:4000], corpus.digest), read=8 * run.config.context
    )


def evenly(found: Tensor, count: int) -> Tensor:
    """At most ``count`` of the windows [w, n], the same number apart."""
    return found[:: max(1, len(found) // count)][:count]


def factors_of_ways(model: ByteModel, fit: Tensor, read: int, home: int) -> dict[str, Tensor]:
    """Way -> what queries are multiplied by, [layers, heads, places], each but the first three by looking at text."""
    ones = torch.ones(model.config.layers, model.config.heads, read)
    keys = torch.arange(1, read + 1)
    by_length = 1 / LengthTemperature(home)(torch.empty(0), visible_keys=keys)[0, 0]
    return {
        "plain": ones,
        "log n": ones * by_length,
        f"log n beyond {home}": ones * by_length.clamp(min=1.0),
        "one calibrated T": ones / calibrate(model, fit, per="model")[..., None],
        "a calibrated T per head": ones / calibrate(model, fit, per="head")[..., None],
        "entropy matched": ones / match_entropy(model, fit[:MATCHED], home)[..., None],
    }


def judge(model: ByteModel, ids: Tensor, factors: Tensor) -> dict[str, Any]:
    """Loss of each window and of each bucket of places, and the mean entropy of attention."""
    with scale_queries(model, factors):
        losses = torch.cat([_losses(model, part) for part in ids.split(4)])
        entropy = entropies(model, ids[:MATCHED, :-1]).mean().item()
    constant = bool((factors == factors[..., :1]).all())
    bucket = min(BUCKET, losses.shape[1])
    return {
        "losses": losses.mean(1).tolist(),
        "by_place": [part.mean().item() for part in losses.split(bucket, dim=1)],
        "temperatures": (1 / factors[..., 0]).tolist() if constant else None,
        "entropy_nats": entropy,
    }


@torch.no_grad()
def _losses(model: ByteModel, ids: Tensor) -> Tensor:
    """[windows, places], nats."""
    return F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:], reduction="none")


@contextmanager
def scale_queries(model: ByteModel, factors: Tensor) -> Iterator[None]:
    """Multiplies the queries of each head by its factors, [layers, heads, places] or with one place for all."""
    layers = [module for module in model.modules() if isinstance(module, Attention)]

    def hook(each: Tensor) -> Any:
        def scale(_: nn.Module, __: Any, query: Tensor) -> Tensor:
            places = each[:, : query.shape[1]].t()[..., None]
            return (query.unflatten(-1, (len(each), -1)) * places).flatten(-2)

        return scale

    handles = [layer.q_proj.register_forward_hook(hook(each)) for layer, each in zip(layers, factors, strict=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def calibrate(model: ByteModel, ids: Tensor, *, per: str) -> Tensor:
    """Temperatures [layers, heads] of the least loss on ``ids`` [windows, n], one for the model or one per head.

    By L-BFGS, from 1, between 1/8 and 8: a head that the loss hardly feels would run away.
    """
    shape = (1, 1) if per == "model" else (model.config.layers, model.config.heads)
    free = torch.zeros(shape, requires_grad=True)
    optimizer = torch.optim.LBFGS([free], max_iter=EVALUATIONS, max_eval=EVALUATIONS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for part in ids.split(4):
            factors = (1 / _temperatures(free)).expand(model.config.layers, model.config.heads)[..., None]
            with scale_queries(model, factors.expand(-1, -1, ids.shape[1])):
                value = model.loss(part) * (len(part) / len(ids))
            value.backward()
            total += value.detach()
        return total

    optimizer.step(loss)  # type: ignore[arg-type]
    return _temperatures(free.detach()).expand(model.config.layers, model.config.heads).clone()


def _temperatures(free: Tensor) -> Tensor:
    """Any numbers as temperatures within the bound; 0 as 1, and near it as logarithms."""
    bound = math.log(FARTHEST)
    return (bound * (free / bound).tanh()).exp()


def match_entropy(model: ByteModel, ids: Tensor, home: int) -> Tensor:
    """Temperatures [layers, heads] at which each head's mean entropy over ``ids`` is that in windows of ``home``.

    Layer by layer from the bottom, since a layer's scores depend on those below it; by bisection of log T.
    """
    target = entropies(model, ids[:, :-1].reshape(-1, home) if (ids.shape[1] - 1) % home == 0 else ids[:, :home])
    logs = torch.zeros_like(target)
    for layer in range(len(logs)):
        low, high = torch.full_like(logs[layer], -math.log(FARTHEST)), torch.full_like(logs[layer], math.log(FARTHEST))
        for _ in range(HALVINGS):
            logs[layer] = (low + high) / 2
            with scale_queries(model, (-logs).exp()[..., None].expand(-1, -1, ids.shape[1])):
                too_hot = entropies(model, ids[:, :-1])[layer] > target[layer]
            low, high = torch.where(too_hot, low, logs[layer]), torch.where(too_hot, logs[layer], high)
    return logs.exp()


def entropies(model: ByteModel, ids: Tensor) -> Tensor:
    """Mean entropy of the rows of each head over ``ids``, nats: [layers, heads]."""
    seen = scan(model, list(ids.split(8)), stats=("entropy",), backend="blocked")
    rows: Sequence[list[float]] = [[_number(head.entropy_nats) for head in site.heads] for site in seen.sites]
    return torch.tensor(rows)


def _number(value: float | None) -> float:
    return math.nan if value is None else value
