"""Where two runs over the same tokens first differ, and why.

Sites are walked in order, and in each its stages: what enters the block, what enters the attention, queries and keys,
which keys are seen, the final score, the mass that a sink leaves, the head output. The first stage that is further
apart than rounding explains, given the stage before it, almost names the cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from attemper.errors import InputError
from attemper.fingerprints import equivalence, finite, floor
from attemper.fingerprints.advice import ADVICE, advice
from attemper.fingerprints.align import align, other_padding, outputs_of
from attemper.fingerprints.causes import masking, outputs, rotary, scores, vectors, weights
from attemper.fingerprints.explanation import FirstDifference, Remark, Runs
from attemper.fingerprints.finding import ACCEPTED, REPRODUCED, Finding, slope
from attemper.fingerprints.levels import levels
from attemper.fingerprints.pair import SitePair, sketch_difference
from attemper.fingerprints.record import Fingerprint
from attemper.fingerprints.site import MARGIN
from attemper.text import clean_name, count

OWN: tuple[Callable[[SitePair], list[Finding]], ...] = (
    masking.find,
    scores.find,
    lambda pair: [one for one in (vectors.key_rounding(pair) if pair.vectors else None, outputs.inside(pair)) if one],
)
"""What each run shows by itself: exact, whatever came before it."""
VECTORS: tuple[Callable[[SitePair], Iterable[Finding]], ...] = (
    vectors.factor_of_products,
    rotary.find,
    vectors.head_order,
    vectors.other_projection,
    vectors.bias,
)
"""What may make queries and keys differ; of those that make run b of run a, that which leaves least counts."""
SURE = 4.0
"""A factor of all products that no single one shows is sure from so many levels of vectors on: rounding of weights
shifts it, too.
"""
SECOND = 0.5
"""Of a cause that is not the first, what it may leave to be told beside it."""
ORDER = (
    *("residual", "input", "q and k", "visible keys", "final score", "kept mass", "head output", "attention output"),
    "model output",
)
"""Stages of a site, and of what is behind the last."""
SMALLER = 0.6
"""Queries or keys do not follow what enters the attention if they differ by so much less."""
UNSEEN = "was not kept in both, or is of other widths"
"""Of what the models give, where it cannot be compared."""
TAKEN_BACK = 0.02
"""A cause that leaves so little of how queries and keys differ says that what enters the attention does not."""


def first_difference(a: Fingerprint, b: Fingerprint) -> FirstDifference:
    """What :func:`attemper.explain` says, as a plain record; there is how it is found, and what it refuses."""
    for name, one in (("a", a), ("b", b)):
        if not isinstance(one, Fingerprint):
            raise InputError(
                f"explain({name}) must be a fingerprint, of attemper.fingerprint, got {type(one).__name__}."
            )
        if not one.sites:
            raise InputError(f"explain({name}) has no attention site: nothing was seen of its model.")
    skipped = tuple((run, *one) for run, side in (("a", a), ("b", b)) for one in side.skipped.items())
    padding = other_padding(a, b)
    if padding is not None:
        site, words = clean_name(a.sites[0].name), f"padding at all sites, visible keys: {padding}."
        said, runs = advice("padding", None), Runs((a.model, b.model), (), skipped)
        return FirstDifference("padding", site, "visible keys", "all sites", None, 0.0, "high", (), words, said, runs)
    pairs = align(a, b)
    found = _of_sites(pairs, outputs_of(a.output, b.output))
    return replace(found, runs=Runs((a.model, b.model), levels(pairs), skipped))


def _of_sites(pairs: list[SitePair], sketches: tuple[np.ndarray, np.ndarray] | None) -> FirstDifference:
    """Of all sites, and of what the models give."""
    lost = {pair.number: found for pair in pairs if (found := finite.find(pair, pairs))}
    lost |= {len(pairs): found} if sketches and (found := finite.of_output(sketches)) else {}
    pairs = [pair if pair.number in lost else equivalence.in_order(pair) for pair in pairs]
    pairs = pairs if lost else equivalence.with_epsilon(pairs)
    output = sketch_difference(*sketches) if sketches and len(pairs) not in lost else None
    found = _Walk(pairs, output, lost).explanation()
    differing = [pair for pair in pairs if pair.a.weight_bits != pair.b.weight_bits]
    numbers = [pair.number for pair in pairs if clean_name(pair.a.name) == found.site]
    # Weights that are rounded differ from the first on.
    if not found.is_fault or not differing or numbers[0] > differing[0].number + 1:
        return found
    rounded = [pair if pair.number in lost else equivalence.with_rounding(pair) for pair in pairs]
    return _Walk(rounded, output, lost).explanation(differing)


def _own(pair: SitePair) -> list[Finding]:
    return [found for cause in OWN for found in cause(pair)]


class _Walk:
    """From the first site on."""

    def __init__(self, pairs: list[SitePair], output: np.ndarray | None, lost: dict[int, Finding]) -> None:
        self.pairs, self._output, self._lost = pairs, output, lost
        self.own = [masking.find(pair) if pair.number in lost else _own(pair) for pair in pairs]
        self._before = floor.Before()
        self._equivalent: list[tuple[SitePair, Finding]] = []
        self._small: list[tuple[SitePair, str, float]] = []
        self._few: list[SitePair] = []
        self._second: list[Finding] = []

    def explanation(self, rounded: list[SitePair] | None = None) -> FirstDifference:
        """What is found first, what else each run shows by itself, and what differs without effect. ``rounded``: sites
        at which weights stand on different grids, if these are taken into account.
        """
        if rounded:
            self._equivalent.append((rounded[0], equivalence.of_rounding(rounded[0])))
        for pair, own in zip(self.pairs, self.own, strict=True):
            lost = self._lost.get(pair.number)
            if lost is not None:
                return FirstDifference.of(pair, lost, None, len(self.pairs), self._also(pair, lost))
            found = self._first_at(pair, own)
            if found is not None:
                return self._explanation(pair, found)
        found = self._lost.get(len(self.pairs)) or self._behind()
        return self._without_cause(rounded or []) if found is None else self._explanation(self.pairs[-1], found)

    @property
    def _level(self) -> float | None:
        """How far what the models give is apart; None where it cannot be compared."""
        return None if self._output is None else self.pairs[-1].level(self._output)

    def _first_at(self, pair: SitePair, own: list[Finding]) -> Finding | None:
        """The first cause at this site, if it has one."""
        floor.enter(pair, self._before)
        before = floor.residual(self._before, pair.eps)
        entering = pair.level(pair.residual)
        found = self._entering(pair, "residual", entering, before)
        if found is not None:
            return found
        if pair.rotation:
            words = f"the residual stream is {pair.rotation}, and so are the weights that read and write it"
            self._note(pair, "residual", pair.rotation, words)
        rows = pair.residual[~np.isnan(pair.residual)]
        if len(rows) and float(floor.times(rows.max(), before)) > 2 and rows.max() > 8 * max(entering, pair.eps):
            if pair is self.pairs[0]:  # no router stands before it
                few = int((floor.times(rows, before) > 1).sum())
                words = f"what enters its block differs by up to {rows.max():.2g} of its size, in {few} of "
                return Finding("input", "residual", 0.0, message=f"{words}{count(len(rows), 'row')} that were kept")
            self._few.append(pair)
        moved = self._entering(pair, "input", pair.level(pair.input), floor.entering(pair))
        noted = len(self._equivalent)
        found = self._vectors(pair, own) or self._scores(pair)
        if moved is not None:
            known = equivalence.is_known(pair)
            if not known or (len(self._equivalent) == noted and not self._takes_back(pair, found)):
                named = self._by_weights(pair, moved)
                return named if named.kind == "order_of_layers" else moved
            if pair.rotation != "rotated":
                self._note(pair, "input", *equivalence.of_input(pair))
        found = found or _earliest(own) or self._values(pair) or self._attention_output(pair)
        if found is None and pair.order is not None:
            words = f"heads of run b are heads {', '.join(map(str, np.argsort(pair.order)[:16]))} of run a"
            if not equivalence.follows(pair):
                words += ", and columns of the output projection do not follow them"
                return Finding("head_order", "q and k", 0.0, message=words)
            self._note(pair, "q and k", "permuted", words + ", and so are columns of the output projection")
        if found is None and pair.a.kv_heads != pair.b.kv_heads:
            self._note(
                pair, "q and k", "repeated", "keys and values of one run stand once for each head that reads them"
            )
        self._before = floor.after(pair, self._before)
        return found

    def _note(self, pair: SitePair, stage: str, transform: str, words: str) -> None:
        """Takes note of what differs without effect."""
        self._equivalent.append((pair, Finding(transform, stage, 0.0, message=words)))

    def _entering(self, pair: SitePair, stage: str, level: float, expected: float) -> Finding | None:
        """What enters the block, or the attention."""
        times = float(floor.times(level, expected))
        if times > 1:
            what = "its block" if stage == "residual" else "the attention"
            words = f"what enters {what} differs by {level:.2g} of its size, where rounding explains {expected:.2g}"
            return Finding("input", stage, 0.0, None, None, words)
        if times > floor.EDGE:
            self._small.append((pair, stage, times))
        return None

    def _takes_back(self, pair: SitePair, found: Finding | None) -> bool:
        """Whether weights take back that what enters the attention differs: a stream that was rotated, or queries or
        keys that are the same, or differ by a cause that leaves nothing.
        """
        if pair.rotation == "rotated":
            return True
        if found is not None and found.residual <= TAKEN_BACK:
            # Queries and keys that are longer because what enters is have a factor, too.
            return found.kind != "scale" or not equivalence.is_longer(pair)
        if not pair.vectors:
            return found is None
        # Rounding may hide a small difference: it must be smaller than what entered.
        level, vector = SMALLER * pair.level(pair.input), floor.vectors(pair)
        return any(
            (floor.times(part, vector) <= 1).all() and np.mean(part) < level
            for part in (pair.query_level, pair.key_level)
        )

    def _values(self, pair: SitePair) -> Finding | None:
        """Head outputs, unless what follows takes back how they differ."""
        found = outputs.values(pair)
        if found is None or not equivalence.agrees(pair):
            return found and self._by_weights(pair, found)
        words = "head outputs differ, and what the attention or its block gives does not"
        self._note(pair, "head output", equivalence.of_outputs(pair), words)
        return None

    def _attention_output(self, pair: SitePair) -> Finding | None:
        """What the attending module gives, or its block adds if weights around the attention say that these differ."""
        if pair.order is not None or (self._equivalent and self._equivalent[-1][0] is pair):
            return None  # whether columns of the output projection follow heads in another order is asked behind
        for name, words in (
            ("attended", "what the attention gives differs"),
            ("change", "what the block adds differs"),
        ):
            rows = pair.states(name)
            if not np.isnan(rows).all() and floor.times(pair.level(rows), floor.states(pair, name)) > 1:
                words += f" by {pair.level(rows):.2g} of its size, head outputs by rounding: the output projection"
                found = Finding("weights", "attention output", 1.0, message=words)
                named = self._by_weights(pair, found)
                if named is not found or name == "attended":
                    return named
        return None

    def _by_weights(self, pair: SitePair, found: Finding) -> Finding:
        """A difference with no rule that is known, and what weights say of it."""
        kind, words = weights.find(pair, self.pairs) or (None, "")
        if not words:
            same = found.stage == "q and k" and {*pair.a.weights} & {*pair.b.weights}
            return replace(found, message=f"{found.message}; the weights around it are the same") if same else found
        if kind is None:
            return replace(
                found, message=f"{found.message}; {words}", advice=found.advice or weights.advice_on_one(pair, found)
            )
        return replace(found, kind=kind, residual=0.0, message=words)

    def _behind(self) -> Finding | None:
        """What the model gives, where no attention differs."""
        pair, level = self.pairs[-1], self._level
        expected = floor.residual(self._before, pair.eps)
        if level is None or floor.times(level, expected) <= 1:
            if self._output is not None and floor.times(self._output.max(), expected) > 8:
                self._few.append(pair)
            return None
        words = (
            f"what the model gives differs by {level:.2g} of its size, where rounding explains {expected:.2g}: what is "
            "behind the last attention does"
        )
        return Finding("output", "model output", 0.0, None, None, words)

    def _vectors(self, pair: SitePair, own: list[Finding]) -> Finding | None:
        """Queries and keys."""
        self._second = []
        levels = pair.query_level, pair.key_level, pair.raw_level
        if not pair.vectors or not max(level.max() for level in levels):
            return None
        vector, product = floor.vectors(pair), floor.products(pair)
        times = [floor.times(level, own) for level, own in zip(levels, (vector, vector, product), strict=True)]
        largest = float(np.concatenate(times).max())
        if largest <= 1:
            if largest > floor.EDGE:
                self._small.append((pair, "q and k", largest))
            for found in vectors.factor_of_products(pair):
                sure = found.residual < 0.9 and abs((found.value or 1) - 1) > SURE * vector
                sure = sure and found.reproduced and not pair.weights and not _agree(pair, pair.score_level)
                return found if sure else None
            return None
        found, agree = vectors.all_zero(pair), _agree(pair, pair.score_level)
        if found is not None and not agree:
            own[:] = [one for one in own if one.kind != "key_rounding"]  # zeros lie on any grid
            return replace(found, kind=self._by_weights(pair, found).kind)
        rounded = [found for found in own if found.kind == "key_rounding"]
        if rounded:
            return rounded[0]
        if agree and any(one.kind == "documents" for one in own):
            return None  # positions start anew in each document: products of pairs that both see are the same
        best, self._second = best_of(pair)
        if agree:
            words = "queries and keys differ" if best is None else best.message
            relative = float((pair.score_level / np.maximum(pair.score_size, 1e-300)).max())
            words += f", and so does what makes scores of them: final scores agree to {relative:.1g} of their size"
            self._note(pair, "q and k", equivalence.of_vectors(pair), words)
            # What queries and keys are longer by, the multiplier takes back.
            own[:] = [one for one in own if one.kind not in ("scale", "logn")]
            return None
        if _agree(pair, pair.product_level):
            self._note(
                pair, "q and k", equivalence.of_vectors(pair), "queries and keys differ, and their products do not"
            )
            return None
        if best is not None and best.kind == "scale":
            named = self._by_weights(pair, best)
            best = named if named.kind == best.kind else best
            same = {*pair.a.weights} & {*pair.b.weights} and not weights.differing(pair)
            which = "after" if same else "heads"
            return best if best.heads is None else replace(best, advice=ADVICE[f"scale q and k {which}"])
        if best is not None:
            return best
        marked = np.maximum(times[0], times[2]) > 1
        return self._by_weights(pair, vectors.apart(pair, pair.heads(marked) if marked.any() else None))

    def _scores(self, pair: SitePair) -> Finding | None:
        """Attention whose queries were not seen: scores alone."""
        if pair.vectors:
            return None
        both = np.isfinite(pair.a.final) & np.isfinite(pair.b.final)
        size = float(np.sqrt((np.where(both, pair.a.final, 0.0) ** 2).sum() / max(both.sum(), 1)))
        times = floor.times(pair.score_level / max(size, 1e-300), floor.vectors(pair))
        if not (times > 1).any():
            return None
        a, b = (np.where(both, site.final, 0.0).astype(np.float64) for site in (pair.a, pair.b))
        c = float(slope((a * a).sum(), (a * b).sum(), (b * b).sum(), pair))
        level = float(np.sqrt(((b - c * a) ** 2).sum()))
        smaller = float(np.sqrt(min(c * c * (a * a).sum(), (b * b).sum())))
        if floor.times(level, floor.vectors(pair) * smaller) <= REPRODUCED:
            left = level**2 / max(((b - a) ** 2).sum(), 1e-300)
            words = f"scores of run b are {c:.5g} times those of run a"
            return Finding("scale", "final score", float(left), c, pair.heads(times > 1), words)
        return Finding("scores", "final score", 1.0, None, pair.heads(times > 1), "scores differ")

    def _explanation(self, pair: SitePair, found: Finding) -> FirstDifference:
        """What was found, where else it is, and what else each run shows by itself."""
        also = self._also(pair, found)
        if found.kind in ("input", "values", "head_order") and not equivalence.is_known(pair):
            words = "; one file does not say whether other weights take it back: take both fingerprints again"
            found = replace(found, message=found.message + words)
        sites = sum(any(one.kind == found.kind for one in own) for own in self.own) if found.own else None
        return FirstDifference.of(pair, found, sites, len(self.pairs), also)

    def _also(self, pair: SitePair, found: Finding) -> tuple[Remark, ...]:
        """Findings of another kind that no difference before them can have made; each kind once."""
        second = self._second if found.stage == "q and k" else ()
        of_sites = ((other, one) for other, own in zip(self.pairs, self.own, strict=True) for one in own)
        others = ((other, one) for other, one in of_sites if one.kind not in (found.kind, "scores"))
        return (*_remarks([*((pair, one) for one in second), *others]), *_remarks(self._equivalent))

    def _without_cause(self, rounded: list[SitePair]) -> FirstDifference:
        """No stage of any site is beyond rounding, or what is has no effect."""
        level = self._level
        if rounded and len(self._equivalent) == 1:
            found = replace(self._equivalent[0][1], kind="rounding")
            return FirstDifference.of(rounded[0], found, len(rounded), len(self.pairs), _remarks(self._equivalent))
        if self._equivalent:
            first = self._equivalent[0][0]
            found = min(
                (one for pair, one in self._equivalent if pair is first), key=lambda one: ORDER.index(one.stage)
            )
            said = UNSEEN if level is None else f"agrees to {level:.1g} of its size"
            words = f"the same function in other weights, and what the model gives {said}"
            found = Finding("equivalent", found.stage, 0.0, message=words)
            sites = len({other.number for other, _ in self._equivalent})
            return FirstDifference.of(first, found, sites, len(self.pairs), _remarks(self._equivalent))
        unseen = f"; what the models give {UNSEEN}" if level is None else ""
        same = self._output is None or not self._output.any()
        if same and all(pair.identical for pair in self.pairs):
            return FirstDifference.plain("none", f"every number of both fingerprints is the same{unseen}")
        if self._few:
            found = Finding(
                "few_tokens", "residual", 0.0, message="a few tokens differ by much, the others by rounding"
            )
            return FirstDifference.of(self._few[0], found, len(self._few), len(self.pairs), ())
        if self._small:
            pair, stage, times = max(self._small, key=lambda one: one[2])
            words = f"this stage differs by {times:.2g} of what rounding may explain: too little to name a cause"
            return FirstDifference.of(pair, Finding("too_small", stage, 1.0, message=words), None, len(self.pairs), ())
        return FirstDifference.plain("rounding", f"they differ by no more than rounding explains{unseen}")


def _remarks(found: Iterable[tuple[SitePair, Finding]]) -> tuple[Remark, ...]:
    """What else was found, or differs without effect; each kind once."""
    seen: dict[str, Remark] = {}
    for pair, one in found:
        seen.setdefault(one.kind, Remark(one.kind, clean_name(pair.a.name), one.stage, one.value, one.message))
    return tuple(seen.values())


def _earliest(own: list[Finding]) -> Finding | None:
    """The finding of the first stage; within one, that which leaves least."""
    return min(own, key=lambda one: (ORDER.index(one.stage), one.residual), default=None)


def best_of(pair: SitePair) -> tuple[Finding | None, list[Finding]]:
    """The cause that makes queries and keys of run b of those of run a and leaves least of their difference, rounding
    aside; and rivals: others that make it too, or where none does those that leave no more than half, without their
    numbers, which do not predict it.
    """
    noise = _noise(pair)
    named = [found for cause in VECTORS for found in cause(pair) if found.residual < 1]
    named = sorted(named, key=lambda one: (not one.reproduced, one.residual))
    named = [replace(one, residual=max(one.residual - noise, 0.0) / (1 - noise)) for one in named]
    best = named[0] if named and named[0].reproduced and named[0].residual <= ACCEPTED else None
    rivals = [one for one in named if one.residual <= SECOND and (best is None or one.reproduced)]
    kinds: dict[str, Finding] = {}
    for one in rivals:
        if best is None or one.kind != best.kind:
            kinds.setdefault(one.kind, one)
    return best, [replace(one, value=None, message=one.left) for one in kinds.values()]


def _noise(pair: SitePair) -> float:
    """The share of the squared difference of queries and keys that is rounding, of heads that are beyond it."""
    levels = np.concatenate((pair.query_level, pair.key_level))
    level = np.sqrt((levels[levels >= min(MARGIN * floor.vectors(pair), levels.max())] ** 2).mean())
    return min((floor.vectors(pair) / level) ** 2, 0.5) if level else 0.0


MENDED = 1e-3
"""Final scores agree if so little is left of what queries and keys differ by: a scale that was set with few digits."""


def _agree(pair: SitePair, scores: np.ndarray) -> bool:
    """Whether scores in pairs that both see agree though queries and keys do not."""
    apart = np.hypot(pair.query_level, pair.key_level.max()) / np.sqrt(pair.a.head_dim)
    final = scores / np.maximum(pair.score_size, 1e-300)
    before = np.maximum(apart, pair.raw_level)
    agree = (floor.times(final, floor.products(pair)) < 1) | (final < MENDED * before)
    return bool(agree.all() and (final < (0.5 if pair.weights else 0.2) * before).any())
