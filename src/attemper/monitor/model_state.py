"""What a forward pass may change beside its outputs, kept before a pass and put back after it.

Kept are the random numbers of every device, of Python and of numpy; buffers and other tensors of modules; their Python
attributes and those of their classes, with what containers and plain objects among them hold; and the same of the
arguments. Parameters are too large to be copied each time: their memory is copied when an operator is about to write.
"""

from __future__ import annotations

import random
import sys
import threading
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from io import IOBase
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attemper.sites.sharded import is_dtensor

MOST_OBJECTS, OF_A_MODULE = 20_000, 20
"""Of so many objects the attributes are kept, and so many more for each module: what a model refers to may be without
end. The nearest come first."""
NEAR = 2
"""So many plain objects inside one another belong to the model: a cache in an attribute holds layers that hold tensors.
What lies further, behind a trainer, say, may be data of any size, and somebody else's: it is not copied in advance, and
its iterators, arrays and objects with a lock are left alone."""

_OURS = ("torch.", "attemper.")
"""Objects of torch keep their own house (process groups, shards, streams), and so do a watch and its hooks."""
_WITHOUT_STATE = (ModuleType, BuiltinFunctionType, threading.Thread, torch.device, torch.dtype, IOBase)
_GENERATORS = (torch.Generator, random.Random)
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
_CONTAINERS = (dict, OrderedDict, list, tuple, set, frozenset, deque)
_LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Condition)


class ObstacleError(Exception):
    """Says why a forward pass cannot be run a second time without a trace."""


class Writes(TorchDispatchMode):
    """Copies the memory of tensors that it knows when an operator is about to write there, by whatever view.

    It sees what operators say that they write. It runs beside compilers without a word: they neither trace it nor give
    up for it.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, torch.UntypedStorage] = {}
        self._copies: dict[int, torch.UntypedStorage] = {}

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def know(self, tensor: Tensor) -> None:
        self._known |= {storage._cdata: storage for storage in _storages(tensor)}

    def has_copied(self, tensor: Tensor) -> bool:
        return any(storage._cdata in self._copies for storage in _storages(tensor))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, schema = kwargs or {}, getattr(func, "_schema", None)
        if schema is None:  # a function of functions, which says nothing
            self._copy((args, kwargs))
        elif schema.is_mutable:
            given = zip((argument.name for argument in schema.arguments), args, strict=False)
            written = {one.name for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write}
            self._copy([value for name, value in (*given, *kwargs.items()) if name in written])
        return func(*args, **kwargs)

    def _copy(self, values: Any) -> None:
        for tensor in tree_leaves(values):
            for storage in _storages(tensor):
                if storage._cdata in self._known and storage._cdata not in self._copies:
                    self._copies[storage._cdata] = storage.clone()

    def put_back(self) -> None:
        for key, copy in self._copies.items():
            if self._known[key].nbytes() != copy.nbytes():
                self._known[key].resize_(copy.nbytes())
            self._known[key].copy_(copy)


def _storages(tensor: Any) -> Iterator[torch.UntypedStorage]:
    """The memory of a tensor, or of the tensors that it is made of; none of anything else."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _storages(getattr(tensor, name))
    elif isinstance(tensor, Tensor) and tensor.layout == torch.strided and tensor.device.type != "meta":
        yield tensor.untyped_storage()


