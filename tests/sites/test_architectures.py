"""The attention of 2026: in every architecture each layer is read exactly, or named with its kind; and what can be
tempered and folded there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attemper
from attemper.control.fold import fold_
from attemper.errors import InputError
from attemper.readings.labels import by_reason, pattern_of
from attemper.readings.reading import Skipped
from attemper.sites.find import chosen_sites

tf = pytest.importorskip("transformers")

from tests.monitor.tiny_models import head_entropies, watched_scan  # noqa: E402
from tests.sites.architectures import ARCHITECTURES, Architecture  # noqa: E402
from tests.sites.token_mixing import eager_weights, holds, mixing_modules  # noqa: E402

LIBRARY = "transformers, architectures of 2026"
DEFAULT = ("Qwen3.5", "gpt-oss", "DeepSeek V4", "Falcon H1", "Mamba 2")
"""Attention beside each kind of mixing without attention; the others run under --all."""
MORE = pytest.mark.slow("more of what a few cases show by default")


def marks(one: Architecture, padding: str | None = None) -> Any:
    return MORE if padding or one.title not in DEFAULT else ()


ATTENDING = [one for one in ARCHITECTURES if one.title != "Mamba 2"]
EACH = [pytest.param(one, id=one.title, marks=marks(one)) for one in ATTENDING]
PADDED = [
    pytest.param(one, padding, id=f"{one.title}-{padding}", marks=marks(one, padding))
    for one in ATTENDING
    for padding in (None, "left", "right")
    if padding is None or one.kind not in ("vision", "vision and text")
    # Its indexer scores padded keys as well, whose states eager attention and sdpa leave unlike: it chooses others.
    if padding != "left" or one.title != "MiniMax M3"
]


def own(model: Any) -> str:
    """The implementation that people run: sdpa, where transformers has it for this model."""
    return "sdpa" if model._supports_sdpa else "eager"


def expected(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Mean entropy per head [H] of every module that attends, all its calls, real queries only, from eager weights."""
    with torch.no_grad(), eager_weights(model) as weights:
        model(**batch)

    def mask(name: str) -> Tensor | None:
        if name.startswith(("vision", "model.visual", "encoder")):
            return None
        return batch.get("decoder_attention_mask", batch.get("attention_mask"))

    return {
        name: torch.stack([head_entropies(layer, mask(name)) for layer in layers]).mean(0)
        for name, layers in weights.items()
    }


def largest_error(scan: attemper.Scan, layers: dict[str, Tensor]) -> float:
    found: dict[str, list[list[float]]] = {}
    for site in scan.sites:
        entropies = [head.entropy_nats for head in site.heads]
        found.setdefault(site.name.partition("#")[0], []).append([value for value in entropies if value is not None])
    assert set(found) == set(layers)
    means = {name: torch.tensor(calls, dtype=torch.float64).mean(0) for name, calls in found.items()}
    return max(float((means[name] - layers[name]).abs().max()) for name in layers)


@pytest.mark.parametrize(("architecture", "padding"), PADDED)
@pytest.mark.turns(2)
def test_every_layer_is_read_exactly_or_named_with_its_kind(
    architecture: Architecture, padding: str | None, seen: Callable[..., None]
) -> None:
    model, batch = architecture.build(), architecture.batch(padding)
    layers = expected(model, batch)
    model.set_attn_implementation(own(model))
    found = watched_scan(model, batch)
    readings = (attemper.scan(model, [batch]), found)
    attending = set(layers)
    if padding:
        layers = {name: layers[name] for name in layers if not any(map(_cannot_tell(name), readings))}
    worst = max(largest_error(reading, layers) for reading in readings)
    assert worst < 1e-5
    uncached = {} if architecture.kind in ("vision", "two towers") else {"use_cache": False}
    mixing = mixing_modules(model, batch | uncached)  # it calls modules more than once
    assert mixing
    for reading in readings:
        told = attending | {skip.name for skip in reading.skipped if skip.kind is not None}
        assert [name for name in mixing if not any(holds(name, one) or holds(one, name) for one in told)] == []
    assert [skip.name for skip in _layers(readings[0])] == [skip.name for skip in _layers(readings[1])]
    # Layers whose padding cannot be told are skipped where there is padding alone: the page has a model without.
    columns = None if padding else {"read": _read(readings[0]), "named, not read": _named(readings[0])}
    seen(LIBRARY, architecture.title, "registry", error_nats=worst, more=columns)


def _cannot_tell(name: str) -> Callable[[attemper.Scan], bool]:
    """Whether a reading skips this site because its keys are not tokens (DeepSeek V4's compressed ones)."""
    reason = "padding of its queries is unknown"
    return lambda scan: any(skip.name == name and skip.reason.startswith(reason) for skip in scan.skipped)


