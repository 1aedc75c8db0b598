"""Temperatures as modules: fixed, learned, conditional on the input, following the length, scheduled; and products.

Every one gives a float32 tensor (float64 in a float64 model) that broadcasts to [B, H, Q], as
``attention(temperature=...)`` takes it on any backend: to a kernel, each of them is one multiplier per row of scores.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from attemper.checks import one_of, positive_number, whole_number
from attemper.errors import InputError
from attemper.functional.measures import TEMPERATURE_ADVICE
from attemper.functional.temperature_of_entropy import LAWS, length_temperature
from attemper.nn.bounds import bounded_exponential
from attemper.schedules import Schedule, schedule_form

ADDED = "attemper_temperature"
"""Name, or its beginning, of a temperature that was added to an attention module."""
ACTIONS = "_attemper_actions"
"""Attribute of an attention module that holds what acts on its attention."""
FLOOR, CEILING = 0.01, 100.0
"""Bounds of a learned temperature: below, a float16 softmax is a step; above, every key has the same weight."""


class Temperature(nn.Module):
    """Base of all: called with the query [B, H, Q, D], it gives a tensor that broadcasts to [B, H, Q].

    ``a * b`` is the product of two temperatures; a number counts as :class:`FixedTemperature`.
    """

    follows_length = False
    """Whether ``visible_keys`` must be given."""
    follows_input = False
    """Whether ``hidden``, the layer's input, must be given."""

    def forward(
        self, query: Tensor, *, hidden: Tensor | None = None, visible_keys: Tensor | int | None = None
    ) -> Tensor:
        """
        Args:
            query: [B, H, Q, D].
            hidden: the layer's input [B, Q, size], for those that are conditional on it.
            visible_keys: how many keys each query sees, broadcastable to [B, H, Q], for those that follow the length.
        """
        raise NotImplementedError

    def follows(self, what: str) -> bool:
        """Whether it or a factor of it ``follows_length`` or ``follows_input``."""
        return any(getattr(part, what, False) for part in self.modules())

    def saved_as(self) -> Temperature:
        """The temperature to save with a model: itself, or its present value if what moves it cannot be saved."""
        return self

    def __mul__(self, other: Temperature | float | Tensor) -> ProductTemperature:
        return ProductTemperature([self, other if isinstance(other, Temperature) else FixedTemperature(other)])

    __rmul__ = __mul__


class FixedTemperature(Temperature):
    """The same temperature always: a number, or one per head.

    Args:
        value: above 0; a tensor [H] is one per head, kept in float64 if it comes so. Saved with the model, not trained.

    Raises:
        InputError: a value is not above 0, or the tensor has not one dimension.
    """

    value: Tensor

    def __init__(self, value: float | Tensor | Iterable[float] = 1.0) -> None:
        super().__init__()
        if isinstance(value, (int, float)):
            positive_number("FixedTemperature(value)", value, TEMPERATURE_ADVICE, infinite=True)
        given = _per_head("FixedTemperature(value)", value)
        self.register_buffer("value", wide(given) if isinstance(value, Tensor) else given.float())
        self._exact = given.cpu().double()

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> FixedTemperature:
        super()._apply(fn, recurse)
        if self.value.dtype == torch.float64 and not self.value.is_meta:
            exact = self._exact.to(self.value.device)
            if torch.equal(exact.float(), self.value.float()):
                self.value.copy_(exact)  # in float64 it is the number that was given, not its float32
        return self

    def forward(
        self, query: Tensor, *, hidden: Tensor | None = None, visible_keys: Tensor | int | None = None
    ) -> Tensor:
        fits("FixedTemperature", self.value, query)
        return wide(self.value)[None, :, None]

    def extra_repr(self) -> str:
        return f"heads={len(self.value)}" if len(self.value) > 1 else f"{self.value.item():g}"


