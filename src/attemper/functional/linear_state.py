r"""The state of linear attention: weighted sums over keys, whose weights are products of features.

    sums_i = sum over visible j of (phi(q_i) . phi(k_j)) [v_j, 1]

for all keys at once, or causal, in chunks: inside a chunk the weights stand in memory, and what came before is one sum.

With the exponential map, numbers may have any size: what would overflow cancels before it is computed.

.. math:: sums_i = \sum_{j \le i} \sum_f e^{q_{if} + k_{jf} - c_i} [v_j, 1], \quad
          c_i = \max_{j \le i, f} (q_{if} + k_{jf})

With ``c_i`` no term exceeds 1 and the denominator is at least 1. To be a matrix product a term must come apart,
``e^(q + m - c) e^(k - m)``, with one m per feature for all the keys and rows of the product. m is the maximum of these
keys; if every row of the product sees them all, ``q + m - c <= 0`` and nothing is lost. Hence:

- what lies before a chunk is a sum with the maximum of its keys (``Sums``), and prefixes are joined by a scan;
- inside a chunk, the later half of the rows sees all keys of the earlier half, and so on in each half: log2(chunk)
  levels of products, and the diagonal. A key of the future has no part in the maximum of any earlier row.

Where no key is far above the first one of its part, one maximum for the whole part does, and the products are those of
any other map. That is the usual case; it is asked for where reading a number costs nothing (``readable``). Elsewhere
the levels are computed. The maxima are constants to the gradient: they cancel.

Shapes here: B batch, G key heads, r query heads of a key head, Q queries, K keys, F features, W = E + 1 (the values and
a 1, whose sum is the denominator).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attemper.call import transforms
from attemper.checks import did_you_mean
from attemper.errors import InputError

FeatureMap = str | Callable[[Tensor], Tensor]
"""A name of ``NAMES``, or a function from [B, heads, tokens, D] to [B, heads, tokens, F] of numbers of 0 or more."""
NAMES = ("elu", "relu", "exp")
CHUNK = 64
"""Keys of a chunk: a token costs chunk x (F + W) inside its chunk and 2 F W outside. A power of 2 for "exp"."""
STEADY = 20.0
"""How far keys may lie above the first: with a denominator of e^-20 at least, the terms that round to 0 are below
e^-67 of it, and exponents of 20 round by 1e-6."""


class _Parts(NamedTuple):
    values: Tensor
    """[B, G, F, E]: the sum of phi(k) v over the keys, times e^-shift."""
    keys: Tensor
    """[B, G, F]: the sum of phi(k), times e^-shift."""
    shift: Tensor
    """[B, G, F]: for the map "exp" the largest k of each feature (-inf before the first key), 0 for the others."""


class LinearState(_Parts):
    """All that later queries need of earlier keys, whatever their number: ``(values, keys, shift)``, float32 or
    float64; G key heads, F features.

    A subset or another order of sequences: ``LinearState(*(part[picked] for part in state))``; to cut the gradient,
    ``LinearState(*(part.detach() for part in state))``.
    """

    feature_map: str | None
    """The map that it belongs to: the next call must have the same. None where it was made by hand."""

    def __new__(cls, values: Tensor, keys: Tensor, shift: Tensor, feature_map: str | None = None) -> LinearState:
        made = super().__new__(cls, values, keys, shift)
        made.feature_map = feature_map
        return made


class Sums(NamedTuple):
    """``e^shift * sums`` is the sum of phi(k) v over some keys."""

    sums: Tensor
    """[..., F, W]"""
    shift: Tensor
    """[..., F]: for "exp" the largest k of each feature, -inf where there is no key; 0 for the other maps."""


def check_feature_map(where: str, feature_map: FeatureMap) -> FeatureMap:
    """``feature_map`` if it is one of the names or can be called."""
    if callable(feature_map):
        return feature_map
    if feature_map not in NAMES:
        names = ", ".join(map(repr, NAMES))
        raise InputError(
            f"{where}(feature_map=...) must be one of {names}, or a function from [B, heads, tokens, D] to "
            f"[B, heads, tokens, F] that gives no negative number; got {feature_map!r}."
            f"{did_you_mean(feature_map, NAMES)}"
        )
    return feature_map


def features(x: Tensor, name: str | None) -> Tensor:
    """``x`` through the map; for "exp" before the map, and without a name ``x`` holds the features already."""
    if name == "relu":
        return x.relu()
    # elu(x) + 1 is e^x below 0, with every digit: ``F.elu(x) + 1`` rounds it to 6e-8.
    return x.clamp(max=0).exp() + x.relu() if name == "elu" else x


def given_features(where: str, feature_map: Callable[[Tensor], Tensor], tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Features of ``tensor`` by the caller's function, in ``dtype``. The function takes the tensor as it came."""
    found = feature_map(tensor)
    expected = tuple(tensor.shape[:3])
    if not isinstance(found, Tensor) or found.dim() != 4 or tuple(found.shape[:3]) != expected:
        came = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise InputError(
            f"{where}(feature_map=...) must give a tensor [{', '.join(map(str, expected))}, features] for "
            f"{list(tensor.shape)}, got {came}."
        )
    if not found.dtype.is_floating_point:
        raise InputError(f"{where}(feature_map=...) must give floating numbers, got {found.dtype}.")
    return refuse_signed(where, found.to(dtype))


