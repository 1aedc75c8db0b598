"""One model type of transformers: built small by rule, read, and held against the weights of its own eager pass."""

from __future__ import annotations

import importlib
import math
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import numpy as np
import torch
import transformers as tf
from torch import Tensor, nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import attemper
from attemper.errors import InputError
from attemper.readings.labels import kind_of, pattern_of
from attemper.sites.mixers import UNREAD
from tests.sweep import batches as inputs
from tests.sweep import page
from tests.sweep.shrink import RECIPES, mended, shrunk
from tests.sweep.weights import Found, Map, together, weights_of

BYTES, SECONDS = 2 * 2**30, 30
"""What a model may take, and how long building it may, and finding inputs, of processor time."""
MEAN = "is the mean over its calls"
"""What is said of a module that attends too often for each call to be a site."""
TOLERANCE, TOLERANCE_DOUBLE = 2e-4, 2e-5
"""Of an entropy in nats, and of a weight: float32 held against float64, and float64 against itself, where some models
softmax in float32.
"""


@dataclass
class Verdict:
    """What became of a model type."""

    type: str
    verdict: str = "not tried"
    reasons: list[str] = field(default_factory=list)
    model: str | None = None
    recipe: str | None = None
    sites: int = 0
    heads: int = 0
    error_nats: float | None = None
    spread_nats: float | None = None
    """How far entropies of heads lie apart: weights that are all alike would show nothing."""
    skipped: dict[str, str] = field(default_factory=dict)
    layers: dict[str, str] = field(default_factory=dict)
    """Layers that mix tokens without weights: their kinds."""
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0


class _SlowError(TimeoutError):
    pass


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Ends what runs inside after so many seconds of processor time."""

    def ring(_: int, __: FrameType | None) -> None:
        raise _SlowError(f"it took longer than {seconds:.0f} s")

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def judge(model_type: str, seconds: float = SECONDS) -> Verdict:
    """The verdict on one model type; ``seconds``: for building it, and for finding inputs."""
    found, start = Verdict(model_type), time.process_time()
    try:
        _judge(model_type, found, seconds)
    except _SlowError as error:
        found.verdict, found.reasons = "not tried", [str(error)]
    except Exception as error:  # while its readings are compared: what it dies of is a fault until it is looked at
        is_memory = isinstance(error, MemoryError) or "allocate memory" in str(error)
        found.verdict = "not tried" if is_memory else "wrong"
        found.reasons = [f"comparing it raised {type(error).__name__}: {_short(error)}"]
    found.seconds = round(time.process_time() - start, 1)
    return found


def _judge(model_type: str, found: Verdict, seconds: float) -> None:
    try:
        kind = CONFIG_MAPPING[model_type]
        kind()
    except Exception as error:
        found.reasons = [f"its configuration cannot be made without arguments ({_short(error)})"]
        return
    classes = model_classes(kind)
    if not classes:
        found.reasons = ["no class of transformers has this configuration for its own"]
        return
    tried = []

    for recipe in RECIPES:
        for name in classes[:2]:
            try:
                with limit(seconds):
                    model = _built(name, shrunk(kind, recipe))
                with limit(seconds):
                    batch = _running(model)
            except Exception as error:
                tried.append(f"{recipe}, {name}: {type(error).__name__}: {_short(error)}")
                found.notes = tried
                continue
            found.model, found.recipe, found.notes = name, recipe, []
            with limit(4 * SECONDS):
                _compare(model, batch, found)
            return
    found.reasons = tried[:1]


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def model_classes(kind: type[Any]) -> list[str]:
    """Names of the classes of a configuration: its base model first."""
    names: list[str] = []
    heads = (one for name, one in vars(modeling_auto).items() if name.endswith("_MAPPING") and name != "MODEL_MAPPING")
    for mapping in (tf.MODEL_MAPPING, *heads):
        with suppress(KeyError, ImportError, AttributeError, ValueError):
            one = mapping[kind]
            names += [part.__name__ for part in (one if isinstance(one, (tuple, list)) else (one,)) if part is not None]
    if not names:
        names = _classes_of_file(kind)
    return list(dict.fromkeys(names))


def _file(kind: type[Any]) -> Any:
    """The module that has the models of a configuration."""
    return importlib.import_module(kind.__module__.replace(".configuration_", ".modeling_"))


def _classes_of_file(kind: type[Any]) -> list[str]:
    with suppress(ImportError):
        return [
            name
            for name, one in vars(_file(kind)).items()
            if isinstance(one, type) and issubclass(one, tf.PreTrainedModel) and one.config_class is kind
            and not name.endswith("PreTrainedModel")
        ]  # fmt: skip
    return []


def _built(name: str, config: Any) -> nn.Module:
    while True:
        try:
            return _made(name, config)
        except AttributeError as error:
            if not mended(config, str(error)):
                raise


def _made(name: str, config: Any) -> nn.Module:
    kind: Any = getattr(tf, name, None) or getattr(_file(type(config)), name)
    with torch.device("meta"), suppress(NotImplementedError, RuntimeError):
        size = sum(part.numel() * 4 for part in kind._from_config(config, attn_implementation="eager").parameters())
        if size > BYTES:
            raise MemoryError(f"its weights take {size / 2**30:.1f} GiB")
    _seed()
    return _sharpened(kind._from_config(config, attn_implementation="eager").float().eval())


def _seed() -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


def _sharpened(model: nn.Module) -> nn.Module:
    """Weights of a size at which attention is neither uniform nor one-hot; nothing is 0 that could be something."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point() or not parameter.numel():
                continue
            drawn = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() != 2:  # of a convolution, too
                parameter += 0.1 * drawn
                continue
            size = parameter.std().item() if parameter.numel() > 1 else 0.0
            wanted = 1.5 * parameter[0].numel() ** -0.5
            if size == 0.0:
                parameter += 0.5 * wanted * drawn
            elif size < wanted:
                parameter.mul_(wanted / size)
    return model


