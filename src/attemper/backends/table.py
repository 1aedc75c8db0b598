"""Which attention backends exist on this machine and what each can do; one is resolved, never silently.

A backend that the caller names is used or refused. ``"auto"`` takes the first of the table that can do what was asked.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from attemper.checks import did_you_mean
from attemper.errors import BackendError, InputError

FEATURES = (
    "mask",
    "bias",
    "causal",
    "window",
    "gqa",
    "softcap",
    "sink",
    "dropout",
    "temperature",
    "varlen",
    "rows",
    "second_pass",
    "score_variance",
    "self_weight",
    "span_mass",
    "statistics_gradient",
    "second_derivative",
    "derivative_in_graph",
    "normalizer",
)
"""What a call can ask for.

``second_pass``: gini, key_mass (they need all keys of a row). ``score_variance``, ``self_weight``, ``span_mass``: the
statistics of these names. ``second_derivative``: the gradient of a gradient.
``derivative_in_graph``: ``torch.func`` or forward mode inside ``torch.compile``. ``normalizer``: another than softmax.
"""


COMPILED_NORMALIZERS = ("softmax", "sparsemax", "entmax15", "entmax", "topk", "threshold", "sigmoid")
"""What the compiled kernels know, in the order of their codes (``enum Normalizer`` of ``native/source/solve.h``)."""


@dataclass(frozen=True)
class Inputs:
    """The tensors and the normalizer of a call, as far as a backend may be unable to take them."""

    dtype: str = "float32"
    device: str = "cpu"
    size: int = 0
    """The larger of the head sizes of keys and values."""
    normalizer: str = "softmax"
    """The kernel of the normalizer: "softmax" also with a sink or a scale."""


UNUSABLE: dict[str, str] = {}
"""Name -> why a backend that is there cannot be used after all: what was found when it was loaded."""


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
    largest: int | None = None
    """The largest head size it takes."""
    normalizers: tuple[str, ...] | None = None
    """The normalizers that its kernels know; None: all."""
    plain: bool = False
    """Whether it is plain operators of PyTorch, which autograd and exporters know: it needs no operator of its own."""
    waits: bool = True
    """Whether a call may read numbers off the device, such as where packed documents start."""
    gathers: bool = False
    """Whether its kernels take some rows of the query as they load them; without a gradient."""
    sums: bool = False
    """Whether it adds statistics to sums per head on the device."""
    direct: bool = False
    """Whether it computes from addresses alone: a call may go past PyTorch's dispatcher, and so may its statistics."""
    joins_heads: bool = False
    """Whether the output of softmax lies as [B, Q, H, E] in memory, so that joining heads copies nothing."""

    def reason(self, needed: frozenset[str], given: Inputs) -> str | None:
        """Why it cannot serve a call with these features and tensors; None where it can."""
        if missing := self.missing or UNUSABLE.get(self.name):
            return missing
        if lacking := needed - self.features:
            return f"it has no {', '.join(sorted(lacking))}"
        if self.normalizers is not None and given.normalizer not in self.normalizers:
            return f"it has no normalizer {given.normalizer!r}"
        if given.dtype not in self.dtypes:
            return f"it takes {', '.join(self.dtypes)}, not {given.dtype}"
        if self.devices not in ("any", given.device):
            return f"its tensors must be on {self.devices}, and these are on {given.device}"
        if self.largest is not None and given.size > self.largest:
            return f"it takes head sizes up to {self.largest}, not {given.size}"
        return None


def _native_missing() -> str | None:
    """Looks for files only: the library is loaded, and torch with it, by the first call."""
    folder = Path(__file__).parent / "native"
    if any(folder.glob("attemper_native_*.so")):
        return None
    reason = folder / "unbuilt.txt"  # written by the install (backends/native/build.py)
    if reason.exists():
        return f"not built: {reason.read_text(encoding='utf-8').strip()}"
    return "not built; in a source tree: python scripts/build_native.py"


def _triton_missing() -> str | None:
    if find_spec("triton") is None:
        return "the package triton is not installed: pip install 'attemper[triton]'"
    return None


