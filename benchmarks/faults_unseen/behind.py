"""Faults behind harmless changes: a smoothed, rotated or reordered model in which one layer is wrong as well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import engine as engines
from . import harmless as changes
from . import layouts, masks, orders, replaced
from . import loading as loads
from .models import at
from .subjects import Expect, Subject, Table

behind = Table()

SMOOTHED = (changes.smoothed, 1.0)
SCALED = (changes.values_scaled_and_outputs_divided,)
FOLDED = (changes.gains_folded,)
ROTATED = (changes.stream_rotated, "hadamard")
REPEATED = (orders.keys_and_values_repeated,)
TRADED = (changes.queries_scaled_and_keys_divided,)

Step = tuple[Any, ...]


def deep(subject: Subject, change: Step, fault: Callable[..., Expect], *values: Any) -> Expect:
    """The change everywhere, then the fault in the last layer, or the last that has one behind it."""
    change[0](subject, *change[1:])
    subject.layer = len(at(subject.model, subject.spec.layers)) - 1
    return fault(subject, *values)


PAIRS: dict[str, tuple[str, Step, tuple[Any, ...]]] = {
    "smoothed_scale": ("llama gpt2 phi qwen2 opt", SMOOTHED, (engines.scale, 0.7, "one")),
    "smoothed_queries_unloaded": ("llama opt phi qwen2 gpt_neox gpt2", SMOOTHED, (loads.unloaded, "q", "normal")),
    "smoothed_window": ("llama gpt2 phi", SMOOTHED, (masks.window_of_one_layer,)),
    "smoothed_mlp_unloaded": ("llama qwen2 opt gpt2", SMOOTHED, (loads.unloaded_mlp_output,)),
    "smoothed_not_turned": ("llama qwen3 gpt_neox", SMOOTHED, (engines.not_turned, "one")),
    "scaled_keys_unloaded": ("llama bert gpt2 minilm qwen2", SCALED, (loads.unloaded, "k", "normal")),
    "scaled_values_replaced": ("llama bert opt", SCALED, (replaced.values_of_another_training,)),
    "scaled_heads_disordered": ("llama gpt2 bert", SCALED, (layouts.heads_without_output, 2)),
    "folded_scale": ("llama qwen2 t5", FOLDED, (engines.scale_of_one_head,)),
    "folded_keys_noisy": ("llama mistral cohere", FOLDED, (replaced.noise_on_a_projection, "k", 0.05)),
    "rotated_scale": ("llama mistral qwen2 phi3", ROTATED, (engines.scale, 0.7, "one")),
    "rotated_queries_unloaded": ("llama qwen2 t5 mixtral", ROTATED, (loads.unloaded, "q", "normal")),
    "rotated_values_unloaded": ("llama qwen3 t5", ROTATED, (loads.unloaded_values,)),
    "rotated_mlp_unloaded": ("llama qwen2 mistral", ROTATED, (loads.unloaded_mlp_output,)),
    "rotated_window": ("llama", ROTATED, (masks.window_of_one_layer,)),
    "repeated_scale": ("llama mistral qwen2", REPEATED, (engines.keys_longer,)),
    "traded_causality": ("llama gpt2 phi", TRADED, (masks.next_token_seen, 1)),
    "traded_queries_noisy": ("llama bert t5", TRADED, (replaced.noise_on_a_projection, "q", 0.05)),
}

for _title, (_names, _change, (_fault, *_values)) in PAIRS.items():

    def _made(
        subject: Subject, change: Step = _change, fault: Any = _fault, values: tuple[Any, ...] = tuple(_values)
    ) -> Expect:
        return deep(subject, change, fault, *values)

    _made.__name__ = _title
    behind("behind a harmless change", _names)(_made)
