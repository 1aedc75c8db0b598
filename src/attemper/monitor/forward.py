"""Forward passes of a whole model that a collector sees all attention of, with everything put back afterwards."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as every_module
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode

from attemper.errors import InputError
from attemper.monitor.checked_model import device_of, explanation
from attemper.monitor.collector import Collector
from attemper.sites import package_functions
from attemper.sites import transformers as registry
from attemper.sites.entry_points import reading
from attemper.sites.names import COMPILED, ORIGINAL, SCRIPTED, compiled_call, compiled_parts, names_of
from attemper.sites.observation import observing, present
from attemper.sites.padding import tracking


@contextmanager
def observation(model: nn.Module, collector: Collector) -> Iterator[None]:
    """Masks and cross attention are followed, compiled code runs as it was written."""
    with ExitStack() as stack:
        stack.enter_context(tracking(collector.context, model))
        # Python modules are searched for attention functions once, not for each batch.
        stack.enter_context(package_functions.reading(model))
        unseen = compiled_parts(names_of(model))
        if COMPILED in unseen.values():
            # Nothing can look into compiled code; run as it was written it computes the same.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        collector.refuse({name: reason for name, reason in unseen.items() if reason == SCRIPTED})
        collector.refuse(registry.outside_registry(model))
        yield


def run(where: str, model: nn.Module, batch: Any, collector: Collector, order: AttentionOrder | None = None) -> None:
    """One batch.

    Args:
        order: ends the pass behind its last attention where that is safe; None: it runs whole.

    Raises:
        InputError: the batch is no dict, tuple, list or tensor, or the model is not loaded. Messages begin with
            ``where``, and say what to do.
    """
    while True:
        collector.begin()
        ending = nullcontext() if order is None else order.one_pass(batch)
        with explanation(where, model), torch.no_grad(), observing(collector), ending, reading(model):
            _call(where, model, batch)
        if order is None or order.intact:
            collector.commit()
            return


def _call(where: str, model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple | list):
        return model(*batch)
    if isinstance(batch, Tensor):
        return model(batch)
    read = " Text is tokenized first: tokenizer([text], return_tensors='pt')." if isinstance(batch, str) else ""
    raise InputError(
        f"{where} is {type(batch).__name__}; expected a dict (model(**batch)), a tuple or list (model(*batch)) or a "
        f"tensor (model(batch)).{read}"
    )


_MODELS = "transformers.models."
_PARTS = ("transformers.", "torch.nn.modules.", "torch.nn.utils.parametri")
"""Where the classes of a model and of its parts are defined, if their code is known."""
_NO_GRAD = "torch.utils._contextlib"
"""Where ``torch.no_grad`` is defined as a decorator."""
_HOOKS = ("attemper.sites.padding", "transformers.utils.output_capturing")
"""Modules with hooks that need nothing of what follows the last attention: those of the scan itself, and those that
collect ``output_hidden_states`` for a result that a scan throws away.
"""
_MOST = 64
"""How many kinds of batches are learned: who gives each batch another number among its arguments gains nothing."""

Calls: TypeAlias = tuple[tuple[str, int, str | None], ...]
"""The name of each call, its number within a forward of its module, and the module in whose forward it ran."""
Key: TypeAlias = tuple[Any, ...]
"""The arguments of a batch without the sizes of its tensors."""
Sizes: TypeAlias = tuple[tuple[int, ...], ...]
"""The shapes of a batch's tensors."""


class _PassEndError(BaseException):
    """Ends a pass. No ``except Exception`` of a model catches it."""


@dataclass
class _PassRecord:
    """What passes with one kind of batch have in common."""

    calls: Calls
    ran: Set[nn.Module]
    """Modules whose forward ran in the first of them."""
    sizes: list[Sizes]
    """The largest batches that ran whole."""
    last: nn.Module | None = None
    """The module in whose forward the last call runs, once a pass is to end behind it."""

    def covers(self, sizes: Sizes) -> bool:
        """Whether a batch that ran whole was as large in every dimension."""
        return any(_is_within(sizes, other) for other in self.sizes)

    def extend(self, sizes: Sizes) -> None:
        """Takes note of a batch that ran whole."""
        if not self.covers(sizes):
            self.sizes = [*(other for other in self.sizes if not _is_within(other, sizes)), sizes]


