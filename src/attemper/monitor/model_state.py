"""What a forward pass may change beside its outputs, kept before a pass and put back after it.

Kept are the random numbers of every device, of Python and of numpy; buffers and other tensors of modules; their Python
attributes, with what lists, dictionaries and plain objects among them hold; and the same of the arguments. Parameters
are never written: sharded ones belong to whoever shards them.
"""

from __future__ import annotations

import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

MOST_OBJECTS = 50_000
"""Of so many objects the attributes are kept: what a model refers to may be without end."""
DEEPEST = 2
"""So many plain objects inside one another are followed: a cache in an attribute holds layers that hold tensors."""

_TORCH = "torch."
"""Objects of torch itself keep their own house: process groups, shards, streams."""
_WITHOUT_STATE = (type, ModuleType, BuiltinFunctionType, threading.Thread, torch.device, torch.dtype)
_GENERATORS = (torch.Generator, random.Random)


class ObstacleError(Exception):
    """Says why a forward pass cannot be run a second time without a trace."""


class ModelState:
    """The state of modules and arguments, as it is now. Nothing is changed before ``put_back``.

    Raises:
        ObstacleError: something among them cannot be put back.
    """

    def __init__(self, model: nn.Module, arguments: Mapping[str, Any]) -> None:
        self._undo: list[Callable[[], object]] = []
        modules = list(model.named_modules())
        self._seen = {id(module) for _, module in modules}
        for name, value in arguments.items():
            _refuse_argument(name, value)
            self._keep(f"the argument {name}", value, 0)
        for name, module in modules:
            self._keep_module(name or "the model", module)
        self._versions = [(name, p, p._version) for name, p in model.named_parameters() if not p.is_inference()]

    def put_back(self) -> str | None:
        """Makes everything as it was; says what it could not: parameters that were changed are not written."""
        failed: list[Exception] = []
        for undo in reversed(self._undo):
            try:
                undo()
            except Exception as error:  # the others are put back all the same
                failed.append(error)
        if failed:
            return f"what its forward changes cannot be put back ({failed[0]})"
        changed = next((name for name, parameter, before in self._versions if parameter._version != before), None)
        return None if changed is None else f"its forward changes the parameter {changed}"

    def _keep_module(self, name: str, module: nn.Module) -> None:
        own = (*module._parameters.values(), *module._buffers.values())
        if any(tensor is not None and nn.parameter.is_lazy(tensor) for tensor in own):
            raise ObstacleError(f"{name} is lazy: its first forward makes its parameters")
        if "_fsdp_wrapped_module" in module._modules:
            raise ObstacleError(f"{name} holds its weights in flat pieces (FSDP's first version; use fully_shard)")
        self._keep_fields(name, module, vars(module), 0)

    def _keep_fields(self, name: str, owner: object, fields: dict[str, Any], depth: int) -> None:
        """Keeps the attributes of an object, and what they hold."""
        self._undo.append(partial(_restore_mapping, fields, dict(fields)))
        self._seen.add(id(owner))
        for key, value in fields.items():
            if key != "_parameters":
                self._keep(f"{name}.{key}", value, depth)

    def _keep(self, name: str, value: Any, depth: int) -> None:
        if value is None or isinstance(value, bool | int | float | complex | str | bytes | nn.Parameter):
            return
        if id(value) in self._seen or len(self._seen) > MOST_OBJECTS:
            return
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            self._keep_tensor(value)
        elif isinstance(value, _GENERATORS):
            self._keep_generator(value)
        elif isinstance(value, Mapping | list | tuple | set | deque):
            self._keep_container(name, value, depth)
        elif (numpy := sys.modules.get("numpy")) is not None and isinstance(value, numpy.ndarray):
            if value.flags.writeable:
                self._undo.append(partial(numpy.copyto, value, value.copy()))
        elif numpy is not None and isinstance(value, numpy.random.Generator):
            self._undo.append(partial(setattr, value.bit_generator, "state", value.bit_generator.state))
        elif hasattr(type(value), "__next__") and not isinstance(value, nn.Module):
            raise ObstacleError(f"{name} is an iterator ({type(value).__name__}), which cannot be put back")
        else:
            self._keep_object(name, value, depth)

    def _keep_tensor(self, value: Tensor) -> None:
        """Its numbers, unless several of its places are one: nobody can write there."""
        if value.is_inference() and not torch.is_inference_mode_enabled():
            return  # nor here
        strided = value.layout == torch.strided and not value.is_nested
        if strided and any(size > 1 and step == 0 for size, step in zip(value.shape, value.stride(), strict=True)):
            return
        self._undo.append(partial(_write, value, value.data, value.detach().clone()))

    def _keep_generator(self, value: Any) -> None:
        if isinstance(value, torch.Generator):
            self._undo.append(partial(value.set_state, value.get_state()))
        else:
            self._undo.append(partial(value.setstate, value.getstate()))

    def _keep_container(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, dict):
            self._undo.append(partial(_restore_mapping, value, dict(value)))
        elif isinstance(value, list | deque):
            self._undo.append(partial(_restore_sequence, value, list(value)))
        elif isinstance(value, set):
            self._undo.append(partial(_restore_set, value, set(value)))
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            self._keep(f"{name}[{key!r:.40}]", item, depth)

    def _keep_object(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, FunctionType):
            self._keep_closure(name, value, depth)
        elif isinstance(value, _WITHOUT_STATE) or depth >= DEEPEST:
            return
        elif isinstance(value, MethodType):
            self._keep(name, value.__self__, depth)
        elif isinstance(value, partial):
            self._keep(name, (value.func, value.args, value.keywords), depth)
        elif isinstance(value, nn.Module):  # which the model does not name as its part
            for part, module in value.named_modules(prefix=name):
                self._seen.add(id(module))
                self._keep_module(part, module)
        elif not type(value).__module__.startswith(_TORCH):
            fields = getattr(value, "__dict__", None)
            if isinstance(fields, dict):
                self._keep_fields(name, value, fields, depth + 1)
            for key in _slots(type(value)):
                if hasattr(value, key):
                    held = getattr(value, key)
                    self._undo.append(partial(_set_slot, value, key, held))
                    self._keep(f"{name}.{key}", held, depth + 1)

    def _keep_closure(self, name: str, function: FunctionType, depth: int) -> None:
        """Keeps what a function, a hook, say, has of the code around it."""
        for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # an empty cell
                self._undo.append(partial(setattr, cell, "cell_contents", cell.cell_contents))
                self._keep(f"{name}.{key}", cell.cell_contents, depth)


