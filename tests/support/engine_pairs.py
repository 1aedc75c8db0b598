"""Pairs of runs for naming faults: a faulty model beside its clean twin, and pairs that differ and are harmless."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

import attemper
from attemper.fingerprints.site import SiteFingerprint
from attemper.types import Fingerprint
from tests.support.engine_faults import FAULTS, Fault
from tests.support.engine_models import PRETRAINED, TOKENS, Tiny, padded, text, tiny, tokens

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Outcome:
    """What was said of one faulty pair."""

    architecture: str
    precision: str
    kernel: str
    kind: str
    variant: str
    size: float
    sites: tuple[int, ...]
    expected_site: str
    expected_value: float | None
    expected_extent: int
    of: int
    """How many sites there are."""
    found: attemper.types.Explanation
    expected_heads: str | None
    """Those that the first site's extent should list, "" for all; None where that is not compared."""
    above_noise: float | None
    """How many times the clean noise of its first site it moves that site; None where both runs are float32."""

    @property
    def named(self) -> bool:
        """Whether kind and site are right."""
        return self.found.kind == self.kind and self.found.site == self.expected_site

    @property
    def valued(self) -> bool | None:
        """Whether the number is right: within 0.5% of a scale, exactly a window's, within 5% elsewhere; None where
        there is none to give.
        """
        if self.expected_value is None or not self.named:
            return None
        if self.found.value is None:
            return False
        limit = {"scale": 0.005, "window": 0.0, "key_rounding": 0.0}.get(self.kind, 0.05)
        return abs(self.found.value / self.expected_value - 1) <= limit

    @property
    def extended(self) -> bool | None:
        """Whether the number of sites is right, where it is told."""
        if not self.named or self.found.extent.startswith("from site"):
            return None
        every = self.found.extent.startswith("all sites")
        return (self.of if every else int(self.found.extent.split()[0])) == self.expected_extent

    @property
    def headed(self) -> bool | None:
        """Whether the heads of the first site are right; None where they are not compared."""
        if self.expected_heads is None or not self.named:
            return None
        return self.found.extent.partition("heads ")[2].partition(" of ")[0] == self.expected_heads

    def __str__(self) -> str:
        return (
            f"{self.architecture} {self.precision} {self.kernel}: {self.kind} {self.variant} {self.size:g} at "
            f"{self.expected_site} -> {self.found.message}"
        )


def batch_of(architecture: str, is_padded: bool, side: str | None = None) -> dict[str, Any]:
    """The tokens of a pair."""
    if architecture == PRETRAINED:
        return text(lengths=(TOKENS, 60 if is_padded else TOKENS))
    batch = padded(side=side or ("right" if architecture == "bert" else "left")) if is_padded else tokens()
    if architecture == "bert":
        batch.pop("position_ids", None)
    return batch


@lru_cache(maxsize=8)
def clean(architecture: str, is_padded: bool, precision: str = "float32", kernel: str = "sdpa") -> Fingerprint:
    """Of the twin: float32 and the kernel that its model takes by default, or as given."""
    model = tiny(architecture, dtype=PRECISIONS[precision], kernel=kernel).model
    return attemper.fingerprint(model, [batch_of(architecture, is_padded)])


def above_noise(site: SiteFingerprint, low: SiteFingerprint, faulty: SiteFingerprint) -> float:
    """How far a fault moves a site in low precision, over how far low precision itself moves it from float32.

    Of each array that a fingerprint keeps of each head: |faulty - low| / |low - site|; the largest of them.
    """
    times = [0.0]
    for one, two, three in zip(_arrays(site), _arrays(low), _arrays(faulty), strict=True):
        known = np.isfinite(one) & np.isfinite(two) & np.isfinite(three)
        noise, moved = (
            np.sqrt(((np.where(known, after, 0.0) - np.where(known, before, 0.0)) ** 2).sum(tuple(range(1, one.ndim))))
            for before, after in ((one, two), (two, three))
        )
        times += [m / n if n else np.inf for m, n in zip(moved.tolist(), noise.tolist(), strict=True) if m]
    return max(times)


def _arrays(site: SiteFingerprint) -> Iterator[np.ndarray]:
    """What is kept of a site, heads first."""
    for states in (site.residual, site.input):
        yield states[None, :, 1:].astype(np.float64)
    yield site.output[..., 1:].astype(np.float64)
    for kept in (site.query, site.key, site.raw, site.final, site.statistics["kept_mass"]):
        yield kept.astype(np.float64)
    for name in ("visible_keys", "first_visible", "last_visible"):
        yield site.counts[name].astype(np.float64)


def places(fault: Fault, model: Tiny) -> Iterator[list[int]]:
    """The sites that a fault is put at: the first, a later one, all."""
    layers = range(len(model.attentions))
    if fault.everywhere:
        yield list(layers)
        return
    wanted = [[0], [2]] if fault.shift else [[0], [2], list(layers)]
    seen = []
    for sites in wanted:
        chosen = [site for site in sites if fault.at(model, site)]
        if chosen and chosen not in seen:
            seen.append(chosen)
            yield chosen


