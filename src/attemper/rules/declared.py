"""What each row of a batch should see: what arguments, the batch and the configuration declare, in this order.

Not what a layer's own attributes say, as ``expected_keys`` of a watch reads them: a layer is held against its model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from attemper.call.attn_mask import hides
from attemper.call.visible_keys import Rule, expected_ends
from attemper.errors import InputError
from attemper.readings.labels import layer_of, pattern_of
from attemper.rules.token_batch import HIDING, TokenBatch
from attemper.sites.declared import (
    STARTS,
    Window,
    declared_documents,
    documents_between,
    follows_rule,
    is_whole,
    windows_of_config,
)
from attemper.sites.find import all_sites
from attemper.sites.names import Names, unwrap

Value = TypeVar("Value")
RULES_OF_KEYS = ("causal", "documents", "padding", "window")
"""Rules that say which keys a row may see."""
_CAUSAL_CLASS = re.compile(r"(ForCausalLM|LMHeadModel)$")
_TELLING = {"position_ids": ", which start anew", "attention_mask": ", which numbers documents"}


@dataclass(frozen=True)
class Said(Generic[Value]):
    """Something that is declared, and where."""

    value: Value
    source: str


@dataclass(frozen=True)
class Declaration:
    """What rows of a batch [B, T] should see. A part is None where nothing declares it."""

    shape: tuple[int, int]
    causal: Said[Mapping[str, bool]]
    """By the pattern of a site's name (``pattern_of``); "" for all others. Empty, with the reason as its source, where
    nothing declares it.
    """
    padding: Said[Tensor] | None = None
    """[B, T] bool: which are tokens."""
    documents: Said[Tensor] | None = None
    """[B, T]: the number of each token's document, below 0 for none."""
    window: Said[tuple[Window | str | None, ...]] | None = None
    """Of each layer; of one alone it is for all. None: a layer without; a str: why it is not known."""
    whole: bool = True
    """Whether rows see all that these allow: the batch holds no other mask, and no kinds of tokens."""
    second: Declaration | None = None
    """Of the tokens that the decoder of an encoder-decoder writes."""

    def side(self, site: str) -> Declaration:
        """What holds for the sequence that a self-attention of this name is over."""
        return self.second if self.second is not None and (self.is_causal(site) or "decoder" in site) else self

    def is_causal(self, site: str) -> bool:
        """Whether rows of a site see no later key."""
        return self.causal.value.get(pattern_of(site.partition("#")[0]), self.causal.value.get("", False))

    def window_of(self, site: str) -> Window | str | None:
        """The window of a site, by the number of its layer; None for none, a str where it is not known."""
        windows = ("nothing declares it",) if self.window is None else self.window.value
        layer = 0 if len(set(windows)) == 1 else layer_of(site)
        return windows[layer] if layer is not None and layer < len(windows) else "no layer of this number"

    def allows(self, rule: str, site: str, rows: Tensor, *, cross: bool = False, least: bool = False) -> Tensor | None:
        """[B or 1, R, T] bool: the keys that ``rows`` [R] of an attention over the T tokens may see by one rule; None
        where it does not bind this site.

        Args:
            rule: one of ``RULES_OF_KEYS``.
            cross: whether rows are of another sequence, for which keys have no places, only padding.
            least: only the keys that they have to see. Windows to both sides reach ``size`` keys, or size - 1, by
                whoever wrote them.
        """
        parts = (self.padding, self.documents)
        real, documents = (None if said is None else said.value.to(rows.device) for said in parts)
        window, law = self.window_of(site), None
        if rule == "padding" and real is not None:
            return real[:, None].expand(-1, len(rows), -1)
        if cross:
            return None
        if rule == "documents" and documents is not None:
            return documents[:, rows, None] == documents[:, None]
        if rule == "causal" and self.is_causal(site):
            law = Rule(causal=True)
        elif rule == "window" and isinstance(window, Window):
            reach = window.size - (least or self.is_causal(site))
            chunk = Rule(chunk=window.size, tokens=real, documents=documents)  # counted from where a document begins
            law = chunk if window.chunked else Rule(left=reach, right=reach)
        if law is None:
            return None
        low, high = (end[:, rows, None] for end in expected_ends(law, self.shape[1], self.shape[1], rows.device))
        keys = torch.arange(self.shape[1], device=rows.device)
        return (keys >= low) & (keys < high)

    def expectation(self, site: str, rows: Tensor, *, least: bool = False) -> Tensor:
        """[B or 1, R, T] bool: the keys that ``rows`` should see by all rules together; ``least`` as in ``allows``."""
        found = torch.ones((1, len(rows), self.shape[1]), dtype=torch.bool, device=rows.device)
        for rule in RULES_OF_KEYS:
            allowed = self.allows(rule, site, rows, least=least)
            found = found if allowed is None else found & allowed
        return found


