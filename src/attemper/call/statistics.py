r"""Statistics from the state that a kernel leaves, and the one law by which two states merge.

The state of a row is relative to its maximum m (``backends/blocked`` lists it), so these formulas add small numbers of
one sign: ``lse = m + z``, ``H = z + a``, ``effective = 1 / c``, ``max_weight = exp(-z)``, ``mu = m - a``. Autograd
differentiates them; the kernel differentiates the state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch
from torch import Tensor

from attemper.call import direct, transforms

State = Mapping[str, Tensor]
"""Letter -> [B, H, Q]."""

VANISHED = -1000.0
"""exp(VANISHED) is 0: a finite distance for a part that sees nothing, so that 0 times it stays 0."""


class Letters(Mapping[str, Tensor]):
    """A state by its letters, from the tensor [F, B, H, Q] of a kernel, which is taken apart when somebody asks."""

    def __init__(self, fields: str, stacked: Tensor, native: bool = False) -> None:
        """``native``: it is of the native kernels, which can derive statistics from it too."""
        self._fields = fields
        self._native = native
        self._stacked = stacked
        self._graph = torch.is_grad_enabled()
        self._parts: tuple[Tensor, ...] | None = None

    def __getitem__(self, letter: str) -> Tensor:
        place = self._fields.find(letter)
        if place < 0:
            raise KeyError(letter)
        if self._parts is None:
            with as_made(self._graph):
                self._parts = self._stacked.unbind(0)
        return self._parts[place]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __contains__(self, letter: object) -> bool:
        return isinstance(letter, str) and letter in self._fields

    def detach(self) -> Letters:
        """The same state outside the autograd graph."""
        return Letters(self._fields, self._stacked.detach(), self._native)

    def statistics(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Those of ``names`` that the native kernels derive at once, without a gradient; by formulas, the same."""
        return direct.statistics(self._fields, self._stacked, names) if self._native else {}

    def sums(self, included: Tensor | None, first_tokens: int) -> Tensor | None:
        """The rows of softmax without a sink as sums per head (``backends/sums.py``), if the native kernels can."""
        return direct.sums(self._fields, self._stacked, included, first_tokens) if self._native else None


def letters(fields: str, stacked: Tensor, native: bool = False) -> State:
    """The state in ``stacked`` [F, B, H, Q], letter by letter."""
    if torch.compiler.is_compiling():
        return dict(zip(fields, stacked.unbind(0), strict=True))
    return Letters(fields, stacked, native)


def as_made(graph: bool) -> AbstractContextManager[object]:
    """On the autograd graph or off it, as it was decided before; never with tensors of inference mode, which a later
    graph could not hold.
    """
    compiling = torch.compiler.is_compiling()
    if torch.is_grad_enabled() == graph and (compiling or not torch.is_inference_mode_enabled()):
        return nullcontext()
    stack = ExitStack()
    if not compiling:
        stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.set_grad_enabled(graph))
    return stack


