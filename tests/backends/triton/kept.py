"""What the compilers made of the Triton kernels, kept beside a hash of the sources that it holds for."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FILE = HERE / "compiled.json"
CALLS = {
    "forward": ("softmax: statistics", "softmax: forward", "softmax: every feature, bias", "softmax: one query"),
    "gradients": ("softmax: every feature, bias", "softmax: one query, bias", "softmax: packed"),
    "forward, rowwise": ("entmax: every",),
    "gradients, rowwise": ("entmax: every", "entmax: one query"),
}
"""Those with the most in registers: with every statistic, with every feature and a bias, with packed documents. What
has less, ``python tests/backends/triton/cross_compile.py [--gradients]`` compiles too: a quarter of an hour more.
"""


def sources_hash() -> str:
    """Of all that decides what is compiled: the kernels, what launches them, and the script. Comments do not count."""
    package = HERE.parents[2] / "src" / "attemper" / "backends"
    files = [*sorted((package / "triton").rglob("*.py")), package / "contract.py", HERE / "cross_compile.py"]
    return hashlib.sha256("\n".join(map(_code, files)).encode()).hexdigest()[:16]


def _code(path: Path) -> str:
    lines = (line.rstrip() for line in path.read_text("utf-8").split("\n"))
    return "\n".join(line for line in lines if line and not line.lstrip().startswith("#"))


def read() -> dict[str, Any]:
    return json.loads(FILE.read_text("utf-8"))


def write(kernels: list[dict[str, Any]], triton: str) -> None:
    head = json.dumps({"sources": sources_hash(), "triton": triton})
    lines = ",\n".join(map(json.dumps, kernels))
    FILE.write_text(f'{head[:-1]}, "kernels": [\n{lines}\n]}}\n', encoding="utf-8")
