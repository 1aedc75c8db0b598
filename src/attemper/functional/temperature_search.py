r"""Finds the temperature of a wanted mean entropy: Newton's method inside a bracket, in u = log beta, beta = 1 / T.

Newton's steps are taken on :math:`\varphi(u) = \log\frac{\log n - H}{H - lowest}`. A step that leaves the bracket, or
two that halve neither the bracket nor the distance in phi, give way to halving. The two cases differ in the bracket:

- Without a bias the entropy only falls with beta, from log n to log m (m tied keys), and two inequalities give a
  bracket without a search. With R the range of the scores and d the target's distance below log n, Hoeffding's lemma on
  KL(p || uniform) says ``d <= beta^2 R^2 / 8``. With e the distance above log m and g the gap to the next score, a
  weight rho outside the tied keys costs at most ``rho (1 + log n + log 1/rho)``, and has
  ``rho <= (n - m) / m * exp(-beta g)``.
- With a bias the entropy may rise and fall. It is computed on a grid of log beta that reaches from where only the bias
  counts to where only the largest score does. Of the places where it crosses the target, the nearest to T = 1 is taken.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

MOST = 120
"""Evaluations after which a row is given up. None has been seen to need more than 25."""
TOLERANCE = 1e-7
"""How near the entropy comes to its target, in nats."""
VANISHED = 50.0
"""exp(-50) of a weight is nothing beside a tolerance of 1e-7, whatever the number of keys."""
GRID = 129
"""Temperatures of the grid."""
NARROWINGS = 30
"""Steps towards an extreme of the entropy between two places of the grid."""


class SolvedTemperature(NamedTuple):
    """What ``temperature_for_entropy`` found, each [...] without ``dim`` (and 1 where entropies were averaged)."""

    temperature: Tensor
    """Float64: rounded to float32, it moves the entropy by up to Var_p(s) * 6e-8 nats."""
    entropy: Tensor
    """Nats, float64, at that temperature."""
    reached: Tensor
    """Bool: whether the entropy is the target's. If not, this is the nearest there is."""
    evaluations: Tensor
    """How often the entropy of the row was computed, int64."""


class Rows(NamedTuple):
    """Groups of rows [G, M, n] that share one temperature, and what follows from them at once, [G, M]."""

    below: Tensor
    """Scores relative to each row's maximum; 0 where hidden."""
    visible: Tensor
    valid: Tensor
    """Whether the row sees a key, and its scores and biases are finite."""
    log_keys: Tensor
    log_ties: Tensor
    bias: Tensor | None

    def of(self, groups: Tensor) -> Rows:
        return Rows(*(None if part is None else part[groups] for part in self))  # pyright: ignore[reportArgumentType]

    def mean(self, values: Tensor) -> Tensor:
        """Over the valid rows of each group, [G]; 0 where there are none."""
        return torch.where(self.valid, values, 0.0).sum(1) / self.valid.sum(1).clamp(min=1)

    def most(self, values: Tensor) -> Tensor:
        """Over the valid rows of each group, [G]; -inf where there are none."""
        return torch.where(self.valid, values, -math.inf).amax(1)

    def gap(self) -> Tensor:
        """How far each row's next score lies below its maximum; inf where all are tied. [G, M]."""
        return -torch.where(self.visible & (self.below < 0), self.below, -math.inf).amax(-1)


class Bracket(NamedTuple):
    """Where one solution lies, each [G]: log beta from, to, and the first guess; whether the entropy falls there."""

    low: Tensor
    high: Tensor
    guess: Tensor
    falls: Tensor


def search(scores: Tensor, bias: Tensor | None, target: Tensor) -> SolvedTemperature:
    """``scores`` and ``bias`` [G, M, n] float64, -inf where hidden; ``target`` [G]. One temperature for each group."""
    rows = _rows(scores, bias)
    highest = rows.mean(rows.log_keys)
    lowest = rows.mean(rows.log_ties) if bias is None else torch.zeros_like(highest)
    if bias is None:
        bracket, (answer, inside) = None, _limits(rows, lowest, highest, target)
    else:
        answer, inside, bracket = _crossings(rows, target)
    if len(inside):
        some = rows.of(inside), lowest[inside], highest[inside], target[inside]
        solved = _solve(*some, _bounds(*some) if bracket is None else bracket)
        solved = solved._replace(evaluations=solved.evaluations + answer.evaluations[inside])
        for part, values in zip(answer, solved, strict=True):
            part[inside] = values
    return answer


def _rows(scores: Tensor, bias: Tensor | None) -> Rows:
    scores = scores if bias is None else torch.where(bias == -math.inf, -math.inf, scores)
    visible = scores != -math.inf
    top = scores.amax(-1, keepdim=True)
    valid = visible.any(-1) & top[..., 0].isfinite() & ~scores.isnan().any(-1)
    if bias is not None:
        valid = valid & ~(visible & (bias.isnan() | (bias == math.inf))).any(-1)
        bias = torch.where(visible, bias, 0.0)
    below = torch.where(visible & valid[..., None], scores - torch.where(valid[..., None], top, 0.0), 0.0)
    ties = ((below == 0) & visible).sum(-1).clamp(min=1)
    return Rows(below, visible, valid, visible.sum(-1).clamp(min=1).double().log(), ties.double().log(), bias)