class AttentionOrder:
    """Learns from passes that ran whole in which order a model attends, and ends later ones behind the last attention.

    For one scan: nothing is kept beyond it.

    Attributes:
        intact: False after a pass in which the model's own code caught what should have ended it: it has to run again.
    """

    def __init__(self, model: nn.Module, collector: Collector) -> None:
        self.intact = True
        self._model, self._collector = model, collector
        self._known: dict[Key, _PassRecord | None] = {}
        """What was learned of each kind of batch; None where its passes run whole."""

    @contextmanager
    def one_pass(self, batch: Any) -> Iterator[None]:
        """A block that runs the model on ``batch``, observed by the collector. Where that is safe it ends early."""
        self.intact = True
        found = _key_and_sizes(batch)
        if found is None or not self._may_end(found[0]):
            yield
            return
        key, sizes = found
        learned = self._known.get(key)
        if learned is None or not learned.covers(sizes):
            before = _random_states(self._model)
            yield
            drew = before is None or before != _random_states(self._model)
            self._known[key] = None if drew else self._learn(learned, sizes)
        elif (last := self._last(learned)) is None:
            self._known[key] = None
            yield
        else:
            with self._ending(key, learned, last):
                yield

    def _may_end(self, key: Key) -> bool:
        """Whether a pass with such a batch may end early, now or once it is learned."""
        is_eligible = self._known[key] is not None if key in self._known else len(self._known) < _MOST
        return is_eligible and present() == (self._collector,) and not _is_followed() and _is_plain(self._model)

    @contextmanager
    def _ending(self, key: Key, learned: _PassRecord, last: nn.Module) -> Iterator[None]:
        ended = False

        def end(*_: Any) -> None:
            nonlocal ended
            # Another thread that runs the model has no observer.
            if not ended and present() == (self._collector,) and self._calls() == learned.calls:
                ended = True
                raise _PassEndError

        hook = last.register_forward_hook(end)
        try:
            yield
        except _PassEndError:
            self._collector.context.leave()
            return
        finally:
            hook.remove()
        self.intact = not ended
        if ended or self._calls() != learned.calls:
            self._known[key] = None

    def _learn(self, learned: _PassRecord | None, sizes: Sizes) -> _PassRecord | None:
        """What is known after a pass that ran whole."""
        calls = self._calls()
        if learned is None:
            return _PassRecord(calls, set(self._collector.context.forwards), [sizes])
        if learned.calls != calls:
            return None
        learned.extend(sizes)
        return learned

    def _calls(self) -> Calls:
        calls = self._collector.calls
        return tuple((call.name, call.number.inner, None if call.is_tap else call.module) for call in calls)

    def _last(self, learned: _PassRecord) -> nn.Module | None:
        """The module that attends last; None where attention might follow in another pass."""
        if learned.last is None and self._is_all(learned):
            last = learned.calls[-1][2]
            learned.last = next((module for module, name in names_of(self._model).items() if name == last), None)
        return learned.last

    def _is_all(self, learned: _PassRecord) -> bool:
        """Whether the calls of a pass are all that a pass can have."""
        called = {module for _, _, module in learned.calls if module is not None}
        if not called or any(module is None for _, _, module in learned.calls):
            return False
        forwards = Counter(module for _, inner, module in learned.calls if inner == 1)
        numbers = forwards.values()
        layers = getattr(getattr(self._model, "config", None), "num_hidden_layers", None)
        # Layers that are shared are all there is; else what runs twice may be run for each of two chunks.
        if any(number > 1 for number in numbers) and (1 in numbers or forwards.total() != layers):
            return False
        collector = self._collector
        return called.issuperset(collector.expected) and collector.mixers.all_attend(learned.ran, called)


def _key_and_sizes(batch: Any) -> tuple[Key, Sizes] | None:
    """The arguments that a batch is, and the shapes of its tensors; None where one is neither a tensor nor plain."""
    if isinstance(batch, Tensor):
        items = [(0, batch)]
    elif isinstance(batch, Mapping):
        items = list(batch.items())
    elif isinstance(batch, tuple | list):
        items = list(enumerate(batch))
    else:
        return None
    key: list[Any] = []
    sizes = []
    for name, value in items:
        if type(value) is Tensor and value.layout == torch.strided and not value.is_nested and value.numel():
            key.append((name, value.dtype, value.device, value.dim()))
            sizes.append(tuple(value.shape))
        elif value is None or isinstance(value, bool | int | float | str):
            key.append((name, type(value), value))
        else:
            return None
    return tuple(key), tuple(sizes)


def _is_within(sizes: Sizes, other: Sizes) -> bool:
    pairs = zip(sizes, other, strict=True)
    return all(own <= most for one, two in pairs for own, most in zip(one, two, strict=True))


def _is_followed() -> bool:
    """Whether a mode of somebody else follows what torch computes: it counts operations, say."""
    modes = _get_current_function_mode_stack()
    return _get_current_dispatch_mode() is not None or not all(isinstance(mode, DeviceContext) for mode in modes)


def _is_plain(model: nn.Module) -> bool:
    """Whether nothing but the known code of a model in eval mode runs in its pass."""
    everywhere = (every_module._global_forward_hooks, every_module._global_forward_pre_hooks)
    if not type(model).__module__.startswith(_MODELS) or any(everywhere):
        return False
    modules = list(model.modules())
    return all(map(_is_known, set(map(type, modules)))) and all(map(_is_untouched, modules))


def _is_known(kind: type[nn.Module]) -> bool:
    """Whether the code of a class is transformers' or torch's, as it was written, with every decorator around it."""
    function: Any = kind.forward
    known = kind.__module__.startswith(_PARTS)
    while known and function is not None:
        # A decorator copies the name of the module that a function is from, but not its globals.
        code = getattr(function, "__globals__", {}).get("__name__", "")
        known = code.startswith((*_PARTS, _NO_GRAD)) and not hasattr(function, ORIGINAL)
        function = getattr(function, "__wrapped__", None)
    return known


def _is_untouched(module: nn.Module) -> bool:
    """Whether a module in eval mode runs the forward of its class, and no hook of anybody else."""
    own = vars(module)
    if module.training or "forward" in own or "_hf_hook" in own or compiled_call(module) is not None:
        return False
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return all(getattr(hook, "__module__", None) in _HOOKS for hook in hooks)


def _random_states(model: nn.Module) -> tuple[bytes, ...] | None:
    """The states of the generators that a model may draw from; None where they cannot be told."""
    device = device_of(model)
    states = [torch.get_rng_state()]
    if device is not None and device.type != "cpu":
        if device.type != "cuda":
            return None
        states.append(torch.cuda.get_rng_state(device))
    others = pickle.dumps((random.getstate(), np.random.get_state(legacy=False)))
    return *(state.numpy().tobytes() for state in states), others
