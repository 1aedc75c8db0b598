"""transformers' attention registry: ``attemper`` as an implementation, and a look at every other implementation.

As an implementation it is registered for masks too: without a mask function of the same name the mask would arrive as
None, and padding would be ignored. Windows and chunks are in that mask, so ``sliding_window`` carries nothing more.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode, _pop_mode_temporarily

from attemper.call.attention import run
from attemper.call.options import first_true, request_of
from attemper.errors import InputError, MissingExtraError
from attemper.sites import registry as lookup
from attemper.sites import torch_functions
from attemper.sites.identity import places
from attemper.sites.names import named
from attemper.sites.observation import AttentionCall, Observer, UnsupportedCallError, current, guarded, tell, told
from attemper.sites.registry import NAME
from attemper.sites.tap import tap_call
from attemper.sites.transformers_arguments import as_eager, reader_of, understood


def register() -> None:
    """Makes ``set_attn_implementation("attemper")`` known to transformers. Safe to call again."""
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise MissingExtraError("Measuring a transformers model", "transformers", "transformers") from error
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None,
    dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None, softcap: float | None = None,
    s_aux: Tensor | None = None, position_bias: Tensor | None = None, **others: Any,
) -> tuple[Tensor, Any]:  # fmt: skip
    """Attention as transformers' models call it: query [B, H, Q, D], key and value [B, G, K, D].

    Under a scan, output and statistics come from one pass of ours. Otherwise the model's SDPA attention runs (eager,
    where sinks or a softcap ask for it), and a tap beside it that costs nothing until a watch samples the step.

    Returns:
        ([B, Q, H, E], None), or what the eager function of the model returns.

    Raises:
        UnsupportedCallError: a keyword or a mask that is not known here: it might mean masking.
    """
    given = {
        "scaling": scaling,
        "is_causal": is_causal,
        "softcap": softcap,
        "s_aux": s_aux,
        "position_bias": position_bias,
    }
    call = understood(module, query, key, attention_mask, **given, **others)
    if not torch.compiler.is_compiling() and any(observer.replace for observer in current()):
        if dropout > 0:
            raise InputError(
                "attention dropout is on: call model.eval() first, what is measured would be random otherwise."
            )
        try:
            return _replaced(module, call, value, current()).transpose(1, 2).contiguous(), None
        except Exception as error:  # whatever it is, under a watch the model's own attention runs
            for observer in current():
                observer.fail(error)
    tap_call(call, module)
    mask = None if attention_mask is None else attention_mask[..., : key.shape[2]]
    if softcap is None and s_aux is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        function = sdpa_attention_forward
    else:
        function = _eager(module)
        if mask is None and call.options.is_causal:
            # SDPA is told by a flag that there is nothing but causality to mask; eager knows masks only.
            pairs = (query.shape[2], key.shape[2])
            mask = torch.ones(pairs, dtype=torch.bool, device=query.device).tril()[None, None]
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.where(mask, 0.0, torch.finfo(query.dtype).min).to(query.dtype)
    if torch.compiler.is_compiling():
        return function(module, query, key, value, mask, dropout=dropout, **given, **others)
    with told():  # by the tap
        return function(module, query, key, value, mask, dropout=dropout, **given, **others)


def _eager(module: nn.Module) -> Callable[..., Any]:
    """The eager attention of the file that a module, or a class that it derives from, stands in."""
    for kind in type(module).__mro__:
        function = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    raise UnsupportedCallError(module, "its file has no eager attention, which sinks and a softcap need")


def _replaced(module: nn.Module, call: AttentionCall, value: Tensor, observers: tuple[Observer, ...]) -> Tensor:
    names = tuple(dict.fromkeys(name for observer in observers for name in observer.stats))
    options = replace(call.options, stats=names, backend=observers[-1].backend)
    request = request_of(type(module).__name__, call.query, call.key, value, call.mask, options)
    tokens = observers[-1].key_tokens(module, call.key.shape[2])
    if tokens is not None:
        first_keys = first_true(tokens, request.problem.first_tokens)
        request = request.with_problem(first_keys=first_keys)
    output, stats = run(request)
    for observer in observers:
        if stats is not None:
            guarded([observer], observer.observe, module, stats, call, request)
    return output


@contextmanager
def seen() -> Iterator[None]:
    """Tells the current observers of every registry call, whatever the implementation; its own function still runs.

    The look-up of the registry is wrapped, and unwrapped when the last look ends; a thread without observers gets
    what it always got.
    """
    lookup.put(lookup.TELLING, _telling)
    try:
        yield
    finally:
        lookup.take(lookup.TELLING)


def _telling(function: Callable[..., Any], implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
    if implementation == NAME or torch.compiler.is_compiling() or not current():
        return function
    try:
        return _Told(function, as_eager if function is default else reader_of(function, implementation))
    except Exception as error:  # whatever it is, it must not end somebody's training run
        for observer in current():
            observer.fail(error)
        return function


class _Told:
    """A registry function that tells the observers what it is called with, and then is what it was."""

    def __init__(self, function: Callable[..., Any], reader: Callable[..., AttentionCall]) -> None:
        self.function, self.reader = function, reader

    def __call__(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        with told(), _without_mode():
            result = self.function(module, query, key, value, *args, **kwargs)
        guarded(current(), self._tell, module, query, key, args, dict(kwargs))
        return result

    def _tell(
        self, module: nn.Module, query: Tensor, key: Tensor, args: tuple[Any, ...], given: dict[str, Any]
    ) -> None:
        mask = args[0] if args else given.pop("attention_mask", None)
        given.pop("dropout", None)
        tell(partial(self.reader, query=query, key=key, mask=mask), (), given, module, places((query, key)))


@contextmanager
def _without_mode() -> Iterator[None]:
    """Takes our function mode off, if it is the innermost: a kernel that is compiled would be compiled anew for it."""
    if not isinstance(_get_current_function_mode(), torch_functions.AttentionMode):
        yield
        return
    with _pop_mode_temporarily():
        yield


@dataclass
class Switched:
    """Models whose attention runs here for a while, and those that would not."""

    models: list[nn.Module] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    """Module name (empty for the model itself) -> reason."""
    _saved: list[tuple[Any, str | None]] = field(default_factory=list)

    def take(self, config: Any) -> None:
        """Makes what reads this config attend here."""
        self._saved.append((config, config._attn_implementation_internal))
        config._attn_implementation_internal = NAME

    def exclude(self, model: nn.Module) -> None:
        """Gives one model its own implementation back, for good."""
        config: Any = model.config
        excluded = [config, *_sub_configs(config)]
        for saved, implementation in self._saved:
            if any(saved is other for other in excluded):
                # Set to attemper by the user, it would only be refused again: eager is what every model has.
                saved._attn_implementation_internal = "eager" if implementation == NAME else implementation
        self.models = [other for other in self.models if other.config is not config]

    def restore(self) -> None:
        for config, implementation in self._saved:
            config._attn_implementation_internal = implementation


def pretrained(model: nn.Module) -> list[nn.Module]:
    """The transformers models inside ``model``; none where transformers is not even imported."""
    library = sys.modules.get("transformers.modeling_utils")
    return [] if library is None else [part for part in model.modules() if isinstance(part, library.PreTrainedModel)]


@contextmanager
def switched(model: nn.Module) -> Iterator[Switched]:
    """Runs the attention of every registry model inside ``model`` here; each gets its own back whatever happens."""
    state, names = Switched(), named(model)
    models: list[Any] = pretrained(model)
    if models:
        register()
    taken: set[int] = set()
    for module in models:
        if not module._can_set_attn_implementation():
            state.refused[names[module]] = (
                f"{type(module).__name__} computes attention with code of its own, not through transformers' registry"
            )
            continue
        state.models.append(module)
        if id(module.config) not in taken:
            taken.add(id(module.config))
            state.take(module.config)
    for config in [config for config, _ in state._saved]:
        # Some models give a sub-config to modules that are no PreTrainedModel: nothing but the config tells them.
        for sub in _sub_configs(config):
            if id(sub) not in taken:
                taken.add(id(sub))
                state.take(sub)
    try:
        yield state
    finally:
        state.restore()


def _sub_configs(config: Any) -> Iterator[Any]:
    for name in config.sub_configs:
        sub = getattr(config, name, None)
        if sub is not None:
            yield sub
            yield from _sub_configs(sub)
