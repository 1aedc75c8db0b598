"""Readings to make pages of: a real one, and small ones put together by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from attemper.readings.labels import layer_of
from attemper.readings.reading import Alarm, HeadReading, Reading, SiteReading, Skipped, VisibleKeyBucket

FIXTURES = Path(__file__).parent / "fixtures"


def minilm() -> Reading:
    """A pretrained encoder of 6 layers of 12 heads over the text that ships."""
    return Reading.from_json(FIXTURES / "minilm.json")


def head(number: int, value: float | None = 0.5, **changes: Any) -> HeadReading:
    """A head all of whose numbers follow from one; None: nothing was measured."""
    known = value is not None
    histogram = [0] * 32
    if known:
        histogram[min(int(value * 32), 31)] = 100
    rows = 100 if known else 0
    made = HeadReading(
        head=number,
        entropy_nats=value * 5 if known else None,
        normalized_entropy=value,
        effective_tokens=148.4**value if known else None,
        max_weight=1 - value if known else None,
        max_logit=20 * (1 - value) if known else None,
        logit_std=3 * (1 - value) if known else None,
        mass=1.0 if known else None,
        first_token_mass=0.1 * value if known else None,
        gini=None,
        normalized_entropy_histogram=tuple(histogram),
        by_visible_keys=(VisibleKeyBucket(128, 255, rows, value * 5, value),) if known else (),
        rows=rows,
        empty_rows=0,
        nonfinite_rows=0,
        judged=known,
    )
    return replace(made, **changes)


def site(name: str, heads: int = 4, kind: str = "self", mode: str = "eval", value: float | None = None) -> SiteReading:
    """A site whose heads spread over the range, or all have ``value``."""
    values = [value if value is not None else (place + 0.5) / heads for place in range(heads)]
    layer = layer_of(name)
    made = tuple(head(place, v, layer=layer) for place, v in enumerate(values))
    return SiteReading(name, kind, mode, 256, 256, made, layer=layer)


def silent(name: str, heads: int = 4) -> SiteReading:
    """A site no row of which was valid."""
    layer = layer_of(name)
    return SiteReading(
        name, "self", "eval", 8, 8, tuple(head(place, None, layer=layer) for place in range(heads)), layer=layer
    )


def reading(*sites: SiteReading, **changes: Any) -> Reading:
    return replace(Reading("some-model", 256, "blocked", sites), **changes)


def alarm(kind: str, severity: str, at: str, number: int | None, value: float | None = None, **changes: Any) -> Alarm:
    where = at if number is None else f"{at} head {number}"
    limit = 100.0 if kind == "logits" else None
    return replace(
        Alarm(at, number, kind, severity, value, limit, f"{where}: {kind} {value}", f"What to do: {kind}."), **changes
    )


def encoder_decoder() -> Reading:
    """Three stacks, two of which alternate, in training and in evaluation, with a broken layer and a silent one."""
    sites = []
    for layer in range(4):
        sites.append(site(f"encoder.block.{layer}.SelfAttention", 8))
    for layer in range(4):
        sites.append(site(f"decoder.block.{layer}.layer.0.SelfAttention", 8))
        sites.append(site(f"decoder.block.{layer}.layer.1.EncDecAttention", 8, kind="cross"))
    sites.append(site("encoder.block.0.SelfAttention", 8, mode="train"))
    broken = replace(sites[5].heads[3], nonfinite_rows=12)
    sites[5] = replace(sites[5], heads=(*sites[5].heads[:3], broken, *sites[5].heads[4:]))
    sites[2] = silent("encoder.block.2.SelfAttention", 8)
    alarms = (
        alarm("nonfinite", "critical", sites[5].name, 3, 12.0),
        alarm("logits", "warning", sites[0].name, 1, 143.2),
        alarm("logits", "warning", sites[0].name, 2, 120.0),
        *(alarm("first_token", "notice", sites[4].name, place, 0.9) for place in range(8)),
    )
    return reading(
        *sites, alarms=alarms, skipped=(Skipped("pooler.attention", "it takes a keyword this version does not know"),)
    )


HOSTILE = (
    "<script>alert(1)</script>",
    "</script><script>alert(2)</script>",
    '"><img src=x onerror=alert(3)>',
    "' onfocus=alert(4) autofocus '",
    "{{ 7 * 7 }}{% raw %}",
    "javascript:alert(5)",
    "</title></style></noscript><svg onload=alert(6)>",
    "<!--<script>",
    "שלום עולם \u202egnp.exe",
    "a\x00b\x1b[31m\u2028c\ud800",
    "&lt;b&gt; &amp; \\u003cscript",
    "x" * 10_000,
)
"""Names that something might take for code, for markup, or for an order to draw from right to left."""


def hostile() -> Reading:
    """Every text of a reading is hostile."""
    sites = [site(f"layer.{place}.{name}", 3, kind=name, mode=name) for place, name in enumerate(HOSTILE)]
    return Reading(
        model="".join(HOSTILE),
        tokens=1,
        backend=HOSTILE[0],
        sites=tuple(sites),
        skipped=tuple(Skipped(name, f"because {name}") for name in HOSTILE),
        alarms=tuple(
            Alarm(one.name, 0, name, severity, 1.0, 2.0, f"{one.name} head 0: {name}", f"do {name}")
            for one, name in zip(sites, HOSTILE, strict=True)
            for severity in ("notice", name)
        ),
    )


def huge(layers: int = 100) -> Reading:
    """Layers of 64 heads over long rows, with an alarm on each."""
    curve = tuple(VisibleKeyBucket(2**n, 2 ** (n + 1) - 1, 2**n, 0.61234 * n, 0.61234) for n in range(1, 12))
    heads = tuple(
        replace(
            head(place, (place + 0.5) / 64), by_visible_keys=curve, normalized_entropy_histogram=tuple(range(100, 132))
        )
        for place in range(64)
    )
    sites = tuple(
        SiteReading(f"model.layers.{layer}.self_attn", "self", "eval", 4096, 4096, heads) for layer in range(layers)
    )
    alarms = tuple(alarm("first_token", "notice", one.name, place, 0.9) for one in sites for place in range(64))
    return reading(*sites, alarms=alarms)