def refuse_signed(where: str, found: Tensor) -> Tensor:
    """``found``, if no feature is negative. Where reading a number costs, negative features become NaN instead."""
    negative = found < 0
    if readable(found) and bool(negative.any()):
        raise InputError(
            f"{where}(feature_map=...) gave negative features (the lowest is {float(found.min()):.3g}): weights would "
            "be negative, and their sum can be 0 or change its sign. Use a map that gives 0 or more, such as "
            f"softplus, or a softmax over the features; built in: {', '.join(map(repr, NAMES))}."
        )
    return found.masked_fill(negative, torch.nan)


def readable(tensor: Tensor) -> bool:
    """Whether reading a number costs nothing: it waits for no device and breaks no graph."""
    transformed = torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore[reportAttributeAccessIssue]
    return tensor.device.type == "cpu" and not (transformed or torch.compiler.is_compiling())


def sums_of(
    where: str, state: LinearState | None, keys: Tensor, size: int, name: str | None, dtype: torch.dtype
) -> Sums:
    """The sums that a call starts from: those of ``state``, or of no key. ``size`` of a value, ``name`` of the map."""
    batch, groups, _, count = keys.shape
    if state is None:
        shift = keys.new_full((batch, groups, count), -torch.inf if name == "exp" else 0.0, dtype=dtype)
        return Sums(keys.new_zeros(batch, groups, count, size + 1, dtype=dtype), shift)
    shapes = ((batch, groups, count, size), (batch, groups, count), (batch, groups, count))
    if not isinstance(state, tuple) or len(state) != 3 or not all(isinstance(part, Tensor) for part in state):
        raise InputError(
            f"{where}(state=...) must be the state that the call before returned, a LinearState; got "
            f"{type(state).__name__}."
        )
    made = getattr(state, "feature_map", None)
    if made not in (None, name or "a function"):
        raise InputError(
            f"{where}(state=...) was made with the feature map {made!r}, and this call has {name or 'a function'!r}: "
            "sums of other features mean nothing here."
        )
    for name, part, shape in zip(LinearState._fields, state, shapes, strict=True):
        if tuple(part.shape) != shape or part.dtype != dtype or part.device != keys.device:
            raise InputError(
                f"{where}(state=...): {name} must be {list(shape)}, {dtype}, on {keys.device}, got "
                f"{list(part.shape)}, {part.dtype}, on {part.device}. A state goes on with the batch, the key heads, "
                "the sizes, the type and the feature map that it was made with."
            )
    state = LinearState(*state)
    return Sums(torch.cat((state.values, state.keys[..., None]), -1), state.shift.detach())