class ModelState:
    """The state of modules and arguments, as it is now. Nothing is changed before ``put_back``. ``ObstacleError``:
    something among them cannot be put back.
    """

    def __init__(self, model: nn.Module, arguments: Mapping[str, Any]) -> None:
        self.writes = Writes()
        """The pass runs in this block."""
        self._undo: list[Callable[[], object]] = [self.writes.put_back]
        modules = list(model.named_modules())
        self._seen = {id(module) for _, module in modules}
        self._most = MOST_OBJECTS + OF_A_MODULE * len(modules)
        self._waiting = deque[tuple[str, Any, int]]()
        for name, value in arguments.items():
            _refuse_argument(name, value)
            self._waiting.append((f"the argument {name}", value, 0))
        for name, module in modules:
            self._keep_module(name or "the model", module, 0)
        while self._waiting:
            self._keep(*self._waiting.popleft())
        self._versions = [(name, p, p._version) for name, p in model.named_parameters() if not p.is_inference()]
        self._undo.append(partial(_gather, model, list(model.parameters())))

    def put_back(self) -> str | None:
        """Makes everything as it was; says what it could not."""
        failed: list[Exception] = []
        for undo in reversed(self._undo):
            try:
                undo()
            except Exception as error:  # the others are put back all the same
                failed.append(error)
        if failed:
            return f"what its forward changes cannot be put back ({failed[0]})"
        changed = (name for name, p, before in self._versions if p._version != before and not self.writes.has_copied(p))
        name = next(changed, None)
        return None if name is None else f"its forward changes the parameter {name}"

    def _keep_module(self, name: str, module: nn.Module, depth: int) -> None:
        own = (*module._parameters.values(), *module._buffers.values())
        if any(tensor is not None and nn.parameter.is_lazy(tensor) for tensor in own):
            raise ObstacleError(f"{name} is lazy: its first forward makes its parameters")
        if "_fsdp_wrapped_module" in module._modules:
            raise ObstacleError(f"{name} holds its weights in flat pieces (FSDP's first version; use fully_shard)")
        self._keep_fields(name, module, vars(module), depth)

    def _keep_fields(self, name: str, owner: object, fields: dict[str, Any], depth: int) -> None:
        """Keeps the attributes of an object and of its classes, and what they hold."""
        self._undo.append(partial(_restore_mapping, fields, dict(fields)))
        self._seen.add(id(owner))
        for key, value in fields.items():
            if key == "_parameters" and isinstance(owner, nn.Module):
                self._undo.append(partial(_restore_parameters, value, dict(value)))
                for parameter in value.values():
                    if parameter is not None:
                        self._keep_memory(parameter)
            elif type(value) not in _PLAIN:
                self._waiting.append((f"{name}.{key}", value, depth))
        for kind in type(owner).__mro__:
            if kind is not object and id(kind) not in self._seen and not _is_ours(kind):
                self._seen.add(id(kind))
                own = {key: value for key, value in vars(kind).items() if not key.startswith("__")}
                self._undo.append(partial(_restore_class, kind, own))
                self._waiting.extend((f"{kind.__name__}.{key}", value, NEAR) for key, value in own.items())

    def _keep(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, type) or id(value) in self._seen or len(self._seen) > self._most:
            return
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            self._keep_tensor(value, depth)
        elif isinstance(value, _GENERATORS):
            self._keep_generator(value)
        elif isinstance(value, bytearray | array):
            self._undo.append(partial(value.__setitem__, slice(None), value[:]))
        elif (numpy := sys.modules.get("numpy")) is not None and isinstance(value, numpy.ndarray):
            if value.flags.writeable and depth < NEAR:
                self._undo.append(partial(numpy.copyto, value, value.copy()))
        elif numpy is not None and isinstance(value, numpy.random.Generator | numpy.random.RandomState):
            bits: Any = getattr(value, "bit_generator", getattr(value, "_bit_generator", None))
            self._undo.append(partial(setattr, bits, "state", bits.state))
        elif hasattr(type(value), "__next__") and not isinstance(value, nn.Module | IOBase):
            if depth < NEAR:
                raise ObstacleError(f"{name} is an iterator ({type(value).__name__}), which cannot be put back")
        else:
            self._keep_items(name, value, depth)
            if type(value) not in _CONTAINERS:
                self._keep_object(name, value, depth)

    def _keep_tensor(self, value: Tensor, depth: int) -> None:
        """Its numbers, at once or when they are written."""
        if value.is_inference() and not torch.is_inference_mode_enabled():
            return  # nobody can write there
        strided = value.layout == torch.strided and not value.is_nested
        expanded = strided and any(
            size > 1 and step == 0 for size, step in zip(value.shape, value.stride(), strict=True)
        )
        if isinstance(value, nn.Parameter) or expanded or depth >= NEAR:
            self._keep_memory(value)
        else:
            self._undo.append(partial(_write, value, value.data, value.detach().clone()))

    def _keep_memory(self, value: Tensor) -> None:
        self.writes.know(value)
        self._undo.append(partial(_give, value, value.data))

    def _keep_generator(self, value: Any) -> None:
        if isinstance(value, torch.Generator):
            self._undo.append(partial(value.set_state, value.get_state()))
        else:
            self._undo.append(partial(value.setstate, value.getstate()))

    def _keep_items(self, name: str, value: Any, depth: int) -> None:
        """What a container holds. One that is none of Python's own holds it in its attributes."""
        if isinstance(value, dict):
            self._undo.append(partial(_restore_mapping, value, dict(value)))
        elif isinstance(value, list | deque):
            self._undo.append(partial(_restore_sequence, value, list(value)))
        elif isinstance(value, set):
            self._undo.append(partial(_restore_set, value, set(value)))
        elif not isinstance(value, tuple | frozenset):
            return
        items = value.items() if isinstance(value, dict) else enumerate(value)
        held = ((key, item) for key, item in items if type(item) not in _PLAIN)
        self._waiting.extend((f"{name}[{key!r:.40}]", item, depth) for key, item in held)

    def _keep_object(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, FunctionType):
            self._keep_closure(name, value, depth)
        elif isinstance(value, MethodType):
            self._waiting.append((name, value.__self__, depth))
        elif isinstance(value, partial):
            self._waiting.append((name, (value.func, value.args, value.keywords), depth))
        elif isinstance(value, nn.Module):  # which the model does not name as its part
            for part, module in value.named_modules(prefix=name):
                self._seen.add(id(module))
                self._keep_module(part, module, depth)
        elif not isinstance(value, _WITHOUT_STATE) and not _is_ours(type(value)):
            fields = getattr(value, "__dict__", None)
            fields = fields if isinstance(fields, dict) else {}
            if depth >= NEAR and any(isinstance(held, _LOCKS) for held in fields.values()):
                return  # other threads change it meanwhile
            self._keep_fields(name, value, fields, depth + 1)
            for key in _slots(type(value)):
                if hasattr(value, key):
                    held = getattr(value, key)
                    self._undo.append(partial(_set_slot, value, key, held))
                    self._waiting.append((f"{name}.{key}", held, depth + 1))

    def _keep_closure(self, name: str, function: FunctionType, depth: int) -> None:
        """Keeps what a function, a hook, say, has of the code around it."""
        for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # an empty cell
                self._undo.append(partial(setattr, cell, "cell_contents", cell.cell_contents))
                self._waiting.append((f"{name}.{key}", cell.cell_contents, depth))