class Derived(Mapping[str, Tensor]):
    """The statistics ``names`` of rows in a state, each [B, H, Q], computed when it is asked for and then kept.

    Whenever that is, they are on the autograd graph as they would be had they been computed by whoever made this
    object; those that are not ``asked`` (kept for merging only) are off it.
    """

    def __init__(
        self, state: State, names: Iterable[str], sink: Tensor | None, asked: Iterable[str] | None = None,
        made: Mapping[str, Tensor] | None = None, normalizer: str = "softmax",
    ) -> None:  # fmt: skip
        """``sink`` [H] or None; ``asked``: None for all; ``made``: values that no formula gives (``key_mass``);
        ``normalizer``: what the weights come from.
        """
        self.names = tuple(names)
        self._asked = self.names if asked is None else tuple(asked)
        self._state = state
        self._parts: dict[str, Tensor] = {}
        self._values: dict[str, Tensor] = {} if made is None else dict(made)
        self._sink = sink
        self._normalizer = normalizer
        self._graph = torch.is_grad_enabled()
        if sink is not None:
            # Its owner may change it before anybody asks.
            for name in OF_SINK:
                if name in self.names:
                    self[name]

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._values:
            if name not in self.names:
                raise KeyError(name)
            value = self._parts.get(name)
            if value is None:
                value = self._computed(name)
            self._values[name] = value if name in self._asked else value.detach()
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def detach(self) -> Derived:
        """The same statistics outside the autograd graph; none is computed for it."""
        state = detached(self._state)
        sink = None if self._sink is None else self._sink.detach()
        made = {name: value.detach() for name, value in self._values.items()}
        return Derived(state, self.names, sink, made=made, normalizer=self._normalizer)

    def _computed(self, name: str) -> Tensor:
        with as_made(self._graph):
            if isinstance(self._state, Letters) and not self._parts and name not in self._state:
                self._parts |= self._state.statistics(n for n in self.names if self._sink is None or n not in OF_SINK)
            return self.part(name)

    def part(self, name: str) -> Tensor:
        """A letter of the state, a statistic, or a step on the way to one."""
        if name in self._state:
            return self._state[name]
        if name not in self._parts:
            formulas = _FORMULAS if self._normalizer == "softmax" else _ROW_FORMULAS
            self._parts[name] = formulas[name](self.part, self._sink)
        return self._parts[name]


def detached(state: State) -> State:
    """The same state outside the autograd graph."""
    return state.detach() if isinstance(state, Letters) else {name: value.detach() for name, value in state.items()}


def derived(
    state: State, names: Iterable[str], sink: Tensor | None, asked: Iterable[str] | None = None,
    made: Mapping[str, Tensor] | None = None, normalizer: str = "softmax",
) -> Mapping[str, Tensor]:  # fmt: skip
    """The statistics ``names`` of rows in this state, as :class:`Derived` gives them; at once in a compiled graph,
    which leaves out itself what nobody reads.
    """
    values = Derived(state, names, sink, asked, made, normalizer)
    return {name: values[name] for name in values.names} if torch.compiler.is_compiling() else values


Part = Callable[[str], Tensor]
"""Name -> a letter, a statistic or a step."""

Formulas = Mapping[str, Callable[[Part, Tensor | None], Tensor]]
"""Statistic or step -> how it follows from others."""


def _mass(part: Part, sink: Tensor | None) -> Tensor:
    """Weight applied to values: 1, or sigmoid(lse - sink); 0 where nothing is seen, NaN where a score is not finite."""
    seen, lse = part("seen"), part("lse")
    finite = _where_seen(seen, lse, 0.0)
    if sink is None:
        return torch.where(seen, finite - finite + 1.0, 0.0)
    return torch.where(seen, torch.sigmoid(finite - sink.to(lse.dtype)[:, None]), 0.0)


def _with_sink(part: Part, sink: Tensor | None) -> Tensor:
    """mass H + h(mass), h the binary entropy: the sink counted as one more outcome."""
    entropy = part("entropy")
    if sink is None:
        return entropy
    mass, seen, lse = part("mass"), part("seen"), part("lse")
    gap = torch.where(seen, lse, 0.0) - sink.to(lse.dtype)[:, None]
    log_sigmoid = torch.nn.functional.logsigmoid
    binary = -mass * log_sigmoid(gap) - (1 - mass) * log_sigmoid(-gap)
    return torch.where(seen, mass * entropy + binary, 0.0)


def _normalized(part: Part, _: Tensor | None) -> Tensor:
    n = part("count")
    return at_most(part("entropy") / n.clamp(min=2.0).log(), n.new_ones(()))


def _effective(part: Part, _: Tensor | None) -> Tensor:
    seen = part("seen")
    return torch.where(seen, 1.0 / _where_seen(seen, part("c"), 1.0), 0.0)


def _whole_number(value: Tensor) -> Tensor:
    """A count as int64: 0 where a row has none."""
    return value.detach().nan_to_num(0.0).to(torch.int64)


