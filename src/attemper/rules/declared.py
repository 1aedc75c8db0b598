"""What each row of a batch should see: what arguments, the batch and the configuration declare, in this order.

Not what a layer's own attributes say, as ``expected_keys`` of a watch reads them: a layer is held against its model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from attemper.call.expected import documents_of_numbers, documents_of_positions, documents_of_starts
from attemper.errors import InputError
from attemper.readings.labels import layer_of, pattern_of
from attemper.rules.token_batch import HIDING, TokenBatch
from attemper.sites.declared import follows_rule
from attemper.sites.find import all_sites
from attemper.sites.names import Names, unwrap
from attemper.text import count

Value = TypeVar("Value")
RULES_OF_KEYS = ("causal", "documents", "padding", "window")
"""Rules that say which keys a row may see."""
_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_CAUSAL_CLASS = re.compile(r"(ForCausalLM|LMHeadModel)$")


@dataclass(frozen=True)
class Said(Generic[Value]):
    """Something that is declared, and where."""

    value: Value
    source: str


@dataclass(frozen=True)
class Window:
    """The keys near a row: ``size`` of them up to its own place and as many behind it, or those of its own chunk."""

    size: int
    chunked: bool = False

    def __str__(self) -> str:
        return f"chunks of {self.size}" if self.chunked else count(self.size, "key")


@dataclass(frozen=True)
class Declaration:
    """What rows of a batch [B, T] should see. Each part is None where nothing declares it."""

    shape: tuple[int, int]
    documents: Said[Tensor] | None = None
    """[B, T]: the number of each token's document, below 0 for none."""
    causal: Said[Mapping[str, bool]] | None = None
    """By the pattern of a site's name (``pattern_of``); "" for all others."""
    window: Said[tuple[Window | None, ...]] | None = None
    """Of each layer; of one alone it is for all. None: a layer without."""
    padding: Said[Tensor] | None = None
    """[B, T] bool: which are tokens."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """Rule -> why nothing declares it, where that is not plain."""
    whole: bool = True
    """Whether rows see all that these allow: the batch holds no other mask, and no kinds of tokens."""
    second: Declaration | None = None
    """Of the tokens that the decoder of an encoder-decoder writes."""

    def side(self, site: str) -> Declaration:
        """What holds for the sequence that a self-attention of this name is over."""
        decoder = self.second is not None and (self.is_causal(site) or "decoder" in site)
        return self.second if decoder and self.second is not None else self

    def is_causal(self, site: str) -> bool:
        """Whether rows of a site see no later key."""
        values = {} if self.causal is None else self.causal.value
        return values.get(pattern_of(site.partition("#")[0]), values.get("", False))

    def window_of(self, site: str) -> Window | None:
        """The window of a site, by the number of its layer; None for none."""
        windows = () if self.window is None else self.window.value
        if len(windows) == 1:
            return windows[0]
        layer = layer_of(site)
        return windows[layer] if layer is not None and layer < len(windows) else None

    def allows(self, rule: str, site: str, rows: Tensor, *, least: bool = False) -> Tensor | None:
        """[B or 1, R, T] bool: the keys that ``rows`` [R] of a self-attention over the T tokens may see by one rule;
        None where it does not bind this site.

        Args:
            rule: "causal", "documents", "window" or "padding".
            least: only the keys that they have to see. Windows to both sides reach ``size`` keys, or size - 1, by
                whoever wrote them.
        """
        keys = torch.arange(self.shape[1], device=rows.device)
        if rule == "causal":
            return (keys <= rows[:, None])[None] if self.is_causal(site) else None
        if rule == "documents" and self.documents is not None:
            documents = self.documents.value.to(rows.device)
            return documents[:, rows, None] == documents[:, None]
        if rule == "padding" and self.padding is not None:
            return self.padding.value.to(rows.device)[:, None].expand(-1, len(rows), -1)
        window = self.window_of(site)
        if rule != "window" or window is None:
            return None
        if not window.chunked:
            reach = window.size - (least or self.is_causal(site))
            return ((rows[:, None] - keys).abs() <= reach)[None]
        first = torch.zeros(1, 1, dtype=torch.int64, device=rows.device)
        if self.padding is not None:
            first = self.padding.value.to(rows.device).int().argmax(1, keepdim=True)
        chunk = (keys - first).div(window.size, rounding_mode="floor")
        return chunk[:, rows, None] == chunk[:, None]

    def expectation(self, site: str, rows: Tensor, *, least: bool = False) -> Tensor:
        """[B or 1, R, T] bool: the keys that ``rows`` should see by all rules together; ``least`` as in ``allows``."""
        found = torch.ones((1, len(rows), self.shape[1]), dtype=torch.bool, device=rows.device)
        for rule in RULES_OF_KEYS:
            allowed = self.allows(rule, site, rows, least=least)
            found = found if allowed is None else found & allowed
        return found


def declare(
    where: str,
    model: nn.Module,
    names: Names,
    batch: TokenBatch,
    *,
    documents: Tensor | None = None,
    causal: bool | None = None,
    window: int | None = None,
    padding: Tensor | None = None,
) -> Declaration:
    """What a batch's rows should see.

    Args:
        where: the public function, for messages.
        names: ``names_of(model)``.
        documents, causal, window, padding: as in :func:`attemper.check`; they come before the batch and the model.

    Raises:
        InputError: one of them is of another shape or type.
    """
    config, notes = text_config(model), {}
    real = _padding(where, model, batch, padding)
    rows = _causal(where, model, names, config, batch, causal, notes)
    second = None
    if batch.second is not None:
        marks = batch.arguments.get("decoder_attention_mask")
        own = None if not isinstance(marks, Tensor) else Said(marks > 0, "decoder_attention_mask of the batch")
        second = Declaration((batch.shape[0], batch.lengths[batch.second]), causal=rows, padding=own)
    parts = _documents(where, batch, documents, real)
    whole = follows_rule(batch.arguments)
    return Declaration(batch.shape, parts, rows, _window(where, config, window), real, notes, whole, second)


def text_config(model: nn.Module) -> Any:
    """The configuration of the model, or of the part of it that reads text."""
    config = getattr(unwrap(model), "config", None)
    text = getattr(config, "get_text_config", None)
    return text() if callable(text) and not getattr(config, "is_encoder_decoder", False) else config


def _documents(where: str, batch: TokenBatch, given: Any, real: Said[Tensor] | None) -> Said[Tensor] | None:
    shape, arguments = batch.shape, batch.arguments
    if given is not None:
        return Said(_given_documents(where, given, shape), "documents=")
    for name in ("cu_seq_lens_q", "cu_seqlens_q", "cu_seqlens", "cu_seq_lens"):
        starts = arguments.get(name)
        if isinstance(starts, Tensor) and starts.dim() == 1 and len(starts) > 2:
            return Said(_of_starts(starts, shape), f"{name} of the batch")
    marks = None if real is None else real.value
    positions, mask, numbers = (arguments.get(name) for name in ("position_ids", "attention_mask", "seq_idx"))
    if isinstance(positions, Tensor) and positions.dim() == 2 and shape[1] > 1:
        found = documents_of_positions(positions.expand(shape), marks)
        if bool(found.any()):
            return Said(found, "position_ids of the batch, which start anew")
    if isinstance(mask, Tensor) and tuple(mask.shape) == shape and mask.dtype in _WHOLE and int(mask.max()) > 1:
        return Said(documents_of_numbers(mask), "attention_mask of the batch, which numbers documents")
    if isinstance(numbers, Tensor) and tuple(numbers.shape) == shape:
        return Said(numbers.long(), "seq_idx of the batch")
    return None


def _given_documents(where: str, given: Any, shape: tuple[int, int]) -> Tensor:
    whole = isinstance(given, Tensor) and given.dtype in _WHOLE
    if whole and tuple(given.shape) == shape:
        return given.long()
    ends = (shape[1], shape[0] * shape[1])
    if whole and given.dim() == 1 and len(given) > 1 and int(given[0]) == 0 and int(given[-1]) in ends:
        return _of_starts(given, shape)
    got = f"{list(given.shape)} {given.dtype}" if isinstance(given, Tensor) else type(given).__name__
    raise InputError(
        f"{where}(documents=...) must be the number of each token's document, whole numbers {list(shape)}, or "
        f"cu_seqlens [documents + 1] from 0 to {shape[1]}; got {got}."
    )


def _of_starts(starts: Tensor, shape: tuple[int, int]) -> Tensor:
    """The documents of tokens by where each begins, in a sequence or in the whole batch laid end to end."""
    if int(starts[-1]) == shape[1]:
        return documents_of_starts(starts, shape[1]).expand(shape)
    return documents_of_starts(starts, shape[0] * shape[1]).view(shape)


def _padding(where: str, model: nn.Module, batch: TokenBatch, given: Any) -> Said[Tensor] | None:
    shape = batch.shape
    if given is not None:
        if not isinstance(given, Tensor) or tuple(given.shape) != shape or given.is_floating_point():
            got = f"{list(given.shape)} {given.dtype}" if isinstance(given, Tensor) else type(given).__name__
            raise InputError(
                f"{where}(padding=...) must be {list(shape)}, bool or whole numbers, 1 for a token and 0 for padding; "
                f"got {got}."
            )
        return Said(given.bool(), "padding=")
    mask = batch.arguments.get("attention_mask")
    library = type(unwrap(model)).__module__.startswith("transformers.") or hasattr(unwrap(model), "config")
    if isinstance(mask, Tensor) and tuple(mask.shape) == shape and (mask.dtype != torch.bool or library):
        return Said(mask > 0 if mask.dtype != torch.bool else mask, "attention_mask of the batch")
    for name in HIDING:
        mask = batch.arguments.get(name)
        if isinstance(mask, Tensor) and tuple(mask.shape) == shape:
            return Said(~mask if mask.dtype == torch.bool else mask == 0, f"{name} of the batch")
    return None


def _causal(
    where: str, model: nn.Module, names: Names, config: Any, batch: TokenBatch, given: Any, notes: dict[str, str]
) -> Said[Mapping[str, bool]] | None:
    if given is not None and not isinstance(given, bool):
        raise InputError(f"{where}(causal=...) must be True, False or None, got {given!r}.")
    stacks: dict[str, list[bool]] = {}
    for site in all_sites(names):
        stacks.setdefault(pattern_of(site.name), []).append(bool(getattr(site.module, "is_causal", False)))
    own = {stack: 2 * sum(flags) > len(flags) for stack, flags in stacks.items()}
    both = batch.second is not None
    if given is not None:
        kept = {stack: False for stack, causal in own.items() if both and not causal}
        return Said({"": given, **kept}, "causal=") if given else Said({"": False}, "causal=")
    arguments = batch.arguments
    if arguments.get("is_causal") is True:
        return Said({"": True}, "is_causal of the batch")
    for name, mask in arguments.items():
        if "mask" in name and isinstance(mask, Tensor) and not both and _is_causal_mask(mask, batch.shape):
            return Said({"": True}, f"{name} of the batch")
    if hasattr(getattr(unwrap(model), "config", None), "vision_config") and "token_type_ids" in arguments:
        notes["causal"] = "token_type_ids of the batch may open a prefix; pass causal=True if they do not"
        return None
    if any(own.values()):
        return Said(own, "is_causal of the model's attention")
    for name in ("is_decoder", "is_causal"):
        if getattr(config, name, False) is True and not both:
            return Said({"": True}, f"config.{name}")
    classes = [type(unwrap(model)).__name__, *(getattr(config, "architectures", None) or ())]
    if not own and any(map(_CAUSAL_CLASS.search, classes)):
        return Said({"": True}, f"the class {next(one for one in classes if _CAUSAL_CLASS.search(one))}")
    return None


def _is_causal_mask(mask: Tensor, shape: tuple[int, int]) -> bool:
    """Whether a mask over all tokens hides what lies behind a row, and only that."""
    tokens = shape[1]
    if mask.shape[-2:] != (tokens, tokens) or mask.numel() != tokens * tokens or tokens < 2:
        return False
    mask = mask.reshape(tokens, tokens)
    later = torch.ones_like(mask, dtype=torch.bool).triu(1)
    hidden = mask <= torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else mask.bool()
    return bool((hidden == later).all()) or (not mask.is_floating_point() and bool((hidden != later).all()))


def _window(where: str, config: Any, given: Any) -> Said[tuple[Window | None, ...]] | None:
    if given is not None:
        if isinstance(given, bool) or not isinstance(given, int) or given < 1:
            raise InputError(
                f"{where}(window=...) must be how many keys a row sees, its own among them: an int of at least 1; got "
                f"{given!r}."
            )
        return Said((Window(given),), "window=")
    size, chunk = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    size = size if isinstance(size, int) and size > 0 else None
    kinds = getattr(config, "layer_types", None)
    if isinstance(kinds, list | tuple) and kinds:
        known = {"sliding_attention": size, "chunked_attention": chunk}
        windows = [(known.get(kind), kind == "chunked_attention") for kind in kinds]
        return Said(
            tuple(None if one is None else Window(one, chunked) for one, chunked in windows), "config.layer_types"
        )
    kinds, local = (getattr(config, name, None) for name in ("attention_layers", "window_size"))
    if isinstance(kinds, list | tuple) and isinstance(local, int):
        return Said(tuple(Window(local) if kind == "local" else None for kind in kinds), "config.attention_layers")
    if not hasattr(config, "sliding_window"):
        return None
    used = size is not None and getattr(config, "use_sliding_window", True) is not False
    return Said((Window(size) if used and size is not None else None,), "config.sliding_window")