def _is_ours(kind: type) -> bool:
    return f"{kind.__module__}.".startswith((*_OURS, "builtins."))


def _refuse_argument(name: str, value: Any) -> None:
    """Refuses arguments that stand for more than this pass."""
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
    _give(target, memory)
    # Not through autograd's counter of versions: a graph that waits for its backward pass may hold this tensor.
    target.data.copy_(kept)


def _give(target: Tensor, memory: Tensor) -> None:
    """Gives a tensor its memory back, where it was given other by way of ``.data``."""
    if type(memory) is Tensor and memory.layout == torch.strided and not target.is_set_to(memory):
        target.data = memory


def _restore_mapping(target: dict[Any, Any], kept: dict[Any, Any]) -> None:
    same = len(target) == len(kept) and all(
        one == two and target[one] is kept[two] for one, two in zip(target, kept, strict=True)
    )
    if not same:
        own: Any = OrderedDict if isinstance(target, OrderedDict) else dict  # a subclass may refuse to be updated
        own.clear(target)
        own.update(target, kept)


def _restore_parameters(target: dict[str, Any], kept: dict[str, Any]) -> None:
    """``fully_shard`` swaps shards, which are DTensors, for whole parameters here: those are left to it."""
    if not any(map(is_dtensor, (*target.values(), *kept.values()))):
        _restore_mapping(target, kept)


def _gather(model: nn.Module, parameters: list[nn.Parameter]) -> None:
    """Gathers weights that the training has just gathered for its own forward, and that the pass has sharded again
    (``reshard_after_forward``). A collective then, as the pass was, of all ranks.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    swapped = any(now is not before for now, before in zip(model.parameters(), parameters, strict=False))
    if fsdp is not None and isinstance(model, fsdp.FSDPModule) and swapped:
        cast("Any", model).unshard()


def _restore_class(kind: type, kept: dict[str, Any]) -> None:
    for key in [key for key in vars(kind) if key not in kept and not key.startswith("__")]:
        type.__delattr__(kind, key)
    for key, value in kept.items():
        if vars(kind).get(key, kept) is not value:
            type.__setattr__(kind, key, value)


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