def state_of(sums: Sums, name: str | None) -> LinearState:
    """The state of a call's sums. Copies: it must not keep the sums of every chunk alive."""
    parts = (sums.sums[..., :-1], sums.sums[..., -1], sums.shift)
    values, keys, shift = (part.clone(memory_format=torch.contiguous_format) for part in parts)
    return LinearState(values, keys, shift, name or "a function")


def over_all(q: Tensor, k: Tensor, v: Tensor, before: Sums, name: str | None) -> tuple[Tensor, Sums]:
    """Every row sees every key.

    Args:
        q: [B, G, r, Q, F], by :func:`features`.
        k: [B, G, K, F], by :func:`features`; -inf where hidden for "exp".
        v: [B, G, K, W].
        before: the sums over keys that came earlier, [B, G, F, W].
        name: of the map; None if the features were given.

    Returns:
        The rows' sums [B, G, r, Q, W], and ``before`` with these keys added.
    """
    if name == "exp":
        after = join(before, sums_of_keys(k, v))
        return products(rows_of(q, after.shift), after.sums), after
    after = before.sums + k.mT @ v
    return products(q, after), Sums(after, before.shift)


def causal(q: Tensor, k: Tensor, v: Tensor, before: Sums, name: str | None, chunk: int) -> tuple[Tensor, Sums]:
    """Row i sees the keys up to i; Q = K, at least 1. Otherwise as :func:`over_all`."""
    if name != "exp":
        found, sums = by_chunks(q, k, v, before.sums, chunk)
        return found, Sums(sums, before.shift)
    shift = torch.maximum(before.shift, k.detach().amax(2))
    if not steady(k, before.shift, shift):
        return by_levels(q, k, v, before, chunk)
    earlier = rescale(before, shift)
    found, sums = by_chunks(rows_of(q, shift), (k - finite(shift)[:, :, None]).exp(), v, earlier, chunk)
    return found, Sums(sums, shift)


