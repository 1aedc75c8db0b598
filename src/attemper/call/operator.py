"""``torch.library`` operators over the kernels: schemas and fakes. The only caller of kernels.

``attemper::attention`` returns the output and the *state* of every row (see ``backends/blocked``), from which every
one-pass statistic follows by a formula that autograd differentiates. One backward operator serves them all, and gets no
more letters of the state than there are gradients for. Their gradients are registered by ``call/autograd.py``.
``torch.compile(fullgraph=True)`` sees one opaque node.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from attemper.backends.blocked import backward, forward
from attemper.backends.contract import ROW_NORMALIZERS as ROW_NORMALIZERS
from attemper.backends.contract import UNBOUNDED, Gradients, Packing, Problem, Upstream, letters_of
from attemper.backends.precision import exact
from attemper.backends.sums import COLUMNS as COLUMNS
from attemper.backends.sums import SUMMED as SUMMED
from attemper.backends.sums import WIDTH as WIDTH
from attemper.backends.sums import column as column
from attemper.backends.sums import emptied as emptied
from attemper.backends.sums import empty_sums as empty_sums
from attemper.backends.sums import joined as joined

_COMMON = """Tensor query, Tensor key, Tensor? value, Tensor? mask, Tensor multiplier, Tensor? sink, Tensor? positions,
    Tensor? first_keys, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seed, int left, int right, bool
    bottom_right, float softcap, float dropout_p, SymInt first_tokens, str fields, bool key_mass, bool
    maximum_gradient, int[] tile, str kernel, Tensor? rows, str normalizer, float number"""
_RESULTS = "Tensor output, Tensor state, Tensor key_mass"
_UPSTREAM = "Tensor grad_output, Tensor grad_state, Tensor grad_key_mass, bool[] needs"

LIBRARY = torch.library.Library("attemper", "DEF")
LIBRARY.define(f"attention({_COMMON}) -> ({_RESULTS})", tags=torch.Tag.pt2_compliant_tag)
LIBRARY.define(
    f"attention_backward({_COMMON}, Tensor output, Tensor state, {_UPSTREAM}) -> Tensor[]",
    tags=torch.Tag.pt2_compliant_tag,
)

LIBRARY.define(
    """accumulate(Tensor query, Tensor key, Tensor? mask, Tensor multiplier, Tensor? sink, Tensor? first_keys,
    Tensor? included, Tensor? rows, Tensor flag, Tensor(a!) sums, int left, int right, bool bottom_right,
    float softcap, SymInt first_tokens, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None,
    Tensor(b!)? state=None) -> ()""",
    tags=torch.Tag.pt2_compliant_tag,
)


@dataclass
class Arguments:
    """The operator's arguments, in its order. Tensors first; the first six are differentiable."""

    query: Tensor
    key: Tensor
    value: Tensor | None
    mask: Tensor | None
    multiplier: Tensor
    sink: Tensor | None = None
    positions: Tensor | None = None
    first_keys: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seed: Tensor | None = None
    left: int = UNBOUNDED
    right: int = UNBOUNDED
    bottom_right: bool = False
    softcap: float = 0.0
    dropout_p: float = 0.0
    first_tokens: int = 1
    fields: str = "mzn"
    key_mass: bool = False
    maximum_gradient: bool = False
    tile: tuple[int, ...] = ()
    """(rows, keys, scores) of a tile, for tests; empty for the kernel's own choice."""
    kernel: str = "blocked"
    """Which kernel computes it ("blocked", "native", "triton"): a compiled graph keeps the choice made for it."""
    rows: Tensor | None = None
    """[R] int: the rows of the query to compute, taken as they are loaded; for triton, without a gradient."""
    normalizer: str = "softmax"
    number: float = 0.0

    def values(self) -> tuple[Any, ...]:
        """The arguments as the operator takes them."""
        # Not vars(self).values(), through which the compiler of torch 2.11 cannot look.
        return tuple([getattr(self, name) for name in NAMES])

    @property
    def differentiable(self) -> tuple[Tensor | None, ...]:
        return self.query, self.key, self.value, self.mask, self.multiplier, self.sink

    @property
    def state_dtype(self) -> torch.dtype:
        return torch.float64 if self.query.dtype == torch.float64 else torch.float32


NAMES = tuple(Arguments.__dataclass_fields__)
COUNT = len(NAMES)
DIFFERENTIABLE = NAMES[:6]


