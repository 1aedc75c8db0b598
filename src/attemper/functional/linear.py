"""Linear attention: weights that are products of features, so that keys can be summed before queries meet them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attemper.call.request import check_groups, check_types
from attemper.call.transforms import constant_in_graphs
from attemper.checks import refuse_nested, whole_number
from attemper.errors import InputError
from attemper.functional.linear_state import (
    CHUNK,
    FeatureMap,
    LinearState,
    Sums,
    causal,
    check_feature_map,
    features,
    given_features,
    over_all,
    state_of,
    sums_of,
)

_WHERE = "linear_attention"
_PART_ROWS = 8192
"""Rows of a part of a causal call: 2 MB of float32 for each tensor of 64 features."""


class _Pair(NamedTuple):
    output: Tensor
    """[B, H, Q, E], in the type of the query."""
    state: LinearState
    """With every key of the call, for the next one."""


class LinearOutput(_Pair):
    """What :func:`linear_attention` returns: ``(output, state)``, and ``valid`` beside them."""

    valid: Tensor
    """[B, H, Q] bool: False where the denominator is 0 (the output is 0 there) or not a finite number."""

    def __new__(cls, output: Tensor, state: LinearState, valid: Tensor) -> LinearOutput:
        made = super().__new__(cls, output, state)
        made.valid = valid
        return made


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: FeatureMap = "elu",
    is_causal: bool = False,
    mask: Tensor | None = None,
    state: LinearState | None = None,
    enable_gqa: bool = False,
    chunk_size: int | None = None,
) -> LinearOutput:
    r"""Attention whose weights are products of features: time and memory grow as the number of tokens, not its square.

    .. math:: o_i = \frac{\sum_j \phi(q_i) \cdot \phi(k_j)\, v_j}{\sum_j \phi(q_i) \cdot \phi(k_j)}

    over the keys j that row i sees. There is no scale and no temperature: multiply q or k.

    ======== =====================================================================================
    "elu"    phi(x) = elu(x) + 1
    "relu"   phi(x) = max(x, 0)
    "exp"    phi(x) = e^x per feature. What would overflow cancels before it is computed: any size of q and k is fine
    callable phi(x) -> [B, heads, tokens, F], none negative; called on q and on k as they came, in their type
    ======== =====================================================================================

    A negative feature is refused. To look for one is to wait for the device, so it is done on the CPU only, outside
    ``torch.compile``; elsewhere negative features become NaN, and the rows that see them are not valid.

    Args:
        q: [B, H, Q, D]; float16, bfloat16, float32 or float64. Or all three without heads, [B, Q, D]: that is one head.
        k: [B, G, K, D]; H is a multiple of G, and ``enable_gqa`` says that this is meant.
        v: [B, G, K, E].
        feature_map: a name of the table, or a function.
        is_causal: row i sees the keys up to i, and all of ``state``; needs Q = K.
        mask: [B, K] bool, True for keys that are seen, False for padding. Whatever a hidden key or value holds, NaN
            too, reaches nothing.
        state: of the call before: its keys are seen by every row.
        enable_gqa: query heads share key heads.
        chunk_size: keys of a chunk of the causal form (rounded up to a power of 2 for "exp"); None for a good size.
            It changes time and memory, and results by rounding only.

    Returns:
        ``LinearOutput(output [B, H, Q, E], state)``, with an attribute ``valid`` [B, H, Q]; without heads [B, Q, E] and
        [B, Q], beside a state of one head. Sums are float32 at least, also under autocast.
        A sequence in parts, each with the state of the one before, gives what it gives whole. First and second
        derivatives are exact, through the state too. A row whose denominator is 0 (it sees no key, or features that
        are all 0) gives 0, gradients of exactly 0, and is not valid. A NaN in a *value* of the same chunk that comes
        later reaches a row, as in :func:`attemper.attention`.

    Raises:
        InputError: an argument has no meaning here, or a feature is negative.

    Source:
        Katharopoulos et al. 2020, "Transformers are RNNs".

    Example:
        >>> x = torch.ones(1, 1, 3, 2)
        >>> v = torch.tensor([[[[3.0], [6.0], [0.0]]]])
        >>> linear_attention(x, x, v, is_causal=True).output.flatten()
        tensor([3.0000, 4.5000, 3.0000])
    """
    check_feature_map(_WHERE, feature_map)
    if all(isinstance(tensor, Tensor) and tensor.ndim == 3 for tensor in (q, k, v)):
        options = {"feature_map": feature_map, "is_causal": is_causal, "mask": mask, "state": state}
        made = linear_attention(q[:, None], k[:, None], v[:, None], chunk_size=chunk_size, **options)
        return LinearOutput(made.output[:, 0], made.state, made.valid[:, 0])
    _check_tensors(q, k, v, mask, enable_gqa)
    _check_causal(q, k, is_causal, chunk_size)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    hidden = None if mask is None else ~mask[:, None, :, None]
    rows, keys = (q, k) if isinstance(feature_map, str) else _given_features(q, k, feature_map, hidden, dtype)
    name = feature_map if isinstance(feature_map, str) else None
    sums = sums_of(_WHERE, state, keys, v.shape[3], name, dtype)
    chunk = chunk_size or CHUNK if is_causal and q.shape[2] > 1 else None
    outputs: list[Tensor] = []
    valids: list[Tensor] = []
    # A function is called under the caller's autocast, above; the sums are not made under it.
    # Products in the type of their tensors; a device without autocast (meta) needs nothing.
    with torch.autocast(q.device.type, enabled=False) if _has_autocast(q.device.type) else nullcontext():
        for part in _parts(rows, keys, v, hidden, chunk):
            output, valid, sums = _of_part(*part, sums, name, chunk)
            outputs.append(output.to(q.dtype))
            valids.append(valid)
    output, valid = (found[0] if len(found) == 1 else torch.cat(found, 2) for found in (outputs, valids))
    return LinearOutput(output, state_of(sums, name), valid)


def _parts(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, chunk: int | None
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
    """q, k, v and hidden: whole, or for a causal call in parts that fit a cache. A compiled graph has one part."""
    batch, heads, tokens, _ = q.shape
    size = tokens
    if chunk is not None and not torch.compiler.is_compiling():
        size = -(-_PART_ROWS // (chunk * max(batch * heads, 1))) * chunk
    if size >= tokens:
        return iter([(q, k, v, hidden)])
    pieces = [tensor.split(size, 2) for tensor in (q, k, v)]
    count = len(pieces[0])
    return zip(*pieces, [None] * count if hidden is None else hidden.split(size, 2), strict=True)


def _of_part(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, before: Sums, name: str | None, chunk: int | None
) -> tuple[Tensor, Tensor, Sums]:
    """Output [B, H, Q, E] and valid [B, H, Q] of some tokens after ``before``, and the sums with their keys.

    A hidden key counts for nothing because its value, and the 1 beside it, are 0. Its features need only be finite, and
    their gradient too, so what it holds is replaced before the map. For "exp" it must not be a maximum.
    """
    dtype = before.sums.dtype
    q, k, values = q.to(dtype), k.to(dtype), F.pad(v.to(dtype), (0, 1), value=1.0)
    if hidden is not None:
        k, values = k.masked_fill(hidden, -torch.inf if name == "exp" else 0), values.masked_fill(hidden, 0)
    rows = features(q, name).unflatten(1, (k.shape[1], q.shape[1] // max(k.shape[1], 1)))
    keys = features(k, name)
    if chunk is None:
        found, after = over_all(rows, keys, values, before, name)
    else:
        found, after = causal(rows, keys, values, before, name, chunk)
    return *_quotient(found.flatten(1, 2)), after


def _given_features(
    q: Tensor, k: Tensor, feature_map: Callable[[Tensor], Tensor], hidden: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Features of rows and keys by the caller's function, which sees 0 in place of a hidden key."""
    rows = given_features(_WHERE, feature_map, q, dtype)
    keys = given_features(_WHERE, feature_map, k if hidden is None else k.masked_fill(hidden, 0), dtype)
    if rows.shape[3] != keys.shape[3] or not rows.shape[3]:
        raise InputError(
            f"{_WHERE}: the feature map gives q the size {rows.shape[3]} and k {keys.shape[3]}; their products "
            "need the same number, at least 1."
        )
    return rows, keys


