"""What tells the sites of a stack apart: layers where each has its own, else names, else places."""

from __future__ import annotations

import pytest

from attemper.readings.stacks import Stack
from tests.report import readings


@pytest.mark.parametrize(
    ("names", "column", "labels"),
    [
        (("layers.3.attn", "layers.7.attn"), "layer", ("3", "7")),
        (("stages.0.blocks.0", "stages.0.blocks.1"), "site", ("0.0", "0.1")),
        (("tap", "tap#2"), "site", ("–", "#2")),
        (("layers.0.attn", "layers.0.attn#2"), "site", ("0", "0#2")),
        (("left", "right"), "site", ("0", "1")),
    ],
)
def test_a_column_is_called_layer_only_where_it_has_layers(
    names: tuple[str, ...], column: str, labels: tuple[str, ...]
):
    stack = Stack("*", "self", "eval", tuple(map(readings.site, names)), (0, 1))
    assert stack.column == column
    assert stack.labels == labels
