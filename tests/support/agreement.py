"""One call of ``attemper.attention`` held against the oracle, results and gradients, under the derived budget."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import attemper
from tests.support import budgets, cases, eager, oracle, oracle_gradients
from tests.support.calls import had


def results_of(call: dict[str, Any], names: tuple[str, ...], backend: str) -> dict[str, Tensor]:
    result = attemper.attention(**call, stats=names, backend=backend)
    assert result.stats is not None
    return {"output": result.output, **{name: result.stats[name] for name in names}}


def gradients_of(call: dict[str, Any], results: dict[str, Tensor], upstream: dict[str, Tensor]) -> dict[str, Tensor]:
    """dL/d(leaf) for L = sum of results times upstream, given as gradients: a row at -inf has no loss to speak of."""
    leaves = {name: value for name, value in call.items() if isinstance(value, Tensor) and value.requires_grad}
    pairs = [
        (results[name], upstream[name].to(results[name].dtype)) for name in upstream if results[name].requires_grad
    ]
    grads = torch.autograd.grad([r for r, _ in pairs], list(leaves.values()), [g for _, g in pairs], allow_unused=True)
    missing = [name for name, grad in zip(leaves, grads, strict=True) if grad is None]
    assert not missing, f"no gradient for {missing}"
    return dict(zip(leaves, grads, strict=True))


def rounds_weights(backend: str, dtype: torch.dtype) -> bool:
    """Whether weights take the values' type before they meet them; native has such products for bfloat16 only."""
    return backend == "triton" or (backend == "native" and dtype == torch.bfloat16)


def assert_agreement(case: cases.Case, backend: str, *, gradients: bool = True) -> None:
    """Output, every statistic of the case and every gradient, each within its budget."""
    case = replace(case, names=had(backend, case.names))
    call, answer = cases.leaves(cases.tensors(case)), cases.answer(case)
    got = results_of(call, case.names, backend)
    by_hand = cases.leaves(cases.tensors(case))
    tensors = {name: by_hand[name] for name in ("attn_mask", "temperature", "sink_logits") if name in by_hand}
    yardstick = eager.attention(by_hand["query"], by_hand["key"], by_hand["value"], answer.call, **tensors)
    for name in ("output", *case.names):
        if name in oracle.INTEGERS:
            assert got[name].dtype == torch.int64
            assert np.array_equal(oracle.numbers(got[name]), answer.results[name]), name
        else:
            slack = answer.slacks[name]
            if name == "output" and rounds_weights(backend, case.dtype):
                slack = slack + answer.slacks["rounded weights"]
            budgets.assert_within(name, got[name], answer.results[name], yardstick[name], slack)
    if not gradients:
        return
    eager_grads = gradients_of(by_hand, yardstick, answer.upstream)
    for name, gradient in gradients_of(call, got, answer.upstream).items():
        assert gradient.dtype == call[name].dtype, f"d{name} is {gradient.dtype}"
        want, slack = (
            oracle_gradients.summed_to(g[name], tuple(gradient.shape)) for g in (answer.grads, answer.grad_slacks)
        )
        slack = budgets.stored(slack, want, gradient.dtype, case.dtype)
        budgets.assert_within(f"d{name}", gradient, want, eager_grads[name], slack)