def _quotient(found: Tensor) -> tuple[Tensor, Tensor]:
    """Numerators by denominators, 0 where there is nothing to divide by, and which rows are valid."""
    denominator = found[..., -1]
    # By inf: 0 where there is nothing to divide by, and no gradient, whatever rounding left in the numerator.
    output = found[..., :-1] / denominator.masked_fill(denominator == 0, torch.inf)[..., None]
    return output, (denominator > 0) & denominator.isfinite()


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, enable_gqa: bool) -> None:
    refuse_nested(_WHERE, {"q": q, "k": k, "v": v, "mask": mask})
    tensors = {"q": q, "k": k, "v": v}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.dim() != 4:
            came = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise InputError(
                f"{_WHERE}({name}) must be a tensor [batch, heads, tokens, size], got {came}. "
                "Without heads, q, k and v must all be [batch, tokens, size]."
            )
    check_types(_WHERE, tensors)
    batch, _, _, size = q.shape
    tokens = k.shape[2]
    if k.shape[0] != batch or k.shape[3] != size or size == 0 or v.shape[:3] != k.shape[:3]:
        raise InputError(
            f"{_WHERE}: k must be [{batch}, heads, keys, {size}] and v the same but for its last size, to match q "
            f"{list(q.shape)} (at least one feature); got k {list(k.shape)} and v {list(v.shape)}."
        )
    check_groups(_WHERE, tensors, enable_gqa)
    if mask is not None and (
        not isinstance(mask, Tensor) or mask.dtype != torch.bool or tuple(mask.shape) != (batch, tokens)
    ):
        came = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise InputError(
            f"{_WHERE}(mask=...) must be a bool tensor [batch, keys] = {[batch, tokens]}, True for keys that are seen, "
            f"got {came}. Keys are summed before any query meets them: a mask that differs from query to query cannot "
            "be honoured; is_causal can."
        )


def _check_causal(q: Tensor, k: Tensor, is_causal: bool, chunk_size: int | None) -> None:
    if is_causal and q.shape[2] != k.shape[2]:
        raise InputError(
            f"{_WHERE}(is_causal=True) needs as many queries as keys, got {q.shape[2]} and {k.shape[2]}. To decode, "
            "pass the new tokens alone and the state of the call before."
        )
    if chunk_size is not None:
        whole_number(f"{_WHERE}(chunk_size=...)", chunk_size, none=" or None")


@constant_in_graphs  # PyTorch 2.11 cannot trace the question
def _has_autocast(device: str) -> bool:
    return torch.amp.is_autocast_available(device)
