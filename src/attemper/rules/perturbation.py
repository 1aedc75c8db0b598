"""What moves when tokens are exchanged: outputs of every block, row by row, of two forward passes.

A row of an output is kept as 16 random projections, so that two passes can be compared whatever their size. Nothing is
asked of a model but that it takes a batch: recurrent layers, convolutions and compiled code are seen as attention is.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from attemper.monitor.shadow import eager
from attemper.rules.token_batch import TokenBatch
from attemper.sites.names import Names, compiled_parts, is_script

OUTPUT = "the output"
COMPILED = "the output of the compiled model"
_PROJECTIONS = 16
_OF_TORCH = (nn.RNNBase, nn.MultiheadAttention, nn.modules.batchnorm._BatchNorm, nn.Conv1d, nn.Embedding)
"""Layers of torch that are looked at: those that mix tokens or sequences, and positions. What a norm or a projection
gives is seen in its block.
"""
_SEED = 20_001


class CannotExchangeError(Exception):
    """Says why tokens cannot be exchanged, or nothing can be compared."""


@dataclass
class Trace:
    """Projections of what a pass gave, in the order in which modules were done."""

    rows: dict[str, Tensor] = field(default_factory=dict)
    """[B, L, P], of what has a row for each token."""
    whole: dict[str, Tensor] = field(default_factory=dict)
    """[B, P], of outputs that a sequence has one of."""
    eps: float = 0.0
    """The relative rounding of the coarsest type met."""
    cache: Any = None
    """What a pass gave to begin the next one with."""

    def cut(self, first: int, count: int, of: int) -> Trace:
        """``count`` rows from ``first`` on of what has ``of`` rows."""
        rows = {name: one[:, first : first + count] if one.shape[1] == of else one for name, one in self.rows.items()}
        return Trace(rows, self.whole, self.eps)

    def join(self, other: Trace) -> Trace:
        """Rows of both, one after another."""
        names = [name for name in self.rows if name in other.rows]
        return Trace({name: torch.cat([self.rows[name], other.rows[name]], 1) for name in names}, {}, self.eps)


@dataclass(frozen=True)
class Movement:
    """What moved and must not."""

    site: str
    rows: int
    moved: float
    """The largest relative change of the output."""
    place: int
    """Where the site stands among the blocks, in the order in which they were done."""


class StableChoice(TorchFunctionMode):
    """Lets ``topk`` choose the first of equal entries. It may choose any, by the number of them, so that an indexer
    that scores several keys 0 chooses others where tokens are added behind a row.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func not in (torch.topk, Tensor.topk) or "out" in (kwargs or {}):
            return func(*args, **(kwargs or {}))
        return _first_of_equal(*args, **(kwargs or {}))


