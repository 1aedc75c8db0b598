"""Causes in the rotary embedding: pairs of features that keep their length and turn by another angle per token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from attemper.fingerprints.finding import Finding, finding_of, short
from attemper.fingerprints.pair import SitePair
from attemper.fingerprints.site import VECTOR_ROWS

BASES = (1e4, 5e5, 1e6, 1.5e5, 1e5, 1e3, 1e7)
"""Bases that are tried where a run does not tell its angles."""
_LEAST = 0.01
"""Angles of a layer that turns nothing are less than this of the others'."""


@dataclass(frozen=True)
class Pairing:
    """Which features are rotated together: halves of the first ``rotated``, or neighbours."""

    rotated: int
    halves: bool

    @property
    def count(self) -> int:
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


def find(pair: SitePair) -> Iterator[Finding]:
    """Another angle per token, another pairing, or features in the order of another pairing."""
    if pair.a.kind != "self":
        return  # positions of what cross attention reads are others
    for parts in ((True, True), (True, False), (False, True)):
        turned = list(_angles(pair, parts)) if len(places_of(pair.a.query)) > 2 else []
        # A number that makes run b of run a has two angles at most, and says more than one for each pair.
        yield from [one for one in turned if one.reproduced and one.value is not None] or turned
    yield from _layouts(pair)


def places_of(vectors: np.ndarray) -> np.ndarray:
    """The place of each vector [P] of [heads, P, size]."""
    return np.array(VECTOR_ROWS[: vectors.shape[1]])


def _angles(pair: SitePair, parts: tuple[bool, bool]) -> Iterator[Finding]:
    """Queries, keys or both (``parts``) turn by other angles per token: with their number, and as they are."""
    chosen = [vectors for vectors, wanted in zip((pair.query, pair.key), parts, strict=True) if wanted]
    a, b = (np.concatenate(part) for part in zip(*chosen, strict=True))
    places = places_of(pair.a.query)
    for pairing in pairings(pair):
        za, zb = as_pairs(a, pairing), as_pairs(b, pairing)
        slopes = _slopes((zb * za.conj()).sum(0), places)
        turned = za * np.exp(1j * places[:, None] * slopes)
        length = float((zb * turned.conj()).sum().real / max((np.abs(turned) ** 2).sum(), 1e-300))
        rest = (np.abs(zb - length * turned) ** 2).sum()
        # What a length alone explains is no rotation.
        straight = float(np.real(zb * za.conj()).sum() / max((np.abs(za) ** 2).sum(), 1e-300))
        small = np.abs(slopes).max() < max(1e-5, pair.eps / places[-1])
        if small or rest > 0.5 * (np.abs(zb - straight * za) ** 2).sum():
            continue
        more = f", and rotated features are {short(length)} times as long"
        more = more if abs(length - 1) > max(2 * pair.eps, 1e-4) else ""
        for value, words, fit in _numbers_of(pair, slopes):
            made = [
                _features(part[0], length * as_pairs(part[0], pairing) * np.exp(1j * places[:, None] * fit), pairing)
                for part in (pair.query, pair.key)
            ]
            yield from _either(pair, made, words + more, value)


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


def _numbers_of(pair: SitePair, slopes: np.ndarray) -> Iterator[tuple[float | None, str, np.ndarray]]:
    """The factor and the base that angles of run b may have beside those of run a, in words, and the slopes that these
    make; and the slopes as they are.
    """
    exponents = -np.arange(len(slopes)) / len(slopes)
    told = pair.a.inv_freq is not None and len(pair.a.inv_freq) == len(slopes)
    for theta in [np.array(pair.a.inv_freq)] if told else [base**exponents for base in BASES]:
        other = theta + slopes
        # A fast pair tells its angle as exactly as a slow one, and few of them are.
        ratio = float((theta * other).sum() / (theta**2).sum())
        if ratio > _LEAST:
            words = f"positions of run b count 1/{short(1 / ratio)} of those of run a"
            yield 1 / ratio, words, (ratio - 1) * theta
        clear = (other > 0) & (exponents < 0) & (np.maximum(theta, other) > 0.02)
        if clear.sum() >= 2 and (not told or _is_of_one_base(theta)):
            weights = np.abs(exponents[clear]) * np.sqrt(theta[clear])
            log_base = float(np.average(np.log(other[clear]) / exponents[clear], weights=weights))
            if 0 < log_base < 40:
                base = float(np.exp(log_base))
                words = f"the base of the rotary embedding is {short(base)} in run b"
                yield base, words, np.exp(exponents * log_base) - theta
    yield None, "pairs of features turn by other angles per token", slopes