def declare(model: nn.Module, names: Names, batch: TokenBatch, given: Mapping[str, Any]) -> Declaration:
    """What a batch's rows should see.

    Args:
        names: ``names_of(model)``.
        given: the arguments of :func:`attemper.check` by the names of rules; they come before the batch and the model.
    """
    config = text_config(model)
    real, rows = _padding(model, batch, given["padding"]), _causal(model, names, config, batch, given["causal"])
    second = None
    if batch.second is not None:
        marks = batch.arguments.get("decoder_attention_mask")
        own = None if not isinstance(marks, Tensor) else Said(marks > 0, "decoder_attention_mask of the batch")
        second = Declaration((batch.shape[0], batch.lengths[batch.second]), rows, own)
    parts, windows = _documents(batch, given["documents"], real), _window(config, given["window"])
    return Declaration(batch.shape, rows, real, parts, windows, follows_rule(batch.arguments), second)


def text_config(model: nn.Module) -> Any:
    """The configuration of the model, or of the part of it that reads text."""
    config = getattr(unwrap(model), "config", None)
    text = getattr(config, "get_text_config", None)
    return text() if callable(text) and not getattr(config, "is_encoder_decoder", False) else config


def _documents(batch: TokenBatch, given: Any, real: Said[Tensor] | None) -> Said[Tensor] | None:
    shape, numbers = batch.shape, _numbers(given)
    if given is None:
        for name in STARTS:
            _refuse_falls(f"{name} of the batch", _numbers(batch.arguments.get(name)))
        for name, found in declared_documents(batch.arguments, shape, None if real is None else real.value):
            if found.shape[1] == shape[1] and bool(found.any()):
                return Said(found.expand(shape), f"{name} of the batch{_TELLING.get(name, '')}")
        return None
    if is_whole(given, 2) and tuple(given.shape) == shape:
        return Said(given.long(), "documents=")
    if len(numbers) > 1 and numbers[0] == 0 and numbers[-1] in (shape[1], shape[0] * shape[1]):
        _refuse_falls("documents=", numbers)
        if isinstance(given, Tensor):
            return Said(documents_between(given.cpu(), shape).expand(shape), "documents=")
    raise InputError(
        f"check(documents=...) must be the number of each token's document, whole numbers {list(shape)}, or "
        f"cu_seqlens [documents + 1] from 0 to {shape[1]}; got {_description(given)}.{_as_tensor(numbers, shape[1])}"
    )


def _numbers(given: Any) -> list[int]:
    """A list of whole numbers, or a tensor of them [N]; none of anything else."""
    numbers = list(given) if isinstance(given, list | tuple) else given.tolist() if is_whole(given, 1) else []
    return numbers if all(type(number) is int for number in numbers) else []


def _refuse_falls(name: str, starts: list[int]) -> None:
    for place, (before, number) in enumerate(pairwise(starts)):
        if number < before:
            raise InputError(
                f"check: {name} must be sorted: entry {place + 1} is {number}, and the one before it is {before}. "
                "cu_seqlens say where each document begins, and where the last one ends."
            )