class LearnedTemperature(Temperature):
    r"""A learned temperature, one for all heads or one each: :math:`T = \min(\max(e^{raw}, floor), ceiling)`.

    The parameter is log T: weight decay draws T to 1, equal steps are equal ratios, and no optimizer step makes it 0,
    infinite or negative (:func:`~attemper.nn.bounded_exponential`).

    Args:
        num_heads: 1 for one temperature, or the number of query heads.
        initial: where it starts.
        floor: least T.
        ceiling: largest T.

    Raises:
        InputError: a number of heads below 1, or ``floor <= initial <= ceiling`` does not hold.
    """

    def __init__(
        self, num_heads: int = 1, *, initial: float = 1.0, floor: float = FLOOR, ceiling: float = CEILING
    ) -> None:
        super().__init__()
        self.floor, self.ceiling = _bounds("LearnedTemperature", initial, floor, ceiling)
        heads = whole_number("LearnedTemperature(num_heads)", num_heads)
        self.log_temperature = nn.Parameter(torch.full((heads,), float(initial)).log())

    def forward(
        self, query: Tensor, *, hidden: Tensor | None = None, visible_keys: Tensor | int | None = None
    ) -> Tensor:
        fits("LearnedTemperature", self.log_temperature, query)
        return self.value()[None, :, None]

    def value(self) -> Tensor:
        """[heads]: the temperatures as they are now; float32, or float64 if the parameter is."""
        return bounded_exponential(wide(self.log_temperature), self.floor, self.ceiling)

    def extra_repr(self) -> str:
        return f"heads={len(self.log_temperature)}, floor={self.floor:g}, ceiling={self.ceiling:g}"


class ConditionalTemperature(Temperature):
    r"""A temperature that each query chooses from its layer's input: :math:`\log T = W x + b`, per head, bounded.

    It starts at ``initial`` everywhere (W = 0). With ``pool="mean"`` one temperature is chosen for a whole sequence,
    from the mean of its tokens: then every query knows of tokens after it, so it is not for causal models, and padded
    tokens count.

    Args:
        dim: size of the layer's input.
        num_heads: query heads, or 1 for one temperature for all.
        pool: None for a temperature per query, or "mean".
        initial, floor, ceiling: as in :class:`LearnedTemperature`.

    Raises:
        InputError: a count below 1, an unknown ``pool``, or ``floor <= initial <= ceiling`` does not hold.

    Source:
        Selective self-attention (Zhang et al., arXiv 2411.12892) has temperatures from the query's token.
    """

    follows_input = True

    def __init__(
        self,
        dim: int,
        num_heads: int = 1,
        *,
        pool: str | None = None,
        initial: float = 1.0,
        floor: float = FLOOR,
        ceiling: float = CEILING,
    ) -> None:
        super().__init__()
        if pool is not None:
            one_of("ConditionalTemperature(pool=...)", pool, ("mean",))
        self.pool = pool
        self.floor, self.ceiling = _bounds("ConditionalTemperature", initial, floor, ceiling)
        heads = whole_number("ConditionalTemperature(num_heads)", num_heads)
        self.projection = nn.Linear(whole_number("ConditionalTemperature(dim)", dim), heads)
        nn.init.zeros_(self.projection.weight)
        nn.init.constant_(self.projection.bias, torch.tensor(float(initial)).log().item())

    def forward(
        self, query: Tensor, *, hidden: Tensor | None = None, visible_keys: Tensor | int | None = None
    ) -> Tensor:
        if hidden is None:
            raise InputError(
                "ConditionalTemperature needs the layer's input: call it with hidden=[batch, queries, "
                f"{self.projection.in_features}]."
            )
        want = (query.shape[0], query.shape[2], self.projection.in_features)
        if tuple(hidden.shape) != want:
            raise InputError(f"ConditionalTemperature(hidden=...) must be {list(want)}, got {list(hidden.shape)}.")
        fits("ConditionalTemperature", self.projection.bias, query)
        given = hidden.mean(1, keepdim=True) if self.pool == "mean" else hidden
        logs = self.projection(given.to(self.projection.weight.dtype)).transpose(1, 2)
        return bounded_exponential(wide(logs), self.floor, self.ceiling)

    def extra_repr(self) -> str:
        return f"pool={self.pool!r}, floor={self.floor:g}, ceiling={self.ceiling:g}"


