"""``attemper bench``: what attention with statistics takes on this machine, beside PyTorch's without them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attemper.backends.table import resolve
from attemper.cli.arguments import BackendName
from attemper.cli.output import say, usage_of

if TYPE_CHECKING:
    from attemper.bench.shape import Shape
    from attemper.bench.timing import Row

SHAPES = ("1,8,512,64", "1,8,2048,64", "1,8,2048,128")
RATIOS = (
    "All ways run in turns. A ratio is the median over the rounds of our time divided by the other's of the same "
    "round. The least and the largest of these quotients follow; that of the two medians in ms lies between them."
)
"""For a reader who divides the printed medians by hand."""


class What(StrEnum):
    """What is timed."""

    attention = "attention"
    backward = "backward"
    normalizers = "normalizers"
    watch = "watch"
    memory = "memory"


class Mode(StrEnum):
    """Which keys a query sees."""

    full = "full"
    causal = "causal"
    both = "both"


class Kind(StrEnum):
    """Types of the tensors."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def bench(
    what: Annotated[
        What,
        typer.Option(
            help="What to time: attention, its backward pass (backward), other normalizers than softmax, or a watched "
            "training step (watch). memory prints peak memory."
        ),
    ] = What.attention,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="B,H,N,D",
            help="Batch, heads, tokens, head size; or B,H,G,Q,K,D with G key heads. Repeatable. Default: three shapes.",
        ),
    ] = None,
    mode: Annotated[
        Mode, typer.Option(help="Mask: all keys (full), no later keys (causal), or both in turn.")
    ] = Mode.both,
    dtype: Annotated[Kind, typer.Option(help="Type of the tensors.")] = Kind.float32,
    backward: Annotated[
        bool, typer.Option("--backward", help="Time forward and backward, with the gradient of entropy.")
    ] = False,
    backend: BackendName = "auto",
    threads: Annotated[
        int | None, typer.Option(min=1, max=4096, help="Number of threads. By default, PyTorch's.")
    ] = None,
    pairs: Annotated[int, typer.Option(min=3, help="Number of rounds. Each round runs every way once.")] = 15,
    quick: Annotated[bool, typer.Option("--quick", help="Time one small shape with 3 rounds: takes seconds.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of sentences.")] = False,
) -> None:
    """Time attention with every statistic on this CPU, in turn with PyTorch's attention without statistics."""
    backward = backward or what is What.backward
    if what is What.watch and (shape or backward):
        raise typer.BadParameter(
            "watch is timed on a fixed model: leave out --shape and --backward", param_hint="--what"
        )
    with usage_of("--backend"):
        resolve(backend, frozenset())
    with usage_of("--shape"):
        shapes = _shapes(shape or (SHAPES[:1] if quick else SHAPES), mode, dtype, backward)
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    if what is What.memory:
        documents, paragraphs = _memory(shapes, backend)
    else:
        rows = list(_rows(what, shapes, backend, 3 if quick else pairs))
        documents = [row.to_dict() for row in rows]
        paragraphs = [f"{rows[0].heading()}\n{RATIOS}", *map(str, rows)]
    print(json.dumps({"schema": 1, "rows": documents}, indent=2) if as_json else "\n\n".join(paragraphs))


def _shapes(texts: tuple[str, ...] | list[str], mode: Mode, dtype: Kind, backward: bool) -> list[Shape]:
    from attemper.bench.shape import Shape

    sides = {Mode.full: (False,), Mode.causal: (True,), Mode.both: (False, True)}[mode]
    return [Shape.of(text, causal=causal, dtype=dtype.value, backward=backward) for text in texts for causal in sides]


def _rows(what: What, shapes: list[Shape], backend: str, pairs: int) -> Iterator[Row]:
    """What is timed, row by row, each after a line of progress."""
    from attemper.bench import attention, timing

    if what is What.watch:
        yield timing.measure_watch(pairs=pairs)
        return
    for number, one in enumerate(shapes, 1):
        place = f"{number} of {len(shapes)}: {one}, {one.mode}"
        if what is not What.normalizers:
            say(place)
            yield attention.measure(one, backend=backend, pairs=pairs)
            continue
        for name in attention.NORMALIZERS:
            say(f"{place}, {name}")
            yield attention.measure_normalizer(one, name, backend=backend, pairs=pairs)


def _memory(shapes: list[Shape], backend: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Documents for JSON, and paragraphs for people."""
    from attemper.bench.attention import peak_extra_bytes
    from attemper.bench.hardware import machine

    documents, paragraphs = [], [str(machine())]
    for one in shapes:
        extra = peak_extra_bytes(one, backend=backend)
        documents.append({"shape": str(one), "mode": one.mode, "peak_extra_bytes": extra})
        amount = "is not reported by this system" if extra is None else f"takes at most {extra / 2**20:.1f} MiB"
        call = f"{one} {one.dtype}, {one.mode}: attention with every statistic"
        paragraphs.append(f"{call} {amount} beyond inputs and results.")
    return documents, paragraphs
