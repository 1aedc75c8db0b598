"""A batch as the arguments of a model by name, and which of them holds the tokens: what may be exchanged or padded."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from attemper.errors import InputError
from attemper.sites.names import unwrap

SECOND = ("decoder_input_ids", "decoder_inputs_embeds", "tgt")
"""Names of the sequence that a decoder writes, beside the one that its encoder reads."""
HIDING = ("src_key_padding_mask", "key_padding_mask", "padding_mask")
"""Names of bool masks in which True hides, as in torch."""
_MASKS = ("mask", "position", "type_ids", "label", "seq", "length", "cache")
"""Parts of names of arguments that are no tokens."""


@dataclass(frozen=True)
class TokenBatch:
    """The arguments of one forward pass. B sequences of T tokens."""

    arguments: Mapping[str, Any]
    positional: int
    """How many of them are given by place."""
    tokens: str
    """The argument that holds the tokens: ids [B, T], or vectors [B, T, E]."""
    second: str | None = None
    """The same for the decoder of an encoder-decoder."""

    @classmethod
    def of(cls, where: str, model: nn.Module, batch: Any) -> TokenBatch:
        """
        Raises:
            InputError: the batch is no dict, tuple, list or tensor, or holds no tokens.
        """
        if isinstance(batch, Mapping):
            arguments, positional = {str(name): part for name, part in batch.items()}, 0
        elif isinstance(batch, Tensor | tuple | list):
            parts = [batch] if isinstance(batch, Tensor) else list(batch)
            named = list(_parameters(unwrap(model)))[: len(parts)]
            names = [*named, *(f"argument {number + 1}" for number in range(len(named), len(parts)))]
            arguments, positional = dict(zip(names, parts, strict=True)), len(parts)
        else:
            raise InputError(
                f"{where}(batch) must be a dict (model(**batch)), a tuple or list (model(*batch)) or a tensor "
                f"(model(batch)), got {type(batch).__name__}."
            )
        first = (one for one in model.modules() if getattr(one, "batch_first", True) is False)
        if type(unwrap(model)).__module__.startswith("torch.nn.") and next(first, None) is not None:
            raise InputError(
                f"{where}: this {type(unwrap(model)).__name__} takes tokens first: make it with batch_first=True, or "
                "wrap it in a module that takes [B, T, E]."
            )
        tokens = next(_tokens(arguments), None)
        if tokens is None:
            raise InputError(
                f"{where}(batch) holds no tokens: expected ids [B, T] of whole numbers, or vectors [B, T, E], among "
                f"{', '.join(arguments) or 'its arguments'}."
            )
        return cls(arguments, positional, tokens, next((name for name in SECOND if name in arguments), None))

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    @property
    def shape(self) -> tuple[int, int]:
        """B and T."""
        rows, tokens = self.arguments[self.tokens].shape[:2]
        return rows, tokens

    @property
    def lengths(self) -> dict[str, int]:
        """Tokens of each sequence, by the argument that holds it."""
        names = [self.tokens, *((self.second,) if self.second else ())]
        return {name: self.arguments[name].shape[1] for name in names}

    @property
    def device(self) -> torch.device:
        return self.arguments[self.tokens].device

    def with_arguments(self, **changes: Any) -> TokenBatch:
        """The same batch with other arguments, or some more."""
        return replace(self, arguments={**self.arguments, **changes})

    def call(self, model: nn.Module) -> Any:
        """What the model gives for it."""
        parts = list(self.arguments.items())
        return model(*(part for _, part in parts[: self.positional]), **dict(parts[self.positional :]))

    def of_sequences(self, chosen: Tensor) -> TokenBatch:
        """The batch of some of its sequences, by number; tensors of another first size stay as they are."""
        batch = self.shape[0]

        def pick(part: Any) -> Any:
            fits = isinstance(part, Tensor) and part.dim() and part.shape[0] == batch
            return part.index_select(0, chosen.to(part.device)) if fits else part

        return replace(self, arguments={name: pick(part) for name, part in self.arguments.items()})


def takes(model: nn.Module, name: str) -> bool:
    """Whether the forward of a model has a parameter of this name."""
    return name in _parameters(unwrap(model))


def _parameters(model: nn.Module) -> Mapping[str, Any]:
    try:
        return inspect.signature(model.forward).parameters
    except (TypeError, ValueError):
        return {}


def _tokens(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Names of the arguments that may hold the tokens, the likeliest first."""
    tensors = {name: part for name, part in arguments.items() if isinstance(part, Tensor) and name not in SECOND}
    plain = {name: part for name, part in tensors.items() if not any(one in name for one in _MASKS)}
    ids = [name for name, part in plain.items() if part.dim() == 2 and not _is_vector(part) and part.numel()]
    yield from sorted(ids, key=lambda name: not name.endswith("input_ids"))
    yield from (name for name, part in plain.items() if part.dim() == 3 and _is_vector(part) and part.numel())
    yield from (name for name, part in plain.items() if part.dim() > 3 and _is_vector(part) and part.numel())


def _is_vector(part: Tensor) -> bool:
    return part.is_floating_point()
