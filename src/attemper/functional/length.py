"""How a temperature follows the number of keys, so that attention does not flatten as a context grows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attemper.checks import one_of
from attemper.errors import InputError

LAWS = ("log", "yarn", "llama4")


def length_temperature(n: float | Tensor, reference: float, law: str = "log", *, beta: float = 0.1) -> float | Tensor:
    r"""The temperature, which divides, of attention over ``n`` keys for a model at home with ``reference`` keys.

    .. math::
        \text{log:}\ \frac{\log reference}{\log n} \qquad
        \text{yarn:}\ (0.1 \log \tfrac{n}{reference} + 1)^{-2} \qquad
        \text{llama4:}\ (1 + \beta \log(1 + \lfloor n / reference \rfloor))^{-1}

    - "log": a key that stands log(reference) above all others keeps half of the weight at any length. Models that
      multiply queries by log(n) / log(reference) ("logn attention") are this law, and so is scalable softmax, s log(n),
      with s = 1 / log(reference).
    - "yarn" is what transformers' ``rope_parameters`` of type "yarn" do with ``factor = n / reference``: their
      ``attention_factor`` multiplies queries and keys alike, hence the square. 1 up to the reference.
    - "llama4" is transformers' ``attn_temperature_tuning`` with ``floor_scale = reference`` and ``attn_scale = beta``,
      whose n is the place of the query, counted from 1.

    Args:
        n: keys that a query sees, or its place; a number, or a tensor of any shape.
        reference: keys that the model was trained with; above 1 for "log".
        law: "log", "yarn" or "llama4".
        beta: of "llama4".

    Returns:
        A number, or a tensor in the shape of ``n``, float64 if ``n`` is and else float32. At one key "log" gives inf,
        which a single key does not feel.

    Raises:
        InputError: the law is unknown, ``reference`` or ``n`` (a number) is too small, or a tensor is not of numbers.

    Example:
        >>> round(length_temperature(1024, 32), 6)
        0.5
    """
    one_of("length_temperature(law=...)", law, LAWS)
    least = 1.0 if law == "log" else 0.0
    if isinstance(reference, bool) or not isinstance(reference, int | float) or not least < reference < math.inf:
        raise InputError(f"length_temperature(reference=...) must be a number above {least:g}, got {reference!r}.")
    if not isinstance(n, Tensor):
        if isinstance(n, bool) or not isinstance(n, int | float) or not 1 <= n < math.inf:
            raise InputError(f"length_temperature(n) must be a number of keys of at least 1, got {n!r}.")
        return float(_law(torch.tensor(n, dtype=torch.float64), float(reference), law, beta))
    if n.dtype == torch.bool or n.is_complex():
        raise InputError(f"length_temperature(n) must hold numbers of keys, got {n.dtype}.")
    return _law(n if n.dtype == torch.float64 else n.float(), float(reference), law, beta)


def _law(n: Tensor, reference: float, law: str, beta: float) -> Tensor:
    if law == "log":
        return math.log(reference) / n.log()
    if law == "yarn":
        return (0.1 * (n / reference).clamp(min=1.0).log() + 1).square().reciprocal()
    return (1 + beta * torch.log1p(torch.floor(n / reference))).reciprocal()