class LengthTemperature(Temperature):
    """A temperature by the number of keys that each query sees, by :func:`~attemper.functional.length_temperature`.

    Args:
        reference: keys that the model was trained with.
        law: "log", "yarn" or "llama4".

    Raises:
        InputError: the law is unknown or the reference too small for it.
    """

    follows_length = True

    def __init__(self, reference: float, law: str = "log") -> None:
        super().__init__()
        one_of("LengthTemperature(law=...)", law, LAWS)
        length_temperature(1, reference, law)
        self.reference, self.law = reference, law

    def forward(
        self, query: Tensor, *, hidden: Tensor | None = None, visible_keys: Tensor | int | None = None
    ) -> Tensor:
        if visible_keys is None:
            raise InputError(
                "LengthTemperature needs visible_keys=: how many keys each query sees, as [B, H, Q] or less."
            )
        keys = torch.as_tensor(visible_keys, device=query.device)
        if keys.dim() > 3:
            raise InputError(f"LengthTemperature(visible_keys=...) must fit [B, H, Q], got {list(keys.shape)}.")
        keys = keys.reshape((1,) * (3 - keys.dim()) + tuple(keys.shape)).clamp(min=1)
        keys = keys.double() if query.dtype == torch.float64 else keys
        found = length_temperature(keys, self.reference, self.law)
        assert isinstance(found, Tensor)
        return found

    def extra_repr(self) -> str:
        return f"reference={self.reference:g}, law={self.law!r}"


class ScheduledTemperature(Temperature):
    """A temperature that follows a schedule of :mod:`attemper.schedules`; call :meth:`step` after each optimizer step.

    Step and value are buffers: training resumes from a checkpoint where it was, and no step compiles a model again.

    Args:
        schedule: ``(step, total_steps) -> T``.
        total_steps: of the training.

    Raises:
        InputError: a total below 1, or a schedule that does not give a number above 0.
    """

    value: Tensor
    steps: Tensor

    def __init__(self, schedule: Schedule, total_steps: int) -> None:
        super().__init__()
        self.schedule, self.total_steps = schedule, whole_number("ScheduledTemperature(total_steps)", total_steps)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("value", torch.tensor(self._at(0)), persistent=False)
        self._register_load_state_dict_pre_hook(self._load_value)

    def forward(
        self, query: Tensor, *, hidden: Tensor | None = None, visible_keys: Tensor | int | None = None
    ) -> Tensor:
        # Attention modules that share one may lie on several devices.
        return wide(self.value).to(query.device)[None, None, None]

    def step(self, step: int | None = None) -> None:
        """Goes on by one optimizer step, or to ``step``."""
        now = int(self.steps) + 1 if step is None else step
        self.steps.fill_(now)
        self.value.fill_(self._at(now))

    def _at(self, step: int) -> float:
        return positive_number(
            f"the schedule's temperature at step {step}", self.schedule(step, self.total_steps), TEMPERATURE_ADVICE
        )

    def saved_as(self) -> Temperature:
        """Itself, if its schedule is one of ``attemper.schedules``; else the temperature as it is now."""
        if schedule_form(self.schedule) is not None:
            return self
        warnings.warn(
            f"the ScheduledTemperature is saved as its value at step {int(self.steps)}, {self.value.item():g}: its "
            "schedule is your own function, which cannot be saved.",
            UserWarning,
            stacklevel=2,
        )
        return FixedTemperature(self.value.detach().reshape(1))

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> ScheduledTemperature:
        super()._apply(fn, recurse)
        if self.value.dtype == torch.float64 and not self.value.is_meta:
            self.value.fill_(self._at(int(self.steps)))  # in float64 it is the schedule's own number again
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        # Where sites share a schedule, safetensors refuses tensors that share their memory.
        destination[f"{prefix}steps"] = destination[f"{prefix}steps"].clone()

    def _load_value(self, state: dict[str, Tensor], prefix: str, *_: object) -> None:
        """The value follows from the step that a checkpoint brings."""
        if f"{prefix}steps" in state:
            self.value.fill_(self._at(int(state[f"{prefix}steps"])))

    def extra_repr(self) -> str:
        return f"total_steps={self.total_steps}"


