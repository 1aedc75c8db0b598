"""Whether a change made attemper slower: python benchmarks/two_trees.py OLD NEW [--rounds 15] [--json FILE]

OLD and NEW are checkouts, each with its native kernels built. Two processes stay alive, one for each tree, and are
asked in turns, in alternating order, to run the same case; only one of them works at a time, with one thread, since
waiting threads of the other would disturb it. Shown are medians over the rounds: the time of each tree, and the ratio
new / old within a round, with its quartiles. ``import attemper`` is timed in fresh processes. Before a case is timed,
both trees must give the same numbers (to 1e-4 of their size).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from import_time import environment

IMPORT = "import attemper"
SECONDS = 0.05
"""A timing repeats its case until it takes about this long."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    trees = [Tree(given.old.resolve()), Tree(given.new.resolve())]
    rows = [row(name, given.rounds, *timers(name, trees)) for name in CASES]
    rows.append(row(IMPORT, 2 * given.rounds, *(tree.import_seconds for tree in trees)))
    print(f"\nmedian of the ratios: {statistics.median(one['ratio'] for one in rows):.3f}")
    if given.json:
        given.json.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1), encoding="utf-8")
    return 0


def timers(case: str, trees: Sequence[Tree]) -> list[Callable[[], float]]:
    """What times the case in each tree, once they agree about its numbers."""
    found = [tree.timer(case) for tree in trees]
    old, new = (tree.check for tree in trees)
    if abs(old - new) > 1e-4 * max(abs(old), 1.0):
        raise SystemExit(f"{case}: the trees give {old} and {new}; nothing is timed")
    return found


class Tree:
    """One checkout, and a process that runs cases in it."""

    def __init__(self, folder: Path) -> None:
        self.environment = os.environ | {"PYTHONPATH": str(folder / "src"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--worker"]
        self._process = subprocess.Popen(
            command, env=self.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def timer(self, case: str) -> Callable[[], float]:
        """What runs the case once and returns its seconds; ``check`` is the number that its results add up to."""
        self.check = self._asked(f"prepare {case}")
        return lambda: self._asked("time")

    def _asked(self, line: str) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"{line!r} failed: see above")
        return float(answer)

    def import_seconds(self) -> float:
        """Of a fresh process that imports the package and ends."""
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", IMPORT], env=self.environment, check=True)
        return time.perf_counter() - began


def row(name: str, rounds: int, old: Callable[[], float], new: Callable[[], float]) -> dict[str, Any]:
    """Both timed in turns; printed, too."""
    for warm in (old, new):
        warm()
    pairs: list[tuple[float, float]] = []
    for turn in range(rounds):
        first, second = (old, new) if turn % 2 else (new, old)
        one, two = first(), second()
        pairs.append((one, two) if turn % 2 else (two, one))
    ratios = sorted(after / before for before, after in pairs)
    low, middle, high = statistics.quantiles(ratios, n=4)
    before, after = (1e3 * statistics.median(times) for times in zip(*pairs, strict=True))
    print(f"{name:44} {before:9.3f} ms {after:9.3f} ms   ratio {middle:.3f} ({low:.3f} to {high:.3f})", flush=True)
    return {"case": name, "old_ms": before, "new_ms": after, "ratio": middle, "quartiles": [low, high]}


def work() -> int:
    """In the process of one tree: prepares the case it is asked for, and times it."""
    import torch

    run: Callable[[], float] | None = None
    times = 1
    for line in sys.stdin:
        word, _, case = line.strip().partition(" ")
        if word == "prepare":
            torch.manual_seed(0)
            run = CASES[case]()
            print(run(), flush=True)
            began = time.perf_counter()
            run()
            times = max(1, round(SECONDS / (time.perf_counter() - began)))
        else:
            assert run is not None
            began = time.perf_counter()
            for _ in range(times):
                run()
            print((time.perf_counter() - began) / times, flush=True)
    return 0


def attention(
    batch: int, heads: int, tokens: int, size: int, *, gradient: bool = False, **options: Any
) -> Callable[[], Callable[[], float]]:
    """A case of causal attention; its number is the sum of what it gives."""

    def prepared() -> Callable[[], float]:
        import torch

        from attemper import attention

        query, key, value = (torch.randn(batch, heads, tokens, size, requires_grad=gradient) for _ in range(3))

        def run() -> float:
            output, stats = attention(query, key, value, is_causal=True, **options)
            total = output.sum() if stats is None else output.sum() + stats["entropy"].sum()
            if gradient:
                total.backward()
            return 0.0 if tokens < 100 else float(total.detach())

        return run

    return prepared


def statistics_alone() -> Callable[[], float]:
    import torch

    from attemper import attention_statistics

    query, key = (torch.randn(1, 8, 1024, 64) for _ in range(2))
    return lambda: float(attention_statistics(query, key, is_causal=True)["entropy"].sum())


def model_of_attention() -> Any:
    """Four layers whose attention is PyTorch's, and a batch."""
    import torch

    layer = torch.nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).eval(), torch.randn(4, 128, 128)


def scan() -> Callable[[], float]:
    import attemper

    model, batch = model_of_attention()
    return lambda: sum(head.entropy_nats or 0.0 for site in attemper.scan(model, [batch]).sites for head in site.heads)


def watched_step() -> Callable[[], float]:
    import attemper

    model, batch = model_of_attention()
    model.train()
    watch = attemper.watch(model, every=1)

    def run() -> float:
        model(batch).sum().backward()
        watch.step()
        return 0.0

    return run


CASES: dict[str, Callable[[], Callable[[], float]]] = {
    "one tiny call": attention(1, 2, 16, 16),
    "one tiny call, every statistic": attention(1, 2, 16, 16, stats="all"),
    "tiny, forward and backward": attention(1, 2, 16, 16, stats="all", gradient=True),
    "1 x 8 x 512 x 64, every statistic": attention(1, 8, 512, 64, stats="all"),
    "1 x 8 x 512 x 64, forward and backward": attention(1, 8, 512, 64, stats="all", gradient=True),
    "1 x 4 x 2048 x 64, every statistic": attention(1, 4, 2048, 64, stats="all"),
    "1 x 4 x 512 x 64, entmax15": attention(1, 4, 512, 64, stats="all", normalizer="entmax15"),
    "1 x 4 x 512 x 64, blocked": attention(1, 4, 512, 64, stats="all", backend="blocked"),
    "1 x 4 x 256 x 64, reference": attention(1, 4, 256, 64, stats="all", backend="reference"),
    "statistics alone, 1 x 8 x 1024 x 64": statistics_alone,
    "scan of 4 layers, 4 x 128 tokens": scan,
    "training step of the same under a watch": watched_step,
}

if __name__ == "__main__":
    sys.exit(work() if sys.argv[1:2] == ["--worker"] else main())