_FORMULAS: Formulas = {
    # No gradient ever belongs to a count.
    "count": lambda part, _: part("n").detach(),
    "seen": lambda part, _: part("count") > 0,
    "lse": lambda part, _: part("m") + part("z"),
    "max_logit": lambda part, _: part("m"),
    "mass": _mass,
    "entropy": lambda part, _: at_most(part("z") + part("a"), log_count(part("count"))),
    "normalized_entropy": _normalized,
    "entropy_with_sink": _with_sink,
    "mean_logit": lambda part, _: torch.where(part("seen"), part("m"), 0.0) - part("a"),
    "max_weight": lambda part, _: torch.where(part("seen"), torch.exp(-part("z")), 0.0),
    "visible_keys": lambda part, _: part("count").to(torch.int64),
    "support_size": lambda part, _: part("visible_keys"),
    "effective_tokens": _effective,
    "logit_variance": lambda part, _: part("v"),
    "first_token_mass": lambda part, _: part("f"),
    "mean_distance": lambda part, _: part("t"),
    "gini": lambda part, _: part("g"),
    "score_variance": lambda part, _: part("y"),
}
_ROW_FORMULAS: Formulas = {
    "count": lambda part, _: part("n").detach(),
    "seen": lambda part, _: part("count") > 0,
    "max_logit": lambda part, _: part("m"),
    "mass": lambda part, _: part("w"),
    "entropy": lambda part, _: at_most(part("h"), log_count(part("count"))),
    "normalized_entropy": _normalized,
    # A sigmoid may leave no weight at all: nothing is a mean then.
    "mean_logit": lambda part, _: torch.where(part("w") == 0, 0.0, part("m") - part("a")),
    "max_weight": lambda part, _: part("p"),
    "visible_keys": lambda part, _: part("count").to(torch.int64),
    "support_size": lambda part, _: _whole_number(part("s")),
    "effective_tokens": lambda part, _: torch.where(
        part("c") == 0, 0.0, 1.0 / torch.where(part("c") == 0, 1.0, part("c"))
    ),
    "logit_variance": lambda part, _: part("v"),
    "first_token_mass": lambda part, _: part("f"),
    "mean_distance": lambda part, _: part("t"),
    "gini": lambda part, _: part("g"),
    "score_variance": lambda part, _: part("y"),
}
"""Of the maps that are computed on whole rows, whose kernels leave the statistics themselves (docs/design/0008)."""
OF_SINK = ("mass", "entropy_with_sink")
"""Statistics that follow from the sink too."""


def _where_seen(seen: Tensor, value: Tensor, other: float) -> Tensor:
    """``value`` before a second ``where`` that hides what nothing sees: its gradient there would be NaN, not 0."""
    return torch.where(seen, value, other) if value.requires_grad else value


def log_count(n: Tensor) -> Tensor:
    """log n of counts given as floats, rounded down (0 for n = 0), so that no entropy exceeds the true bound by a
    rounding.
    """
    wide = torch.float32 if n.device.type == "mps" else torch.float64
    exact = n.clamp(min=1.0).to(wide).log()
    rounded = exact.to(n.dtype)
    below = torch.nextafter(rounded, rounded.new_zeros(()))
    # In the widest type the logarithm itself may have been rounded up: one step down is below it for certain.
    return below if n.dtype == wide else torch.where(rounded > exact, below, rounded)


def at_most(value: Tensor, bound: Tensor) -> Tensor:
    """``value`` cut at ``bound`` without touching its gradient: only rounding ever exceeds it."""
    if not value.requires_grad and not transforms.forward_mode():
        return torch.minimum(value, bound)
    return value - (value - bound).detach().clamp(min=0.0)


