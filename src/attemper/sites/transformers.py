"""transformers' attention registry: ``attemper`` as an implementation, and every other one read and acted on.

As an implementation it is registered for masks too: without a mask function of the same name the mask would arrive as
None, and padding would be ignored. Windows and chunks are in that mask, so ``sliding_window`` carries nothing more.

Every other implementation is met in the look-up of the registry, where functions are wrapped on their way to a model.
Two wraps may stand there: ``_reporting`` inside of ``_acting``, so that observers see the call as it was acted on. The
class gets its own method back when both are gone. A scan attends in the place of that function: the model keeps its own
implementation, with the masks made for it, and each call means here what it means there.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode, _pop_mode_temporarily

from attemper.call.attention import run
from attemper.call.attn_mask import hides
from attemper.call.known_requests import KNOWN
from attemper.errors import InputError, needs
from attemper.nn.temperature import ACTIONS
from attemper.sites import torch_functions
from attemper.sites.actions import Actions, ModelCall, attend
from attemper.sites.identity import note_output, places
from attemper.sites.names import names_of, pretrained_models
from attemper.sites.observation import (
    AttentionCall,
    Observer,
    Reader,
    UnsupportedCallError,
    beside,
    check_mask,
    current,
    guard,
    refuse_shared_queries,
    report,
    tell,
)
from attemper.sites.tap import tap_call
from attemper.sites.transformers_arguments import (
    OPTIONS,
    can_read,
    reader_of,
    registry_call,
)

NAME = "attemper"
"""The name of our own implementation in the registry."""
_UNSET = dict.fromkeys(OPTIONS)
"""Options of registry functions, as they are where a model does not pass them."""


def register() -> None:
    """Makes ``set_attn_implementation("attemper")`` known to transformers. Safe to call again."""
    with needs("Measuring a transformers model", "transformers", "transformers"):
        from transformers import AttentionInterface, AttentionMaskInterface
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, mask_function)


def mask_function(*sizes: Any, config: Any = None, **given: Any) -> Tensor | None:
    """The mask of a model that attends by our implementation: bool, as SDPA takes it.

    The code of a model that transformers has no sdpa attention for may compute with its mask, and expects the one that
    eager attention adds: it gets that.
    """
    from transformers.masking_utils import eager_mask, sdpa_mask

    return (eager_mask if _adds_mask(type(config)) else sdpa_mask)(*sizes, config=config, **given)


_adding: dict[type, bool] = {}
"""Configuration -> whether its model knows added masks only."""


def _adds_mask(kind: type) -> bool:
    if kind not in _adding:
        if torch.compiler.is_compiling():
            return False  # no graph holds the search below; a model that ran before is known already
        from transformers import MODEL_MAPPING

        model = MODEL_MAPPING.get(kind, None)
        models = model if isinstance(model, tuple) else (model,)
        _adding[kind] = any(one is not None and not one._supports_sdpa for one in models)
    return _adding[kind]


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    **given: Any,
) -> tuple[Tensor, Any]:
    """Attention as transformers' models call it: query [B, H, Q, D], key and value [B, G, K, D].

    Under a scan, output and statistics come from one pass of our kernel. Otherwise the model's SDPA attention runs
    (eager, where sinks or a softcap ask for it). A tap beside it does nothing until a watch samples the step.

    Args:
        given: ``scaling``, ``is_causal``, ``softcap``, ``s_aux``, ``position_bias``, and keywords without effect.

    Returns:
        ([B, Q, H, E], None), or what the eager function of the model returns.

    Raises:
        UnsupportedCallError: a keyword or a mask that is not known here: it might mean masking.
    """
    call = registry_call(module, query, key, attention_mask, **given)
    if not torch.compiler.is_compiling():
        with ExitStack() as outside:
            output = _in_place(outside, module, lambda: call, value, dropout)
        if output is not None:
            return output, None
    tap_call(call, module)
    mask = None if attention_mask is None else attention_mask[..., : key.shape[2]]
    if given.get("softcap") is None and given.get("s_aux") is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        function = sdpa_attention_forward
    else:
        function, mask = _eager(module), _added_mask(call, mask)
    given = {**_UNSET, **given, "dropout": dropout}
    if torch.compiler.is_compiling():
        return function(module, query, key, value, mask, **given)
    return beside(function, (module, query, key, value, mask), given, _ignore)  # the tap reports it


def _added_mask(call: AttentionCall, mask: Tensor | None) -> Tensor | None:
    """The mask of a call as eager attention adds it: eager knows no flag for causality, as SDPA does."""
    query, keys = call.query, call.key.shape[2]
    if mask is None and call.options.is_causal:
        mask = torch.ones((query.shape[2], keys), dtype=torch.bool, device=query.device).tril()[None, None]
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, torch.finfo(query.dtype).min).to(query.dtype)
    return mask


def _eager(module: nn.Module) -> Callable[..., Any]:
    """The eager attention in the file of a module's class, or of a class that it derives from."""
    for kind in type(module).__mro__:
        function = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    raise UnsupportedCallError(module, "its file has no eager attention, which sinks and a softcap need")