def _weights(rows: Rows, beta: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights relative to the largest, their sum, the logits beta y + b below the largest, and their mean."""
    s = rows.below * beta[:, None, None]
    if rows.bias is None:
        s = torch.where(rows.visible, s, -math.inf)
    else:
        s = torch.where(rows.visible, s + rows.bias, -math.inf)
        top = s.amax(-1, keepdim=True)
        s = s - torch.where(top.isfinite(), top, 0.0)
    e = s.exp()
    z = e.sum(-1).clamp(min=1.0)
    s = torch.where(e > 0, s, 0.0)
    return e, z, s, (e * s).sum(-1) / z


def _entropy(rows: Rows, place: Tensor) -> Tensor:
    """Mean entropy of each group at its log beta, [G]."""
    _, z, _, mean = _weights(rows, place.exp())
    return rows.mean(z.log() - mean)


def _entropy_and_fall(rows: Rows, place: Tensor) -> tuple[Tensor, Tensor]:
    """Mean entropy of each group at its log beta, and -dH / d log beta = Cov_p(s, beta y), [G]."""
    e, z, s, mean = _weights(rows, place.exp())
    x, centre = s, mean
    if rows.bias is not None:
        x = torch.where(e > 0, rows.below * place.exp()[:, None, None], 0.0)
        centre = (e * x).sum(-1) / z
    covariance = (e * ((s - mean[..., None]) * (x - centre[..., None]))).sum(-1) / z
    return rows.mean(z.log() - mean), rows.mean(covariance)


def _solve(rows: Rows, lowest: Tensor, highest: Tensor, target: Tensor, bracket: Bracket) -> SolvedTemperature:
    """The solution inside each bracket."""
    wanted = (highest - target).log() - (target - lowest).log()
    left, groups = rows, torch.arange(len(target), device=target.device)
    low, high, guess, falls = bracket
    # log beta from, to and at; width of the bracket and distance in phi two steps ago; entropy.
    state = torch.stack((low, high, guess, high - low, torch.full_like(low, math.inf), torch.zeros_like(low)))
    evaluations = torch.zeros_like(groups)
    for step in range(MOST):
        at = state[:, groups]
        entropy, fall = _entropy_and_fall(left, at[2])
        evaluations[groups] += 1
        state[5, groups] = entropy
        going = (entropy - target[groups]).abs() > TOLERANCE
        if not bool(going.any()):
            break
        if not bool(going.all()):
            some = going.nonzero()[:, 0]
            groups, left, at, entropy, fall = groups[some], left.of(some), at[:, some], entropy[some], fall[some]
        flat = (entropy > target[groups]) == falls[groups]
        low, high = torch.where(flat, at[2], at[0]), torch.where(flat, at[1], at[2])
        above = (highest[groups] - entropy).clamp(min=1e-300)
        beyond = (entropy - lowest[groups]).clamp(min=1e-300)
        need = wanted[groups] - above.log() + beyond.log()
        place = at[2] + _newton(need, fall * (1 / above + 1 / beyond))
        halve = ~((place > low) & (place < high))
        if step % 2 == 0:  # Newton's steps must earn their keep: in two of them half of the way, or of the bracket.
            halve |= (high - low > at[3] / 2) & (need.abs() > at[4] / 2)
            at[3], at[4] = high - low, need.abs()
        state[:5, groups] = torch.stack((low, high, torch.where(halve, (low + high) / 2, place), at[3], at[4]))
    else:
        state[5, groups] = _entropy(left, state[2, groups])
    return SolvedTemperature((-state[2]).exp(), state[5], (state[5] - target).abs() <= TOLERANCE, evaluations)


def _newton(need: Tensor, slope: Tensor) -> Tensor:
    """The step in u that moves phi by ``need``, for phi = 2 u + c e^u + const with the slope that it has here.

    Where the slope is below 2 (scores in far clusters, or a bias), phi is taken as linear.
    """
    bend = (slope - 2).clamp(min=0.0)
    rising = torch.minimum(need / 2, torch.log1p(need.clamp(min=0.0) / bend.clamp(min=1e-30)))
    step = torch.where(need > 0, rising, need / slope)
    for _ in range(6):
        step = step - (2 * step + bend * torch.expm1(step) - need) / (2 + bend * step.exp())
    return torch.where(slope > 2, step, need / slope)


def _answer(rows: Rows, temperature: Tensor, entropy: Tensor, target: Tensor) -> SolvedTemperature:
    """An answer without a search. A group without a valid row has T = 1 and entropy 0, or NaN where it sees a key."""
    has_row = rows.valid.any(1)
    nothing = torch.where(rows.visible.any(-1).any(1), math.nan, 0.0)
    entropy = torch.where(has_row, entropy, nothing.to(entropy.dtype))
    reached = has_row & ((entropy - target).abs() <= TOLERANCE)
    return SolvedTemperature(
        torch.where(has_row, temperature, 1.0), entropy, reached, torch.ones_like(reached, dtype=torch.int64)
    )


def _limits(rows: Rows, lowest: Tensor, highest: Tensor, target: Tensor) -> tuple[SolvedTemperature, Tensor]:
    """Without a bias: the answers for targets at or beyond the limits, and which groups have theirs between them."""
    gap = rows.gap()
    least = torch.where(rows.valid & gap.isfinite(), gap, math.inf).amin(1)
    sharp = torch.where(least.isfinite(), least / VANISHED, 1.0)
    high = target >= (lowest + highest) / 2
    temperature = torch.where(high & least.isfinite(), math.inf, sharp)
    answer = _answer(rows, temperature, torch.where(high, highest, lowest), target)
    inside = (target > lowest + TOLERANCE) & (target < highest - TOLERANCE) & rows.valid.any(1)
    answer.evaluations[inside] = 0
    return answer, inside.nonzero()[:, 0]


def _bounds(rows: Rows, lowest: Tensor, highest: Tensor, target: Tensor) -> Bracket:
    """Without a bias. The guess is that of a normal distribution of scores, ``log n - H = beta^2 Var / 2``."""
    counts, ties = rows.log_keys.exp(), rows.log_ties.exp()
    deficit, excess = highest - target, target - lowest
    spread = rows.mean(rows.below.amin(-1).square())
    low = (8 * deficit / spread).sqrt()
    rho = excess[:, None] / (2 * (1 + torch.log1p(1 / excess[:, None]) + rows.log_keys))
    gap = rows.gap()
    others = (counts - ties).clamp(min=1)
    high = rows.most(torch.where(gap.isfinite(), ((others / (ties * rho)).log() / gap).clamp(min=0), 0.0))
    low, high = low.log(), torch.maximum(high, low * 1.0001).log()
    mean = rows.below.sum(-1) / counts
    away = torch.where(rows.visible, rows.below - mean[..., None], 0.0)
    guess = (2 * deficit / rows.mean(away.square().sum(-1) / counts)).sqrt()
    return Bracket(low, high, guess.log().clamp(low, high), torch.ones_like(low, dtype=torch.bool))


def _crossings(rows: Rows, target: Tensor) -> tuple[SolvedTemperature, Tensor, Bracket]:
    """With a bias: the nearest entropy of the grid; which groups have a crossing; and a bracket for each of those."""
    places = _grid(rows)
    levels = torch.stack([_entropy(rows, place) for place in places])
    places, levels = _with_extreme(rows, target, places, levels)
    off = levels - target
    nearest = off.abs().argmin(0)[None]
    answer = _answer(rows, (-places.gather(0, nearest)[0]).exp(), levels.gather(0, nearest)[0], target)
    answer.evaluations.fill_(len(places) + 2 * NARROWINGS)
    crosses = (off[:-1] > 0) != (off[1:] > 0)
    inside = (crosses.any(0) & rows.valid.any(1)).nonzero()[:, 0]
    far = torch.where(crosses, (places[:-1] + places[1:]).abs(), math.inf)
    first = far.argmin(0)[None, inside]
    low, high, before = (part[:, inside].gather(0, first)[0] for part in (places[:-1], places[1:], off[:-1]))
    return answer, inside, Bracket(low, high, (low + high) / 2, before > 0)


def _grid(rows: Rows) -> Tensor:
    """[GRID, G] of log beta, ascending; 0 (T = 1) lies inside."""
    assert rows.bias is not None
    width = rows.bias.amax(-1) - rows.bias.amin(-1)
    gap = rows.gap()
    sharp = rows.most(torch.where(gap.isfinite(), (VANISHED + width) / gap, 1.0)).clamp(min=2.0)
    spread = rows.most(-rows.below.amin(-1))
    flat = torch.where(spread > 0, 1e-8 / spread, 0.5).clamp(max=0.5)
    along = torch.linspace(0, 1, GRID, dtype=sharp.dtype, device=sharp.device)[:, None]
    return flat.log() + along * (sharp.log() - flat.log())


def _with_extreme(rows: Rows, target: Tensor, places: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """The grid and one place more: the extreme beside the level nearest to the target, where two crossings may hide."""
    best = (levels - target).abs().argmin(0)
    low, high = (places.gather(0, (best + step).clamp(0, GRID - 1)[None])[0] for step in (-1, 1))
    for _ in range(NARROWINGS):
        thirds = (2 * low + high) / 3, (low + 2 * high) / 3
        left, right = ((_entropy(rows, place) - target).abs() for place in thirds)
        low, high = torch.where(left > right, thirds[0], low), torch.where(left > right, high, thirds[1])
    extreme = (low + high) / 2
    places, order = torch.cat((places, extreme[None])).sort(0)
    return places, torch.cat((levels, _entropy(rows, extreme)[None])).gather(0, order)
