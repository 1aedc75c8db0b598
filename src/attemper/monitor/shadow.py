"""A shadow pass: the forward of a compiled model once more, eagerly, beside the compiled one.

Nothing sees into a compiled graph. So on a sampled step, before the compiled forward runs, the module that was compiled
runs as it was written, without gradients, and every attention of it is read as in any eager model. Everything that the
pass could leave behind is put back (``model_state``), and what is compiled inside is set aside meanwhile. The graph is
the same on sampled and other steps, and so is every number of the training.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from attemper.call import transforms
from attemper.monitor.calls import SeenCall
from attemper.monitor.collector import Collector
from attemper.monitor.hooks import set_for_now
from attemper.monitor.model_state import ModelState, ObstacleError, random_numbers
from attemper.sites.actions import without_listeners
from attemper.sites.entry_points import reading
from attemper.sites.names import ORIGINAL, compiled_call, is_compiled, missing_door, unwrap, wrapper_kind
from attemper.sites.observation import in_shadow, observing
from attemper.sites.padding import tracking
from attemper.sites.tap_buffers import has_graphs
from attemper.text import count

Run = Callable[[], Any]
Taps = list[nn.Module]


def original_of(model: nn.Module) -> nn.Module:
    """The module that runs eagerly in place of ``model``: without compiled and data-parallel wrappers around it."""
    return unwrap(model, ("_orig_mod",))


class Shadow:
    """The shadow passes of a watch."""

    def __init__(self, model: nn.Module, collector: Collector, most: int | None = None) -> None:
        """``most``: how many sequences of a batch run; None for all."""
        self.model, self._collector, self._most = original_of(model), collector, most
        self._enough: Taps = []
        """The sites of the taps that have seen all that a pass has seen, and of which modules:"""
        self._makeup: list[tuple[nn.Module, bool]] = []
        self._obstacle: str | None = None
        """What a pass has shown that no later one may run."""

    @property
    def only_taps(self) -> bool:
        """Whether taps see all: a pass has shown it, its taps still run, and no module was added or compiled since."""
        return bool(self._enough) and self._makeup == _makeup_of(self.model)

    def note_taps(self, calls: Iterable[SeenCall]) -> None:
        """Takes note of which taps ran in a compiled pass. In CUDA graphs they run without Python, and are trusted."""
        silent = set(map(self._collector.name_of, self._enough)) - {seen.number.name for seen in calls if seen.is_tap}
        if silent and not any(map(has_graphs, devices_of(self.model))):
            self._enough = []

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any], begin: Callable[[], None]) -> None:
        """Reads a pass with these arguments, after ``begin``. Its calls wait in the collector until ``commit``; those
        beside which a tap stands are left to the tap. ``ObstacleError``: the pass could not be taken back.
        """
        collector, context = self._collector, self._collector.context
        try:
            with ExitStack() as stack:
                run, taps = stack.enter_context(self._one_pass(args, kwargs))
                begin()
                collector.begin()
                stack.enter_context(tracking(context, self.model))
                stack.enter_context(observing(collector))
                stack.enter_context(reading(self.model))
                run()
            calls = collector.take_calls()
            tapped = {*map(collector.name_of, taps), *collector.note_taps(calls)}
            collector.calls = [seen for seen in calls if not seen.is_tap]
            self._enough, self._makeup = [] if collector.calls else taps, _makeup_of(self.model)
        except BaseException:
            collector.begin()
            raise
        self._forwards = {one: n for one, n in context.forwards.items() if collector.name_of(one) not in tapped}
        context.reset()

    def shrink(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Has later passes run half as many sequences; says so."""
        batch = _batch_of((args, kwargs))
        if batch is None:
            return "its batch size is unknown"
        self._most = max(1, min(batch, self._most or batch) // 2)
        return f"the next samples run {self._most} of {count(batch, 'sequence')} in a batch"

    def commit(self) -> None:
        """Adds what was read, once the pass beside it went through."""
        self._collector.context.forwards.update(self._forwards)
        self._collector.commit()

    @contextmanager
    def _one_pass(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Run, Taps]]:
        """A block in which the model may run once more, by what this gives; afterwards everything is as it was. The
        list then holds the sites of its taps.
        """
        if self._obstacle is not None:
            raise ObstacleError(self._obstacle)
        if transforms.active():
            raise ObstacleError("it runs inside a transform of torch.func (vmap, grad)")
        arguments = {f"{number + 1}": value for number, value in enumerate(args)} | kwargs
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            state = ModelState(self.model, arguments)
            stack.enter_context(random_numbers(devices_of(self.model)))
            # The training would find weights there that were cast without a graph, and lose their gradients.
            stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
            torch.set_autocast_cache_enabled(False)
            stack.enter_context(eager(self.model))
            stack.enter_context(without_listeners(self.model))
            taps: Taps = []
            stack.callback(in_shadow.reset, in_shadow.set(taps))
            stack.enter_context(state.writes)
            try:
                args, kwargs = first_sequences((args, kwargs), self._most)
                yield (lambda: self.model(*args, **kwargs)), taps
            finally:
                stack.close()
                self._obstacle = state.put_back()
        if self._obstacle is not None:
            raise ObstacleError(self._obstacle)


def _makeup_of(model: nn.Module) -> list[tuple[nn.Module, bool]]:
    """The modules of a model, and which of them are compiled."""
    return [(module, is_compiled(module)) for module in model.modules()]


def lacking(door: str) -> str:
    """Why there are no shadow passes with a release of torch that has no such private name."""
    return f"torch {torch.__version__} has no {door}, by which a watch meets compiled code"