def _read(scan: attemper.Scan) -> str:
    """The stacks that are read, and in which of them attention is cross attention."""
    stacks = {pattern_of(site.name.partition("#")[0]): site.kind for site in scan.sites}
    return ", ".join(f"`{name}`{' (cross)' if kind == 'cross' else ''}" for name, kind in stacks.items())


def _layers(scan: attemper.Scan) -> list[Skipped]:
    """What is skipped, without the missed mass of layers that are read, which only a scan looks for."""
    return [skip for skip in scan.skipped if not skip.name.endswith(".missed_mass")]


def _named(scan: attemper.Scan) -> str:
    stacks = {pattern_of(skip.name.partition("#")[0]): skip.kind or "router" for skip in _layers(scan)}
    return ", ".join(f"`{name}`: {kind}" for name, kind in stacks.items())


def test_a_model_that_does_not_attend_says_what_its_layers_are(seen: Callable[..., None]) -> None:
    (architecture,) = (one for one in ARCHITECTURES if one.title == "Mamba 2")
    model, batch = architecture.build(), architecture.batch(None)
    told = r"saw no attention in Mamba2ForCausalLM, and there is none to measure"
    for read in (lambda: attemper.scan(model, [batch]), lambda: watched(model, batch)):
        with pytest.raises(InputError, match=told) as error:
            read()
        assert "backbone.layers.*.mixer (0, 1): state space: " in str(error.value)
    assert mixing_modules(model, batch) == {"backbone.layers.0.mixer", "backbone.layers.1.mixer"}
    seen(LIBRARY, "Mamba 2", "registry", more={"named, not read": "`backbone.layers.*.mixer`: state space"})


def watched(model: nn.Module, batch: dict[str, Tensor]) -> attemper.Scan:
    with attemper.watch(model) as watch:
        model(**batch)
    return watch.table()


WHY = {
    "by a gain that its heads share": "heads share the gain of their norm",
    "without a learned gain of the queries alone": "queries are normalised without a gain",
    "the layout of its query and key projections is not known": "the layout of its projections is not known",
}
"""What an error of folding says -> the same in a table."""


@pytest.mark.parametrize("architecture", EACH)
def test_what_folds_gives_the_outputs_of_the_tempered_model(
    architecture: Architecture, seen: Callable[..., None]
) -> None:
    model, batch = architecture.build(), architecture.batch(None)
    sites = [site.name for site in chosen_sites("test", model, None)]
    by_layer, by_head = {}, {}
    for name in sites:
        by_layer[name] = torch.rand(1) + 0.6
        by_head[name] = torch.rand(4) + 0.6
    folded, reasons = _folding(model, batch, by_head)
    text = "per head"
    if len(folded) < len(sites):
        whole, rest = _folding(model, batch, by_layer)
        text = _joined((folded, "per head", reasons), (whole, "per layer", rest), sites)
    seen(LIBRARY, architecture.title, "registry", more={"temper": "yes", "fold": text})


def _joined(head: tuple[set[str], str, dict[str, str]], layer: tuple[set[str], str, dict[str, str]], sites: Any) -> str:
    """Which sites fold per head, which per layer and why not per head, and which not at all and why."""
    outcomes = {}
    for name in sites:
        if name in head[0]:
            outcomes[name] = "per head"
        elif name in layer[0]:
            outcomes[name] = f"per layer: {head[2][name]}"
        else:
            outcomes[name] = f"no: {layer[2][name]}"
    if len(set(outcomes.values())) == 1:
        return next(iter(outcomes.values()))
    return "; ".join(f"`{name}` {text}" for name, text in by_reason(outcomes.items()))


def _folding(model: nn.Module, batch: dict[str, Tensor], given: dict[str, Tensor]) -> tuple[set[str], dict[str, str]]:
    """Names of the sites that fold these temperatures, checked all together, and why the others do not."""
    folded, reasons = copy.deepcopy(model), {}
    for name, value in given.items():
        try:
            fold_("fold", folded, {name: value})
        except InputError as error:
            (reasons[name],) = (short for said, short in WHY.items() if said in str(error))
    fine = {name: value for name, value in given.items() if name not in reasons}
    # What does not fold is tempered all the same.
    tempered = copy.deepcopy(model)
    for name, value in given.items():
        attemper.temper(tempered, temperature=attemper.nn.FixedTemperature(value), sites=[name])
    for name in reasons:
        attemper.temper(folded, temperature=attemper.nn.FixedTemperature(given[name]), sites=[name])
    plain, whole = _output(model, batch), _output(tempered, batch)
    moved = (whole - plain).abs().max()
    assert moved > 3e-5
    assert (_output(folded, batch) - whole).abs().max() < 1e-6 + 1e-3 * moved
    return set(fine), reasons


def _output(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        found = model(**batch)
    return next(found[name] for name in ("logits", "last_hidden_state", "logits_per_image") if name in found)
