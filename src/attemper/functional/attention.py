"""Attention that reports exact statistics of every row, at about the price of attention itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Unpack

import torch
from torch import Tensor

from attemper.call import known_requests
from attemper.call.attention import DENSE_BACKEND, attend, run, weights
from attemper.call.packing import check_offsets, packing_of
from attemper.call.request import Keywords, Options, options_of, request_of, shows_keywords
from attemper.call.result import AttentionOutput, AttentionStats
from attemper.call.sampling import sample
from attemper.call.spans import Spans
from attemper.checks import refuse_nested
from attemper.errors import InputError


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, *,
    temperature: float | Tensor = 1.0, normalizer: object = "softmax", causal_alignment: str = "top-left",
    window_size: tuple[int, int] = (-1, -1), softcap: float | None = None, sink_logits: Tensor | None = None,
    stats: str | Iterable[str] = (), first_tokens: int = 1, spans: Spans | None = None, backend: str = "auto",
) -> AttentionOutput:  # fmt: skip
    r"""Scaled dot-product attention with exact per-row statistics, in one pass.

    .. math:: s_{ij} = \mathrm{softcap}(\tfrac{scale}{T_i} q_i \cdot k_j) + bias_{ij}, \quad
              p = \mathrm{softmax}_j(s), \quad o_i = \sum_j p_{ij} v_j

    with softmax, or with another normalizer of the scores in its place (``normalizer``).

    The positional arguments are those of ``torch.nn.functional.scaled_dot_product_attention``. No n x n tensor is
    ever held (except by ``backend="reference"``), forward or backward.

    Args:
        query: [B, H, Q, D]; float16, bfloat16, float32 or float64.
        key: [B, G, K, D]; H is a multiple of G, and ``enable_gqa`` says that this is meant.
        value: [B, G, K, E]. Under autocast, tensors of several types are brought to its type, as SDPA brings them. Of
            one type they are computed as they are, and so is the output: SDPA rounds float32 there, and gives
            autocast's type. Pass ``query.bfloat16()`` and so on for its output.
        attn_mask: broadcastable to [B, H, Q, K]; bool (True = visible) or floating (added to the scores,
            differentiable; an entry at or below ``finfo.min / 2`` of its type hides the key, -1e4 or -1e9 do not).
            Intersects with the rest. A ``torch.nn.attention.bias.CausalBias`` is read as causality with its alignment,
            and refused beside ``is_causal``, as by SDPA; any other subclass of Tensor is refused.
        dropout_p: dropout of the weights; statistics are of the weights before it.
        is_causal: a query sees keys up to its own place.
        scale: multiplies q.k; None for 1/sqrt(D).
        temperature: divides q.k (not bias, not sink): a number above 0 (inf for uniform), or a tensor broadcastable to
            [B, H, Q], differentiable. A number is checked, a tensor is not (that would sync the device).
        normalizer: how scores become weights: "softmax", "softmax_plus_one", "scalable_softmax", "sigmoid",
            "sparsemax", "entmax15", or an object of ``attemper.nn`` (``TopK(k)``, ``Threshold(min_weight)``,
            ``Entmax(alpha)``, ``Sigmoid(bias)``, ``Sink(num_heads)``, ``ScalableSoftmax(s)``), whose learned parts are
            differentiated. ``functional`` has them on scores. Statistics are of the weights renormalised to sum 1, and
            ``mass`` is their sum; only softmax, also with a sink or a scale, has ``lse``. The scores of scalable
            softmax, in every statistic of scores, are those that its softmax sees: times s log n.
        causal_alignment: where the diagonal stands when Q != K: "top-left" as in PyTorch,
            "bottom-right" as in flash-attention.
        window_size: (left, right) visible keys beside the diagonal; -1 for no limit.
        softcap: c of ``c tanh(x / c)``, applied before the bias.
        sink_logits: [H] learned logits that take weight and give no value; statistics describe the visible keys,
            renormalised, and ``mass`` tells what is left to them.
        stats: names of statistics, or "all" for those of one pass.
        first_tokens: how many tokens count as first for ``first_token_mass``.
            A key that no query of the call may see under ``attn_mask`` is padding.
        spans: the keys whose weight ``span_mass`` sums: a bool tensor [K] or [B, K], or a list of pairs (first, last),
            both ends in the span: ``[(0, 3)]`` is the first four keys. Of packed documents: places among all keys.
        backend: "auto", or one that must be used: "reference", "blocked", "native" or "triton". `attemper doctor` lists
            what each can do.

    Returns:
        ``AttentionOutput(output [B, H, Q, E], stats)``; ``stats`` is None if none were asked for. ``.merge(other)``
        joins partial results over keys. A row that sees no key gives 0, lse -inf, and gradients of exactly 0. A NaN in
        a *value* that is hidden reaches the output, as in PyTorch; it never reaches a statistic.

    Raises:
        InputError: an argument has no meaning here.
        BackendError: the named backend is missing or cannot do this.

    Example:
        >>> q = torch.zeros(1, 1, 2, 4)
        >>> attention(q, q, q, is_causal=True, stats="all").stats.entropy
        tensor([[[0.0000, 0.6931]]])
    """
    options = Options(
        scale=scale,
        temperature=temperature,
        normalizer=normalizer,
        is_causal=is_causal,
        causal_alignment=causal_alignment,
        window_size=window_size,
        softcap=softcap,
        sink_logits=sink_logits,
        stats=stats,
        first_tokens=first_tokens,
        spans=spans,
        dropout_p=dropout_p,
        enable_gqa=enable_gqa,
        backend=backend,
    )
    return attend("attention", query, key, value, attn_mask, options, known_requests.KNOWN)


@shows_keywords()
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **options: Unpack[Keywords],
) -> AttentionOutput:
    """``attention`` over packed documents: each sees only itself. It has the laws and options of :func:`attention`.

    Args:
        query: [total_q, H, D]: the documents' queries one after another.
        key: [total_k, G, D].
        value: [total_k, G, E].
        cu_seqlens_q: [documents + 1] int: where each document starts among the queries; first 0, last total_q.
        cu_seqlens_k: the same among the keys.
        max_seqlen_q: length of the longest document; here for the signature of other varlen functions, not needed.
        max_seqlen_k: the same for keys.
        temperature: as in :func:`attention`, with B = 1 and Q = total_q.

    Returns:
        ``AttentionOutput(output [total_q, H, E], stats)``; statistics are [1, H, total_q] (``key_mass`` [1,
        H, total_k]).

    Raises:
        InputError: as :func:`attention`, or offsets that do not fit the tensors.
    """
    del max_seqlen_q, max_seqlen_k
    given = options_of(
        "varlen_attention", options, is_causal=is_causal, scale=scale, dropout_p=dropout_p, enable_gqa=enable_gqa
    )
    tensors = [_unpack("varlen_attention", name, t) for name, t in (("query", query), ("key", key), ("value", value))]
    packing = packing_of("varlen_attention", cu_seqlens_q, cu_seqlens_k)
    totals = (query.shape[0], key.shape[0])
    check_offsets("varlen_attention", packing, totals)
    request = request_of("varlen_attention", tensors[0], tensors[1], tensors[2], None, given, packing)
    check_offsets("varlen_attention", packing, totals, request.problem)
    result = run(request)
    return AttentionOutput(result.output[0].transpose(0, 1), result.stats)


@shows_keywords(stats="all")
def attention_statistics(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    rows: int | None = None,
    generator: torch.Generator | None = None,
    **options: Unpack[Keywords],
) -> AttentionStats:
    """Returns attention statistics from queries and keys alone. It needs no values, computes no output, and does about
    half the work of a forward pass.

    It can stand beside any attention, whoever's kernel computes the output. Arguments as :func:`attention`.

    Args:
        query: [B, H, Q, D].
        key: [B, G, K, D].
        rows: measure only this many query rows of each sequence, evenly strided from a random start. Then
            ``max_logit`` is a lower bound, ``.standard_error()`` estimates what sampling may have missed, and
            ``.rows`` tells which rows were read.
        generator: draws the start; None for torch's default one
            (of the query's device on triton, so that nothing waits).

    Returns:
        ``AttentionStats`` with tensors [B, H, Q], or [B, H, rows] when sampled.

    Raises:
        InputError: as :func:`attention`, or ``rows`` below 1.
    """
    options = {"stats": "all", **options}
    given = options_of("attention_statistics", options, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    request = known_requests.KNOWN.request("attention_statistics", query, key, None, attn_mask, given)
    result = run(sample("attention_statistics", request, rows, generator))
    if result.stats is None:
        raise InputError("attention_statistics(stats=()) asks for nothing: pass 'all' or names.")
    return result.stats


@shows_keywords()
def dense_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **options: Unpack[Keywords],
) -> Tensor:
    """The weights that :func:`attention` applies, [B, H, Q, K], before dropout: n x n in memory, for small inputs
    and pictures.

    Same arguments as :func:`attention`. With a sink they sum to ``mass``; a row that sees no key is all 0.
    """
    del dropout_p, value
    options["backend"] = DENSE_BACKEND
    given = options_of("dense_weights", options, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    problem = request_of("dense_weights", query, key, None, attn_mask, given).problem
    return weights(problem)


def _unpack(where: str, name: str, tensor: Tensor) -> Tensor:
    refuse_nested(where, {name: tensor})
    if not isinstance(tensor, Tensor) or tensor.dim() != 3:
        came = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
        raise InputError(f"{where}({name}=...) must be [total tokens, heads, size], got {came}.")
    return tensor.transpose(0, 1)[None]
