"""``attemper.fingerprint``: what a model's attention does with some tokens, small enough to send to somebody."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from attemper.checks import index_of, whole_number
from attemper.errors import InputError
from attemper.fingerprints.encoding import round_rows
from attemper.fingerprints.record import Fingerprint
from attemper.fingerprints.site import ROWS, ModelOutput, SiteFingerprint, chosen_sequences
from attemper.fingerprints.taking.rows import SeenAttention, sketch_of
from attemper.fingerprints.taking.site import CallRows, SiteRows
from attemper.fingerprints.taking.weights import grid_of, weights_of
from attemper.monitor.calls import MOST_CALLS
from attemper.monitor.checked_model import check_model, provenance, title, why_nothing
from attemper.monitor.collector import Collector
from attemper.monitor.forward import observation, run
from attemper.monitor.options import Scope
from attemper.monitor.token_ids import hash_of_tokens, sequences_of
from attemper.readings.labels import JOINED
from attemper.sites.find import all_sites
from attemper.sites.names import names_of
from attemper.sites.observation import AttentionCall
from attemper.sites.padding import CallContext
from attemper.statistics import ONE_PASS
from attemper.text import date_of

_BLOCK = re.compile(r"(^|\.)\d+$")
"""How the names of blocks end: a number in a list."""


def fingerprint(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    rows: int = ROWS,
    heads: Iterable[int] | None = None,
    name: str | None = None,
) -> Fingerprint:
    """Records a few attention rows of every site, for :func:`attemper.explain`.

    Each batch runs through the model once, without gradients. The model's own attention runs and is looked at; nothing
    is put in its place. Rows are chosen by token: padding, its side, and how texts are batched make no difference.

    Args:
        model: any module, in evaluation mode.
        batches: an iterable of dict (``model(**batch)``), tuple or list (``model(*batch)``), or tensor
            (``model(batch)``), on the model's device.
        rows: how many rows of each site are kept, of all sequences together.
        heads: numbers of the heads that are kept of each site, with those that read the same keys; None for all.
        name: of the model in the result; None for its class and what it was loaded from.

    Returns:
        :class:`attemper.types.Fingerprint`: ``.sites``, ``.skipped``; ``.save(path)``.

    Raises:
        InputError: the model is no module, or in training mode; there is no batch, or no attention was seen; a site
            has no such head.
    """
    check_model("fingerprint", model)
    if isinstance(batches, Tensor | Mapping | str):
        raise InputError(
            f"fingerprint(batches) must be an iterable of batches, got one {type(batches).__name__}: write [batch]."
        )
    whole_number("fingerprint(rows=...)", rows)
    chosen = check_heads("fingerprint", heads)
    if any(part.training and isinstance(part, nn.Dropout) and part.p > 0 for part in model.modules()):
        raise InputError("fingerprint: the model is in training mode, and its dropout is random: call model.eval().")
    listed = list(batches)
    if not listed:
        raise InputError("fingerprint: batches is empty, or an iterator that was used up before.")
    sizes = [_sequences(batch) for batch in listed]
    collector = FingerprintCollector(model, CallContext(), chosen_sequences(sum(sizes), rows), chosen)
    with observation(model, collector), following(model) as hidden:
        collector.hidden = hidden
        for number, batch in enumerate(listed):
            run(f"fingerprint: batch {number + 1}", model, batch, collector)
            collector.first_sequence += sizes[number]
    sites = collector.fingerprints()
    if not sites:
        raise InputError(why_nothing("fingerprint", model, collector.skips(())))
    skipped = {skip.name: skip.reason for skip in collector.skips(()) if skip.name not in {s.name for s in sites}}
    own = next((site for site in collector.found.values() if site.kind == "self"), None)
    lengths = () if own is None else tuple(own.lengths)
    hashed = _hash(listed)
    about = {key: part for key, part in provenance(model, date_of(time.time())).items() if part is not None}
    about["given"] = _hash(listed, whole=True)
    return Fingerprint(name or title(model), hashed, lengths, sites, skipped, about, join_outputs(collector.outputs))


def check_heads(where: str, heads: Iterable[int] | None) -> tuple[int, ...] | None:
    if heads is None:
        return None
    given = tuple(heads) if isinstance(heads, Iterable) else (heads,)
    listed = tuple(-1 if (number := index_of(head)) is None else number for head in given)
    wrong = [head for head, number in zip(given, listed, strict=True) if number < 0]
    if wrong or not listed or isinstance(heads, str | int):
        got = repr(wrong[0]) if wrong and not isinstance(heads, str) else repr(heads)
        raise InputError(f"{where}(heads=...) must be numbers of heads, such as [0, 3], got {got:.60}.")
    return listed


class FingerprintCollector(Collector):
    """Keeps the chosen rows of every call of a pass that went through.

    ``counts``: sequence among all batches -> how many of its rows. ``heads``: numbers of those that are kept, or None.
    """

    def __init__(
        self, model: nn.Module, context: CallContext, counts: Mapping[int, int], heads: tuple[int, ...] | None = None
    ) -> None:
        super().__init__(model, context, Scope(ONE_PASS, "reference", replace=False))
        self._model, self._counts, self._heads = model, counts, heads
        self.first_sequence = 0
        self.hidden = HiddenStates()
        self.found: dict[tuple[str, str], SiteRows] = {}
        self._chosen: dict[int, CallRows] = {}
        """By number of tokens."""
        self.outputs: list[ModelOutput | None] = []

    def begin(self) -> None:
        super().begin()
        self._chosen.clear()

    def _take(self, module: nn.Module, call: AttentionCall, done: object = None) -> None:
        seen = self._note_call(module, call)
        if seen.number.call > MOST_CALLS:
            why = f"it attends more than {MOST_CALLS} times in a pass: a fingerprint has the first of them"
            self.skipped[f"{seen.number.name}{JOINED}"] = why
            return
        made = self.prepare(module, call, seen)
        if made is None:
            return
        place, own, kind, real, keys = made.place, made.call, made.kind, made.real, made.call.key.shape[2]
        shape = made.problem.query.shape
        real_keys = self.key_tokens(place, keys)
        if real_keys is None and kind == "self" and shape[2] == keys:
            real_keys = real
        real, real_keys = map(_unless_all, (real, real_keys))
        inner, block = self.hidden.around(place, self._names)
        states = [None if frame is None else frame.given for frame in (inner, block)]
        attention = SeenAttention(made.problem, kind, real, real_keys, own.value, own.output, *states)
        rows = CallRows.of(attention, self.first_sequence, self._counts)
        for name, frame in (("attended", inner), ("change", block)):
            if frame is not None:
                frame.waiting.append(partial(rows.end, name))
        if kind == "self":
            self._chosen[shape[2]] = rows
        within = place if block is None else block.module
        seen.made = rows, torch.get_float32_matmul_precision(), within

    def commit(self) -> None:
        """Keeps the rows of a pass that went through. A tap and the attention beside it are one site."""
        for seen in self.take_calls():
            if seen.reason is not None:
                self.skipped[seen.name] = seen.reason
            elif seen.made is not None:
                self._add_rows(seen.name, *seen.made)
        if any(call.rows for call in self._chosen.values()):
            self.outputs.append(output_of(self.hidden.output, self._chosen))
        self.hidden.output = None

    def _add_rows(self, name: str, rows: CallRows, precision: str, block: nn.Module) -> None:
        key = name, rows.kind
        if key not in self.found:
            facts = {
                "inv_freq": _inv_freq(self._model, name, rows.shape[2]),
                "matmul_precision": precision,
                "weights": weights_of(self._model, name, rows.shape, rows.facts["dtype"]),
            }
            facts |= zip(("weight_bits", "weight_error"), grid_of(block) or (None, None), strict=True)
            self.found[key] = SiteRows.of(name, len(self.found), rows, self._heads, **facts)
        if not self.found[key].add(rows):
            self.skipped[name] = "its heads or their size change from batch to batch"

    def fingerprints(self) -> tuple[SiteFingerprint, ...]:
        """What was kept, a site each, in the order in which they ran."""
        return tuple(s.fingerprint() for s in self.found.values() if s.rows and self.withdrawn(s.name) is None)


@dataclass(eq=False)
class Frame:
    """A module whose forward is running."""

    module: nn.Module
    given: Tensor | None
    waiting: list[Callable[[Tensor | None], None]] = field(default_factory=list)
    """Called with what it gives."""


class HiddenStates:
    """What the modules whose forward is running were given, outermost first, and what the model gave."""

    def __init__(self) -> None:
        self.running: list[Frame] = []
        self.output: Any = None

    def around(self, place: nn.Module, names: Mapping[nn.Module, str]) -> tuple[Frame | None, Frame | None]:
        """The module that attends, or the innermost around it that was given states, and its block; the first is both
        where there is no block.
        """
        at = next((n for n in reversed(range(len(self.running))) if self.running[n].module is place), None)
        if at is None:
            return None, None
        around = list(reversed(self.running[: at + 1]))
        inner = next((frame for frame in around if frame.given is not None), None)
        block = next((frame for frame in around if _BLOCK.search(names.get(frame.module, ""))), None)
        return inner, inner if block is None or block.given is None else block


@contextmanager
def following(model: nn.Module) -> Iterator[HiddenStates]:
    """Notes what the modules of ``model`` are given, by hooks that are removed afterwards."""
    hidden = HiddenStates()
    attending = {site.module for site in all_sites(names_of(model))}

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden.running.append(Frame(module, _hidden_of((kwargs.get("hidden_states"), *args, *kwargs.values()))))

    def leave(module: nn.Module, _: Any, output: Any) -> None:
        frame = hidden.running.pop() if hidden.running else None
        if frame is not None and frame.waiting:
            states = _hidden_of(output if isinstance(output, tuple | list) else (output,))
            for end in frame.waiting:
                end(states)
        if module is model:
            hidden.output = output

    with ExitStack() as hooks:
        for module in model.modules():
            if isinstance(module, torch.jit.ScriptModule) or not (module in attending or any(module.children())):
                continue
            hooks.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield hidden


def _unless_all(real: Tensor | None) -> Tensor | None:
    """Which places are tokens; None where all are."""
    return None if real is None or bool(real.all()) else real


def _hidden_of(parts: Iterable[Any]) -> Tensor | None:
    """The first of them that can be states [B, tokens, E]."""
    tensors = (part for part in parts if isinstance(part, Tensor) and part.dim() == 3)
    return next((part.detach() for part in tensors if part.is_floating_point() and not part.is_nested), None)


def _inv_freq(model: nn.Module, name: str, size: int) -> tuple[float, ...] | None:
    """The angles per token of a site's rotary embedding, where the model has one buffer that can be meant."""
    found = [
        (key, part)
        for key, part in model.named_buffers()
        if key.endswith("inv_freq") and "original" not in key and 2 * part.numel() <= size
    ]
    number = re.search(r"\.(\d+)\.", f".{name}.")
    kinds = getattr(getattr(model, "config", None), "layer_types", None)
    if len(found) > 1 and kinds and number and int(number[1]) < len(kinds):
        kind = str(kinds[int(number[1])])
        found = [(key, part) for key, part in found if kind in key]
    if len(found) != 1 or found[0][1].is_meta:
        return None
    return tuple(found[0][1].detach().cpu().double().flatten().tolist())


