"""Which runs the benchmark has, in which order: configurations, seeds, and the faults put into them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from attemper.lab.model import ByteConfig
from attemper.lab.trained.training import Run
from research.early_warning.encoder import EncoderConfig
from research.early_warning.faults import KINDS, Fault, draw
from research.early_warning.optimizers import OtherRun
from research.early_warning.spacing import ATTENTION

SEEDS = 5
"""Healthy runs of a configuration: what its noise floor is measured from."""


@dataclass(frozen=True)
class Trial:
    """One run, healthy or with a fault. The run without the fault is its twin."""

    run: Run
    fault: Fault | None = None

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Self:
        """The trial that ``asdict`` made a document of."""
        sizes, fault = document["run"]["config"], document["fault"]
        config = (EncoderConfig if "model" in sizes else ByteConfig)(**sizes)
        run = OtherRun if "optimizer" in document["run"] else Run
        return cls(run(**{**document["run"], "config": config}), fault and Fault(**fault))

    @property
    def twin(self) -> Self:
        """The healthy run of the same configuration and seed."""
        return replace(self, fault=None)

    @property
    def of_encoder(self) -> bool:
        """Whether it trains the pretrained encoder, which needs packages of its own."""
        return isinstance(self.run.config, EncoderConfig)


def _run(rate: float, layers: int = 4, context: int = 64, width: int = 64, **other: Any) -> Run:
    config = ByteConfig(layers, width // 16, width, context, qk_norm=other.pop("qk_norm", False))
    return Run(rate=rate, config=config, every=ATTENTION, **other)


CONFIGURATIONS = (
    _run(3e-3, layers=2),
    _run(1e-2, layers=2, qk_norm=True),
    _run(3e-3, layers=2, warmup=0.0),
    _run(1e-3, layers=2),
    _run(5e-3, layers=2, width=32),
    _run(3e-3, width=32),
    _run(2e-3, layers=2, warmup=0.2),
    _run(3e-3, layers=3),
    _run(3e-3),
    _run(3e-3, qk_norm=True),
    _run(2e-3, layers=2, width=96),
    _run(2e-3, layers=2, context=128),
    _run(3e-3, layers=3, qk_norm=True, warmup=0.0),
    _run(1e-3, warmup=0.0),
    _run(2e-3, layers=3, context=96),
    _run(3e-3, layers=2, context=128, qk_norm=True),
    _run(1e-2, qk_norm=True),
    _run(1e-3, layers=3, context=128),
    _run(3e-3, layers=3, context=128),
    _run(1e-3, layers=3, context=96, width=96),
)
"""Sixteen dimensions a head, those that train fastest first. Rates are those at which such models train well: plain
ones to 5e-3, others to 1e-2.
"""
LARGER = (
    _run(1e-3, layers=8),
    _run(2e-3, layers=2, context=256),
    _run(1e-3, layers=4, context=256, qk_norm=True),
    _run(1e-3, layers=2, context=512),
)
"""Five healthy runs and six faults of each come after the small ones."""
ENCODER = Run(rate=1e-4, config=EncoderConfig(), every=ATTENTION)
ENCODER_KINDS = ("rate", "jump", "scale", "shuffled", "head")
"""Of faults in the encoder, one each. It sees all keys, so that none can leak."""


def plan(steps: int = 600, seeds: int = SEEDS, *, quick: bool = False) -> list[Trial]:
    """Every run, so ordered that any first part is of use: a configuration's healthy runs, then half of its faults.

    The other halves come after the last configuration, then the larger models. At the end a pretrained encoder, which
    learns another task, for a quarter of the steps.
    """
    if quick:
        return _quick()
    small = [run.change(steps=steps) for run in CONFIGURATIONS]
    large = [run.change(steps=steps) for run in LARGER]
    trials: list[Trial] = []
    for place, run in enumerate(small):
        trials += [*_healthy(run, seeds), *_faulty(run, seeds, place, first=True)]
    for place, run in enumerate(small):
        trials += _faulty(run, seeds, place, first=False)
    for place, run in enumerate(large):
        trials += [*_healthy(run, seeds), *_faulty(run, seeds, place, first=True)]
    encoder = ENCODER.change(steps=max(1, steps // 4))
    trials += _healthy(encoder, seeds)
    for number, kind in enumerate(ENCODER_KINDS):
        seeded = encoder.change(seed=number % seeds)
        trials.append(Trial(seeded, draw(kind, seeded)))
    return trials


def _quick() -> list[Trial]:
    """Two configurations, a few steps: whether it works."""
    trials = []
    for run in (_run(3e-3, layers=2, context=32, width=32), _run(1e-2, layers=2, context=32, width=32, qk_norm=True)):
        short = run.change(steps=12, batch=2)
        trials += [*_healthy(short, SEEDS), *(Trial(short, draw(kind, short)) for kind in ("rate", "shuffled", "leak"))]
    return trials


def _healthy(run: Run, seeds: int) -> Iterator[Trial]:
    return (Trial(run.change(seed=seed)) for seed in range(seeds))


def _faulty(run: Run, seeds: int, place: int, *, first: bool) -> Iterator[Trial]:
    """Half of the kinds: configurations one after the other begin with other ones, and kinds with other seeds."""
    kinds = [kind for kind in KINDS if kind != "warmup" or run.warmup > 0]
    turned = [*kinds[5 * place % len(kinds) :], *kinds[: 5 * place % len(kinds)]]
    half = len(kinds) - len(kinds) // 2
    for number, kind in enumerate(turned[:half] if first else turned[half:]):
        seeded = run.change(seed=(place + number) % seeds)
        yield Trial(seeded, draw(kind, seeded))