def faulty_pairs(
    architecture: str, precision: str, kernel: str = "sdpa", kinds: Sequence[str] | None = None
) -> Iterator[Outcome]:
    """Every fault that fits an architecture, in every size and place."""
    for fault in FAULTS:
        if kinds is not None and fault.kind not in kinds:
            continue
        if fault.kind == "grouping" and kernel == "eager":
            continue  # Eager attention alone groups heads so: these pairs count once.
        own = "eager" if fault.kind == "grouping" else kernel
        model = tiny(architecture, dtype=PRECISIONS[precision], kernel=own)
        if not fault.fits(model):
            continue
        for size in fault.sizes:
            for sites in places(fault, model):
                yield outcome(fault, model, size, sites, precision, own)


def outcome(fault: Fault, model: Tiny, size: float, sites: list[int], precision: str, kernel: str) -> Outcome:
    """What is said of one fault."""
    a = clean(model.name, fault.padding)
    with fault.patch(model, sites, size):
        b = attemper.fingerprint(model.model, [batch_of(model.name, fault.padding)])
    found = attemper.explain(a, b)
    first = sites[0] + fault.shift
    above = None
    if precision != "float32":
        low = clean(model.name, fault.padding, precision, kernel)
        above = above_noise(a.sites[first], low.sites[first], b.sites[first])
    value, site = fault.value(model, size), a.sites[first]
    heads = None if fault.heads is None else fault.heads(site.heads, site.kv_heads)
    listed = None if heads is None else "" if len(heads) == site.heads else ", ".join(map(str, heads))
    return Outcome(
        model.name, precision, kernel, fault.kind, fault.variant, size, tuple(sites), site.name, value,
        len(sites), len(a.sites), found, listed, above,
    )  # fmt: skip


def double_faults(architecture: str, precision: str) -> Iterator[tuple[str, str, attemper.types.Explanation]]:
    """Two faults at once: the kind that comes first, the other one, and what is said."""
    chosen = {fault.variant: fault for fault in FAULTS}
    for first, second, sites in (
        ("one key", "of the call", ([0], [2])),
        ("of the call", "one that should not be", ([0], [3])),
        ("stored keys", "of the call", ([1], [2])),
        ("base", "one that should not be", ([0, 1, 2, 3], [3])),
    ):
        faults = chosen[first], chosen[second]
        model = tiny(architecture, dtype=PRECISIONS[precision])
        if not all(fault.fits(model) for fault in faults) or not faults[1].at(model, sites[1][0]):
            continue
        with ExitStack() as stack:
            for fault, where in zip(faults, sites, strict=True):
                stack.enter_context(fault.patch(model, where, fault.sizes[-1] if fault.kind != "key_rounding" else 4.0))
            b = attemper.fingerprint(model.model, [batch_of(architecture, False)])
        yield faults[0].kind, faults[1].kind, attemper.explain(clean(architecture, False), b)


HARMLESS = (
    *("bfloat16", "float16", "bfloat16 eager", "other kernel", "batch split, other kernel"),
    *("batch split, bfloat16", "padding side, other kernel", "padding behind, other kernel"),
    *("bfloat16 24 layers", "24 layers, other kernel"),
)
"""Ways in which two runs differ and neither is wrong."""


def harmless(way: str, architecture: str, seed: int) -> tuple[Fingerprint, Fingerprint] | None:
    """A pair that is not the same bits, and harmless; None where it does not fit."""
    deep = 24 if "24" in way else 4
    if architecture == PRETRAINED and deep == 24:
        return None
    one = tiny(architecture, seed, layers=deep)
    low = torch.bfloat16 if "bfloat16" in way else torch.float16 if "float16" in way else torch.float32
    kernel = "eager" if "eager" in way or "other kernel" in way else "sdpa"
    if low is torch.float32 and one.model.config._attn_implementation == "eager":
        return None
    other = tiny(architecture, seed, layers=deep, dtype=low, kernel=kernel)
    batch = batches = text(seed, (TOKENS,) * 3) if architecture == PRETRAINED else tokens(seed, 3)
    if "padding" in way and architecture in ("bert", "gpt2", PRETRAINED):
        return None
    if "padding side" in way:
        batch = padded(seed, "left")
        batches = _flipped(batch)
    elif "padding behind" in way:
        batches = {name: torch.nn.functional.pad(part, (0, 29)) for name, part in batch.items()}
    apart = [batches]
    if "split" in way:
        apart = [{name: part[number : number + 1] for name, part in batch.items()} for number in range(3)]
    return attemper.fingerprint(one.model, [batch]), attemper.fingerprint(other.model, apart)


def _flipped(batch: dict[str, Any]) -> dict[str, Any]:
    """The same sequences with padding on the right."""
    ids, mask = torch.zeros_like(batch["input_ids"]), torch.zeros_like(batch["attention_mask"])
    for number, real in enumerate(batch["attention_mask"].bool()):
        length = int(real.sum())
        ids[number, :length], mask[number, :length] = batch["input_ids"][number][real], 1
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def is_same(a: Fingerprint, b: Fingerprint) -> bool:
    """Whether two fingerprints are bit for bit the same."""
    return attemper.explain(a, b).kind == "none"
