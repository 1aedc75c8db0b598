"""Whatever fails inside of a watch, training goes on as without it: each piece of ours is made to raise, one by one."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import reduce
from inspect import getattr_static
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attemper
from attemper.integrations.training import Monitor
from attemper.sites import torch_functions
from attemper.sites.observation import current

BROKEN = RuntimeError("a piece of ours is broken")


class Odd(nn.Module):
    """An attention that cannot be read."""

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return (q @ k.transpose(-2, -1)).softmax(-1).square() @ k


class Attention(nn.Module):
    """The ways in: SDPA with a tap, softmax by hand, our own function, nn.MultiheadAttention with padding."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.qkv = 4, nn.Linear(32, 96)
        self.inner, self.odd = nn.MultiheadAttention(32, 4, batch_first=True), Odd()

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        attemper.tap(q, k, is_causal=True, name="tap")
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed = mixed + (q @ v.transpose(-2, -1)).softmax(-1) @ k
        mixed = mixed + attemper.attention(k, q, v).output
        mixed = mixed + self.odd(q + v, k)
        mixed = mixed.transpose(1, 2).flatten(2)
        return self.inner(mixed, mixed, mixed, key_padding_mask=attention_mask == 0)[0]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, attention_mask)
        return x


def run(model: Model, watch: attemper.types.Watch | None) -> list[Tensor]:
    """Losses and parameters of three steps."""
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mask, losses = torch.ones(2, 10), []
    mask[1, 7:] = 0
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.randn(2, 10, 32), attention_mask=mask).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if watch is not None:
            watch.step()
    return [*losses, *(parameter.detach() for parameter in model.parameters())]


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def home(path: str) -> tuple[Any, str]:
    """The module or class that holds a name, and the name: ``monitor.watch:Watch.runs``."""
    module, _, names = path.partition(":")
    holder = reduce(getattr, names.split(".")[:-1], __import__(f"attemper.{module}", fromlist=["_"]))
    return holder, names.split(".")[-1]


@contextmanager
def broken(path: str) -> Iterator[None]:
    """While a watch is open, this piece raises."""
    holder, name = home(path)
    original = getattr_static(holder, name)

    def raising(*_: Any, **__: Any) -> Any:
        raise BROKEN

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(holder, name, property(raising) if isinstance(original, property) else raising)
        yield


PIECES = (
    *(f"monitor.collector:Collector.{name}" for name in ("begin", "key_tokens", "see", "skip", "commit", "_site")),
    *("monitor.collector:measure", "monitor.live_sample:SiteSums", "monitor.collector:attention_type"),
    *("monitor.calls:CallSites.number", "monitor.calls:Pairing.join", "monitor.head_sums:SiteSums.add"),
    *(f"monitor.watch:Watch.{name}" for name in ("_begin_pass", "_switch_taps", "sampling", "_end_step", "_tell")),
    *("monitor.recorder:sample_of", "monitor.recorder:Judge.feed", "monitor.kept_run:KeptRun.take"),
    *("monitor.collector:Collector.snapshot", "monitor.sampled_steps:FirstPasses.join", "monitor.passes:observing"),
    *("sites.padding:_token_mask", "sites.padding:CallContext.module", "sites.padding:Tokens.of_queries"),
    *("sites.torch_functions:AttentionMode._report", "sites.torch_functions:softmax_by_hand.ByHand.follow"),
    *("sites.identity:Origins.of_scores", "sites.tensor_axes:FeatureAxes.follow", "sites.observation:_tell_of"),
    *("sites.package_functions:report", "sites.tap:_run", "sites.tap_buffers:deliver"),
)
"""Some of every file, which raise whenever they are called: test_faults_everywhere.py has every function, once."""