def _in_place(
    outside: ExitStack, module: nn.Module, read: Callable[[], AttentionCall], value: Tensor, dropout: float
) -> Tensor | None:
    """The output of our kernel, [B, Q, H, E], whose statistics observers receive; None where the model's own function
    has to run. ``outside``: our function mode is off until it is closed.
    """
    try:
        if any(observer.replace for observer in current()):
            _leave_mode(outside)
            if dropout > 0:
                raise InputError("attention dropout is on: call model.eval() first, or results would be random.")
            call = _readable(module, read)
            return None if call is None or call.packing is not None else _attend_here(module, call, value, current())
    except Exception as error:  # whatever it is, under a watch the model's own attention runs
        tell(error)
    return None


def _readable(module: nn.Module, read: Callable[[], AttentionCall]) -> AttentionCall | None:
    try:
        call = read()
        check_mask(module, call)
    except Exception:  # whatever it is: it is met again, and told, where the call is read beside the model's function
        return None
    return call


def _attend_here(module: nn.Module, call: AttentionCall, value: Tensor, observers: tuple[Observer, ...]) -> Tensor:
    names = tuple(dict.fromkeys(name for observer in observers for name in observer.stats))
    options = observers[-1].options_of(module, call, names)
    value = value.to(call.query.dtype)
    request = KNOWN.request(type(module).__name__, call.query, call.key, value, call.mask, options)
    first_keys = observers[-1].first_keys(module, call)
    if first_keys is not None:
        request = request.with_problem(first_keys=first_keys)
    output, stats = run(request)
    for observer in observers:
        if stats is not None:
            guard([observer], observer.observe, module, stats, call, request)
    output = _with_even_rows(output, call, value).transpose(1, 2).contiguous()
    note_output(output, module)
    return output


