"""``torch.library`` operators over the backends: schemas and fakes. The only caller of kernels.

``attemper::attention`` returns the output and the *state* of every row (see ``backends/blocked``), from which every
one-pass statistic follows by a formula that autograd differentiates. One backward operator serves them all, and gets no
more columns of the state than there are gradients for. Their gradients are registered by ``call/autograd.py``.
``torch.compile(fullgraph=True)`` sees one opaque node.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from attemper.backends import table
from attemper.backends.contract import NAMES, Gradients, Problem, Upstream
from attemper.call.packing import Document, documents

_TYPES = {
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "int": "int",
    "Size": "SymInt",
    "float": "float",
    "bool": "bool",
    "str": "str",
    "tuple[Column, ...]": "int[]",
}
"""What a field of ``Problem`` is in a schema."""
_PROBLEM = ", ".join(f"{_TYPES[str(field.type)]} {field.name}" for field in fields(Problem))
"""No defaults: a graph leaves out an argument that has its default, and rules for ``vmap`` go by their places."""
COUNT = len(NAMES)

# Not torch.library.custom_op: its first call imports the compiler, torch._dynamo, for more than a second.
LIBRARY = torch.library.Library("attemper", "DEF")
Kernel = TypeVar("Kernel", bound=Callable[..., Any])


def operator(
    schema: str, fake: Callable[..., Any] = lambda *_: None, *, tags: Sequence[torch.Tag] = ()
) -> Callable[[Kernel], Kernel]:
    """Makes a function the kernel of an operator of ``torch.ops.attemper``.

    ``fake``: gives results of the same shapes, types and strides while a graph is traced; there are none by default.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    torch.library.register_fake(f"attemper::{name}", fake, lib=LIBRARY)

    def register(kernel: Kernel) -> Kernel:
        LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
        return kernel

    return register