class ProductTemperature(Temperature):
    """The product of temperatures: what is learned times what the length asks for, and so on.

    Raises:
        InputError: nothing to multiply.
    """

    def __init__(self, factors: Iterable[Temperature]) -> None:
        super().__init__()
        self.factors = nn.ModuleList(factors)
        if not len(self.factors):
            raise InputError("ProductTemperature(factors) must hold at least one temperature.")

    def saved_as(self) -> Temperature:
        factors = [factor.saved_as() for factor in self.factors if isinstance(factor, Temperature)]
        same = all(one is other for one, other in zip(factors, self.factors, strict=True))
        return self if same else ProductTemperature(factors)

    def forward(
        self, query: Tensor, *, hidden: Tensor | None = None, visible_keys: Tensor | int | None = None
    ) -> Tensor:
        parts = [factor(query, hidden=hidden, visible_keys=visible_keys) for factor in self.factors]
        product = parts[0]
        for part in parts[1:]:
            product = times(product, part)
        return product


def wide(tensor: Tensor) -> Tensor:
    """In float32, or float64 if it is: the type of a temperature, whatever the model's type is."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def product_of(
    temperatures: Iterable[Temperature], query: Tensor, hidden: Tensor | None, counts: Callable[[], Tensor]
) -> Tensor | None:
    """The product of temperatures, broadcastable to [B, H, Q]; None of none. ``counts``: the keys that queries see."""
    product: Tensor | None = None
    for given in temperatures:
        part = given(query, hidden=hidden, visible_keys=counts() if given.follows("follows_length") else None)
        product = part if product is None else times(product, part)
    return product


def times(one: Tensor, other: Tensor) -> Tensor:
    """The product of two temperatures. Where one is infinite it is infinite, and nothing flows back."""
    infinite = torch.isinf(one) | torch.isinf(other)
    product = torch.where(infinite, 1.0, one) * torch.where(infinite, 1.0, other)
    return torch.where(infinite, torch.inf, product)


def _per_head(where: str, value: float | Tensor | Iterable[float]) -> Tensor:
    """[heads]: the tensor in its own type, or numbers in float64."""
    if isinstance(value, Tensor):
        tensor = value.detach().clone()
    else:
        numbers = [value] if isinstance(value, (int, float)) else value
        tensor = torch.tensor([float(number) for number in numbers], dtype=torch.float64)
    if tensor.dim() == 0:
        tensor = tensor[None]
    if tensor.dim() != 1 or not len(tensor) or not bool((tensor > 0).all()):
        raise InputError(
            f"{where} must be a number above 0 or a tensor [heads] of them, got {value!r}. {TEMPERATURE_ADVICE}"
        )
    return tensor


def _bounds(where: str, initial: float, floor: float, ceiling: float) -> tuple[float, float]:
    for name, value in (("floor", floor), ("initial", initial), ("ceiling", ceiling)):
        positive_number(f"{where}({name}=...)", value, TEMPERATURE_ADVICE)
    if not floor <= initial <= ceiling:
        raise InputError(f"{where} needs floor <= initial <= ceiling, got {floor}, {initial} and {ceiling}.")
    return float(floor), float(ceiling)


def fits(where: str, per_head: Tensor, query: Tensor) -> None:
    """One temperature, or as many as the query has heads."""
    if query.dim() != 4:
        raise InputError(f"{where} is called with a query [B, H, Q, D], got {list(query.shape)}.")
    if len(per_head) not in (1, query.shape[1]):
        raise InputError(f"{where} has {len(per_head)} temperatures; the query's heads are {query.shape[1]}.")
