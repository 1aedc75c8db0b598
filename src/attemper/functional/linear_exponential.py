r"""Linear attention with the exponential map, for numbers of any size: what overflows cancels before it is computed.

.. math:: sums_i = \sum_{j \le i} \sum_f e^{q_{if} + k_{jf} - c_i} [v_j, 1], \quad
          c_i = \max_{j \le i, f} (q_{if} + k_{jf})

With ``c_i`` no term exceeds 1 and the denominator is at least 1. To be a matrix product a term must come apart,
``e^(q + m - c) e^(k - m)``, with one m per feature for all the keys and rows of the product. m is the maximum of these
keys; if every row of the product sees them all, ``q + m - c <= 0`` and nothing is lost. Hence:

- what lies before a chunk is a sum with the maximum of its keys (``Sums``), and prefixes are joined by a scan;
- inside a chunk, the later half of the rows sees all keys of the earlier half, and so on in each half: log2(chunk)
  levels of products, and the diagonal. A key of the future has no part in the maximum of any earlier row.

Where no key is far above the first one of its part, one maximum for the whole part does, and the products are those of
any other map: the usual case, asked for where a number can be looked at (``readable``), else the levels are taken.

The maxima are constants to the gradient: they cancel. Shapes as in ``linear_chunks``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from attemper.functional import linear_chunks
from attemper.functional.feature_maps import readable
from attemper.functional.linear_chunks import chunked, products

CHUNK = 64
"""Keys of a chunk of the exact form, a power of 2."""
STEADY = 20.0
"""How far keys may lie above the first: with a denominator of e^-20 at least, the terms that round to 0 are below
e^-67 of it, and exponents of 20 round by 1e-6."""


class Sums(NamedTuple):
    """``e^shift * sums`` is the sum of phi(k) v over some keys."""

    sums: Tensor
    """[..., F, W]"""
    shift: Tensor
    """[..., F]: the largest k of each feature, -inf where there is no key."""


def over_all(q: Tensor, k: Tensor, v: Tensor, before: Sums) -> tuple[Tensor, Sums]:
    """Every row sees every key. Arguments as of ``linear_chunks.over_all``, q and k before the map; k -inf: hidden."""
    after = joined(before, summed(k, v))
    return products(rows_of(q, after.shift), after.sums), after


def causal(q: Tensor, k: Tensor, v: Tensor, before: Sums, chunk: int | None) -> tuple[Tensor, Sums]:
    """Row i sees the keys up to i. Arguments as of ``linear_chunks.causal``, q and k before the map."""
    shift = torch.maximum(before.shift, k.detach().amax(2))
    if not steady(k, before.shift, shift):
        return by_levels(q, k, v, before, chunk)
    earlier = scaled(before, shift)
    found, sums = linear_chunks.causal(rows_of(q, shift), (k - finite(shift)[:, :, None]).exp(), v, earlier, chunk)
    return found, Sums(sums, shift)


def steady(k: Tensor, before: Tensor, largest: Tensor) -> bool:
    """Whether, in every feature, no key is more than ``STEADY`` above what the first row sees. NaN is not steady."""
    if not readable(k):
        return False
    first = torch.maximum(before, k.detach()[:, :, 0])
    return bool(((largest - first <= STEADY) | (largest == -math.inf)).all())


def by_levels(q: Tensor, k: Tensor, v: Tensor, before: Sums, chunk: int | None) -> tuple[Tensor, Sums]:
    """:func:`causal`, whatever the keys; the chunk is rounded up to a power of 2."""
    tokens, heads = k.shape[2], q.shape[2]
    chunk = 1 << (min(chunk or CHUNK, tokens) - 1).bit_length()
    q, k, v = chunked(q, chunk), chunked(k, chunk, -math.inf), chunked(v, chunk)
    # [B, G, chunks, chunk r, F]: the rows of one token stand together, so that half of the tokens is half of the rows.
    q = q.movedim(2, 4).flatten(3, 4)
    own, first = summed(k, v), Sums(before.sums[:, :, None], before.shift[:, :, None])
    sums = prefixes(Sums(*(torch.cat(pair, 2) for pair in zip(first, own, strict=True))))
    earlier = Sums(sums.sums[:, :, :-1], sums.shift[:, :, :-1, None])
    largest = torch.maximum(k.detach().cummax(-2).values, earlier.shift).repeat_interleave(heads, -2)
    q, reference = referred(q, largest)
    found = triangle(q, k, reference) @ v + row_features(q, earlier.shift, reference) @ earlier.sums
    found = found.unflatten(3, (chunk, heads)).movedim(4, 2).flatten(3, 4)
    return found[:, :, :, :tokens], Sums(sums.sums[:, :, -1], sums.shift[:, :, -1])


def summed(k: Tensor, v: Tensor) -> Sums:
    """The keys [..., K, F] and values [..., K, W] of one place as sums."""
    if not k.shape[-2]:
        return Sums(k.mT @ v, k.new_full((*k.shape[:-2], k.shape[-1]), -math.inf))
    shift = k.detach().amax(-2)
    return Sums((k - finite(shift)[..., None, :]).exp().mT @ v, shift)


def joined(one: Sums, two: Sums) -> Sums:
    """The sums over the keys of both."""
    shift = torch.maximum(one.shift, two.shift)
    return Sums(scaled(one, shift) + scaled(two, shift), shift)


def scaled(part: Sums, shift: Tensor) -> Tensor:
    """The sums as they are under another shift, that is not lower."""
    return part.sums * (part.shift - finite(shift)).exp()[..., None]


def prefixes(parts: Sums) -> Sums:
    """Sums over dimension 2 up to and with each place: pairs first, then what lies between; about 2 n joins."""
    count = parts.shift.shape[2]
    if count == 1:
        return parts
    even, odd = at(parts, slice(0, None, 2)), at(parts, slice(1, None, 2))
    up_to_odd = prefixes(joined(at(even, slice(0, count // 2)), odd))
    later = joined(at(up_to_odd, slice(0, (count - 1) // 2)), at(even, slice(1, None)))
    up_to_even = (torch.cat(pair, 2) for pair in zip(at(even, slice(0, 1)), later, strict=True))
    return Sums(*(interleaved(*pair) for pair in zip(up_to_even, up_to_odd, strict=True)))


def at(parts: Sums, places: slice) -> Sums:
    """Some places of dimension 2."""
    return Sums(parts.sums[:, :, places], parts.shift[:, :, places])


def interleaved(even: Tensor, odd: Tensor) -> Tensor:
    """Places 0, 1, 2, ... of dimension 2 from those of even and odd numbers; of the even there may be one more."""
    pairs = torch.stack((even[:, :, : odd.shape[2]], odd), 3).flatten(2, 3)
    return torch.cat((pairs, even[:, :, odd.shape[2] :]), 2)


def triangle(q: Tensor, k: Tensor, reference: Tensor) -> Tensor:
    """Weights inside chunks, [..., C r, C], 0 in the future: e^(q + k - reference) summed over features.

    Args:
        q: [..., C r, F], C a power of 2.
        k: [..., C, F].
        reference: [..., C r, 1].
    """
    chunk = k.shape[-2]
    heads = q.shape[-2] // chunk
    own, references = q.unflatten(-2, (chunk, heads)), reference.unflatten(-2, (chunk, heads))
    # Blocks of one token, [..., blocks, size r, size]; a block of twice the size is made of two and of what is between.
    found = row_features(own, k[..., None, :], references).sum(-1, keepdim=True)
    size = 1
    while size < chunk:
        pairs = chunk // (2 * size)
        rows, references = (tensor.unflatten(-2, (pairs, 2, size * heads))[..., 1, :, :] for tensor in (q, reference))
        earlier = k.unflatten(-2, (pairs, 2, size))[..., 0, :, :]
        largest = earlier.detach().amax(-2, keepdim=True)
        between = row_features(rows, largest, references) @ (earlier - finite(largest)).exp().mT
        blocks = found.unflatten(-3, (pairs, 2))
        upper, lower = blocks[..., 0, :, :], blocks[..., 1, :, :]
        found = torch.cat((torch.cat((upper, torch.zeros_like(upper)), -1), torch.cat((between, lower), -1)), -2)
        size *= 2
    return found.squeeze(-3)


def rows_of(q: Tensor, shift: Tensor) -> Tensor:
    """Features of rows [B, G, r, Q, F] that meet keys whose maxima are ``shift`` [B, G, F]."""
    largest = shift[:, :, None, None]
    q, reference = referred(q, largest)
    return row_features(q, largest, reference)


def referred(q: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """q and the maxima it meets, each told from its value at the feature where their sum is largest, the row's ``c``.

    c itself would round: 1e4 + 1e4 keeps 3 digits after the point, and the differences keep all that q and k had.

    Returns:
        q less its value there, and the maximum there [..., 1].
    """
    place = (q.detach() + largest).argmax(-1, keepdim=True)
    there = largest.expand_as(q).gather(-1, place)
    return q - finite(q.detach().gather(-1, place)), finite(there)


def row_features(q: Tensor, largest: Tensor, reference: Tensor) -> Tensor:
    """e^(q + largest - reference): a row's features for keys whose maxima are ``largest``; 0 where there is no key."""
    return (q + (largest - reference)).exp()


def finite(shift: Tensor) -> Tensor:
    """``shift`` with 0 for -inf: nothing to be shifted."""
    return shift.masked_fill(shift == -math.inf, 0)
