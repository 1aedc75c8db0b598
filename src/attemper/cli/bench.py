"""``attemper bench``: what attention with statistics takes on this machine, beside PyTorch's without them."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from attemper._backends import resolve
from attemper.errors import BackendError, InputError

if TYPE_CHECKING:
    from attemper.bench import Row, Shape

SHAPES = ("1,8,512,64", "1,8,2048,64", "1,8,2048,128")


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
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="B,H,N,D",
            help="Batch, heads, tokens, head size; or B,H,G,Q,K,D with G key heads. Repeatable; three without it.",
        ),
    ] = None,
    mode: Annotated[Mode, typer.Option(help="Which keys a query sees.")] = Mode.both,
    dtype: Annotated[Kind, typer.Option(help="Type of the tensors.")] = Kind.float32,
    backward: Annotated[bool, typer.Option("--backward", help="Forward and backward, with the entropy's.")] = False,
    backend: Annotated[str, typer.Option(help="auto, or one that `attemper doctor` lists.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="Threads; without it, as many as PyTorch takes.")] = None,
    pairs: Annotated[int, typer.Option(min=3, help="Rounds in which every way runs once.")] = 15,
    quick: Annotated[bool, typer.Option("--quick", help="One small shape and few rounds: seconds.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of sentences.")] = False,
) -> None:
    """Time attention with every statistic on this CPU, and PyTorch's attention without any, in turns."""
    try:
        resolve(backend, frozenset())
    except (InputError, BackendError) as error:
        raise typer.BadParameter(str(error), param_hint="--backend") from error
    shapes = _shapes(shape or (SHAPES[:1] if quick else SHAPES), mode, dtype, backward)
    import torch

    from attemper.bench import measure

    if threads is not None:
        torch.set_num_threads(threads)
    rows = []
    for number, one in enumerate(shapes):
        print(f"{number + 1} of {len(shapes)}: {one}, {one.mode}", file=sys.stderr)
        rows.append(measure(one, backend=backend, pairs=3 if quick else pairs))
    if as_json:
        print(json.dumps({"schema": 1, "rows": [row.to_dict() for row in rows]}, indent=2))
    else:
        print("\n\n".join((_machine(rows[0]), *map(sentences, rows))))


def _shapes(texts: tuple[str, ...] | list[str], mode: Mode, dtype: Kind, backward: bool) -> list[Shape]:
    """Told before anything is timed, exit code 2."""
    from attemper.bench.shape import parsed

    sides = {Mode.full: (False,), Mode.causal: (True,), Mode.both: (False, True)}[mode]
    try:
        return [parsed(text, causal=causal, dtype=dtype.value, backward=backward) for text in texts for causal in sides]
    except InputError as error:
        raise typer.BadParameter(str(error), param_hint="--shape") from error


def _machine(row: Row) -> str:
    machine, peak = row.machine, row.peak_gflops
    threads = f"{machine.threads} thread{'' if machine.threads == 1 else 's'}"
    told = f"{machine.processor}, {machine.instructions}, {threads}, torch {machine.torch}."
    if peak is None:
        return f"{told}\nThe native kernels are not built: their share of the machine's peak is not known."
    return f"{told}\nIts registers alone were measured to do {peak:.0f} GFLOP/s."


OTHERS = {
    "sdpa": "PyTorch's attention, without statistics",
    "sdpa_packed_heads": "PyTorch's attention, query heads of a key head packed",
    "two_sdpa_calls": "entropy out of two calls of PyTorch's attention",
    "eager_entropy": "attention and entropy written by hand",
    "without_statistics": "the same call that asks for no statistic",
}
"""What a ratio is against, in the order in which they are told."""


def sentences(row: Row) -> str:
    """A paragraph: what was measured, against what, how much of the machine it is, and how exact it was."""
    shape = row.shape
    which = "its entropies and their gradient" if shape.backward else "every statistic of one pass"
    share = "" if row.peak_share is None else f", {row.peak_share:.0%} of that peak"
    lines = [
        f"{shape} {shape.dtype}, {shape.mode}: attention with {which} takes {row.ms:.2f} ms on backend "
        f"{row.backend} ({row.gflops:.0f} GFLOP/s{share}; median of {row.pairs})."
    ]
    for name, against in OTHERS.items():
        if name in row.ratios:
            lines.append(f"  {row.ratios[name]:.2f} times {against} ({row.other_ms[name]:.2f} ms).")
    lines.append(
        f"  Against float64 the output was off by at most {row.output_error:.1e}, the entropy by "
        f"{row.entropy_error_nats:.1e} nats."
    )
    return "\n".join(lines)