def _first_of_equal(input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    if not input.dim() or type(input) is not Tensor:
        return input.topk(k, dim, largest, sorted)
    values, places = input.sort(stable=True, dim=dim, descending=largest)
    return torch.return_types.topk((values.narrow(dim, 0, k), places.narrow(dim, 0, k)))


class Runner:
    """Runs a model on changed batches, without gradients and with the same random numbers each time."""

    def __init__(self, model: nn.Module, names: Names, mixing: Iterable[str], fresh: Callable[[], object]) -> None:
        """
        Args:
            mixing: names of modules that mix tokens. What lies inside is not looked at: rotated queries may move where
                nothing else does.
            fresh: makes the model forget what passes stored in it.
        """
        self.model, self._fresh = model, fresh
        inside = tuple(f"{name}." for name in mixing if name)
        self._names = {one: name for one, name in names.items() if not name.startswith(inside)} if inside else names
        self._compiled = bool(compiled_parts(names)) and not any(map(is_script, names))
        self._projections: dict[tuple[int, torch.device], Tensor] = {}
        self.forwards = 0
        self.replaced = False
        """Whether embeddings were exchanged in the latest pass."""

    def trace(self, batch: TokenBatch, replace: Tensor | None = None, *, seed: bool = True, cache: str = "") -> Trace:
        """A pass; of a compiled model two: as it was written, block by block, and as it is.

        Args:
            replace: [B, T] bool: tokens whose embeddings are exchanged, where an embedding reads the ids.
            seed: whether random numbers begin anew, and what passes store in the model.
            cache: what of the result is kept; a compiled pass would fill it again, and is left out. A pass that is
                given one goes on with what the pass before stored.
        """
        found, self.replaced = Trace(), False
        self._begin(seed=seed, anew=batch.arguments.get(cache) is None)
        with torch.no_grad(), eager(self.model), self._hooks(found, batch, replace), StableChoice():
            result = batch.call(self.model)
        self._take_output(found, OUTPUT, result, batch)
        found.cache = getattr(result, cache, None) if cache else None
        if self._compiled and not cache and replace is None:
            self._begin(seed=seed, anew=True)
            with torch.no_grad():
                self._take_output(found, COMPILED, batch.call(self.model), batch)
        return found

    def _begin(self, *, seed: bool, anew: bool) -> None:
        self.forwards += 1
        if seed and anew:
            self._fresh()
        if seed:
            torch.manual_seed(_SEED)
            random.seed(_SEED)
            np.random.seed(_SEED)

    @contextmanager
    def _hooks(self, found: Trace, batch: TokenBatch, replace: Tensor | None) -> Iterator[None]:
        sizes = {(batch.shape[0], length) for length in batch.lengths.values()}
        with ExitStack() as stack:
            for module, name in self._names.items():
                if is_script(module) or not name:
                    continue
                if isinstance(module, nn.Embedding) and replace is not None:
                    stack.callback(module.register_forward_hook(partial(self._exchange, batch, replace)).remove)
                if _is_traced(module):
                    hook = partial(self._take_block, found, sizes, name)
                    stack.callback(module.register_forward_hook(hook).remove)
            yield

    def _exchange(self, batch: TokenBatch, places: Tensor, _: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        ids = batch[batch.tokens]
        if not args or not isinstance(args[0], Tensor) or args[0].shape != ids.shape or not torch.equal(args[0], ids):
            return None
        self.replaced = True
        return with_others(output, places)

    def _take_block(
        self, found: Trace, sizes: set[tuple[int, int]], name: str, module: nn.Module, _: Any, out: Any
    ) -> None:
        for states in (leaf for leaf in _floating(out) if leaf.dim() > 2):
            if isinstance(module, nn.Conv1d | nn.modules.batchnorm._BatchNorm):
                states = states.transpose(1, 2) if states.dim() == 3 else states
            swapped = getattr(module, "batch_first", True) is False or tuple(states.shape[:2]) not in sizes
            if swapped and tuple(states.shape[1::-1]) in sizes:
                states = states.transpose(0, 1)
            if isinstance(module, nn.Embedding) and states.shape[0] == 1:  # positions, the same in all sequences
                states = states.expand(next(iter(sizes))[0], *states.shape[1:])
            if tuple(states.shape[:2]) in sizes:
                calls = sum(one == name or one.startswith(f"{name}#") for one in found.rows)
                self._add(found, found.rows, f"{name}#{calls + 1}" if calls else name, states, 2)
                break

    def _take_output(self, found: Trace, name: str, result: Any, batch: TokenBatch) -> None:
        size, lengths = batch.shape[0], set(batch.lengths.values())
        for leaf in _floating(result):
            swapped = leaf.dim() > 2 and leaf.shape[0] != size == leaf.shape[1] and leaf.shape[0] in lengths
            states = leaf.transpose(0, 1) if swapped else leaf
            if states.dim() > 1 and states.shape[0] != size and states.shape[0] in {size * one for one in lengths}:
                states = states.unflatten(0, (size, -1))  # sequences laid end to end
            if states.dim() < 2 or states.shape[0] != size:
                continue
            if states.dim() > 2 and name not in found.rows and states.shape[1] <= max(lengths):
                self._add(found, found.rows, name, states, 2)
            elif states.dim() == 2 and name not in found.whole and states.shape[1] not in (size, *lengths):
                self._add(found, found.whole, name, states, 1)

    def _add(self, found: Trace, target: dict[str, Tensor], name: str, states: Tensor, first: int) -> None:
        states = states.detach().flatten(first)
        found.eps = max(found.eps, torch.finfo(states.dtype).eps)
        key = states.shape[-1], states.device
        if key not in self._projections:
            drawn = torch.randn((key[0], _PROJECTIONS), generator=torch.Generator().manual_seed(key[0]))
            self._projections[key] = drawn.to(states.device)
        wide = states if states.dtype == torch.float64 else states.float()
        target[name] = (wide @ self._projections[key].to(wide.dtype)).cpu()


def with_others(vectors: Tensor, places: Tensor) -> Tensor:
    """[B, L, ...] with random vectors of the same mean and spread at ``places`` [B, L]."""
    drawn = torch.randn(vectors.shape, generator=torch.Generator().manual_seed(_SEED)).to(vectors)
    spread = vectors.std() if bool(vectors.std() > 0) else 1.0
    places = places.to(vectors.device).view(*places.shape, *(1,) * (vectors.dim() - 2))
    return torch.where(places, vectors.mean() + spread * drawn, vectors)


def _is_traced(module: nn.Module) -> bool:
    if type(module).__module__.startswith("torch.nn.") and not any(True for _ in module.children()):
        return isinstance(module, _OF_TORCH)
    # A layer without parts and parameters gives angles of positions, say, and no states.
    return any(True for _ in module.parameters())


def _floating(result: Any) -> Iterator[Tensor]:
    """The tensors of numbers that a result holds, which may be an object with fields. Caches are within one, and hold
    no output.
    """
    fields = result if isinstance(result, Mapping) else getattr(result, "__dict__", None)
    parts = list(fields.values()) if fields and not isinstance(result, Tensor) else result
    tensors = (leaf for leaf in tree_leaves(parts) if isinstance(leaf, Tensor))
    return (leaf for leaf in tensors if leaf.is_floating_point() and not leaf.is_nested)


Stay = Callable[[str, int], Tensor | None]
"""From the name of a block and the number of its rows to the rows [B, L] that must not move; None: it says nothing."""


def relative_change(one: Tensor, two: Tensor) -> Tensor:
    """[...] of [..., P]: how far rows are apart, relative to their size; 0 where both are not finite."""
    sizes = one.norm(dim=-1), two.norm(dim=-1)
    usual = sizes[0][torch.isfinite(sizes[0])]
    least = 1e-3 * float(usual.median()) if usual.numel() else 0.0
    change = (one - two).norm(dim=-1) / torch.maximum(*sizes).clamp(min=max(least, 1e-30))
    return torch.where(torch.isfinite(one).all(-1) | torch.isfinite(two).all(-1), change.nan_to_num(1.0, 1.0), 0.0)


def changes(base: Trace, changed: Trace, stay: Stay) -> Iterator[tuple[str, Tensor]]:
    """Of each block that has its rows in both passes, how far those moved that must not, and 0 for others: [B, L]."""
    for name, rows in base.rows.items():
        other, marks = changed.rows.get(name), stay(name, rows.shape[1])
        if other is not None and marks is not None and other.shape == rows.shape and rows.numel():
            yield name, relative_change(rows, other) * marks


def movement(
    base: Trace, changed: Trace, stay: Stay, limit: Callable[[str], float], whole: Tensor | None = None
) -> Movement | None:
    """The first block of which a row moves that must not; None where none does.

    Args:
        limit: of each block, how far noise moves it.
        whole: [B] bool: sequences whose outputs as a whole must not move either; None: these are not compared.

    Raises:
        CannotExchangeError: the passes have nothing that could be compared.
    """
    found = [*changes(base, changed, stay)]
    moved = [float(change.max()) for _, change in found[-1:]]
    for name, one in base.whole.items():
        if whole is not None and (other := changed.whole.get(name)) is not None and other.shape == one.shape:
            found.append((name, relative_change(one, other) * whole))
            moved.append(float(found[-1][1].max()))
    if not found:
        raise CannotExchangeError("nothing that the model gives has a row for each token")
    counts, order = ((name, int((change > limit(name)).sum())) for name, change in found), list(base.rows)
    site, rows = next((one for one in counts if one[1]), (None, 0))
    place = order.index(site) if site in order else len(order)
    return None if site is None else Movement(site, rows, max(moved), place)
