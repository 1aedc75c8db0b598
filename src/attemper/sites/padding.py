"""Which tokens of a model are real and not padding, from the 2-D masks that its models are called with.

The innermost model decides: an encoder and a decoder each get their own mask, a vision tower gets none. A 4-D mask does
not say which: right-padded rows see keys there.

In a model that is not transformers' a bool ``attention_mask`` may mean either (True = real, or True = hidden): there it
counts only once a call's own mask hides the same keys, or if it is the same everywhere.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from attemper.call.attn_mask import hides, shows
from attemper.sites.declared import documents_of_call, follows_rule
from attemper.sites.names import is_pretrained, is_script, own_class, pretrained_models, unwrap

CROSS_ARGUMENTS = ("key_value_states", "encoder_hidden_states", "cross_attention_states")
"""Arguments whose presence makes a module's attention cross attention."""
OTHER_SEQUENCES = (
    *("context", "memory", "cross_states", "encoder_states"),
    *("encoder_output", "encoder_out", "enc_output", "enc_out"),
)
"""Names that people give to another sequence: attention over as many keys as it has tokens is over it."""

_IDS = "input_ids"
"""How the names of transformers' arguments that hold token ids end."""
_INTEGERS = (torch.int32, torch.int64)

_PADDING = {
    nn.TransformerEncoderLayer: ("src_key_padding_mask",),
    nn.TransformerDecoderLayer: ("tgt_key_padding_mask",),
}
"""Layers of torch whose padding masks have other names, and in which True hides."""
_LAYERS = tuple(_PADDING)

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


@dataclass(frozen=True)
class Tokens:
    """Real tokens, [B, tokens] bool: of a model's own sequence, and of the one that its cross attention reads."""

    own: Tensor | None
    encoder: Tensor | None
    past: int | Tensor | None = None
    """Tokens that a cache held when the model was called; None without a cache."""
    sided: bool = False
    """Whether ``own`` may be of either side of an encoder-decoder: which queries are real is then not known."""
    unclear: bool = False
    """Whether True in ``own`` may mean hidden: ``CallContext.settle`` decides."""
    ids: Mapping[str, Tensor] | None = None
    """Token ids [B, tokens] among the arguments, by name; empty where the sequence is that of the module around; None
    where it is something else (pixels, frames).
    """
    documents: Tensor | None = None
    """[B|1, tokens] int: the documents that the arguments declare; None where they declare none."""
    ruled: bool = False
    """Whether layers' rules and padding say all: no other mask and no kinds of tokens are among the arguments."""

    def of_queries(self, queries: int, keys: int, *, cross: bool) -> Tensor | None:
        """[B, queries] bool: which queries are real; None where the mask does not say.

        A cache holds other keys than the mask has tokens where its window slides or its length is fixed: the place of
        the queries follows from what it held.
        """
        mask = self.own
        if self.sided or self.unclear:
            return None
        if mask is None or mask.shape[1] == queries:
            # As many tokens as queries, and other keys: only a cache that began empty explains that.
            return mask if cross or self.past is not None or keys == queries else None
        if self.past is None or mask.shape[1] < queries:
            return None
        places = torch.arange(queries, device=mask.device) + self.past
        if isinstance(self.past, int) and self.past + queries > mask.shape[1]:
            return None
        # A length on the device is not waited for: transformers itself needs the mask to reach as far.
        return mask.index_select(1, places.clamp(max=mask.shape[1] - 1))


@dataclass(frozen=True)
class OtherSequence:
    """Numbers of tokens of a module's own sequence and of another one among its arguments."""

    own: int
    other: int
    name: str | None
    """The name of the argument, if it says that this is another sequence."""

    def is_cross(self, keys: int) -> bool:
        """Whether so many keys are the other sequence's."""
        if self.name in CROSS_ARGUMENTS:
            # Joint attention reads its own tokens and the other's as one.
            return keys != self.own + self.other
        # A sequence of unknown name may be a cache. Fewer keys than queries are none, and not the module's own tokens.
        return keys == self.other and (self.name is not None or keys < self.own)


