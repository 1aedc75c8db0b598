"""What the weights of a site say, where what it computes differs: another layer's, transposed, moved, not loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from attemper.fingerprints.advice import ADVICE
from attemper.fingerprints.finding import Finding, short
from attemper.fingerprints.pair import SitePair
from attemper.fingerprints.site import SIDE, weight_shape
from attemper.text import clean_name

SAME = 0.1
"""Weights are the same if their sketches differ by at most so much: rounding to few bits does less, chance never."""
Weights = Mapping[str, np.ndarray]
Marks = Mapping[str, np.ndarray]
"""Name -> which blocks of rows differ."""
Said = tuple[str | None, str]
"""Kind, None where none is known, and words."""


def find(pair: SitePair, pairs: Sequence[SitePair]) -> Said | None:
    """What weights that differ by more than rounding are; None where none does, or a file does not say."""
    a, b, marks = pair.a.weights, pair.b.weights, differing(pair)
    if not marks:
        return None
    return _of_layer(pair, pairs, marks) or _transpose(a, b, marks) or _elsewhere(a, b, marks) or _new(a, b, marks)


def differing(pair: SitePair) -> Marks:
    """Which weights differ by more than rounding."""
    a, b = pair.a.weights, pair.b.weights
    limit = max(8 * pair.eps, 1e-5)
    marks = {name: _apart(a[name], b[name])[1:] > limit for name in a if name in b and a[name].shape == b[name].shape}
    return {name: mark for name, mark in marks.items() if mark.any()}


def advice_on_one(pair: SitePair, found: Finding) -> str:
    """What to do about the one weight that differs, by no rule that is known; nothing if it does not explain it all."""
    names = [*differing(pair)]
    if found.kind not in ("weights", "values") or len(names) != 1 or len(found.parts) > 1:
        return ""
    text = ADVICE["weights named" if found.heads is None or len(found.heads) > 1 else "weights named head"]
    return text.format(name=names[0].partition(" [")[0], place=clean_name(pair.a.name), head=(found.heads or (0,))[0])


def _apart(one: np.ndarray, two: np.ndarray) -> np.ndarray:
    """How far sketches [..., 1 + SIDE^2] are apart, relative to the larger."""
    one, two = one[..., 1:].astype(np.float64), two[..., 1:].astype(np.float64)
    size = np.maximum(np.linalg.norm(one, axis=-1), np.linalg.norm(two, axis=-1))
    return np.linalg.norm(two - one, axis=-1) / np.maximum(size, 1e-300)


def _of_layer(pair: SitePair, pairs: Sequence[SitePair], marks: Marks) -> Said | None:
    for other in pairs:
        for run, own, its in (("b", pair.b, other.a), ("a", pair.a, other.b)):
            both = [(own.weights[name], its.weights.get(name, np.zeros(0))) for name in marks]
            same = all(one.shape == two.shape and (_apart(one, two) <= SAME).all() for one, two in both)
            if other is not pair and same:
                return "order_of_layers", f"{', '.join(marks)} of run {run} equal those of {its.name} in the other run"
    return None


def _transpose(a: Weights, b: Weights, marks: Marks) -> Said | None:
    for name in marks:
        rows, columns = weight_shape(name)
        turned = np.concatenate((a[name][0, :1], a[name][0, 1:].reshape(SIDE, SIDE).T.ravel()))
        if rows != columns or _apart(turned, b[name][0]) > SAME:
            return None
    return "transposed", f"{', '.join(marks)} of run b equals run a's, transposed"


def _elsewhere(a: Weights, b: Weights, marks: Marks) -> Said | None:
    """Rows of one run that stand elsewhere in the other: in each other's place, or once more in the place of others."""
    found = {"b": _sources(b, a, marks), "a": _sources(a, b, marks)}
    for run, names in found.items():
        if names and all(found.values()):
            if mixed := [name for name, sources in names.items() if len(sources) > 1]:
                return None, f"rows of {', '.join(mixed)} of run b stand in several places of run a: another layout"
            words = ", ".join(f"{name} of run b is {source} of run a" for name, (source,) in names.items())
            return "head_order" if all((one,) == two for one, two in names.items()) else "swapped", words
        every = {source for sources in names.values() for source in sources}
        if names and {*names} == every and all(name not in sources for name, sources in names.items()):
            # A part of each in the other's place, as of fewer heads of keys.
            return "swapped", ", ".join(
                f"{name} of run {run} is {each[0]} of the other" for name, each in names.items()
            )
        if names:
            said = (f"in run {run} {name} is {' and '.join(sources)}" for name, sources in names.items())
            return "not_loaded", ", ".join(said)
    return None


