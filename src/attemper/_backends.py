"""Which attention backends exist on this machine and what each can do; one is resolved, never silently.

A backend that the caller names is used or refused. ``"auto"`` takes the first of the table that can do what was asked.
"""

from __future__ import annotations

from dataclasses import dataclass

from attemper.errors import BackendError, InputError

FEATURES = (
    "mask", "bias", "causal", "window", "gqa", "softcap", "sink", "dropout", "temperature", "varlen", "rows",
    "second_pass", "statistics_gradient", "second_derivative",
)  # fmt: skip
"""What a call can ask for. ``second_pass``: gini, key_mass (they need whole rows). ``second_derivative``: double
backward.
"""


@dataclass(frozen=True)
class Backend:
    """One way to compute attention: its name, one line on it, and the features it has."""

    name: str
    summary: str
    features: frozenset[str]
    dtypes: tuple[str, ...]
    devices: str
    missing: str | None = None
    """Why it cannot be used on this machine; None where it can."""


_ALL_DTYPES = ("float16", "bfloat16", "float32", "float64")
BACKENDS = (
    Backend(
        "blocked",
        "pure PyTorch, block by block, O(block x keys) memory",
        frozenset(FEATURES) - {"second_derivative"},
        _ALL_DTYPES,
        "any",
    ),
    Backend("reference", "dense, float64 inside: the specification", frozenset(FEATURES), _ALL_DTYPES, "any"),
    Backend("native", "C++ for CPUs", frozenset(), (), "cpu", "it is not part of this version"),
    Backend("triton", "Triton for GPUs", frozenset(), (), "cuda", "it is not part of this version"),
)
"""Every backend this version knows; ``"auto"`` takes the first that can."""


def resolve(name: str, needed: frozenset[str]) -> Backend:
    """The backend to use for a call that needs these features.

    Raises:
        InputError: no backend has this name.
        BackendError: the named one is missing here or lacks a feature; the message names one that can.
    """
    able = [backend for backend in BACKENDS if backend.missing is None and needed <= backend.features]
    if name == "auto":
        if not able:
            raise BackendError(f"no backend can do {', '.join(sorted(needed))} in one call.")
        return able[0]
    for backend in BACKENDS:
        if backend.name != name:
            continue
        if backend in able:
            return backend
        reason = backend.missing or f"it has no {', '.join(sorted(needed - backend.features))}"
        use = f"Use backend={able[0].name!r} or 'auto'." if able else "No other backend can either."
        raise BackendError(f"backend={name!r} cannot serve this call: {reason}. {use}")
    names = ", ".join(repr(backend.name) for backend in BACKENDS)
    raise InputError(
        f"backend must be 'auto' or one of {names}; got {name!r}. `attemper doctor` shows what each can do."
    )
