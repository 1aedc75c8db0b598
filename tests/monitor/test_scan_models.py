"""``scan`` agrees with float64 entropies of eager weights on every supported architecture, padded on either side."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import attemper

pytest.importorskip("transformers")

from tests.monitor.tiny_models import TINY, eager_entropies, inputs, largest_error, sharpened


@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("name", TINY)
def test_scan_agrees_with_eager_weights_on_every_site(
    name: str, padding: str | None, seen: Callable[..., None]
) -> None:
    tiny = TINY[name]
    model = sharpened(tiny.build())
    batch = inputs(tiny.kind, padding, tiny.tokens)
    expected = eager_entropies(model, batch)
    scan = attemper.scan(model, [batch])
    assert scan.skipped == ()
    worst = largest_error(scan, tiny.kind, expected)
    assert worst < 2e-5
    seen("transformers", tiny.title, "scan, attemper implementation", error_nats=worst)