class ShadowPasses:
    """Those of a watch: of its model or, where that must not run twice, of each compiled part."""

    def __init__(self, model: nn.Module, collector: Collector, most: int | None) -> None:
        """``most``: how many sequences of a batch run; None for all."""
        self._model, self._collector, self._most = model, collector, most
        self.whole, self._parts = Shadow(model, collector, most), dict[nn.Module, Shadow]()
        """``whole``: those of the model."""
        self._agreed: bool | None = None
        self.read_by: Shadow | None = None
        """What has read the pass that runs beside itself."""

    def new_parts(self) -> list[nn.Module]:
        """The outermost compiled parts that are not known yet; ``read`` takes them from now on."""
        found = [part for part in compiled_modules(self._model) if part not in self._parts]
        self._parts |= {part: Shadow(part, self._collector, self._most) for part in found}
        return found

    def read(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        begin: Callable[[], None],
        shared: Callable[[], bool],
    ) -> None:
        """Reads a pass of the model, or of this part of it, before it runs; see ``Shadow.read``.

        Args:
            shared: whether all ranks that the pass waits for run it, too; asked before the first one.

        Raises:
            ObstacleError: the pass could not be taken back, or not all ranks run it.
            MemoryError: there was too little; the next one runs fewer sequences.
        """
        if self._agreed is None:
            self._agreed = shared()
        if not self._agreed:
            raise ObstacleError(
                "its forward gathers weights of other ranks, and not all ranks watch it on the same steps: open the "
                "watch on every rank, with the same every= and step()"
            )
        if (door := missing_door()) is not None:
            raise ObstacleError(lacking(door))
        shadow, spent = self._parts.get(module, self.whole), None
        try:
            shadow.read(args, kwargs, begin)
        except Exception as error:
            if not (isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)):
                raise
            spent = f"a shadow pass ran out of memory; {shadow.shrink(args, kwargs)}"
        if spent is not None:  # outside: the error holds what the pass had made
            for kind in {device.type for device in devices_of(self._model)} - {"cpu", "meta"}:
                torch.get_device_module(kind).empty_cache()
            raise MemoryError(spent)
        self.read_by, self._collector.shadowed = shadow, not shadow.only_taps

    def end(self, *, commit: bool) -> None:
        """Ends the pass that was read, if one was; it counts if the one beside it went through."""
        shadow, self.read_by = self.read_by, None
        if shadow is not None:
            (shadow.commit if commit else self._collector.begin)()


def first_sequences(arguments: Any, most: int | None) -> Any:
    """Arguments with the first ``most`` sequences of every tensor that has as many as the first of them."""
    batch = _batch_of(arguments)
    if most is None or batch is None or batch <= most:
        return arguments
    return tree_map_only(Tensor, lambda one: one[:most] if one.dim() and one.shape[0] == batch else one, arguments)


def _batch_of(arguments: Any) -> int | None:
    """The number of sequences; None where a tensor of so many rows may be something else: a mask over the tokens."""
    tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor) and leaf.dim() > 1]
    if not tensors or tensors[0].shape[0] == tensors[0].shape[1]:
        return None
    return tensors[0].shape[0]


def devices_of(model: nn.Module) -> set[torch.device]:
    return {tensor.device for tensors in (model.parameters(), model.buffers()) for tensor in tensors}


@contextmanager
def eager(model: nn.Module) -> Iterator[None]:
    """Runs ``model`` and its parts as they were written, in this block.

    What is compiled of it is set aside module by module, so that other threads are left alone. Functions that are
    compiled can only be reached by a word to the whole process (``torch.compiler.set_stance``): it is given where
    the model's code names one.
    """
    with ExitStack() as stack:
        for module in model.modules():
            if compiled_call(module) is not None:
                set_for_now(stack, vars(module), "_compiled_call_impl", None)
            if (inner := module._modules.get("_orig_mod")) is not None:
                set_for_now(stack, vars(module), "forward", inner)
            elif (function := getattr(module.forward, ORIGINAL, None)) is not None:
                bound = function if isinstance(function, MethodType) else MethodType(function, module)
                set_for_now(stack, vars(module), "forward", bound)
        if _names_compiled(model):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def _names_compiled(model: nn.Module) -> bool:
    """Whether the model's code may call a function that is compiled: one of its classes, or of their Python modules."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    own = [kind for kind in kinds if kind.__module__.partition(".")[0] not in ("torch", "builtins")]
    files = [sys.modules[name] for name in {kind.__module__ for kind in own} if name in sys.modules]
    # What dynamo has made of other functions lies there, too, under names like these.
    named = ((name, value) for place in (*own, *files) for name, value in list(vars(place).items()))
    return any(ORIGINAL in getattr(value, "__dict__", ()) for name, value in named if not name.startswith("__"))


def compiled_modules(model: nn.Module) -> list[nn.Module]:
    """The outermost parts of a model that are compiled."""
    found: list[nn.Module] = []
    for part in model.children():
        found += [part] if is_compiled(part) else compiled_modules(part)
    return found


def wrappers_of(model: nn.Module) -> list[nn.Module]:
    """What ``torch.compile`` has made of ``model`` and is still held by somebody."""
    kind = wrapper_kind()
    if kind is None:
        return []
    # An object refers to its class: to look for what does takes a fourth of the time of looking at every object.
    found = (one for one in gc.get_referrers(*_with_subclasses(kind)) if issubclass(type(one), kind))
    return [one for one in found if original_of(one) is original_of(model) and one is not model]


def _with_subclasses(kind: type) -> list[type]:
    """FSDP2 gives a compiled module a class that it makes of the old one."""
    return [kind, *(one for below in kind.__subclasses__() for one in _with_subclasses(below))]