def merged(one: State, two: State) -> dict[str, Tensor]:
    """The state over the keys of both parts, ``two`` holding the later keys. Associative; the empty row is
    the identity.

    With base = max(m1, m2), t = m_i - base, w_i = exp(t_i + z_i), p_i = w_i / (w_1 + w_2) and d_i = t_i - a_i::

        z = log(w_1 + w_2)     a = -sum p_i d_i     v = sum p_i (v_i + (d_i + a)^2)     c = sum p_i^2 c_i

    u and y, the mean and variance without weights, as a and v with n_i / n in the place of p_i.
    """
    wide = torch.float32 if one["m"].device.type == "mps" else torch.float64
    parts = [{letter: value.to(wide) for letter, value in part.items()} for part in (one, two)]
    maximum = torch.maximum(parts[0]["m"], parts[1]["m"])
    base = torch.where(maximum == -math.inf, 0.0, maximum)
    steps = [torch.where(part["n"] > 0, part["m"] - base, VANISHED).clamp(min=VANISHED) for part in parts]
    shares = [
        torch.where(part["n"] > 0, torch.exp(step + part["z"]), 0.0) for part, step in zip(parts, steps, strict=True)
    ]
    total = shares[0] + shares[1]
    n = parts[0]["n"] + parts[1]["n"]
    total = torch.where(n > 0, total, 1.0)
    p = [share / total for share in shares]
    result = {"m": maximum, "z": total.log(), "n": n}
    if "a" in one:
        d = [step - part["a"] for part, step in zip(parts, steps, strict=True)]
        result["a"] = -(p[0] * d[0] + p[1] * d[1])
        if "v" in one:
            spread = [part["v"] + (x + result["a"]) ** 2 for part, x in zip(parts, d, strict=True)]
            result["v"] = p[0] * spread[0] + p[1] * spread[1]
    if "c" in one:
        result["c"] = p[0] ** 2 * parts[0]["c"] + p[1] ** 2 * parts[1]["c"]
    if "y" in one:
        result |= _merged_moments(parts, base)
    if "f" in one:
        # The first token stands in the first part, unless no row of the sequence sees that part: then it is padding.
        padding = ~(parts[0]["n"] > 0).flatten(1).any(1)[:, None, None]
        result["f"] = p[0] * parts[0]["f"] + torch.where(padding, p[1] * parts[1]["f"], 0.0)
    return {letter: value.to(one["m"].dtype) for letter, value in result.items()}


def _merged_moments(parts: list[dict[str, Tensor]], base: Tensor) -> dict[str, Tensor]:
    """u and y of both parts' keys, each counted once."""
    n = (parts[0]["n"] + parts[1]["n"]).clamp(min=1.0)
    shares = [part["n"] / n for part in parts]
    # Not cut at VANISHED: a key without weight counts here.
    d = [torch.where(part["n"] > 0, part["m"] - base, 0.0) - part["u"] for part in parts]
    u = -(shares[0] * d[0] + shares[1] * d[1])
    spread = [part["y"] + (x + u) ** 2 for part, x in zip(parts, d, strict=True)]
    return {"u": u, "y": shares[0] * spread[0] + shares[1] * spread[1]}


def joined_output(
    outputs: tuple[Tensor, Tensor], states: tuple[State, State], sinks: tuple[Tensor | None, ...]
) -> Tensor:
    """The output over the keys of both parts: each weighted by its denominator, a sink counted where it was given."""
    sink = next((s for s in sinks if s is not None), None)
    base = torch.maximum(states[0]["m"], states[1]["m"])
    if sink is not None:
        base = torch.maximum(base, sink.to(base.dtype)[:, None])
    base = torch.where(base == -math.inf, 0.0, base)
    shares = []
    for state, own in zip(states, sinks, strict=True):
        step = torch.where(state["n"] > 0, state["m"] - base, VANISHED)
        share = torch.where(state["n"] > 0, torch.exp(step + state["z"]), 0.0)
        shares.append(share if own is None else share + torch.exp(own.to(base.dtype)[:, None] - base))
    total = shares[0] + shares[1]
    total = torch.where(total > 0, total, 1.0)
    dtype = torch.promote_types(outputs[0].dtype, total.dtype)
    parts = [o.to(dtype) * (share / total)[..., None] for o, share in zip(outputs, shares, strict=True)]
    return (parts[0] + parts[1]).to(outputs[0].dtype)


def divided(x: Tensor | float, temperature: Tensor) -> Tensor:
    """x / T, with the gradient of T taken as -(dx . x / T) / T: x / T^2 would overflow at a T of 1e-20. inf gives 0."""
    fixed = temperature.detach()
    infinite = torch.isinf(fixed)
    ratio = torch.where(infinite, 1.0, fixed) / torch.where(infinite, 1.0, temperature)
    return x / fixed * ratio