def _is_of_one_base(theta: np.ndarray) -> bool:
    """Whether angles are powers of one base: scaled ones are not."""
    steps = np.diff(np.log(np.maximum(theta, 1e-300)))
    return bool((np.abs(steps - steps[:1]) < 1e-3 * np.abs(steps[:1])).all())


def _layouts(pair: SitePair) -> Iterator[Finding]:
    """The same features, each run with its own pairing; or in the order of another pairing."""
    places = places_of(pair.a.query)
    ways = [(pairing, n, theta) for pairing in pairings(pair) for n, theta in enumerate(angles_of(pair, pairing.count))]
    for one, n, theta in ways:
        plain = [turn(part[0], one, theta, -places) for part in (pair.query, pair.key)]
        for two, m, other in ways:
            if one is not two and n == m:
                words = "one run rotates halves of a head, the other neighbouring features"
                if one.halves == two.halves:
                    words = f"run a rotates {one.rotated} features of a head, run b {two.rotated}"
                yield from _either(pair, [turn(part, two, other, places) for part in plain], words)
        for order in _orders(one, pair.a.head_dim):
            words = "features of a head stand in the order of the other rotary pairing, halves or neighbours"
            yield from _either(pair, [turn(part[..., order], one, theta, places) for part in plain], words)


def _either(pair: SitePair, made: list[np.ndarray], words: str, value: float | None = None) -> Iterator[Finding]:
    """Of queries and keys or of one alone, whichever leaves least, if it leaves little."""
    both = (pair.query, pair.key)
    total = [((b - a) ** 2).sum() for a, b in both]
    left = [((b - part) ** 2).sum() for part, (_, b) in zip(made, both, strict=True)]
    wanted = [one < other for one, other in zip(left, total, strict=True)]
    if any(wanted) and sum(map(min, left, total)) < 0.5 * sum(total):
        which = "" if all(wanted) else ", of queries alone" if wanted[0] else ", of keys alone"
        query, key = (one if mark else part[0] for one, mark, part in zip(made, wanted, both, strict=True))
        yield finding_of(pair, "rotary", query, key, words + which, value=value)


def _orders(pairing: Pairing, size: int) -> Iterator[np.ndarray]:
    """Halves as neighbours, and neighbours as halves."""
    own = np.arange(pairing.rotated)
    for order in (own.reshape(2, -1).T.ravel(), own.reshape(-1, 2).T.ravel()):
        yield np.concatenate((order, np.arange(pairing.rotated, size)))


def turn(vectors: np.ndarray, pairing: Pairing, theta: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Vectors whose pairs are turned by angles per token."""
    return _features(vectors, as_pairs(vectors, pairing) * np.exp(1j * places[:, None] * theta), pairing)


def _features(vectors: np.ndarray, z: np.ndarray, pairing: Pairing) -> np.ndarray:
    out = vectors.copy()
    if pairing.halves:
        out[..., : pairing.count], out[..., pairing.count : pairing.rotated] = np.real(z), np.imag(z)
    else:
        out[..., 0 : pairing.rotated : 2], out[..., 1 : pairing.rotated : 2] = np.real(z), np.imag(z)
    return out
