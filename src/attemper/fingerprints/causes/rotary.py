"""Causes in the rotary embedding: pairs of features that keep their length and turn by another angle per token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from attemper.fingerprints.finding import Finding, short
from attemper.fingerprints.pair import SitePair
from attemper.fingerprints.record import VECTOR_ROWS

STAGE = "q and k"
BASES = (1e4, 5e5, 1e6, 1.5e5, 1e5, 1e3, 1e7)
"""Bases that are tried where a run does not tell its angles."""


@dataclass(frozen=True)
class Pairing:
    """Which features are rotated together: halves of the first ``rotated``, or neighbours."""

    rotated: int
    halves: bool

    @property
    def count(self) -> int:
        """Pairs."""
        return self.rotated // 2


def pairings(pair: SitePair) -> Iterator[Pairing]:
    """Every way to pair features that models use."""
    size = pair.a.head_dim
    known = {2 * len(site.inv_freq) for site in (pair.a, pair.b) if site.inv_freq}
    sizes = known or {size, size // 2, size // 4, 3 * size // 4}
    for rotated in sorted(sizes, reverse=True):
        if 2 <= rotated <= size and rotated % 2 == 0:
            yield Pairing(rotated, True)
            yield Pairing(rotated, False)


def as_pairs(vectors: np.ndarray, pairing: Pairing) -> np.ndarray:
    """[..., pairs] complex of [..., D]."""
    part = vectors[..., : pairing.rotated]
    first, second = (
        (part[..., : pairing.count], part[..., pairing.count :])
        if pairing.halves
        else (part[..., 0::2], part[..., 1::2])
    )
    return first + 1j * second


def angles_of(pair: SitePair, count: int) -> Iterator[np.ndarray]:
    """Angles per token of each pair that a run may have used: its own, or those of known bases."""
    told = [np.array(site.inv_freq) for site in (pair.a, pair.b) if site.inv_freq and len(site.inv_freq) == count]
    yield from told
    if not told:
        for base in BASES:
            yield base ** (-np.arange(count) / count)


def find(pair: SitePair) -> Finding | None:
    """Another angle per token, or another pairing."""
    named = [one for one in (_angles(pair), _layout(pair)) if one is not None]
    return min(named, key=lambda one: one.residual) if named else None


def _places(pair: SitePair) -> np.ndarray:
    return np.array(VECTOR_ROWS[: pair.a.query.shape[1]])


def _angles(pair: SitePair) -> Finding | None:
    a, b = (np.concatenate(part) for part in zip(pair.query, pair.key, strict=True))
    total = ((b - a) ** 2).sum()
    places = _places(pair)
    if not total or len(places) < 3:
        return None
    best: tuple[float, float, np.ndarray] | None = None
    for pairing in pairings(pair):
        za, zb = as_pairs(a, pairing), as_pairs(b, pairing)
        slopes = _slopes((zb * za.conj()).sum(0), places)
        turned = za * np.exp(1j * places[:, None] * slopes)
        length = float((zb * turned.conj()).sum().real / max((np.abs(turned) ** 2).sum(), 1e-300))
        rest = (np.abs(zb - length * turned) ** 2).sum()
        beside = ((b - a)[..., pairing.rotated :] ** 2).sum()
        # What a length alone explains is no rotation.
        straight = float(np.real(zb * za.conj()).sum() / max((np.abs(za) ** 2).sum(), 1e-300))
        if rest > 0.5 * (np.abs(zb - straight * za) ** 2).sum():
            continue
        rest += beside
        if best is None or rest / total < best[0]:
            best = float(rest / total), length, slopes
    if best is None:
        return None
    left, length, slopes = best
    if np.abs(slopes).max() < max(1e-5, pair.eps / places[-1]):
        return None
    value, words = _number_of(pair, slopes)
    if abs(length - 1) > max(2 * pair.eps, 1e-4):
        words += f", and rotated features are {short(length)} times as long"
    return Finding("rotary", STAGE, left, value, None, words)


def _slopes(turned: np.ndarray, places: np.ndarray) -> np.ndarray:
    """[pairs]: the angle per token by which ``turned`` [P, pairs] turns, refined from place to place."""
    slopes = np.zeros(turned.shape[1])
    weight = np.zeros(turned.shape[1])
    for place, values in zip(places, turned, strict=True):
        if place == 0:
            continue
        step = np.angle(values * np.exp(-1j * slopes * place)) / place
        own = np.abs(values) * place**2
        slopes = slopes + step * own / np.maximum(weight + own, 1e-300)
        weight = weight + own
    return slopes


def _number_of(pair: SitePair, slopes: np.ndarray) -> tuple[float | None, str]:
    """The factor or the base that angles of run b have beside those of run a."""
    found: list[tuple[float, str, float]] = []
    told = pair.a.inv_freq is not None and len(pair.a.inv_freq) == len(slopes)
    options = (
        [np.array(pair.a.inv_freq)] if told else [base ** (-np.arange(len(slopes)) / len(slopes)) for base in BASES]
    )
    for theta in options:
        other = theta + slopes
        scale = (np.abs(slopes) ** 2).sum()
        ratio = (theta * other).sum() / (theta**2).sum()
        found.append(
            (float(((other - ratio * theta) ** 2).sum() / scale), "factor", float(1 / ratio if ratio else np.inf))
        )
        exponents = -np.arange(len(slopes)) / len(slopes)
        clear = (other > 0) & (exponents < 0) & (theta > 0.02)
        if clear.sum() >= 2:
            weights = np.abs(exponents[clear]) * np.sqrt(theta[clear])
            log_base = float(np.average(np.log(other[clear]) / exponents[clear], weights=weights))
            if 0 < log_base < 40:
                fit = np.exp(exponents * log_base)
                found.append((float(((other - fit) ** 2).sum() / scale), "base", float(np.exp(log_base))))
    left, what, value = min(found)
    if left > 0.05 or not np.isfinite(value):
        return None, "pairs of features turn by other angles per token"
    words = (
        f"positions of run b count 1/{short(value)} of those of run a"
        if what == "factor"
        else f"the base of the rotary embedding is {short(value)} in run b"
    )
    return value, words


def _layout(pair: SitePair) -> Finding | None:
    """One run rotates halves, the other neighbours: what is undone each its own way is the same."""
    a, b = (np.concatenate(part) for part in zip(pair.query, pair.key, strict=True))
    total = ((b - a) ** 2).sum()
    places = _places(pair)
    if not total:
        return None
    best = None
    for rotated in {one.rotated for one in pairings(pair)}:
        for theta in angles_of(pair, rotated // 2):
            for first in (True, False):
                plain = [
                    _rotate_back(part, Pairing(rotated, halves), theta, places)
                    for part, halves in ((a, first), (b, not first))
                ]
                left = (np.abs(plain[1] - plain[0]) ** 2).sum() / total
                best = left if best is None else min(best, left)
    words = "one run rotates halves of a head, the other neighbouring features"
    return None if best is None else Finding("rotary", STAGE, float(best), None, None, words)


def _rotate_back(vectors: np.ndarray, pairing: Pairing, theta: np.ndarray, places: np.ndarray) -> np.ndarray:
    z = as_pairs(vectors, pairing) * np.exp(-1j * places[:, None] * theta)
    out = vectors.copy()
    if pairing.halves:
        out[..., : pairing.count], out[..., pairing.count : pairing.rotated] = np.real(z), np.imag(z)
    else:
        out[..., 0 : pairing.rotated : 2], out[..., 1 : pairing.rotated : 2] = np.real(z), np.imag(z)
    return out