def _refuse_argument(name: str, value: Any) -> None:
    """Refuses arguments that stand for more than this pass.

    Raises:
        ObstacleError: the argument is one.
    """
    kind = type(value).__name__
    if isinstance(value, _GENERATORS):
        raise ObstacleError(f"the argument {name} is a generator of random numbers ({kind})")
    if callable(getattr(value, "get_seq_length", None)):
        raise ObstacleError(f"the argument {name} is a cache ({kind}), to which the pass adds")


def _slots(kind: type) -> Iterator[str]:
    for one in kind.__mro__:
        slots = vars(one).get("__slots__", ())
        yield from (slots,) if isinstance(slots, str) else slots


def _set_slot(owner: Any, name: str, value: Any) -> None:
    if getattr(owner, name, None) is not value:
        object.__setattr__(owner, name, value)


def _write(target: Tensor, memory: Tensor, kept: Tensor) -> None:
    if target.shape != kept.shape:  # given other memory by way of ``.data``
        target.data = memory
    # Not through autograd's counter of versions: a graph that waits for its backward pass may hold this tensor.
    target.data.copy_(kept)


def _restore_mapping(target: dict[Any, Any], kept: dict[Any, Any]) -> None:
    same = len(target) == len(kept) and all(
        one == two and target[one] is kept[two] for one, two in zip(target, kept, strict=True)
    )
    if not same:
        target.clear()
        target.update(kept)


def _restore_sequence(target: Any, kept: list[Any]) -> None:
    if len(target) != len(kept) or any(one is not two for one, two in zip(target, kept, strict=True)):
        target.clear()
        target.extend(kept)


def _restore_set(target: set[Any], kept: set[Any]) -> None:
    if target != kept:
        target.clear()
        target.update(kept)


@contextmanager
def random_numbers(devices: set[torch.device]) -> Iterator[None]:
    """Puts the random numbers of all devices of these kinds back, and those of the host, of Python and of numpy."""
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        if (numpy := sys.modules.get("numpy")) is not None:
            stack.callback(numpy.random.set_state, numpy.random.get_state(legacy=False))
        stack.callback(torch.set_rng_state, torch.get_rng_state())
        for kind in {device.type for device in devices} - {"cpu", "meta"}:
            module = torch.get_device_module(kind)
            if kind == "mps":
                stack.callback(module.set_rng_state, module.get_rng_state())
                continue
            for number in range(module.device_count()):
                stack.callback(module.set_rng_state, module.get_rng_state(number), number)
        yield