def attention(arguments: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    """Output [B, H, Q, E], state [F, B, H, Q] and key_mass [B, H, K] (size 0 where not asked)."""
    return torch.ops.attemper.attention(*arguments.values())


@torch.library.impl(LIBRARY, "attention", "CompositeExplicitAutograd")
def _attention(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    arguments = Arguments(*args)
    if arguments.kernel == "triton":
        with torch.no_grad(), _current(arguments.query.device):
            return _triton().forward(_whole(arguments), arguments.rows)
    assert arguments.rows is None
    parts = documents(arguments)
    with exact(arguments.query), torch.no_grad():
        if arguments.cu_seqlens_q is None:
            return _forward(arguments, parts[0].problem)
        output, state, key_mass = empty_results(arguments)
        output.zero_()
        state.zero_()[0] = -torch.inf
        key_mass.zero_()
        for part in parts:
            document = _forward(arguments, part.problem)
            output[:, :, part.rows], state[..., part.rows] = document[0], document[1]
            if arguments.key_mass:
                key_mass[:, :, part.keys] = document[2]
        return output, state, key_mass


@torch.library.register_fake("attemper::attention", lib=LIBRARY)
def _attention_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    return empty_results(Arguments(*args))


def empty_results(arguments: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    query, dtype = arguments.query, arguments.state_dtype
    batch, heads, queries, _ = query.shape
    rows = queries if arguments.rows is None else arguments.rows.shape[0]
    width = 0 if arguments.value is None else arguments.value.shape[3]
    # As each kernel leaves it in memory.
    by_rows = arguments.kernel == "native" and arguments.cu_seqlens_q is None and arguments.normalizer == "softmax"
    output = query.new_empty((batch, rows, heads, width)) if by_rows else query.new_empty((batch, heads, rows, width))
    return (
        output.transpose(1, 2) if by_rows else output,
        query.new_empty((len(arguments.fields), batch, heads, rows), dtype=dtype),
        query.new_empty((batch, heads, arguments.key.shape[2]) if arguments.key_mass else (0,), dtype=dtype),
    )


@torch.library.impl(LIBRARY, "attention_backward", "CompositeExplicitAutograd")
def _backward(*args: Any) -> list[Tensor]:
    arguments = Arguments(*args[:COUNT])
    output, state, grad_output, grad_state, grad_key_mass, needs = args[COUNT:]
    upstream = Upstream(grad_output, grad_state, grad_key_mass)
    assert arguments.rows is None
    if arguments.kernel == "triton":
        with torch.no_grad(), _current(arguments.query.device):
            return _returned(arguments, _triton().backward(_whole(arguments), output, state, upstream, tuple(needs)))
    parts = documents(arguments)
    with exact(arguments.query), torch.no_grad():
        if arguments.cu_seqlens_q is None:
            return _returned(arguments, _gradients(arguments, parts[0].problem, output, state, upstream, needs))
        results = _empty_gradients(arguments, needs)
        # What documents share is summed over them in the type of the state, and rounded once.
        totals = [
            result.zero_() if place < 3 else result.new_zeros(result.shape, dtype=arguments.state_dtype)
            for place, result in enumerate(results)
        ]
        for part in parts:
            rows = part.rows
            above = _document_upstream(arguments, upstream, part)
            grads = _gradients(arguments, part.problem, output[:, :, rows], state[..., rows], above, needs)
            _collect(totals, grads, part)
    return [total.to(result.dtype) for total, result in zip(totals, results, strict=True)]


def _native() -> ModuleType:
    """The native kernels, loaded with the first call that wants them."""
    return import_module("attemper.backends.native")


def _forward(arguments: Arguments, problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    return _native().forward(problem) if arguments.kernel == "native" else forward(problem)


def _gradients(
    arguments: Arguments, problem: Problem, output: Tensor, state: Tensor, upstream: Upstream, needs: list[bool]
) -> Gradients:
    kernel = _native().backward if arguments.kernel == "native" else backward
    return kernel(problem, output, state, upstream, tuple(needs))


def _returned(arguments: Arguments, grads: Gradients) -> list[Tensor]:
    """Gradients in the type of their tensors; size 0 stands for none."""
    return [
        arguments.query.new_empty(0) if grad is None or tensor is None else grad.to(tensor.dtype)
        for grad, tensor in zip(vars(grads).values(), arguments.differentiable, strict=True)
    ]


def _document_upstream(arguments: Arguments, upstream: Upstream, part: _Part) -> Upstream:
    key_mass = upstream.key_mass[..., part.keys] if arguments.key_mass else upstream.key_mass
    return Upstream(upstream.output[:, :, part.rows], upstream.state[..., part.rows], key_mass)


@torch.library.register_fake("attemper::attention_backward", lib=LIBRARY)
def _backward_fake(*args: Any) -> list[Tensor]:
    return _empty_gradients(Arguments(*args[:COUNT]), args[-1])


def _empty_gradients(arguments: Arguments, needs: list[bool]) -> list[Tensor]:
    """One tensor per differentiable argument; of size 0 where no gradient is needed."""
    return [
        torch.empty_like(tensor, memory_format=torch.contiguous_format)
        if tensor is not None and needed
        else arguments.query.new_empty(0)
        for tensor, needed in zip(arguments.differentiable, needs, strict=True)
    ]


def _collect(results: list[Tensor], grads: Gradients, part: _Part) -> None:
    """Adds a document's gradients to the whole: rows and keys to their place, what all share to the sum."""
    places = (part.rows, part.keys, part.keys, None, None, None)
    for result, name, place in zip(results, Gradients.__dataclass_fields__, places, strict=True):
        gradient = getattr(grads, name)
        if gradient is None:
            continue
        if name == "multiplier" and result.shape[2] > 1:
            place = part.rows
        target = result if place is None else result[:, :, place]
        target += gradient.to(result.dtype)


@torch.library.impl(LIBRARY, "accumulate", "CompositeExplicitAutograd")
def _accumulate(
    query: Tensor, key: Tensor, mask: Tensor | None, multiplier: Tensor, sink: Tensor | None,
    first_keys: Tensor | None, included: Tensor | None, rows: Tensor | None, flag: Tensor, sums: Tensor,
    left: int, right: int, bottom_right: bool, softcap: float, first_tokens: int,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None, state: Tensor | None = None,
) -> None:  # fmt: skip
    """Adds the statistics of a call to a site's sums on the device, unless the flag there is down: nothing waits.

    ``backends/sums.py`` has the layout of ``sums``. ``state``, [F, B, H, R] float32, keeps the state of the measured
    rows for who wants it. Triton only: another backend is for who can wait.
    """
    kernels = _triton()
    call = Arguments(
        query, key, None, mask, multiplier, sink, first_keys=first_keys, left=left, right=right,
        bottom_right=bottom_right, softcap=softcap, first_tokens=first_tokens, kernel="triton",
        fields=letters_of(SUMMED), cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
    )  # fmt: skip
    with torch.no_grad(), _current(query.device):
        kernels.accumulate(_whole(call), flag, sums, rows, included, state)


@torch.library.register_fake("attemper::accumulate", lib=LIBRARY)
def _accumulate_fake(*_: Any, **__: Any) -> None:
    return None


def sampled_positions(start: Tensor, rows: int, queries: int, flag: Tensor) -> Tensor:
    """``rows`` of ``queries`` rows, chosen on the device from the ``start`` that it holds, unless ``flag`` is down."""
    with _current(start.device):
        return _triton().positions(start, rows, queries, flag)


@dataclass(frozen=True)
class _Part:
    """One document of a packed call (or the whole of a plain one), and where it stands."""

    problem: Problem
    rows: slice
    keys: slice


def _triton() -> ModuleType:
    """The Triton kernels, imported with the first call that wants them: the package is an extra."""
    return import_module("attemper.backends.triton")


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU the current one: Triton launches there, wherever the tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _whole(arguments: Arguments) -> Problem:
    """The call as one problem; a packed one keeps its offsets on the device."""
    tile = dict(zip(("tile_rows", "tile_keys", "tile_elements"), arguments.tile, strict=False))
    packing = None
    if arguments.cu_seqlens_q is not None and arguments.cu_seqlens_k is not None:
        packing = Packing(arguments.cu_seqlens_q, arguments.cu_seqlens_k, arguments.bottom_right)
    return Problem(
        query=arguments.query,
        key=arguments.key,
        value=arguments.value,
        mask=arguments.mask,
        multiplier=arguments.multiplier,
        sink=arguments.sink,
        positions=arguments.positions,
        first_keys=arguments.first_keys,
        left=arguments.left,
        right=arguments.right,
        offset=arguments.key.shape[2] - arguments.query.shape[2] if arguments.bottom_right else 0,
        softcap=arguments.softcap,
        dropout_p=arguments.dropout_p,
        seed=0 if arguments.seed is None else int(arguments.seed),
        first_tokens=arguments.first_tokens,
        fields=arguments.fields,
        key_mass=arguments.key_mass,
        maximum_gradient=arguments.maximum_gradient,
        packing=packing,
        normalizer=arguments.normalizer,
        number=arguments.number,
        **tile,
    )


def documents(arguments: Arguments) -> list[_Part]:
    whole = _whole(arguments)
    if arguments.cu_seqlens_q is None or arguments.cu_seqlens_k is None:
        return [_Part(whole, slice(None), slice(None))]
    bounds = zip(_spans(arguments.cu_seqlens_q), _spans(arguments.cu_seqlens_k), strict=True)
    return [_document(arguments, whole, rows, keys, number) for number, (rows, keys) in enumerate(bounds)]


def _spans(cu_seqlens: Tensor) -> list[slice]:
    edges = cu_seqlens.tolist()
    return [slice(start, stop) for start, stop in pairwise(edges)]


def _document(arguments: Arguments, whole: Problem, rows: slice, keys: slice, number: int) -> _Part:
    multiplier, value = whole.multiplier, whole.value
    offset = (keys.stop - keys.start) - (rows.stop - rows.start) if arguments.bottom_right else 0
    problem = replace(
        whole,
        query=whole.query[:, :, rows],
        key=whole.key[:, :, keys],
        value=None if value is None else value[:, :, keys],
        multiplier=multiplier[:, :, rows] if multiplier.shape[2] > 1 else multiplier,
        positions=None if whole.positions is None else whole.positions[rows],
        first_keys=None if whole.first_keys is None else whole.first_keys[:, keys],
        offset=offset,
        seed=whole.seed + 104_729 * number,
        packing=None,
    )
    return _Part(problem, rows, keys)