def _running(model: nn.Module) -> inputs.Batch:
    """The first inputs with which a forward goes through."""
    _seed()
    while True:
        try:
            return inputs.fitting(model, lambda batch: _forward(model, batch))
        except LookupError as error:
            if not mended(model.config, str(error)):
                raise


def _forward(model: nn.Module, batch: inputs.Batch) -> Any:
    _seed()
    with torch.no_grad():
        return model(**batch)


def _compare(model: Any, batch: inputs.Batch, found: Verdict) -> None:
    """Reads a model in float32 and holds it against its weights in float64, for each of its implementations."""
    readings = _readings(model, batch, found)
    double = {name: _doubled(part) for name, part in batch.items()}
    oracles = {name: _oracle(model, batch, double, name, found) for name in dict.fromkeys(one.how for one in readings)}
    faults = _faults(readings, oracles, found, TOLERANCE)
    if all(oracle.double for oracle in oracles.values()) and any("weights" in fault for fault in faults):
        # A router or a choice of keys may fall differently in float32: then both run in float64.
        again = _readings(model.double(), double, found)
        faults = _faults(again, oracles, found, TOLERANCE_DOUBLE)
        found.notes.append("compared in float64")
    for oracle in oracles.values():
        added = {pattern_of(one.module) for one in oracle.maps if one.added}
        found.notes += [f"{name}: what two weights gave is added" for name in added]
    found.notes = list(dict.fromkeys(found.notes))
    _sort(found, faults)


def _doubled(part: Any) -> Any:
    return part.double() if torch.is_tensor(part) and part.is_floating_point() else part


def _oracle(model: Any, batch: inputs.Batch, double: inputs.Batch, implementation: str, found: Verdict) -> Found:
    """The weights of a pass with one implementation: eager masks and SDPA's may mean something else."""
    model.set_attn_implementation(implementation)
    try:
        with _experts_one_by_one(model), weights_of(model.double()) as oracle:
            output = _first(_forward(model, double))
        if output is not None and output.is_floating_point() and not bool(output.isfinite().all()):
            raise ValueError("its output is not finite")
    except _SlowError:
        raise
    except Exception as error:
        found.notes.append(f"{page.FLOAT32}: {_short(error)}")
        with weights_of(model.float()) as oracle:
            _forward(model, batch)
        oracle.double = False
    model.float()
    return oracle