def attention(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Output [B, H, Q, E], state [columns, B, H, Q] and key_mass [B, H, K] (size 0 where not asked)."""
    return torch.ops.attemper.attention(*problem.values())


def forward(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """``attention`` by the kernels themselves, of one sequence, or of documents that a backend reads on the device."""
    return table.kernels(problem.backend).forward(problem)


def backward(problem: Problem, output: Tensor, state: Tensor, upstream: Upstream, needs: list[bool]) -> list[Tensor]:
    """Gradients of ``problem.differentiable`` by the kernels themselves, each in its tensor's type; size 0 for none."""
    grads = table.kernels(problem.backend).backward(problem, output, state, upstream, tuple(needs))
    return [
        problem.query.new_empty(0) if grad is None or tensor is None else grad.to(tensor.dtype)
        for grad, tensor in zip(vars(grads).values(), problem.differentiable, strict=True)
    ]


@operator(
    f"attention({_PROBLEM}) -> (Tensor output, Tensor state, Tensor key_mass)",
    lambda *args: empty_results(Problem(*args)),
)
def _attention(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    problem = Problem(*args)
    with torch.no_grad(), _surroundings(problem):
        return _by_documents(problem) if _cut(problem) else forward(problem)


def _by_documents(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    output, state, key_mass = empty_results(problem)
    output.zero_()
    state.zero_()[0] = -torch.inf
    key_mass.zero_()
    for part in documents(problem):
        document = forward(part.problem)
        output[:, :, part.rows], state[..., part.rows] = document[0], document[1]
        if problem.key_mass:
            key_mass[:, :, part.keys] = document[2]
    return output, state, key_mass


def empty_results(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Output, state and key_mass in the shapes, types and memory layout of ``attention``, without numbers."""
    query, dtype = problem.query, problem.compute_dtype
    batch, heads, queries, _ = query.shape
    rows = queries if problem.rows is None else problem.rows.shape[0]
    width = 0 if problem.value is None else problem.value.shape[3]
    # As each kernel leaves it in memory.
    joined = table.by_name(problem.backend).joins_heads and not problem.packed and not problem.rowwise
    output = query.new_empty((batch, rows, heads, width)) if joined else query.new_empty((batch, heads, rows, width))
    return (
        output.transpose(1, 2) if joined else output,
        query.new_empty((len(problem.columns), batch, heads, rows), dtype=dtype),
        query.new_empty((batch, heads, problem.key.shape[2]) if problem.key_mass else (0,), dtype=dtype),
    )


@operator(
    f"""attention_backward({_PROBLEM}, Tensor output, Tensor state, Tensor grad_output, Tensor grad_state,
    Tensor grad_key_mass, bool[] needs) -> Tensor[]""",
    lambda *args: _empty_gradients(Problem(*args[:COUNT]), args[-1]),
)
def _attention_backward(*args: Any) -> list[Tensor]:
    problem = Problem(*args[:COUNT])
    output, state, *above, needs = args[COUNT:]
    assert problem.rows is None
    with torch.no_grad(), _surroundings(problem):
        gradients = _gradients_by_documents if _cut(problem) else backward
        return gradients(problem, output, state, Upstream(*above), needs)


def _gradients_by_documents(
    problem: Problem, output: Tensor, state: Tensor, upstream: Upstream, needs: list[bool]
) -> list[Tensor]:
    results = _empty_gradients(problem, needs)
    # What documents share is summed over them in the type of the state, and rounded once.
    totals = [
        result.zero_() if place < 3 else result.new_zeros(result.shape, dtype=problem.compute_dtype)
        for place, result in enumerate(results)
    ]
    for part in documents(problem):
        rows, kernels = part.rows, table.kernels(problem.backend)
        key_mass = upstream.key_mass[..., part.keys] if problem.key_mass else upstream.key_mass
        above = Upstream(upstream.output[:, :, part.rows], upstream.state[..., part.rows], key_mass)
        grads = kernels.backward(part.problem, output[:, :, rows], state[..., rows], above, tuple(needs))
        _collect(totals, grads, part)
    return [total.to(result.dtype) for total, result in zip(totals, results, strict=True)]


def _empty_gradients(problem: Problem, needs: list[bool]) -> list[Tensor]:
    """One tensor per differentiable field; of size 0 where no gradient is needed."""
    return [
        torch.empty_like(tensor, memory_format=torch.contiguous_format)
        if tensor is not None and needed
        else problem.query.new_empty(0)
        for tensor, needed in zip(problem.differentiable, needs, strict=True)
    ]


def _collect(results: list[Tensor], grads: Gradients, part: Document) -> None:
    """Adds a document's gradients to the whole: rows and keys to their place, what all share to the sum."""
    places = {"query": part.rows, "key": part.keys, "value": part.keys}
    for result, (name, gradient) in zip(results, vars(grads).items(), strict=True):
        if gradient is None:
            continue
        place = part.rows if name == "multiplier" and result.shape[2] > 1 else places.get(name)
        target = result if place is None else result[:, :, place]
        target += gradient.to(result.dtype)


@operator(f"accumulate({_PROBLEM}, Tensor? included, Tensor flag, Tensor(a!) sums, Tensor(b!)? state) -> ()")
def _accumulate(*args: Any) -> None:
    """Adds the statistics of a call to a site's sums on the device, unless the flag there is down: nothing waits.

    ``backends/sums.py`` has the layout of ``sums``. ``state``, [F, B, H, R] float32, receives the state of the
    measured rows if it is given. Only for a backend that sums on the device; any other would block the host.
    """
    accumulate(Problem(*args[:COUNT]), *args[COUNT:])


def accumulate(problem: Problem, included: Tensor | None, flag: Tensor, sums: Tensor, state: Tensor | None) -> None:
    """``attemper::accumulate`` by the kernels themselves."""
    with torch.no_grad(), _current(problem.query.device):
        table.kernels(problem.backend).accumulate(problem, flag, sums, included, state)


def sampled_positions(start: Tensor, rows: int, queries: int, flag: Tensor) -> Tensor:
    """``rows`` of ``queries`` rows, chosen on the device from the ``start`` that it holds, unless ``flag`` is down."""
    with _current(start.device):
        return table.kernels(table.summing().name).positions(start, rows, queries, flag)


def _surroundings(problem: Problem) -> AbstractContextManager[object]:
    """What kernels run in: the device of their tensors, or products that are exact wherever PyTorch computes them."""
    return _exact(problem.query) if table.by_name(problem.backend).waits else _current(problem.query.device)


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU the current one: kernels are launched there, wherever the tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _cut(problem: Problem) -> bool:
    """Whether documents are computed one by one: the backend cannot read on the device where they start."""
    assert problem.rows is None or table.by_name(problem.backend).gathers
    return problem.packed and table.by_name(problem.backend).waits


_precision_lock = threading.Lock()
_precision: list[Any] = []
"""Settings of the process as they were before the outermost of the calls that compute."""
_precision_depth = 0
"""How many calls compute, inside each other or in several threads."""


@contextmanager
def _exact(like: Tensor) -> Iterator[None]:
    """float32 products in float32: no autocast, no TF32, no bfloat16 matmul inside; the settings are put back after.

    The precision settings are process-wide, so nested and concurrent calls share one count.
    """
    with torch.autocast(like.device.type, enabled=False), _ieee_float32():
        yield


@contextmanager
def _ieee_float32() -> Iterator[None]:
    global _precision_depth
    settings: tuple[Any, ...] = (torch.backends.mkldnn.matmul, torch.backends.cuda.matmul)  # pyright: ignore[reportAttributeAccessIssue]
    with _precision_lock:
        if _precision_depth == 0:
            _precision[:] = [setting.fp32_precision for setting in settings]
            for setting in settings:
                setting.fp32_precision = "ieee"
        _precision_depth += 1
    try:
        yield
    finally:
        with _precision_lock:
            _precision_depth -= 1
            if _precision_depth == 0:
                for setting, saved in zip(settings, _precision, strict=True):
                    setting.fp32_precision = saved
