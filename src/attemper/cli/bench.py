"""``attemper bench``: what attention with statistics takes on this machine, beside PyTorch's without them."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from attemper.backends.table import resolve
from attemper.cli.output import say
from attemper.errors import BackendError, InputError

if TYPE_CHECKING:
    from attemper.bench import Machine, NormalizerRow, Row, Shape
    from attemper.bench.watched import WatchRow

SHAPES = ("1,8,512,64", "1,8,2048,64", "1,8,2048,128")


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
            help="attention, or with its backward pass; other maps than softmax beside it; what a watch costs a "
            "training step; or peak memory."
        ),
    ] = What.attention,
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
    backward = backward or what is What.backward
    if what is What.watch and (shape or backward):
        raise typer.BadParameter(
            "a watch is timed on a model of its own, without --shape and --backward", param_hint="--what"
        )
    try:
        resolve(backend, frozenset())
    except (InputError, BackendError) as error:
        raise typer.BadParameter(str(error), param_hint="--backend") from error
    shapes = _shapes(shape or (SHAPES[:1] if quick else SHAPES), mode, dtype, backward)
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    count = 3 if quick else pairs
    match what:
        case What.watch:
            rows, told = _watched(count)
        case What.memory:
            rows, told = _memory(shapes, backend)
        case What.normalizers:
            rows, told = _normalizers(shapes, backend, count)
        case _:
            rows, told = _attention(shapes, backend, count)
    if as_json:
        print(json.dumps({"schema": 1, "rows": rows}, indent=2))
    else:
        print("\n\n".join(told))


Told = tuple[list[dict[str, object]], list[str]]
"""Rows for JSON, and paragraphs for people."""


def _attention(shapes: list[Shape], backend: str, pairs: int) -> Told:
    from attemper.bench import measure

    rows = []
    for number, one in enumerate(shapes):
        say(f"{number + 1} of {len(shapes)}: {one}, {one.mode}")
        rows.append(measure(one, backend=backend, pairs=pairs))
    return [row.to_dict() for row in rows], [_machine(rows[0]), *map(sentences, rows)]


def _normalizers(shapes: list[Shape], backend: str, pairs: int) -> Told:
    from attemper.bench import NORMALIZERS, measure_normalizer

    rows = []
    for number, one in enumerate(shapes):
        for name in NORMALIZERS:
            say(f"{number + 1} of {len(shapes)}: {one}, {one.mode}, {name}")
            rows.append(measure_normalizer(one, name, backend=backend, pairs=pairs))
    told = [f"{_setting(rows[0].machine)}\n{RATIOS}", *map(normalizer_sentences, rows)]
    return [row.to_dict() for row in rows], told


def _watched(pairs: int) -> Told:
    from attemper.bench.watched import measure_watch

    row = measure_watch(pairs=pairs)
    return [row.to_dict()], [f"{_setting(row.machine)}\n{RATIOS}", watch_sentence(row)]


def _memory(shapes: list[Shape], backend: str) -> Told:
    from attemper.bench import machine, peak_extra_bytes

    rows: list[dict[str, object]] = []
    told = [_setting(machine())]
    for one in shapes:
        extra = peak_extra_bytes(one, backend=backend)
        rows.append({"shape": str(one), "mode": one.mode, "peak_extra_bytes": extra})
        amount = "is not told by this system" if extra is None else f"takes at most {extra / 2**20:.1f} MiB"
        told.append(
            f"{one} {one.dtype}, {one.mode}: attention with every statistic {amount} beyond inputs and results."
        )
    return rows, told


def _shapes(texts: tuple[str, ...] | list[str], mode: Mode, dtype: Kind, backward: bool) -> list[Shape]:
    """Told before anything is timed, exit code 2."""
    from attemper.bench.shape import parsed

    sides = {Mode.full: (False,), Mode.causal: (True,), Mode.both: (False, True)}[mode]
    try:
        return [parsed(text, causal=causal, dtype=dtype.value, backward=backward) for text in texts for causal in sides]
    except InputError as error:
        raise typer.BadParameter(str(error), param_hint="--shape") from error


def _setting(machine: Machine) -> str:
    threads = f"{machine.threads} thread{'' if machine.threads == 1 else 's'}"
    return f"{machine.processor}, {machine.instructions}, {threads}, torch {machine.torch}."


def _machine(row: Row) -> str:
    told, peak = _setting(row.machine), row.peak_gflops
    if peak is None:
        return f"{told}\nThe native kernels are not built: their share of the machine's peak is not known.\n{RATIOS}"
    return f"{told}\nIts registers alone were measured to do {peak:.0f} GFLOP/s.\n{RATIOS}"


RATIOS = (
    "All ways run in turns. A ratio is the median over the rounds of our time divided by the other's of the same "
    "round. The least and the largest of these quotients follow; that of the two medians in ms lies between them."
)
"""What a reader needs who divides the printed medians by hand."""


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
            by_round = _by_round(row.ratio_ranges[name])
            lines.append(f"  {row.ratios[name]:.2f} times {against} ({row.other_ms[name]:.2f} ms){by_round}.")
    lines.append(
        f"  Against float64 the output was off by at most {row.output_error:.1e}, the entropy by "
        f"{row.entropy_error_nats:.1e} nats."
    )
    return "\n".join(lines)


def _by_round(span: tuple[float, float], digits: int = 2) -> str:
    least, largest = span
    return f"; {least:.{digits}f} to {largest:.{digits}f} by round"


def normalizer_sentences(row: NormalizerRow) -> str:
    """A paragraph on one map: what it took, against what, how sparse and how exact it was."""
    lines = [
        f"{row.shape} {row.shape.dtype}, {row.shape.mode}: {row.normalizer} with every statistic takes {row.ms:.2f} ms "
        f"on backend {row.backend} (median of {row.pairs}); {row.support:.1%} of the keys have weight.",
        f"  {row.ratios['softmax']:.2f} times our softmax attention ({row.other_ms['softmax']:.2f} ms)"
        f"{_by_round(row.ratio_ranges['softmax'])}.",
    ]
    if "entmax_package" in row.ratios:
        times = 1 / row.ratios["entmax_package"]
        least, largest = row.ratio_ranges["entmax_package"]
        by_round = _by_round((1 / largest, 1 / least), digits=1)
        lines.append(
            f"  {times:.1f} times as fast as the entmax package ({row.other_ms['entmax_package']:.2f} ms){by_round}."
        )
    lines.append(f"  Against float64 the output was off by at most {row.output_error:.1e}.")
    return "\n".join(lines)


def watch_sentence(row: WatchRow) -> str:
    """What a watch costs."""
    return (
        f"A training step of {row.batch} x {row.tokens} tokens, 2 layers of 4 heads, width 256, takes {row.ms:.1f} ms "
        f"(median of {row.pairs}).\n  Sampled by a watch, 128 rows of each sequence: {row.ratios['sampled']:.3f} times "
        f"that{_by_round(row.ratio_ranges['sampled'], 3)}. Watched and not sampled: {row.ratios['between']:.3f} times"
        f"{_by_round(row.ratio_ranges['between'], 3)}."
    )
