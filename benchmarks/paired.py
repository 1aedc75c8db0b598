"""What the scripts share that time models in turns, in one process: options and the clock."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

Clock = Callable[[], float]


def parser_of(text: str | None, models: Iterable[str]) -> argparse.ArgumentParser:
    """With the options that all of them take; ``text`` is the script's docstring."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=list(models), default=list(models))
    parser.add_argument("--pairs", type=int, default=25)
    parser.add_argument("--cpu-time", action="store_true", help="process time on one thread, for a busy machine")
    parser.add_argument("--json", type=Path, help="where the results go")
    return parser


def clock_of(options: argparse.Namespace) -> tuple[Clock, str]:
    """The clock that was asked for, and what results say of it."""
    if not options.cpu_time:
        return time.perf_counter, "wall"
    torch.set_num_threads(1)
    return time.process_time, "process time, of all threads"