@pytest.fixture(scope="module")
def plain() -> list[Tensor]:
    return run(model(), None)


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.quick(
    "Collector.see",
    "Collector.commit",
    "CallSites",
    "Watch._begin_pass",
    "Watch._tell",
    "KeptRun",
    "FirstPasses",
    "_token_mask",
    "AttentionMode",
    "tensor_axes",
    "tap:_run",
)
@pytest.mark.turns(2)
def test_training_goes_on_bit_for_bit_when_a_piece_of_ours_raises(piece: str, plain: list[Tensor]) -> None:
    one = model()
    with attemper.watch(one, every=2, rows=4) as watch, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with broken(piece):
            found = run(one, watch)
    assert all(map(torch.equal, found, plain))
    assert sum(len(part._forward_pre_hooks) + len(part._forward_hooks) for part in one.modules()) == 0
    assert current() == ()
    assert not torch_functions._active.get()
    reasons = [entry.reason for entry in watch._collector.readings().skipped]
    assert watch.failures > 0 or any(str(BROKEN) in reason for reason in reasons), "nobody was told"
    warned = sum("Training goes on" in str(warning.message) for warning in told)
    assert warned == (1 if watch.failures else 0)


OF_THE_REGISTRY = (
    ("beside", "sites.transformers:reader_of"),
    ("beside", "sites.transformers:_Reporting._report"),
    ("beside", "sites.transformers:places"),
    ("beside", "sites.transformers:_wrap_lookup"),
    ("beside", "sites.transformers:report"),
    ("replace", "sites.transformers:run"),
    ("replace", "sites.transformers:_attend_here"),
    ("replace", "sites.transformers:outside_registry"),
    ("replace", "monitor.collector:Collector.observe"),
    ("replace", "monitor.collector:Collector.key_tokens"),
)


@pytest.mark.parametrize(("observe", "piece"), OF_THE_REGISTRY)
@pytest.mark.turns(2)
def test_a_transformers_model_trains_on_when_a_piece_of_ours_raises(observe: str, piece: str) -> None:
    pytest.importorskip("transformers")
    from tests.monitor.tiny_models import TINY

    torch.manual_seed(0)
    one = TINY["llama"].build()
    one.set_attn_implementation("sdpa")
    batch = {"input_ids": torch.arange(24).reshape(2, 12)}
    # Either the model's own attention has run, or ours in its place.
    with attemper.watch(one, observe=observe):
        expected = [one(**batch).logits]
    expected.append(one(**batch).logits)
    with attemper.watch(one, observe=observe) as watch, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with broken(piece):
            found = one(**batch).logits
    assert any(torch.equal(found, logits) for logits in expected)
    assert one.config._attn_implementation == "sdpa"
    assert watch.failures > 0
    assert sum("Training goes on" in str(warning.message) for warning in told) == 1


@pytest.mark.parametrize(
    "piece", ["monitor.watch:Watch.table", "integrations.training:scalars", "monitor.recorder:sample_of"]
)
def test_a_callback_goes_on_when_a_reading_fails(piece: str) -> None:
    one = model()
    monitor = Monitor(
        every=1, rows=None, stats=["max_logit"], trackers=None, max_keys=None, filter=None, on_alarm=None
    )  # fmt: skip
    monitor.begin(one)
    with broken(piece):
        for step in range(2):
            one(torch.randn(2, 10, 32), torch.ones(2, 10))
            with ExitStack() as expected:
                for said in ("Training goes on", "parts of Model were not measured") if step == 0 else ():
                    expected.enter_context(pytest.warns(UserWarning, match=said))
                assert monitor.step(step) == {}
    one(torch.randn(2, 10, 32), torch.ones(2, 10))
    assert "attention/max_logit/max" in monitor.step(2)
    assert monitor.watch is not None
    assert monitor.watch.failures >= 2
    monitor.close()


def test_failures_count_the_samples_that_the_store_lost_and_the_store_is_named_by_its_path(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "run"
    model = nn.MultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(2, 5, 16)
    with attemper.watch(model, store=path) as watch:
        for _ in range(3):
            model(x, x, x)
            watch.step()
    assert watch.failures == 3
    (record,) = caplog.records
    assert f"the run {path} cannot be stored" in record.message
