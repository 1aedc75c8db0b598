"""Hooks on a watched model, and whether a call of it still runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack
from functools import wraps
from types import FrameType
from typing import Any, TypeVar
from weakref import WeakMethod

import torch
from torch import nn

from attemper.errors import InputError
from attemper.sites.observation import in_shadow, say

Result = TypeVar("Result")


class RefusedError(InputError):
    """The one error of a watch that ends a training step: every rank gets it before the same forward."""


def call_of(model: nn.Module) -> FrameType | None:
    """The frame of torch's call of ``model`` that is running now."""
    calls = (frame for frame in _frames() if frame.f_code.co_name == "_call_impl")
    return next((frame for frame in calls if frame.f_locals.get("self") is model), None)


def is_running(call: FrameType | None) -> bool:
    """Whether this frame is one of those that led here; taken for granted where the call was not found."""
    return call is None or any(frame is call for frame in _frames())


def _frames() -> Iterator[FrameType]:
    """The frames that led here, the latest first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def quietly(method: Callable[..., Result]) -> Callable[..., Result | None]:
    """A method of a watch that runs inside somebody's training step: what goes wrong in it is reported to the watch,
    and None returned.
    """

    @wraps(method)
    def guard(watch: Any, *args: Any, **kwargs: Any) -> Result | None:
        try:
            return method(watch, *args, **kwargs)
        except RefusedError:
            raise
        except Exception as error:  # whatever it is, it must not end somebody's training run
            note(watch, error)
            return None

    return guard


def note(watch: Any, error: Exception) -> None:
    """Reports to a watch what went wrong in it; where that fails, too, the log has it."""
    try:
        watch.note_failure(watch.title, error)
    except Warning:  # a filter of the user's makes errors of warnings
        raise
    except Exception:
        say(error)


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method whose object this does not keep alive; it does nothing once that is gone."""
    found = WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        own = found()
        return None if own is None else own(*args, **kwargs)

    return call


def set_for_now(stack: ExitStack, fields: MutableMapping[str, Any], name: str, value: Any) -> None:
    """Sets one of the ``fields`` of an object itself, or of the environment, until ``stack`` is closed."""
    if name in fields:
        stack.callback(fields.__setitem__, name, fields[name])
    else:
        stack.callback(fields.pop, name, None)
    fields[name] = value


class Hook:
    """A hook that stays behind: a copy or a pickle of a watched model carries one that does nothing."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, *arguments: Any) -> None:
        self.function(*arguments)

    def __deepcopy__(self, _: Any) -> Inert:
        return Inert()

    def __reduce__(self) -> tuple[type[Inert], tuple[()]]:
        return Inert, ()


class Door(Hook):
    """The hook of a watch, which it does not keep alive: it does nothing once that is gone. Nothing that fails inside
    gets out into the training step, a failing report of a failure included.
    """

    def __init__(self, method: Callable[..., Any]) -> None:
        super().__init__(WeakMethod(method))

    def __call__(self, *arguments: Any) -> None:
        # Traced where a compiled wrapper (DistributedDataParallel's, say) holds the watched model: taps are seen there.
        if torch.compiler.is_compiling() or in_shadow.get() is not None:
            return
        method = self.function()
        if method is None:
            return
        try:
            method(*arguments)
        except (RefusedError, Warning):
            raise
        except Exception as error:
            note(method.__self__, error)


class Inert:
    """The hook that a copy carries."""

    def __call__(self, *_: Any) -> None:
        return None


class CompiledCall(Hook):
    """Stands where ``module.compile()`` keeps its compiled call, with the doors around it: inside they are traced."""

    def __init__(self, module: nn.Module, before: Door, after: Door | None = None) -> None:
        super().__init__(module._compiled_call_impl)
        self._module, self._before, self._after = module, before, after
        module._compiled_call_impl = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.function(*args, **kwargs)
        self._before(self._module, args, kwargs)
        try:
            return self.function(*args, **kwargs)
        finally:
            if self._after is not None:
                self._after(self._module)

    def remove(self) -> None:
        """Puts the compiled call back, unless somebody has compiled the module anew."""
        if self._module._compiled_call_impl is self:
            self._module._compiled_call_impl = self.function


class WrapperCall(Hook):
    """Tells a watch of the calls of wrappers that ``torch.compile`` makes of a module after the watch was opened.

    Such a wrapper asks a module that has lazy parameters to make them before its first compiled call. The watched
    module says that it has some, and by this it learns of its wrapper, outside the graph, while it is called.
    """

    def __init__(self, module: nn.Module, called: Callable[[nn.Module, Any, Any], object]) -> None:
        super().__init__(WeakMethod(called))
        self._module = module
        if not hasattr(module, "_initialize_hook") and "_orig_mod" not in module._modules:
            vars(module).update(_initialize_hook=None, _infer_parameters=self)

    def __call__(self, *arguments: Any) -> None:
        method = None if torch.compiler.is_compiling() or in_shadow.get() is not None else self.function()
        if method is None:
            return
        calls = (frame.f_locals.get("self") for frame in _frames() if frame.f_code.co_name == "_call_lazy_check")
        wrapper = next(calls, None)
        if isinstance(wrapper, nn.Module):
            method(wrapper, *arguments[1:])

    def remove(self) -> None:
        own = vars(self._module)
        if own.get("_infer_parameters") is self:
            del own["_initialize_hook"], own["_infer_parameters"]