@dataclass
class CallContext:
    """What surrounds the attention call that is running."""

    stack: list[Tokens] = field(default_factory=list)
    others: dict[nn.Module, OtherSequence] = field(default_factory=dict)
    """The other sequence that a module was given."""
    masks: dict[nn.Module, Tensor] = field(default_factory=dict)
    """The 4-D mask that a module was given."""
    forwards: dict[nn.Module, int] = field(default_factory=dict)
    """How often the forward of each module has begun in this pass."""
    passes: int = 0
    """How many have been reset: calls of two passes are told apart by it."""

    reports: int = 0
    """How many calls were reported, whatever became of them."""
    running: list[nn.Module] = field(default_factory=list)
    """Modules whose forward is running, outermost first."""
    fail: Callable[[Exception], None] | None = None
    """Receives errors in attemper's own hooks, which must not end a training run; None to raise them."""

    def guard(self, hook: Callable[..., None]) -> Callable[..., None]:
        """``hook`` for a module, with its errors given to ``fail``. No mode sees what it asks of tensors."""

        def safe(*arguments: Any) -> None:
            try:
                with torch._C.DisableTorchFunction():
                    hook(*arguments)
            except Exception as error:  # whatever it is
                if self.fail is None:
                    raise
                self.fail(error)

        return safe

    def real_queries(
        self, kind: str, shape: tuple[int, ...], rows: Tensor | None, tokens: Tensor | None = None
    ) -> tuple[Tensor | None, str | None]:
        """Which queries of a call (batch, heads, queries, keys) are real tokens, [B, Q] (None for all); or why that
        cannot be told.

        Args:
            kind: "self" or "cross".
            rows: the queries that are measured; None for all.
            tokens: the real tokens of the call itself, [B, tokens] bool; None: those of the model around it.
        """
        known = self.tokens if tokens is None else Tokens(tokens, None)
        if known.own is None:
            return None, None
        real = known.of_queries(shape[2], shape[3], cross=kind == "cross")
        if real is not None and real.shape[0] == shape[0]:
            return real, None
        if bool(known.own.all()):
            return None, None
        seen = [*shape[:2], shape[2] if rows is None else len(rows)]
        return None, f"padding of its queries is unknown under a mask of {list(known.own.shape)} (rows: {seen})"

    def module(self) -> nn.Module:
        return self.running[-1]

    def enter_module(
        self, names: list[str], counts: bool, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Before a forward of a module that may attend, whose parameters have these ``names``. ``counts``: whether its
        masks do.
        """
        self.forwards[module] = self.forwards.get(module, 0) + 1
        self.others.pop(module, None)
        self.masks.pop(module, None)
        arguments = dict(zip(names, args, strict=False)) | kwargs
        mask = arguments.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() == 4:
            self.masks[module] = mask
        given = _other_sequence(arguments)
        if given is not None:
            self.others[module] = given
        self.running.append(module)
        if counts:
            self.stack.append(_tokens_of(module, arguments, (*args, *kwargs.values())))

    def leave_module(self, counts: bool, module: nn.Module, *_: Any) -> None:
        """After it."""
        self.masks.pop(module, None)
        if self.running:
            self.running.pop()
        if counts and self.stack:
            self.stack.pop()

    def leave(self) -> None:
        """Back to outside of every module, where a pass ended within."""
        self.stack.clear()
        self.running.clear()
        self.masks.clear()

    def reset(self) -> None:
        """Forgets the pass that ran, too."""
        self.leave()
        self.forwards.clear()
        self.passes += 1

    def is_cross(self, module: nn.Module, keys: int) -> bool:
        """Whether these keys are another sequence's. Joint attention reads its own tokens and the other's as one."""
        given = self.others.get(module)
        return given is not None and given.is_cross(keys)

    def settle(self, mask: Tensor | None) -> None:
        """Learns from a call's mask, [B, H, Q, K], what True means in a bool ``attention_mask`` that is unclear."""
        tokens = self.tokens
        if not tokens.unclear or tokens.own is None or mask is None or mask.dim() != 4:
            return
        shown = shows(mask)
        real = shown.flatten(1, 2).any(1)
        if real.shape == tokens.own.shape and bool((real == tokens.own).all() | (real != tokens.own).all()):
            self.stack[-1] = replace(tokens, own=real, unclear=False)

    @property
    def tokens(self) -> Tokens:
        return self.stack[-1] if self.stack else Tokens(None, None)


@contextmanager
def tracking(context: CallContext, model: nn.Module, begun: Call | None = None) -> Iterator[CallContext]:
    """Follows masks and cross attention through ``model``'s forward passes, by hooks that are removed afterwards.

    The masks of the models of transformers inside it count, where there are none those of ``model`` itself without its
    wrappers, whose arguments have no names. The padding masks of nn.Transformer's layers count as well.

    Args:
        begun: the arguments of a forward of ``model`` that has begun already.
    """
    models = {*pretrained_models(model)} or {unwrap(model)}
    with ExitStack() as hooks:
        for module in model.modules():
            if begun is not None and module is model:
                continue  # its hooks run already, and must not change while they do
            if is_script(module) or (not _may_attend(module) and module not in models):
                continue
            names = parameter_names(module)
            # A vision tower of transformers is not a PreTrainedModel in every release: CLIP's is not in 5.1.
            counts = module in models or isinstance(module, _LAYERS) or "pixel_values" in names
            before = context.guard(partial(context.enter_module, names, counts))
            after = context.guard(partial(context.leave_module, counts))
            hooks.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(after, always_call=True).remove)
        if begun is not None:
            context.enter_module(parameter_names(model), model in models, model, *begun)
        yield context