@contextmanager
def _experts_one_by_one(model: Any) -> Iterator[None]:
    """Runs experts without the grouped products of matrices, which take no float64."""
    before = model.get_experts_implementation()
    model.set_experts_implementation("eager")
    try:
        yield
    finally:
        model.set_experts_implementation(before)


def _sort(found: Verdict, faults: list[str]) -> None:
    if faults:
        found.verdict, found.reasons = "wrong", list(dict.fromkeys(faults))[:12]
    elif found.skipped or not found.sites:
        found.verdict, found.reasons = "skipped", sorted(set(found.skipped.values())) or [_nothing(found.layers)]
    else:
        found.verdict = "exact"


def _nothing(layers: Mapping[str, str]) -> str:
    """Why a model has no site though nothing was skipped."""
    if UNREAD in layers.values():
        return f"{UNREAD} in modules whose name says attention: named, not read"
    return "no attention in it: its layers mix tokens in other ways" if layers else "no attention in it"


@dataclass(frozen=True)
class Reading:
    """What one way of reading a model said."""

    how: str
    """The implementation that the model had."""
    by: str
    sites: tuple[Any, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    fault: str | None = None
    """What went wrong beside the numbers."""


def _readings(model: Any, batch: inputs.Batch, found: Verdict) -> list[Reading]:
    made = []
    for implementation in ("eager", "sdpa") if getattr(model, "_supports_sdpa", False) else ("eager",):
        try:
            model.set_attn_implementation(implementation)
            before = _first(_forward(model, batch))
        except _SlowError:
            raise
        except Exception as error:
            found.notes.append(f"does not run with {implementation}: {_short(error)}")
            continue
        with attemper.watch(model) as watch:
            during = _first(_forward(model, batch))
        fault = f"{watch.failures} failures" if watch.failures else None
        if before is not None and not _same(before, during):
            fault = "it changed the output"
        made.append(_read(implementation, "watch", watch.table, fault))
        _seed()
        made.append(_read(implementation, "scan", lambda: attemper.scan(model, [batch])))
    return made


def _read(implementation: str, by: str, read: Callable[[], Any], fault: str | None = None) -> Reading:
    """A reading; of a model in which nothing was seen the reasons that its error names."""
    try:
        reading = read()
    except InputError as error:
        if "no attention" not in str(error):
            return Reading(implementation, by, fault=f"it raised {_short(error)}")
        pairs = (line.strip().partition(": ") for line in str(error).splitlines()[1:])
        return Reading(implementation, by, (), {name.partition(" (")[0]: reason for name, _, reason in pairs}, fault)
    except _SlowError:
        raise
    except Exception as error:
        return Reading(implementation, by, fault=f"it raised {type(error).__name__}: {_short(error)}")
    skipped = {skip.name: skip.reason for skip in reading.skipped if not skip.name.endswith(".missed_mass")}
    return Reading(implementation, by, reading.sites, skipped, fault)


def _same(one: Tensor, two: Tensor | None) -> bool:
    return two is not None and one.shape == two.shape and torch.equal(one.nan_to_num(), two.nan_to_num())


def _first(result: Any) -> Tensor | None:
    parts = (
        list(result.values()) if isinstance(result, dict) else result if isinstance(result, (tuple, list)) else [result]
    )
    return next((part for part in parts if isinstance(part, Tensor)), None)


def _faults(readings: list[Reading], oracles: Mapping[str, Found], found: Verdict, tolerance: float) -> list[str]:
    faults: list[str] = []
    found.skipped, found.layers, found.error_nats = {}, {}, None
    for reading in readings:
        oracle, how = oracles[reading.how], f"{reading.by}, {reading.how}"
        own = [*faults_of(reading, oracle, found, tolerance), *filter(None, [reading.fault])]
        faults += [f"{how}: {fault}" for fault in own]
        attending = {one.module for one in oracle.maps}
        for name, reason in reading.skipped.items():
            if "computes attention with custom code, not through" in reason:
                continue
            pattern = pattern_of(name.partition("#")[0])
            attends = any(_holds(pattern, one) or _holds(one, pattern) for one in attending)
            kind = kind_of(reason) or (None if attends else reason)
            (found.skipped if kind is None else found.layers)[pattern] = kind or reason
        found.sites, found.heads = len(reading.sites), sum(len(site.heads) for site in reading.sites)
    return faults


def faults_of(reading: Reading, oracle: Found, found: Verdict, tolerance: float) -> Iterator[str]:
    """What a reading says otherwise than the weights of the pass, and what it leaves out."""
    maps: dict[str, list[Map]] = {}
    for one in oracle.maps:
        maps.setdefault(one.module, []).append(one)
    used: dict[int, tuple[int, int]] = {}
    """Weights that a site was found to have -> rows of each of its heads, and how many there are."""
    for site in reading.sites:
        if site.keys == 1:
            continue  # one key has the weight 1, and nothing to tell it by
        own = maps.get(site.name.partition("#")[0], [])
        pairs = ((head.entropy_nats, head.max_weight) for head in site.heads)
        told = torch.tensor([[math.nan if one is None else one for one in pair] for pair in pairs]).double().T
        left = [one for one in own if id(one) not in used]
        joined = left and any(MEAN in why and _holds(site.name, name) for name, why in reading.skipped.items())
        best, error = _nearest([together(left)] if joined else left, told)
        if best is None:
            yield f"{site.name}: no weights of this module have {site.keys} keys and {len(site.heads)} heads"
            continue
        if not error <= tolerance:
            yield f"{site.name}: entropies differ from the weights by {error:.1e} nats"
            continue
        found.error_nats = max(found.error_nats or 0.0, error)
        found.spread_nats = max(found.spread_nats or 0.0, float(told[0].max() - told[0].min()))
        for one in left if joined else (best,):
            used[id(one)] = one.weights.shape[0] * one.weights.shape[1] // len(site.heads), len(site.heads)
        if best.factor:
            yield f"{site.name}: its weights are a factor of several, not attention"
        if best.subtracted:
            yield f"{site.name}: a head subtracts what two weights give"
        if best.heads and len(site.heads) not in best.heads:
            yield f"{site.name}: it has {len(site.heads)} heads, its module says {best.heads}"
    yield from _missed(reading, maps, used, found)


def _missed(
    reading: Reading, maps: Mapping[str, list[Map]], used: Mapping[int, tuple[int, int]], found: Verdict
) -> Iterator[str]:
    """Weights that are neither read nor named, and rows that are missing in what was read."""
    sites = {site.name.partition("#")[0] for site in reading.sites}
    for name, own in maps.items():
        read = [one for one in own if id(one) in used]
        named = any(_holds(name, other) or _holds(other, name) for other in reading.skipped)
        if len(read) < len(own) and name not in sites and not named:
            yield f"{name}: weights over {own[0].weights.shape[-1]} keys are neither read nor named"
        elif 0 < len(read) < len(own) and not named:
            found.notes.append(f"{pattern_of(name)}: {len(own)} weights, {len(read)} of them read")
        for call in {one.call for one in read}:
            parts = [one for one in read if one.call == call]
            rows = sum(used[id(one)][0] for one in parts)
            wanted = parts[0].rows_of_output(used[id(parts[0])][1])
            if rows < wanted:
                yield f"{name}: it has {rows} rows, its module returns {wanted}"


def _nearest(own: list[Map], told: Tensor) -> tuple[Map | None, float]:
    best, least = None, math.inf
    for one in own:
        for expected in one.statistics(told.shape[1]):
            error = float((expected - told).abs().max())
            if best is None or error < least:
                best, least = one, error
    return best, least


def _holds(outer: str, inner: str) -> bool:
    outer, inner = (pattern_of(one.partition("#")[0].partition(" (")[0]) for one in (outer, inner))
    return not outer or inner == outer or inner.startswith(f"{outer}.")