def is_interpreted() -> bool:
    """Whether Triton was told to interpret its kernels, on CPU tensors (for tests: thousands of times slower)."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


_ALL_DTYPES = ("float16", "bfloat16", "float32", "float64")
_NOT_COMPILED = frozenset(("dropout", "second_pass", "score_variance", "second_derivative", "derivative_in_graph"))
"""What no compiled backend can do."""
BACKENDS = (
    Backend(
        "blocked",
        "pure PyTorch, block by block, O(block x keys) memory",
        frozenset(FEATURES) - {"second_derivative", "derivative_in_graph"},
        _ALL_DTYPES,
        "any",
    ),
    Backend(
        "reference",
        "dense, float64 inside: the specification",
        frozenset(FEATURES),
        _ALL_DTYPES,
        "any",
        plain=True,
    ),
    Backend(
        "native",
        "C++ for CPUs",
        frozenset(FEATURES) - _NOT_COMPILED,
        ("float16", "bfloat16", "float32"),
        "cpu",
        _native_missing(),
        256,
        COMPILED_NORMALIZERS,
        direct=True,
        joins_heads=True,
    ),
    Backend(
        "triton",
        "Triton for GPUs",
        frozenset(FEATURES) - _NOT_COMPILED,
        ("float16", "bfloat16", "float32"),
        "cuda",
        _triton_missing(),
        256,
        COMPILED_NORMALIZERS,
        waits=False,
        gathers=True,
        sums=True,
    ),
)
"""Every backend this version knows; ``"auto"`` takes the first that can."""


_BY_NAME = {backend.name: backend for backend in BACKENDS}


def by_name(name: str) -> Backend:
    """The backend of this name, which is known to be one."""
    return _BY_NAME[name]


def summing() -> Backend:
    """The backend that adds statistics to sums on the device, whether it is here or not."""
    return next(backend for backend in BACKENDS if backend.sums)


def probe() -> None:
    """Learns which backends cannot be used after all, by loading their libraries: "auto" takes none of those."""
    for backend in BACKENDS:
        if backend.direct and (reason := kernels(backend.name).why_unusable()) is not None:
            UNUSABLE[backend.name] = reason


@cache
def kernels(name: str) -> ModuleType:
    """The functions of a backend, imported with the first call that wants them: its packages may be extras."""
    return import_module(f"attemper.backends.{name}")


def resolve(name: str, needed: frozenset[str], given: Inputs = Inputs()) -> Backend:
    """The backend to use for a call that needs these features, on tensors like these.

    ``"auto"`` prefers a backend that is made for the tensors' device. Interpreted kernels are for whoever names them.

    Raises:
        InputError: no backend has this name.
        BackendError: the named one is missing here or lacks a feature; the message names one that can.
    """
    if name == "auto":
        able = _first_able(needed, given)
        if able is None:
            raise BackendError(f"no backend can do {', '.join(sorted(needed))} in one call.")
        return able
    for backend in BACKENDS:
        if backend.name != name:
            continue
        reason = backend.reason(needed, _inputs_for(backend, given))
        if reason is None:
            return backend
        able = _first_able(needed, given)
        use = "No other backend can either." if able is None else f"Use backend={able.name!r} or 'auto'."
        raise BackendError(f"backend={name!r} cannot serve this call: {reason}. {use}")
    names = ", ".join(repr(backend.name) for backend in BACKENDS)
    raise InputError(
        f"backend must be 'auto' or one of {names}; got {name!r}."
        f"{did_you_mean(name, ('auto', *(backend.name for backend in BACKENDS)))} `attemper doctor` shows what each "
        "can do."
    )


def _first_able(needed: frozenset[str], given: Inputs) -> Backend | None:
    """The first that "auto" may take: of those made for the device, then of the rest."""
    for made_for_it in (True, False):
        for backend in BACKENDS:
            if (backend.devices == given.device) is made_for_it and backend.reason(needed, given) is None:
                return backend
    return None


def check_backend(name: str, device: str | None) -> None:
    """Refuses a backend that no call on ``device`` can have (None: on any device); what a call needs is not asked.

    Raises:
        InputError: no backend has this name.
        BackendError: it is missing on this machine, or not for this device.
    """
    chosen = next((backend for backend in BACKENDS if backend.name == name), None)
    dtype = "float32" if chosen is None else chosen.dtypes[0]
    if device is None:
        device = "cpu" if chosen is None or chosen.devices == "any" else chosen.devices
    resolve(name, frozenset(), Inputs(dtype, device))


def asynchronous(device: str) -> bool:
    """Whether work on this device runs behind the host, so that reading a number off it waits for all of it."""
    return device not in ("cpu", "meta")


def waits(name: str, device: str) -> bool:
    """Whether a call on the backend of this name may wait for ``device`` to read a number off it."""
    return by_name(name).waits or not asynchronous(device)


def _inputs_for(backend: Backend, given: Inputs) -> Inputs:
    """Interpreted, kernels for GPUs take tensors of the CPU."""
    return replace(given, device="cuda") if backend.name == "triton" and is_interpreted() else given
