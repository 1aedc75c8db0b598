"""What a fingerprint costs, beside a scan and a bare forward pass of the same batch, in turn in one process.

    OMP_NUM_THREADS=1 python benchmarks/fingerprint.py [--rounds 10]

The model that ships reads 14 windows of 256 bytes of the shipped text, all-MiniLM-L6-v2 8 windows of 512 tokens of it.
Seconds of the process (and of the clock) are the least of all rounds; ratios are of processor seconds, the median of
rounds. A scan attends by kernels of attemper, a fingerprint looks at the model's own attention.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import torch
from tests.support import encoder

import attemper
from attemper.lab.representation import shipped_text
from attemper.monitor.model import computed_on


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    given = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    logging.disable(logging.WARNING)
    print(f"{computed_on(None)}; load {os.getloadavg()[0]:.1f}\n")
    print("| model | fingerprint | scan | forward pass | fingerprint / scan | fingerprint / forward pass |")
    print("|---|---|---|---|---|---|")
    for name, (model, batch) in {"the one that ships": shipped(), "all-MiniLM-L6-v2": minilm()}.items():
        _row(name, model, batch, given.rounds)


def shipped() -> tuple[Any, torch.Tensor]:
    """The byte-level model, and 14 windows of 256 bytes."""
    from attemper.lab.model import load

    text = shipped_text()[: 14 * 256]
    return load().eval(), text.view(14, 256).long()


def minilm() -> tuple[Any, dict[str, torch.Tensor]]:
    """The encoder, and 8 windows of 512 tokens; the text begins again where it ends."""
    model, tokenizer = encoder.loaded()
    words = bytes(shipped_text().tolist()).decode(errors="replace")
    ids = torch.tensor(tokenizer(words, add_special_tokens=False)["input_ids"])
    ids = ids.repeat(1 + 4096 // len(ids))[:4096].view(8, 512)
    return model.eval(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _row(name: str, model: Any, batch: Any, rounds: int) -> None:
    def forward() -> None:
        with torch.no_grad():
            model(**batch) if isinstance(batch, dict) else model(batch)

    actions: list[Callable[[], Any]] = [
        lambda: attemper.fingerprint(model, [batch]),
        lambda: attemper.scan(model, [batch]),
        forward,
    ]
    for action in actions:
        action()
    found = [[_seconds(action) for action in actions] for _ in range(rounds)]
    cells = [f"{min(one[place] for one in found)[0]:.2f} s" for place in range(3)]
    clock = [min(one[place][1] for one in found) for place in range(3)]
    cells = [f"{cell} ({seconds:.2f})" for cell, seconds in zip(cells, clock, strict=True)]
    ratios = [statistics.median(one[0][0] / one[place][0] for one in found) for place in (1, 2)]
    print(
        f"| {name} | " + " | ".join(cells) + " | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |", flush=True
    )


def _seconds(action: Callable[[], Any]) -> tuple[float, float]:
    """Of the process, and of the clock."""
    process, clock = time.process_time(), time.perf_counter()
    action()
    return time.process_time() - process, time.perf_counter() - clock


if __name__ == "__main__":
    main()
