"""Linear attention by its definition, in float64: the weights in memory, and token by token."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attemper.functional import linear_state

MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": lambda x: torch.where(x > 0, x + 1, x.clamp(max=0).exp()),
    "relu": lambda x: x.clamp(min=0),
    "exp": torch.exp,
    "exp by levels": torch.exp,
    "softplus": torch.nn.functional.softplus,
}


def given(name: str) -> str | Callable[[Tensor], Tensor]:
    """What the public function is given for an entry of ``MAPS``: a name it knows, or the function."""
    return MAPS[name] if name == "softplus" else name.split()[0]


@pytest.fixture(autouse=True)
def levels_where_asked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test whose ``name`` is "exp by levels" takes the form for keys of any size, whatever the keys."""
    if "by levels" in getattr(getattr(request.node, "callspec", None), "params", {}).get("name", ""):
        monkeypatch.setattr(linear_state, "STEADY", -1.0)


def quadratic(
    q: Tensor, k: Tensor, v: Tensor, name: str, *, causal: bool = False, mask: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:  # fmt: skip
    """[B, H, Q, E] in ``dtype``; 0 for rows without a denominator. A causal row i sees the last keys but Q - 1 - i."""
    q, k, v = (tensor.to(dtype) for tensor in (q, k, v))
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    queries, keys = q.shape[2], k.shape[2]
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if causal:
        seen = seen.tril(keys - queries)
    seen = seen if mask is None else seen & mask[:, None, None]
    if name.startswith("exp"):
        # Products of exponentials as one softmax over keys and features, which never overflows.
        logs = (q[:, :, :, None] + k[:, :, None]).masked_fill(~seen[..., None], -torch.inf)
        weights = logs.flatten(-2).softmax(-1).nan_to_num(0).unflatten(-1, (keys, -1)).sum(-1)
        return weights @ v
    weights = (MAPS[name](q) @ MAPS[name](k).mT).masked_fill(~seen, 0)
    total = weights.sum(-1, keepdim=True)
    return torch.where(total == 0, 0, (weights @ v) / torch.where(total == 0, 1, total))


def assert_within(got: Tensor, q: Tensor, k: Tensor, v: Tensor, name: str, **options: object) -> None:
    """``got`` is as near to float64 as twice the quadratic form in the compute type is, and four roundings of |v|.

    A result in a narrower type is rounded to it once more. For "exp" the yardstick is given no help by float64 either:
    its scores are sums of two numbers, each rounded once.
    """
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    want = quadratic(q, k, v, name, **options)  # type: ignore[arg-type]
    eager = quadratic(q, k, v, name, dtype=compute, **options)  # type: ignore[arg-type]
    assert torch.isfinite(got).all()
    largest = float(v.double().abs().max()) if v.numel() else 0.0
    slack = 4 * torch.finfo(compute).eps * largest
    stored = torch.finfo(got.dtype).eps / 2 * largest if got.dtype != compute else 0.0
    allowed = 2 * float((eager.double() - want).abs().max()) + slack + stored
    error = float((got.double() - want).abs().max())
    assert error <= allowed, f"{name}: off by {error:.2e}, allowed {allowed:.2e}"