def _sources(own: Weights, others: Weights, marks: Marks) -> dict[str, tuple[str, ...]]:
    """Name -> the weights of the other run that have the same rows in some order; none where rows are not found."""
    every = [(name, block) for name, blocks in others.items() for block in blocks[1:]]
    found: dict[str, tuple[str, ...]] = {}
    for name, mark in marks.items():
        for block, twin in zip(own[name][1:][mark], others[name][1:][mark], strict=True):
            source = next((where for where, other in every if _apart(block, other) <= SAME), None)
            if source is None or _apart(block, twin) <= SAME:
                return {}
            found[name] = tuple(dict.fromkeys((*found.get(name, ()), source)))
    return found


def _new(a: Weights, b: Weights, marks: Marks) -> Said:
    """How far weights are apart; and whether those of one run alone look as an initialiser draws them."""
    said, alike = [], True
    drawn: dict[str, list[set[int]]] = {"a": [], "b": []}
    for name, mark in marks.items():
        one, two = (part[name][1:][mark].astype(np.float64) for part in (a, b))
        x, y = one[:, 1:].ravel(), two[:, 1:].ravel()
        norms = [float(np.linalg.norm(part[:, 0])) for part in (one, two)]
        like = float((x * y).sum() / max(np.linalg.norm(x) * np.linalg.norm(y), 1e-300))
        blocks = ", ".join(map(str, np.flatnonzero(mark)[:8]))
        some = "" if mark.all() else f", {'block' if mark.sum() == 1 else 'blocks'} {blocks} (of {len(mark)}),"
        apart = np.linalg.norm(y - x) / max(np.linalg.norm(x), np.linalg.norm(y), 1e-300)
        words = f"{name}{some} differs by {apart:.2g} of its size (correlation {like:.2f}"
        zero = " and ".join(run for run, norm in zip("ab", norms, strict=True) if norm == 0)
        size = f"all 0 in run {zero}" if zero else f"{short(norms[1] / norms[0])} times as large in run b"
        said.append(f"{words}, {size})")
        alike &= abs(like) < 4 / np.sqrt(len(x))
        for run, part in (("a", one), ("b", two)):
            drawn[run].append(_initialisers(name, part[:, 0], len(mark)))
    new = [run for run, found in drawn.items() if alike and set.intersection(*found)]
    words = "; ".join(said)
    # Where both look new, as in models that were never trained, neither says of itself that it was not loaded.
    return ("not_loaded", f"{words}; looks newly initialised in run {new[0]}") if len(new) == 1 else (None, words)


def _initialisers(name: str, norms: np.ndarray, blocks: int) -> set[int]:
    """Which of the spreads that initialisers give a weight has, by the norms of some of its blocks."""
    rows, columns = weight_shape(name)
    count = rows * columns * len(norms) / blocks
    spread = float(np.linalg.norm(norms)) / count**0.5
    by_size = (3 * columns) ** -0.5, columns**-0.5, (2 / columns) ** 0.5, (2 / (rows + columns)) ** 0.5
    known = (0.02, *by_size, 0.0)
    return {n for n, one in enumerate(known) if abs(spread - one) <= one * (3 / (2 * count) ** 0.5 + 0.002)}
