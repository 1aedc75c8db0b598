"""The machine that a figure belongs to, how many multiply-adds it can do, and how much memory a call takes on it."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from attemper.backends.native.library import library
from attemper.errors import BackendError
from attemper.monitor.checked_model import processor
from attemper.text import count

Clock = Callable[[], float]
"""Seconds since some moment."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Numbers of glibc's mallopt."""
_LARGE = 32 << 20
"""Bytes from which on glibc asks the system for each block: the most that it takes."""
_MARK = Path("/proc/self/clear_refs")
"""Where Linux takes orders on the high-water mark of a process."""
_ROUNDS = 20_000
"""Rounds of the loop that measures the peak: about a tenth of a millisecond."""


@dataclass(frozen=True)
class Machine:
    """What every row carries."""

    processor: str
    instructions: str
    """What PyTorch uses of the processor: AVX512, AVX2, DEFAULT, ..."""
    threads: int
    torch: str
    python: str

    def __str__(self) -> str:
        return f"{self.processor}, {self.instructions}, {count(self.threads, 'thread')}, torch {self.torch}."


def machine() -> Machine:
    """The machine as it is set up now."""
    instructions, threads = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    return Machine(processor(), instructions, threads, torch.__version__, platform.python_version())


def peak_flops(threads: int, bursts: int = 5, clock: Clock = time.perf_counter) -> float | None:
    """Multiply-adds per second times two, of registers alone, on ``threads`` threads at once: the best of some bursts.

    None without the native library, whose loop this is.
    """
    try:
        loop = library().attemper_peak_flops
    except BackendError:
        return None
    together = threading.Barrier(threads)

    def rate(_: int) -> float:
        together.wait()
        start = clock()
        return loop(_ROUNDS) / (clock() - start)

    with ThreadPoolExecutor(threads) as pool:
        return max(sum(pool.map(rate, range(threads))) for _ in range(bursts))


@contextmanager
def kept_memory() -> Iterator[None]:
    """Inside, what is freed is kept for what is allocated next: blocks of up to 32 MB, of glibc. Else it gives memory
    back as soon as the end of its heap is free, and the call that frees the last block there pays for what others left:
    12 ms instead of 6 in every third round of 2, 12, 512, 64, causal, after attention by hand. Afterwards it gives
    memory back as in a process that has freed such a block. Other C libraries are left alone.
    """
    try:
        c = ctypes.CDLL(None)
        option, trim = c.mallopt, c.malloc_trim
    except (AttributeError, OSError, TypeError):
        yield
        return
    option(_MMAP_THRESHOLD, _LARGE)
    option(_TRIM_THRESHOLD, 2**31 - 1)
    try:
        yield
    finally:
        option(_TRIM_THRESHOLD, 2 * _LARGE)
        trim(0)


def resident_bytes(name: str) -> int:
    """A field of this process's memory as Linux reports it: ``VmRSS`` now, ``VmHWM`` at its highest."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def peak_bytes(call: Callable[[], Iterable[Tensor]]) -> int:
    """What a call needs at most beyond what is resident before it and what it returns; nothing else may run."""
    # 5 sets the high-water mark to what is resident now.
    _MARK.write_text("5", encoding="utf-8")
    before = resident_bytes("VmRSS")
    results = call()
    highest = resident_bytes("VmHWM")
    return highest - before - sum(tensor.numel() * tensor.element_size() for tensor in results)


def printed_apart(where: str, code: str, timeout: float | None = None) -> str | None:
    """What a program that measures memory prints, in a process whose allocator gives it back at once: what was freed
    before cannot hide what is needed. None on systems other than Linux, which keeps a process's high-water mark.

    Raises:
        RuntimeError: it failed; its last words are in the message.
    """
    if not _MARK.exists():
        return None
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, env=environment)
    if done.returncode != 0:
        raise RuntimeError(f"{where}: the process that measures memory failed:\n{done.stderr[-2000:]}")
    return done.stdout