def by_chunks(q: Tensor, k: Tensor, v: Tensor, before: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """:func:`causal` for features [..., F]. In a chunk the weights are held, [chunk, chunk]; before it one sum."""
    tokens, heads = k.shape[2], q.shape[2]
    chunk = min(chunk, tokens)
    q, k, v = (in_chunks(tensor, chunk) for tensor in (q, k, v))
    # [B, G, chunks, r chunk, F]: all rows that meet the keys of a chunk.
    q = q.transpose(2, 3).flatten(3, 4)
    sums = torch.cat((before[:, :, None], k.mT @ v), 2).cumsum(2)
    # Not times a mask: a NaN of the future would stay one.
    weights = (q @ k.mT).unflatten(3, (heads, chunk))
    # In place, but not under torch.vmap, which has no rule for that.
    weights = (weights.tril() if transforms.active() else weights.tril_()).flatten(3, 4)
    found = (weights @ v + q @ sums[:, :, :-1]).unflatten(3, (heads, chunk))
    return found.transpose(2, 3).flatten(3, 4)[:, :, :, :tokens], sums[:, :, -1]


def products(q: Tensor, sums: Tensor) -> Tensor:
    """[B, G, r, Q, F] times [B, G, F, W], without a copy of the sums for each head."""
    return (q.flatten(2, 3) @ sums).unflatten(2, q.shape[2:4])


def in_chunks(tensor: Tensor, size: int, value: float = 0.0) -> Tensor:
    """[..., n, F] -> [..., chunks, size, F], the last chunk filled up with ``value``."""
    missing = -tensor.shape[-2] % size
    tensor = F.pad(tensor, (0, 0, 0, missing), value=value) if missing else tensor
    return tensor.unflatten(-2, (tensor.shape[-2] // size, size))


def steady(k: Tensor, before: Tensor, largest: Tensor) -> bool:
    """Whether, in every feature, no key is more than ``STEADY`` above what the first row sees. NaN is not steady."""
    if not readable(k):
        return False
    first = torch.maximum(before, k.detach()[:, :, 0])
    return bool(((largest - first <= STEADY) | (largest == -math.inf)).all())


def by_levels(q: Tensor, k: Tensor, v: Tensor, before: Sums, chunk: int) -> tuple[Tensor, Sums]:
    """:func:`causal` for "exp", whatever the keys; the chunk is rounded up to a power of 2."""
    tokens, heads = k.shape[2], q.shape[2]
    chunk = 1 << (min(chunk, tokens) - 1).bit_length()
    q, k, v = in_chunks(q, chunk), in_chunks(k, chunk, -math.inf), in_chunks(v, chunk)
    # [B, G, chunks, chunk r, F]: the rows of one token stand together, so that half of the tokens is half of the rows.
    q = q.movedim(2, 4).flatten(3, 4)
    own, first = sums_of_keys(k, v), Sums(before.sums[:, :, None], before.shift[:, :, None])
    sums = prefixes(Sums(*(torch.cat(pair, 2) for pair in zip(first, own, strict=True))))
    earlier = Sums(sums.sums[:, :, :-1], sums.shift[:, :, :-1, None])
    largest = torch.maximum(k.detach().cummax(-2).values, earlier.shift).repeat_interleave(heads, -2)
    q, reference = relative_to_largest(q, largest)
    found = triangle(q, k, reference) @ v + row_features(q, earlier.shift, reference) @ earlier.sums
    found = found.unflatten(3, (chunk, heads)).movedim(4, 2).flatten(3, 4)
    return found[:, :, :, :tokens], Sums(sums.sums[:, :, -1], sums.shift[:, :, -1])


def sums_of_keys(k: Tensor, v: Tensor) -> Sums:
    """The keys [..., K, F] and values [..., K, W] of one place as sums."""
    if not k.shape[-2]:
        return Sums(k.mT @ v, k.new_full((*k.shape[:-2], k.shape[-1]), -math.inf))
    shift = k.detach().amax(-2)
    return Sums((k - finite(shift)[..., None, :]).exp().mT @ v, shift)


def join(one: Sums, two: Sums) -> Sums:
    """The sums over the keys of both."""
    shift = torch.maximum(one.shift, two.shift)
    return Sums(rescale(one, shift) + rescale(two, shift), shift)


def rescale(part: Sums, shift: Tensor) -> Tensor:
    """The sums as they are under another shift, that is not lower."""
    return part.sums * (part.shift - finite(shift)).exp()[..., None]


def prefixes(parts: Sums) -> Sums:
    """Sums over dimension 2 up to and with each place: pairs first, then what lies between; about 2 n joins."""
    count = parts.shift.shape[2]
    if count == 1:
        return parts
    even, odd = at(parts, slice(0, None, 2)), at(parts, slice(1, None, 2))
    up_to_odd = prefixes(join(at(even, slice(0, count // 2)), odd))
    later = join(at(up_to_odd, slice(0, (count - 1) // 2)), at(even, slice(1, None)))
    up_to_even = (torch.cat(pair, 2) for pair in zip(at(even, slice(0, 1)), later, strict=True))
    return Sums(*(interleave(*pair) for pair in zip(up_to_even, up_to_odd, strict=True)))


def at(parts: Sums, places: slice) -> Sums:
    """Some places of dimension 2."""
    return Sums(parts.sums[:, :, places], parts.shift[:, :, places])


def interleave(even: Tensor, odd: Tensor) -> Tensor:
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
    q, reference = relative_to_largest(q, largest)
    return row_features(q, largest, reference)


def relative_to_largest(q: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
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
