"""Linear attention, causal, against this package's softmax attention, and against itself at twice the length.

    python benchmarks/linear_attention.py [--quick] [--threads N] [--pairs N] [--maps NAME ...] [--json FILE]
                                         [--cpu-time]

Every map is checked against its quadratic form in float64 first. Then all ways run in turns in one process, and ratios
are medians of pairs (in brackets, of the shortest times). --cpu-time, on a machine that is busy with something else:
one thread, and the time that it was given. --quick: shorter sequences, under a minute.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

import attemper
from attemper.bench.hardware import machine
from attemper.bench.timing import rounds
from attemper.functional import linear_attention

HEADS, SIZE = 8, 64
AGAINST = 16384
LENGTHS = (4096, 8192, 16384, 32768)
QUICK = (1024, 2048, 4096)
CHECKED_ROWS = 16
LARGEST_ERROR = 2e-5
FEATURES: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": lambda x: torch.nn.functional.elu(x) + 1,
    "relu": torch.relu,
    "exp": torch.exp,
}
Way = Callable[[], object]


def tensors(tokens: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, HEADS, tokens, SIZE, generator=generator) for _ in range(3)]


def checked(name: str, tokens: int) -> float:
    """The largest error of some rows against the quadratic form in float64; too large a one ends the program."""
    q, k, v = tensors(tokens)
    got = linear_attention(q, k, v, feature_map=name, is_causal=True).output
    picked = torch.linspace(0, tokens - 1, CHECKED_ROWS).long()
    phi = FEATURES[name]
    weights = phi(q[:, :, picked].double()) @ phi(k.double()).mT
    weights = weights.masked_fill(torch.arange(tokens) > picked[:, None], 0)
    want = (weights @ v.double()) / weights.sum(-1, keepdim=True)
    error = float((got[:, :, picked] - want).abs().max())
    if not error <= LARGEST_ERROR:
        sys.exit(f"{name!r} at {tokens} tokens is off by {error:.1e}, and {LARGEST_ERROR:.0e} is allowed: not timed")
    return error


def linear(name: str, tokens: int, backward: bool = False) -> Way:
    """One causal call, with the gradients of its sum if wanted."""
    inputs = [tensor.requires_grad_(backward) for tensor in tensors(tokens)]

    def call() -> object:
        output = linear_attention(inputs[0], inputs[1], inputs[2], feature_map=name, is_causal=True).output
        return torch.autograd.grad(output, inputs, torch.ones_like(output)) if backward else output

    return call


def softmax(tokens: int, backward: bool = False) -> Way:
    """``attemper.attention`` without statistics, on the backend that "auto" takes."""
    inputs = [tensor.requires_grad_(backward) for tensor in tensors(tokens)]

    def call() -> object:
        output = attemper.attention(inputs[0], inputs[1], inputs[2], is_causal=True).output
        return torch.autograd.grad(output, inputs, torch.ones_like(output)) if backward else output

    return call


def row(title: str, ways: dict[str, Way], options: argparse.Namespace) -> dict[str, object]:
    """Times ``ways``, prints each against the last, and returns the figures."""
    clock = time.thread_time if options.cpu_time else time.perf_counter
    times = rounds(ways, options.pairs, options.seconds, clock=clock)
    *names, base = ways
    found: dict[str, object] = {"title": title, "base": base, "base_ms": 1e3 * median(times[base])}
    print(f"{title}: {base} {1e3 * median(times[base]):.1f} ms, {len(times[base])} rounds")
    for name in names:
        ratio = median(one / other for one, other in zip(times[name], times[base], strict=True))
        least = min(times[name]) / min(times[base])
        found[name] = {"ms": 1e3 * median(times[name]), "ratio": ratio, "least_ratio": least}
        print(f"  {name:<12}{1e3 * median(times[name]):>10.1f} ms{ratio:>9.3f} ({least:.3f})", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--pairs", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=60.0, help="about how long one row may take")
    parser.add_argument("--maps", nargs="+", choices=tuple(FEATURES), default=list(FEATURES))
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1 if options.cpu_time else options.threads)
    here = machine()
    print(here)
    print(
        f"1, {HEADS}, tokens, {SIZE}, float32, causal; " + ("time of the thread" if options.cpu_time else "wall clock")
    )
    lengths = QUICK if options.quick else LENGTHS
    against = lengths[-1] if options.quick else AGAINST
    errors = {name: checked(name, against) for name in options.maps}
    print("largest error against float64: " + ", ".join(f"{name} {error:.1e}" for name, error in errors.items()))
    rows = []
    for backward in (False, True):
        ways = {name: linear(name, against, backward) for name in options.maps}
        title = f"{against} tokens, {'forward + backward' if backward else 'forward'}"
        rows.append(row(title, ways | {"softmax": softmax(against, backward)}, options))
    for name in options.maps:
        ways = {str(tokens): linear(name, tokens) for tokens in reversed(lengths)}
        rows.append(row(f"{name}, by tokens", ways, options))
    if options.json:
        document = {"machine": asdict(here), "errors": errors, "rows": rows}
        options.json.write_text(json.dumps(document, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
