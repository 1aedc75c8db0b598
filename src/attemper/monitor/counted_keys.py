"""How many keys the rows of a call see, how many they should, and how many are of other documents: sums per head.

What rows see comes from the kernel that measured them. What they should see is the same for all layers of one rule.
"""

from __future__ import annotations

from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from attemper.backends.contract import UNBOUNDED
from attemper.call.attn_mask import is_causal_bias
from attemper.call.call_sums import CallSums
from attemper.call.result import AttentionStats
from attemper.call.visible_keys import (
    Rule,
    document_ends,
    documents_of_starts,
    expected_ends,
    expected_keys,
    visible_between,
)
from attemper.sites.declared import documents_of_keys, rule_of_call, rule_of_module
from attemper.sites.observation import AttentionCall
from attemper.sites.padding import Tokens


class CountedKeys:
    """Counts of the calls of a model. What its layers declare is what they declared at first. Where rows
    saw fewer keys then, a mask was there that no attribute tells, and what they should see is not known.
    """

    def __init__(self) -> None:
        self._rules: WeakKeyDictionary[nn.Module, Rule | None] = WeakKeyDictionary()
        self._told: WeakKeyDictionary[nn.Module, dict[str, Tensor]] = WeakKeyDictionary()
        """Module -> kind -> [] bool on the device: whether attributes tell what rows see at least."""
        self._tokens: Tokens | None = None
        self._expected: dict[tuple[object, ...], Tensor | None] = {}
        """What rows of the model call that is running should see, by rule and lengths: layers share it."""

    @torch.no_grad()
    def sums(
        self,
        module: nn.Module,
        kind: str,
        call: AttentionCall,
        tokens: Tokens,
        found: AttentionStats | CallSums,
        rows: Tensor | None,
    ) -> Tensor:
        """``COUNTED`` over the rows that count, and over how many rows each is known: [2, statistics, H] float64.

        Args:
            module, kind: where the call ran, and "self" or "cross".
            tokens: what the model around it was called with.
            found: what was measured of it.
            rows: [R] int, the queries that were measured; None for all.
        """
        visible, counts = found.visible_rows
        expected = self._expected_rows(module, kind, call, tokens)
        within = None if kind == "cross" else _keys_of_own_documents(call, tokens)
        at = None if rows is None else rows.to(visible.device)
        expected, within = (one if one is None or at is None else one[..., at] for one in (expected, within))
        leaked = None if within is None else visible - within
        values = [one if one is None else torch.where(counts, one, 0) for one in (visible, expected, leaked)]
        device = torch.device("cpu") if visible.device.type == "mps" else visible.device
        many = counts.to(device).sum((0, 2), dtype=torch.float64)
        sums = [one if one is None else one.to(device).sum((0, 2), dtype=torch.float64) for one in values]
        known = [many if one is not None else torch.zeros_like(many) for one in sums]
        if expected is not None:
            told = (sums[0] >= sums[1]).all()  # type: ignore[operator]
            known[1] = many * self._told.setdefault(module, {}).setdefault(kind, told).to(device)
        if leaked is not None and tokens.documents is not None:
            known[2] = many * tokens.documents.any().to(device)  # a device was not asked whether there are several
        return torch.stack([*(torch.zeros_like(many) if one is None else one for one in sums), *known]).view(2, 3, -1)

    def _expected_rows(self, module: nn.Module, kind: str, call: AttentionCall, tokens: Tokens) -> Tensor | None:
        """[B|1, 1, Q]; None where nothing declares it."""
        if module not in self._rules:
            self._rules[module] = rule_of_module(module)
        own, (batch, _, queries, _), keys = self._rules[module], call.query.shape, call.key.shape[2]
        if own is None or call.tokens is not None:
            return None
        if tokens is not self._tokens:
            self._tokens, self._expected = tokens, {}
        device = call.query.device
        known = (own.causal, own.left, own.right, own.chunk, kind, batch, queries, keys, device)
        if known not in self._expected:
            rule = rule_of_call(own, kind, tokens, batch, queries, keys)
            if rule is not None:
                parts = {name: getattr(rule, name) for name in ("tokens", "documents")}
                rule = replace(rule, **{name: one if one is None else one.to(device) for name, one in parts.items()})
            self._expected[known] = None if rule is None else expected_keys(rule, queries, keys, device)[:, None]
        return self._expected[known]


def _keys_of_own_documents(call: AttentionCall, tokens: Tokens) -> Tensor | None:
    """[B|1, H|1, Q]: visible keys of each row's own document; None where no documents are declared, or the call has
    another rule than is known here.
    """
    (batch, _, queries, _), keys, device = call.query.shape, call.key.shape[2], call.query.device
    documents = documents_of_keys(tokens, batch, keys)
    if documents is None or queries != keys or is_causal_bias(call.mask):
        return None
    options, packed = call.options, None
    if call.packing is not None:
        packed = documents_of_starts(call.packing.cu_seqlens_k.to(device), keys)
    left, right = (UNBOUNDED if side == -1 else side for side in options.window_size)
    rule = Rule(options.is_causal, left, right, documents=packed)
    places = torch.arange(queries, device=device)[None]
    ends = zip(
        expected_ends(rule, queries, keys, device), document_ends(documents.to(device), places, keys), strict=True
    )
    (low, other_low), (high, other_high) = ends
    low = torch.maximum(low, other_low)
    return visible_between(call.mask, keys, low, torch.maximum(low, torch.minimum(high, other_high)))
