"""Peak memory of one call beyond its inputs and results, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from attemper.bench.hardware import resident_bytes
from attemper.bench.shape import Shape, parsed
from attemper.functional import attention


def peak_extra_bytes(shape: Shape, *, backend: str = "auto") -> int | None:
    """Bytes that a forward call with every statistic needs at most beyond its inputs, output and statistics.

    None where the system does not tell (it is Linux that keeps a process's high-water mark).

    Raises:
        RuntimeError: the process that measures failed; its last words are in the message.
    """
    if not Path("/proc/self/clear_refs").exists():
        return None
    code = "from attemper.bench.memory import print_peak; print_peak()"
    arguments = [str(shape), str(int(shape.causal)), shape.dtype, backend, str(torch.get_num_threads())]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False,
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"},
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"bench: the process that measures memory failed:\n{done.stderr[-2000:]}")
    return int(done.stdout)


def print_peak() -> None:
    """The peak of this process, in bytes, on stdout: the whole program of the process that measures it."""
    text, causal, dtype, backend, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    shape = parsed(text, causal=causal == "1", dtype=dtype)
    with torch.no_grad():
        small = Shape(1, 1, 1, 16, 16, shape.size, shape.causal, shape.dtype).tensors()
        attention(*small, is_causal=shape.causal, stats="all", backend=backend)
        query, key, value = shape.tensors()
        # 5 sets the high-water mark to what is resident now.
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
        before = resident_bytes("VmRSS")
        result = attention(
            query, key, value, is_causal=shape.causal, enable_gqa=shape.groups != shape.heads, stats="all",
            backend=backend,
        )  # fmt: skip
        assert result.stats is not None
        held = [result.output, *(result.stats[name] for name in result.stats)]  # computed as they are read
        highest = resident_bytes("VmHWM")
    print(highest - before - sum(tensor.numel() * tensor.element_size() for tensor in held))