def _with_even_rows(output: Tensor, call: AttentionCall, value: Tensor) -> Tensor:
    """The output of transformers' functions where an added number hides every key of a row: their mean, not 0."""
    mask = call.mask
    if mask is None or mask.dtype == torch.bool or call.options.sink_logits is not None:
        return output
    even = (hides(mask) & mask.isfinite()).all(-1, keepdim=True)
    mean = value.mean(2, keepdim=True)
    return torch.where(even, mean.repeat_interleave(output.shape[1] // mean.shape[1], 1), output)


_REPORTING, _ACTING = 0, 1
_needs = [0, 0]
"""How many need each wrap of the look-up, innermost first."""
_lock = threading.RLock()  # a model may be collected, and release its wrap, while its thread holds the lock
_original: list[Callable[..., Any]] = []


def _wrap_lookup(place: int) -> None:
    """Wraps what the look-up gives to models, until ``_unwrap_lookup`` is called as often."""
    with _lock:
        if not _original:
            from transformers import AttentionInterface

            _original.append(AttentionInterface.get_interface)
            AttentionInterface.get_interface = _with_wraps(_original[0])
        _needs[place] += 1


def _unwrap_lookup(place: int) -> None:
    """Ends one ``_wrap_lookup``."""
    with _lock:
        _needs[place] -= 1
        if _original and not any(_needs):
            interface: Any = sys.modules["transformers"].AttentionInterface
            interface.get_interface = _original.pop()


def _with_wraps(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def get_interface(self: Any, implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        function = original(self, implementation, default)
        try:
            if _needs[_REPORTING]:
                function = _reporting(function, implementation, default)
        except Exception as error:  # whatever it is, it must not end a training run
            tell(error)
        return _acting(function, implementation, default) if _needs[_ACTING] else function

    return get_interface


@contextmanager
def reading(model: nn.Module) -> Iterator[None]:
    """Reports every registry call to the current observers, whatever the implementation; its own function still runs.

    A thread without observers gets what it always got. Nothing happens where ``model`` holds no transformers model.
    """
    if not pretrained_models(model):
        yield
        return
    _wrap_lookup(_REPORTING)
    try:
        yield
    finally:
        _unwrap_lookup(_REPORTING)


def _reporting(function: Callable[..., Any], implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
    if implementation == NAME or torch.compiler.is_compiling() or not current():
        return function
    return _Reporting(function, reader_of(function, implementation, default))


class _Reporting:
    """A registry function whose calls are reported. It runs as it would; under a scan our kernel takes its place where
    the call is read.

    With a keyword that is not known here the softmax by hand or the SDPA call inside is read. So is what a function of
    somebody else's calls inside; where that is nothing known, the call is skipped.
    """

    def __init__(self, function: Callable[..., Any], reader: Reader) -> None:
        self.function, self.reader = function, reader

    def __call__(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        readable, look, output = False, _ignore, None
        with ExitStack() as outside:
            try:
                given = _arguments(args, kwargs)
                readable = can_read(self.reader, given)
                look = partial(self._report, module, query, key, value, given, _reports())
                if readable:
                    _leave_mode(outside)
                    read = partial(self._read, module, query, key, given)
                    output = _in_place(outside, module, read, value, kwargs.get("dropout", 0.0))
            except Exception as error:  # whatever it is, the model's own function runs
                tell(error)
            if output is not None:
                return output, None
            return beside(self.function, (module, query, key, value, *args), kwargs, look, mark=readable)

    def _read(self, module: nn.Module, query: Tensor, key: Tensor, given: dict[str, Any]) -> AttentionCall:
        return replace(self._call(module, query, key, **given), places=places((query, key)))

    def _call(self, module: nn.Module, query: Tensor, key: Tensor, **given: Any) -> AttentionCall:
        refuse_shared_queries(module, query, key)
        return self.reader(module, query=query, key=key, **given)

    def _report(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, given: dict[str, Any], seen: Any, made: Any
    ) -> None:
        if seen != _reports():
            return  # what the function calls inside was read
        reader = partial(self._call, query=query, key=key)
        made = made[0] if isinstance(made, tuple) else made
        output = made.transpose(1, 2) if isinstance(made, Tensor) and made.dim() == 4 else None
        report(reader, (), given, module, places((query, key)), value=value, output=output)


def _ignore(_: object) -> None:
    """What looks at the result of a call that is reported otherwise, or not at all."""


def _reports() -> list[int]:
    return [observer.context.reports for observer in current()]


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The mask and the options of a registry call by the names that readers know."""
    given = {name: value for name, value in kwargs.items() if name not in ("attention_mask", "dropout")}
    return {"mask": args[0] if args else kwargs.get("attention_mask"), **given}


def _leave_mode(outside: ExitStack) -> None:
    """Takes our function mode off until ``outside`` is closed, if it is the innermost: a compiled kernel would be
    compiled anew under it, and what we compute ourselves has nothing to be followed.
    """
    if isinstance(_get_current_function_mode(), torch_functions.AttentionMode):
        outside.enter_context(_pop_mode_temporarily())


class RegistryActions(Actions):
    """Actions on a module of the registry. They keep the look-up wrapped as long as they live, or until ``release``."""

    def __init__(self) -> None:
        super().__init__()
        self._hold()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._hold()

    def _hold(self) -> None:
        _wrap_lookup(_ACTING)
        # A model that is garbage-collected needs the wrap no more.
        self._let_go = weakref.finalize(self, _unwrap_lookup, _ACTING)

    def release(self) -> None:
        self._let_go()


@dataclass
class _RegistryCall(ModelCall):
    """A call of a registry function."""

    function: Callable[..., Any]
    implementation: str
    default: Callable[..., Any]
    """The model's eager function."""
    key: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def read(self, query: Tensor) -> AttentionCall:
        # An observer's function may stand around the one that the model calls.
        own = getattr(self.function, "function", self.function)
        is_ours = self.implementation == NAME
        reader = registry_call if is_ours else reader_of(own, self.implementation, self.default)
        return reader(self.module, query=query, key=self.key, **_arguments(self.args, self.kwargs))

    def run(self, query: Tensor) -> Any:
        return self.function(self.module, query, self.key, self.value, *self.args, **self.kwargs)

    def result_of(self, output: Tensor) -> Any:
        return output.transpose(1, 2).contiguous(), None

    def map_output(self, function: Callable[[Tensor], Tensor], result: Any) -> Any:
        return (function(result[0]), *result[1:])


def _acting(function: Callable[..., Any], implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the registry, under which the calls of modules that have ``Actions`` are acted on."""

    def forward(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        if getattr(module, ACTIONS, None) is None:
            return function(module, query, key, value, *args, **kwargs)
        dropout = kwargs.get("dropout", 0.0)
        call = _RegistryCall(module, query, value, dropout, True, function, implementation, default, key, args, kwargs)
        return attend(call)

    return forward


def outside_registry(model: nn.Module) -> dict[str, str]:
    """Models of transformers inside ``model`` that do not attend through its registry, by name: why not."""
    models: list[Any] = pretrained_models(model)
    return {
        names_of(model)[part]: f"{type(part).__name__} computes attention with custom code, not through "
        "transformers' registry"
        for part in models
        if not part._can_set_attn_implementation()
    }