def _sequences(batch: Any) -> int:
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else (batch,)
    tensors = [part for part in parts if isinstance(part, Tensor) and part.dim() > 1]
    return tensors[0].shape[0] if tensors else 1


def _hash(batches: Iterable[Any], *, whole: bool = False) -> str | None:
    """A hash of the token ids of every sequence, padding left out unless ``whole``; None where there are no ids."""
    found = [sequences_of(batch, whole=whole) for batch in batches]
    return None if None in found else hash_of_tokens(row for rows in found for row in rows or ())


_WIDEST = 2**18
"""Numbers of a sequence that are kept as one row."""


def output_of(given: Any, calls: Mapping[int, CallRows]) -> ModelOutput | None:
    """The rows of what the model gave, or one for each sequence, whole, where it gave classes, images, pooled states;
    None where it gave no numbers.

    Args:
        calls: number of tokens -> a call over so many, whose rows are those of states of as many tokens.
    """
    name, states = _first(given)
    if states is None:
        return None
    call = calls.get(states.shape[1], next(iter(calls.values())))
    taken, rows = call.chosen.take(states), np.concatenate([part.rows for part in call.rows])
    vectors = states.flatten(1) if taken is None else taken[0]
    if taken is None:
        places = [place for sequences, _ in call.chosen.groups for place in sequences]
        if vectors.shape[1] > _WIDEST or max(places) >= len(vectors):
            return None
        rows = np.array([[number, -1] for number in dict.fromkeys(rows[:, 0].tolist())], np.int32)
        vectors = vectors[places].cpu().double()
    sketch = sketch_of(vectors)
    return ModelOutput(name, vectors.shape[1], rows, round_rows(sketch) if states.dtype.itemsize == 2 else sketch)


def join_outputs(parts: Sequence[ModelOutput | None]) -> ModelOutput | None:
    """Those of all batches as one; None where a batch had none, or they are of different kinds."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts) or len({(part.name, part.width) for part in known}) != 1:
        return None
    arrays = (np.concatenate([getattr(part, name) for part in known]) for name in ("rows", "sketch"))
    return ModelOutput(known[0].name, known[0].width, *arrays)


def _first(given: Any) -> tuple[str, Tensor | None]:
    """The first tensor of numbers, one or more for each sequence, and its name."""
    named = given.items() if isinstance(given, Mapping) else enumerate(given) if isinstance(given, tuple | list) else ()
    for name, part in (("", given), *named):
        if isinstance(part, Tensor) and part.dim() > 1 and part.is_floating_point() and not part.is_nested:
            return str(name), part.detach()
    return "", None
