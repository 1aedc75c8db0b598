"""A watched training holds no more memory after hundreds of steps than after the first ones, whatever is seen."""

from __future__ import annotations

import gc
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import attemper
from attemper.lab.model import ByteConfig, ByteModel
from tests.sites.own_models import Hand, Own
from tests.support.allocations import peak_allocated_bytes

STEPS = 300
SETTLED = 50
"""Steps after which the allocator holds what a step needs."""
LARGEST_GROWTH = 6 * 2**20
"""Bytes of resident memory. A graph kept of each step of these models is ten times as much."""


class Tapped(Own):
    """Attention that only its tap shows."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.split(x)
        attemper.tap(query, key, is_causal=True, name="tapped")
        scores = query @ key.mT / 8**0.5
        exponentials = (scores - scores.amax(-1, keepdim=True)).exp()
        return exponentials / exponentials.sum(-1, keepdim=True) @ value


def own(kind: type[Own]) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    x = torch.randn(4, 128, 32)
    return kind(0.1).train(), lambda model: model(x).square().mean()


def registry() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    from tests.monitor.tiny_models import TINY, inputs

    batch = inputs("decoder", "right", tokens=96)
    return TINY["llama"].build(dropout=0.1).train(), lambda model: model(**batch).logits.square().mean()


MODELS: dict[str, Callable[[], tuple[nn.Module, Callable[[nn.Module], Tensor]]]] = {
    "registry": registry,
    "by hand": lambda: own(Hand),
    "tap": lambda: own(Tapped),
}


def tensors() -> int:
    gc.collect()
    return sum(1 for thing in gc.get_objects() if type(thing) is Tensor)


def peak_bytes() -> int:
    """The largest resident memory so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def measured(name: str) -> dict[str, int]:
    """Trains, and tells how many tensors and bytes the steps after the first ones have added."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, loss_of = MODELS[name]()
    with attemper.watch(model) as watch:

        def train(steps: int) -> tuple[int, int]:
            for _ in range(steps):
                model.zero_grad()
                loss_of(model).backward()
                watch.step()
            return tensors(), peak_bytes()

        before, after = train(SETTLED), train(STEPS)
        sites = len(watch.table().sites)
    assert watch.failures == 0
    return {"tensors": after[0] - before[0], "bytes": after[1] - before[1], "sampled": watch.sampled, "sites": sites}


@pytest.mark.slow("takes many seconds")
@pytest.mark.parametrize("name", MODELS)
def test_memory_stays_flat_over_three_hundred_sampled_steps(name: str) -> None:
    if name == "registry":
        pytest.importorskip("transformers")
    # In a process of its own: a peak of earlier tests would hide any growth.
    command = [sys.executable, "-m", "tests.monitor.test_watch_memory", name]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["sampled"] == SETTLED + STEPS
    assert found["sites"] == (2 if name == "registry" else 1)
    assert found["tensors"] == 0
    assert found["bytes"] < LARGEST_GROWTH


if __name__ == "__main__":
    print(json.dumps(measured(sys.argv[1])))


ROW_BYTES = 64
"""At most, of a measured row until its step ends: a dozen statistics in float32."""


def peaks_of_passes(layers: int) -> tuple[int, int, int]:
    """Of a forward without gradients, of the same after a shadow pass, and of a training step."""
    model, ids = ByteModel(ByteConfig(layers=layers)), torch.randint(0, 256, (4, 129))

    def forward() -> None:
        with torch.no_grad():
            model(ids)

    model(ids).sum().backward()
    alone, step = peak_allocated_bytes(forward), peak_allocated_bytes(lambda: model(ids).sum().backward())
    with attemper.watch(model, observe="shadow") as watch:
        for _ in range(2):
            watch.step()
            forward()
        watch.step()
        beside = peak_allocated_bytes(forward)
        assert len(watch.table().sites) == layers
    return alone, beside, step


def test_a_shadow_pass_holds_one_layer_at_a_time() -> None:
    for layers in (2, 6):
        alone, beside, step = peaks_of_passes(layers)
        assert alone < beside < alone + layers * 4 * 4 * 129 * ROW_BYTES < step / 2