def _as_tensor(numbers: list[int], tokens: int) -> str:
    """The end of a message: a list of the documents' lengths, or of where each begins, as the tensor that is taken."""
    if not numbers or not all(0 <= number <= tokens for number in numbers):
        return ""
    begins = numbers if numbers[0] == 0 and numbers[-1] == tokens else [0, *accumulate(numbers)]
    return f" Pass torch.tensor({begins}), where each document begins and the last one ends." * (begins[-1] == tokens)


def _padding(model: nn.Module, batch: TokenBatch, given: Any) -> Said[Tensor] | None:
    shape = batch.shape
    if given is not None:
        if not isinstance(given, Tensor) or tuple(given.shape) != shape or given.is_floating_point():
            raise InputError(
                f"check(padding=...) must be {list(shape)}, bool or whole numbers, 1 for a token and 0 for padding; "
                f"got {_description(given)}."
            )
        return Said(given.bool(), "padding=")
    for name in ("attention_mask", *HIDING):
        mask = batch.arguments.get(name)
        if not isinstance(mask, Tensor) or tuple(mask.shape) != shape:
            continue
        if name in HIDING or mask.dtype != torch.bool or hasattr(unwrap(model), "config"):
            return Said(~mask.bool() if name in HIDING else mask > 0, f"{name} of the batch")
    return None


def _description(given: Any) -> str:
    return f"{list(given.shape)} {given.dtype}" if isinstance(given, Tensor) else type(given).__name__


def _causal(model: nn.Module, names: Names, config: Any, batch: TokenBatch, given: Any) -> Said[Mapping[str, bool]]:
    if given is not None and not isinstance(given, bool):
        raise InputError(f"check(causal=...) must be True, False or None, got {given!r}.")
    stacks: dict[str, list[bool]] = {}
    for site in all_sites(names):
        stacks.setdefault(pattern_of(site.name), []).append(bool(getattr(site.module, "is_causal", False)))
    own = {stack: 2 * sum(flags) > len(flags) for stack, flags in stacks.items()}
    both, arguments = batch.second is not None, batch.arguments
    if given is not None:
        kept = {stack: False for stack, causal in own.items() if both and not causal}
        return Said({"": given, **kept}, "causal=")
    if arguments.get("is_causal") is True:
        return Said({"": True}, "is_causal of the batch")
    for name, mask in arguments.items():
        if "mask" in name and isinstance(mask, Tensor) and not both and _is_causal_mask(mask, batch.shape[1]):
            return Said({"": True}, f"{name} of the batch")
    if hasattr(getattr(unwrap(model), "config", None), "vision_config") and "token_type_ids" in arguments:
        return Said({}, "token_type_ids of the batch may open a prefix; pass causal=True if they do not")
    if any(own.values()):
        return Said(own, "is_causal of the model's attention")
    for name in ("is_decoder", "is_causal"):
        if getattr(config, name, False) is True and not both:
            return Said({"": True}, f"config.{name}")
    classes = [type(unwrap(model)).__name__, *(getattr(config, "architectures", None) or ())]
    named = next((one for one in classes if _CAUSAL_CLASS.search(one)), None)
    return Said({"": True}, f"the class {named}") if named and not own else Said({}, "nothing declares it")


def _is_causal_mask(mask: Tensor, tokens: int) -> bool:
    """Whether a mask over all tokens hides what lies behind a row, and only that."""
    if mask.shape[-2:] != (tokens, tokens) or mask.numel() != tokens * tokens or tokens < 2:
        return False
    hidden = hides(mask) if mask.is_floating_point() else mask.bool()
    later = torch.ones_like(hidden).triu(1).expand(mask.shape)
    return torch.equal(hidden, later) or (not mask.is_floating_point() and torch.equal(hidden, ~later))


def _window(config: Any, given: Any) -> Said[tuple[Window | str | None, ...]] | None:
    if given is None:
        field, windows = windows_of_config(config)
        return Said(windows, f"config.{field}") if windows else None
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise InputError(
            f"check(window=...) must be how many keys a row sees, its own among them: an int of at least 1; got "
            f"{given!r}."
        )
    return Said((Window(given),), "window=")
