"""What a fault acts on, and what a user would call a right answer about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .models import Block, blocks, decoder_blocks, generator
from .specs import HELD_OUT, SPECS, UNFIT, Spec


@dataclass
class Expect:
    """Right answers: for each kind its grade, and the first sites at which it may be named."""

    kinds: dict[str, tuple[str, frozenset[str]]]
    value: float | None = None
    """The number of ``explain(a, b)``; None where any number that predicts will do, and none is needed."""
    back: float | None = None
    """The number of ``explain(b, a)``."""
    true: frozenset[str] = frozenset()
    """What a message may say about this fault: keys of ``judging.CLAIMS``."""


@dataclass
class Subject:
    """A copy of a clean model, on which a fault or a harmless change acts; two batches that may be made to differ."""

    spec: Spec
    model: Any
    layer: int
    draw: torch.Generator
    a: dict[str, Tensor]
    b: dict[str, Tensor]
    clean: str = ""
    """Names what else makes run a: '' for the clean model on the usual batch."""
    prepare: Callable[[Subject], None] | None = None
    """Acts on run a's model, too."""
    attention: str | None = None
    """Run b's attention implementation, if another."""
    exact: bool = True
    """Of a harmless change: outputs agree to rounding. Rounded weights change them a little."""
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def blocks(self) -> list[Block]:
        return blocks(self.spec, self.model)

    @property
    def block(self) -> Block:
        return self.blocks[self.layer]

    def site(self, index: int | None = None) -> str:
        return self.blocks[self.layer if index is None else index].site

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.draw)

    def like(self, tensor: Tensor) -> Tensor:
        return self.noise(*tensor.shape)

    def all_blocks(self) -> list[Block]:
        """T5's decoder among them."""
        return self.blocks + (decoder_blocks(self.spec, self.model) if self.spec.name == "t5" else [])


def expect(
    best: str,
    fair: str = "",
    *,
    at: str | Iterable[str],
    also: Iterable[tuple[str, str, str | Iterable[str]]] = (),
    value: float | None = None,
    back: float | None = None,
    true: str = "",
) -> Expect:
    """``best`` and ``fair`` kinds at site ``at``; ``also`` has (kind, grade, sites) for other sites."""

    def sites(names: str | Iterable[str]) -> frozenset[str]:
        return frozenset([names] if isinstance(names, str) else names)

    kinds: dict[str, tuple[str, frozenset[str]]] = {}
    for grade, words in (("fair", fair), ("best", best)):
        for kind in words.split():
            kinds[kind] = (grade, sites(at))
    for kind, grade, names in also:
        known = kinds.get(kind, (grade, frozenset()))
        kinds[kind] = (known[0], known[1] | sites(names))
    return Expect(kinds, value, back, frozenset(true.split()))


@dataclass(frozen=True)
class Case:
    """A fault or a harmless change, and the architectures that it is made on."""

    name: str
    group: str
    architectures: tuple[str, ...]
    make: Callable[[Subject], Any]


def architectures(names: str) -> tuple[str, ...]:
    """``"all -t5 -vit"`` or names."""
    words = names.split()
    chosen = list(SPECS) if "all" in words else [word for word in words if not word.startswith("-")]
    dropped = {word[1:] for word in words if word.startswith("-")}
    return tuple(name for name in chosen if name not in dropped)


def with_held_out(title: str, case: str, chosen: tuple[str, ...]) -> tuple[str, ...]:
    """With the held-out ones whose likeness is chosen, and which the case fits."""
    more = [name for name, like in HELD_OUT.items() if like in chosen and not {title, case} & set(UNFIT[name])]
    return tuple(dict.fromkeys((*chosen, *more)))


class Table:
    """Cases, filled by decorators."""

    def __init__(self) -> None:
        self.cases: list[Case] = []

    def __call__(self, group: str, names: str, **variants: tuple[Any, ...]) -> Callable[[Any], Any]:
        """Registers a function of a subject; each variant's values follow the subject."""

        def register(make: Callable[..., Any]) -> Callable[..., Any]:
            title = make.__name__
            for label, values in (variants or {"": ()}).items():
                name = f"{title}-{label}" if label else title
                chosen = with_held_out(title, name, architectures(names))
                self.cases.append(Case(name, group, chosen, _bound(make, values)))
            return make

        return register


def _bound(make: Callable[..., Any], values: tuple[Any, ...]) -> Callable[[Subject], Any]:
    return lambda subject: make(subject, *values)


def subject(name: str, case: str, model: nn.Module, a: dict[str, Tensor], b: dict[str, Tensor]) -> Subject:
    """With a layer that depends on the names alone."""
    count = len(blocks(SPECS[name], model))
    draw = generator(name, case)
    layer = int(torch.randint(count, (1,), generator=draw))
    return Subject(SPECS[name], model, layer, draw, a, b)