def enter_compiled(context: CallContext, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Notes the mask of a forward of ``model`` that is compiled, so that no hook can run inside.

    The two sides of an encoder-decoder have a mask each, and its call does not say which queries belong to which.
    """
    context.reset()
    arguments = dict(zip(parameter_names(model), args, strict=False)) | kwargs
    context.stack.append(_tokens_of(model, arguments, (*args, *kwargs.values())))
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        masks = [_token_mask(arguments.get(name)) for name in ("attention_mask", "decoder_attention_mask")]
        sides = [mask.flatten() for mask in masks if mask is not None]
        context.stack[-1] = replace(context.stack[-1], own=torch.cat(sides)[None] if sides else None, sided=True)


_signatures: WeakKeyDictionary[Callable[..., Any], list[str]] = WeakKeyDictionary()
"""Names of the parameters of each forward that was asked for: reading a signature costs more than calling it."""


def parameter_names(module: nn.Module) -> list[str]:
    """Of its forward; none where they cannot be told."""
    bound = module.forward
    function = getattr(bound, "__func__", bound)
    names = _signatures.get(function)
    if names is None:
        try:
            names = list(inspect.signature(function).parameters)
        except (TypeError, ValueError):
            names = []
        _signatures[function] = names
    return names[1:] if function is not bound else names


def _may_attend(module: nn.Module) -> bool:
    """Whether attention may be called in this module's own forward: torch's own layers but a few never do."""
    kind = type(module)
    return not kind.__module__.startswith("torch.nn.modules.") or isinstance(module, (nn.MultiheadAttention, *_LAYERS))


def _other_sequence(arguments: dict[str, Any]) -> OtherSequence | None:
    """The other sequence among a module's arguments: by its name, or else any that is shorter than the first."""
    sequences = {name: part for name, part in arguments.items() if _tokens(part)}
    if len(sequences) < 2:
        return None
    first = next(iter(sequences.values()))
    own = sequences.get("hidden_states", first)
    for name in (*CROSS_ARGUMENTS, *OTHER_SEQUENCES):
        other = sequences.get(name)
        if other is not None and other is not own:
            return OtherSequence(_tokens(own), _tokens(other), name)
    shorter = [_tokens(part) for part in sequences.values() if part.dim() > 2 and _tokens(part) < _tokens(own)]
    return OtherSequence(_tokens(own), shorter[0], None) if shorter else None


def _tokens(sequence: Any) -> int:
    """Tokens of a sequence [..., tokens, size] of numbers, or of ids [B, tokens]; 0 where it is none."""
    if not isinstance(sequence, Tensor) or sequence.dim() < 2 or sequence.dtype == torch.bool:
        return 0
    return sequence.shape[-2 if sequence.is_floating_point() else -1]


def _tokens_of(module: nn.Module, arguments: dict[str, Any], given: tuple[Any, ...]) -> Tokens:
    """What a model is called with, by name and as it was ``given``."""
    own, encoder = (_token_mask(arguments.get(name)) for name in ("attention_mask", "encoder_attention_mask"))
    unclear = own is not None and _may_mean_either(module, arguments.get("attention_mask"))
    if own is not None and unclear:
        own = own | ~own.any()  # no batch is all padding
    for padding in map(arguments.get, _PADDING.get(own_class(module), ())):
        own = ~hides(padding) if isinstance(padding, Tensor) and _token_mask(padding) is not None else own
    past = _past((arguments.get("cache"), *given))
    documents = documents_of_call(arguments, None if unclear else own)
    ids, ruled = _token_ids(module, arguments), follows_rule(arguments)
    return Tokens(own, encoder, past, unclear=unclear, ids=ids, documents=documents, ruled=ruled)


def _token_ids(module: nn.Module, arguments: dict[str, Any]) -> dict[str, Tensor] | None:
    """Arguments that are token ids, [B, tokens]: by their names in transformers, any whole numbers elsewhere."""
    if isinstance(module, _LAYERS):
        return {}
    matrices = {name: part for name, part in arguments.items() if isinstance(part, Tensor) and part.dim() == 2}
    found = {name: part for name, part in matrices.items() if part.dtype in _INTEGERS and "mask" not in name}
    named = {name: part for name, part in found.items() if name.endswith(_IDS)}
    if "pixel_values" not in arguments and not is_pretrained(module):
        return named or found
    return named if named or arguments.get("inputs_embeds") is not None else None


def _past(arguments: Iterable[Any]) -> int | Tensor | None:
    """Tokens that the cache among some arguments holds; None where there is none, or it does not say.

    It is told by what it is: transformers 5.24 calls it ``cache``, and of two that one counts.
    """
    cache = next((one for one in arguments if callable(getattr(one, "get_seq_length", None))), None)
    if cache is None:
        return None
    try:
        found = cache.get_seq_length()
    except Exception:  # a cache of another kind of layer: whatever it raises, it must not end somebody's forward pass
        return None
    return found.clone() if isinstance(found, Tensor) else found if isinstance(found, int) else None


def _token_mask(mask: Any) -> Tensor | None:
    return mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None


def _may_mean_either(module: nn.Module, mask: Any) -> bool:
    """Whether True in this mask may mean hidden: in transformers, and as a number anywhere, it is a real token."""
    return mask.dtype == torch.bool and not is_pretrained(module)
