"""A batch as the arguments of a model by name, and which of them holds the tokens: what may be exchanged or padded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from attemper.errors import InputError
from attemper.monitor.checked_model import check_batch
from attemper.sites.names import unwrap
from attemper.sites.padding import parameter_names

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
    def of(cls, model: nn.Module, batch: Any) -> TokenBatch:
        check_batch("check", batch)
        if isinstance(batch, Mapping):
            arguments, positional = {str(name): part for name, part in batch.items()}, 0
        else:
            parts = [batch] if isinstance(batch, Tensor) else list(batch)
            named = parameter_names(unwrap(model))[: len(parts)]
            names = [*named, *(f"argument {number + 1}" for number in range(len(named), len(parts)))]
            arguments, positional = dict(zip(names, parts, strict=True)), len(parts)
        own = unwrap(model)
        last = any(getattr(one, "batch_first", True) is False for one in model.modules())
        if type(own).__module__.startswith("torch.nn.") and last:
            raise InputError(
                f"check: this {type(own).__name__} takes tokens first: make it with batch_first=True, or wrap it in "
                "a module that takes [B, T, E]."
            )
        tokens = _tokens(arguments)
        if tokens is None:
            if any(isinstance(part, Mapping) for part in arguments.values()):
                raise InputError("check(batch) takes one batch, got a list with a dict in it: pass one dict.")
            raise InputError(
                "check(batch) holds no tokens: expected ids [B, T] of whole numbers, or vectors [B, T, E], among "
                f"{', '.join(arguments) or 'its arguments'}."
            )
        return cls(arguments, positional, tokens, next((name for name in SECOND if name in arguments), None))

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    @property
    def shape(self) -> tuple[int, int]:
        """B and T."""
        return self[self.tokens].shape[0], self[self.tokens].shape[1]

    @property
    def lengths(self) -> dict[str, int]:
        """Tokens of each sequence, by the argument that holds it."""
        return {name: self[name].shape[1] for name in (self.tokens, self.second) if name is not None}

    @property
    def device(self) -> torch.device:
        return self.arguments[self.tokens].device

    def with_arguments(self, **changes: Any) -> TokenBatch:
        """The same batch with other arguments, or some more."""
        return replace(self, arguments={**self.arguments, **changes})

    def call(self, model: nn.Module) -> Any:
        parts = list(self.arguments.items())
        return model(*(part for _, part in parts[: self.positional]), **dict(parts[self.positional :]))

    def of_sequences(self, chosen: Tensor) -> TokenBatch:
        """The batch of some of its sequences, by number; tensors of another first size stay as they are."""
        fits = {n for n, one in self.arguments.items() if isinstance(one, Tensor) and one.shape[:1] == self.shape[:1]}
        return self.with_arguments(**{n: self[n].index_select(0, chosen.to(self[n].device)) for n in fits})


def takes(model: nn.Module, name: str) -> bool:
    return name in parameter_names(unwrap(model))


def _tokens(arguments: Mapping[str, Any]) -> str | None:
    """The argument that holds the tokens: ids [B, T], or vectors [B, T, E] or, at last, [B, T, ..., E]."""
    tensors = {name: part for name, part in arguments.items() if isinstance(part, Tensor) and part.numel()}
    plain = [name for name in tensors if name not in SECOND and not any(one in name for one in _MASKS)]
    ids = [name for name in plain if tensors[name].dim() == 2 and not tensors[name].is_floating_point()]
    vectors = [name for name in plain if tensors[name].dim() > 2 and tensors[name].is_floating_point()]
    likely = [
        *sorted(ids, key=lambda one: not one.endswith("input_ids")),
        *sorted(vectors, key=lambda one: tensors[one].dim() > 3),
    ]
    return next(iter(likely), None)
