"""What models declare of the keys that rows should see."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from attemper.backends.contract import UNBOUNDED
from attemper.call.visible_keys import Rule, expected_keys
from attemper.sites.declared import Window, documents_of_call, rule_of_call, rule_of_module, windows_of_config
from attemper.sites.padding import Tokens


class Layer(nn.Module):
    """A layer as transformers names its attributes."""

    __module__ = "transformers.models.own.modeling_own"

    def __init__(self, causal: object = True, layer_idx: int = 0, **config: object) -> None:
        super().__init__()
        self.is_causal, self.layer_idx = causal, layer_idx
        self.config = SimpleNamespace(**config)


def indexed() -> Layer:
    """A layer that chooses its keys."""
    layer = Layer()
    layer.indexer = nn.Identity()
    return layer


def of_another_library() -> Any:
    module: Any = nn.Identity()
    module.is_causal = True
    return module


def told(rule: Rule | None) -> tuple[object, ...] | None:
    return None if rule is None else (rule.causal, rule.left, rule.right, rule.chunk)


@pytest.mark.parametrize(
    ("layer", "rule"),
    [
        (Layer(), (True, UNBOUNDED, UNBOUNDED, None)),
        (Layer(False), (False, UNBOUNDED, UNBOUNDED, None)),
        (Layer(None), None),
        (Layer(sliding_window=8), (True, 7, UNBOUNDED, None)),
        (Layer(sliding_window=8, use_sliding_window=False), (True, UNBOUNDED, UNBOUNDED, None)),
        (Layer(False, sliding_window=8), (False, 8, 8, None)),
        (Layer(layer_types=["full_attention"], sliding_window=8), (True, UNBOUNDED, UNBOUNDED, None)),
        (Layer(layer_types=["sliding_attention"], sliding_window=8), (True, 7, UNBOUNDED, None)),
        (Layer(layer_types=["chunked_attention"], attention_chunk_size=4), (True, UNBOUNDED, UNBOUNDED, 4)),
        (Layer(layer_types=["chunked_attention"]), None),
        (Layer(layer_types=["of_another_kind"], sliding_window=8), None),
        (indexed(), None),
        (of_another_library(), None),
    ],
)
def test_layers_of_transformers_declare_their_rule_and_no_others(layer: nn.Module, rule: tuple[object, ...] | None):
    assert told(rule_of_module(layer)) == rule


def heterogeneous() -> Any:
    """A configuration whose windows differ by layer, as transformers has them: asked as a whole, it raises."""
    transformers = pytest.importorskip("transformers")
    windows: Any = {"per_layer_config": {"1": {"sliding_window": None}}}
    config = transformers.MistralConfig(num_hidden_layers=2, sliding_window=8, **windows)
    try:
        assert config.sliding_window == 8
    except RuntimeError:
        return config
    pytest.skip("this transformers has no configurations that differ by layer")


def test_a_configuration_that_differs_by_layer_is_asked_for_each():
    config, found = heterogeneous(), []
    for number in range(3):  # it has no third layer
        layer = Layer(layer_idx=number)
        layer.config = config
        found.append(told(rule_of_module(layer)))
    assert found == [(True, 7, UNBOUNDED, None), (True, UNBOUNDED, UNBOUNDED, None), None]
    assert windows_of_config(config) == ("per_layer_config", (Window(8), None))


IDS = torch.zeros(1, 5, dtype=torch.int64)
POSITIONS = torch.tensor([[0, 1, 2, 0, 1]])
ONES = torch.ones(1, 5, dtype=torch.int64)


@pytest.mark.parametrize(
    ("arguments", "documents"),
    [
        ({}, None),
        ({"attention_mask": ONES}, None),
        ({"attention_mask": torch.tensor([[1, 1, 2, 2, 0]])}, [[0, 0, 1, 1, 1]]),
        ({"position_ids": POSITIONS}, [[0, 0, 0, 1, 1]]),
        ({"position_ids": POSITIONS, "attention_mask": ONES}, [[0, 0, 0, 1, 1]]),
        ({"position_ids": torch.arange(5)[None]}, None),
        ({"position_ids": POSITIONS.expand(3, 1, 5)}, None),
        ({"cu_seq_lens_k": torch.tensor([0, 2, 5], dtype=torch.int32)}, [[0, 0, 1, 1, 1]]),
        ({"cu_seqlens": torch.tensor([0, 2, 5])}, [[0, 0, 1, 1, 1]]),
        ({"seq_idx": torch.tensor([[0, 0, 1, 1, 1]])}, [[0, 0, 1, 1, 1]]),
        ({"position_ids": torch.arange(5)[None], "attention_mask": torch.tensor([[1, 1, 2, 2, 2]])}, [[0, 0, 1, 1, 1]]),
        ({"input_ids": IDS.expand(2, 5), "cu_seqlens": torch.tensor([0, 2, 10])}, [[0, 0, 1, 1, 1], [1] * 5]),
    ],
)
def test_arguments_declare_documents(arguments: dict[str, torch.Tensor], documents: list[list[int]] | None):
    given = {"input_ids": IDS, **arguments}
    mask = arguments.get("attention_mask")
    found = documents_of_call(given, None if mask is None else mask.bool())
    assert (None if found is None else found.tolist()) == documents


def declared(**known: Any) -> Tokens:
    given: dict[str, Any] = {"own": None, "encoder": None, "ids": {}, "ruled": True}
    return Tokens(**(given | known))


@pytest.mark.parametrize(
    ("tokens", "kind", "queries", "keys", "rows"),
    [
        (declared(), "self", 4, 4, [[1, 2, 3, 4]]),
        (declared(own=torch.tensor([[0, 1, 1, 1]]).bool()), "self", 4, 4, [[0, 1, 2, 3]]),
        (declared(documents=torch.tensor([[0, 0, 1, 1]])), "self", 4, 4, [[1, 2, 1, 2]]),
        (declared(past=3), "self", 1, 4, [[4]]),
        (declared(encoder=torch.tensor([[1, 1, 0]]).bool()), "cross", 2, 3, [[2, 2]]),
        (declared(), "cross", 2, 3, None),
        (declared(), "self", 1, 4, None),
        (declared(past=torch.tensor(3)), "self", 1, 4, None),
        (declared(ruled=False), "self", 4, 4, None),
        (declared(ids=None), "self", 4, 4, None),
        (declared(own=torch.ones(1, 6).bool()), "self", 4, 4, None),
    ],
)
def test_a_call_says_what_its_rows_should_see(tokens: Tokens, kind: str, queries: int, keys: int, rows: object):
    rule = rule_of_call(Rule(causal=True), kind, tokens, 1, queries, keys)
    assert (None if rule is None else expected_keys(rule, queries, keys).tolist()) == rows
