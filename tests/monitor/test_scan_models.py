"""``scan`` agrees with float64 entropies of eager weights on every supported architecture, padded on either side."""

from __future__ import annotations

import pytest
import torch

import attemper

pytest.importorskip("transformers")

from tests.monitor.tiny_models import TINY, eager_entropies, inputs, sharpened


def by_group(scan: attemper.Scan, kind: str) -> dict[str, list[attemper.records.SiteReading]]:
    """Sites under the name of the output that holds their weights."""
    if kind in ("decoder", "encoder", "vision"):
        return {"attentions": list(scan.sites)}
    groups: dict[str, list] = {"encoder_attentions": [], "decoder_attentions": [], "cross_attentions": []}
    for site in scan.sites:
        place = (
            "cross"
            if site.kind == "cross"
            else "encoder"
            if site.name.split(".")[-4:][0] == "encoder" or "encoder." in site.name.split("decoder")[0]
            else "decoder"
        )
        groups[f"{place}_attentions"].append(site)
    return groups


@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("name", TINY)
def test_scan_agrees_with_eager_weights_on_every_site(name: str, padding: str | None) -> None:
    tiny = TINY[name]
    model = sharpened(tiny.build())
    batch = inputs(tiny.kind, padding, tiny.tokens)
    expected = eager_entropies(model, batch)
    scan = attemper.scan(model, [batch])
    assert scan.skipped == ()
    found = by_group(scan, tiny.kind)
    worst = 0.0
    for group, layers in expected.items():
        assert len(found[group]) == len(layers), (group, [site.name for site in scan.sites])
        for site, entropies in zip(found[group], layers, strict=True):
            measured = torch.tensor([head.entropy_nats for head in site.heads], dtype=torch.float64)
            worst = max(worst, float((measured - entropies).abs().max()))
    print(f"{name}, padding {padding}: worst error {worst:.2e} nats")
    assert worst < 2e-5
