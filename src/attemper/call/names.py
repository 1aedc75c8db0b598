"""The letters of the kernels' state that statistics need."""

from __future__ import annotations

from collections.abc import Iterable

from attemper.statistics import ONE_PASS

_FIELDS = {
    "entropy": "a", "normalized_entropy": "a", "entropy_with_sink": "a", "mean_logit": "a", "logit_variance": "av",
    "effective_tokens": "c", "first_token_mass": "f", "mean_distance": "t", "gini": "g",
    "score_variance": "uy",
}  # fmt: skip

_ORDER = "mznavcftguy"

_ROW_FIELDS = {
    "entropy": "h", "normalized_entropy": "h", "effective_tokens": "c", "max_weight": "p", "mean_logit": "aw",
    "logit_variance": "v", "mass": "w", "first_token_mass": "f", "support_size": "s", "mean_distance": "t", "gini": "g",
    "score_variance": "y",
}  # fmt: skip
_ROW_ORDER = "mnxwspahvcftgy"


def state_fields(names: Iterable[str]) -> str:
    """The letters of the kernel's state that these statistics follow from."""
    if names is ONE_PASS:
        return "mznavcf"
    letters = set("mzn").union(*(_FIELDS.get(name, "") for name in names))
    return "".join(letter for letter in _ORDER if letter in letters)


def row_fields(names: Iterable[str]) -> str:
    """``state_fields`` where the normalizer is not softmax (docs/design/0008)."""
    # Whether a row has any weight decides about the rest.
    letters = set("mnxw" if tuple(names) else "mnx").union(*(_ROW_FIELDS.get(name, "") for name in names))
    return "".join(letter for letter in _ROW_ORDER if letter in letters)
