"""What a fingerprint costs, beside a scan and a bare forward pass of the same batch, in turn in one process.

    OMP_NUM_THREADS=1 python benchmarks/fingerprint.py [--rounds 10] [--sizes]

The model that ships reads 14 windows of 256 bytes of the shipped text, all-MiniLM-L6-v2 8 windows of 512 tokens of it,
with PyTorch's SDPA, the default of transformers, and with eager attention. Seconds of the process (and of the clock)
are the least of all rounds; ratios are of processor seconds, the median of rounds. A scan attends by kernels of
attemper whatever the model has, a fingerprint looks at the model's own attention. ``--sizes`` prints what files take in
place of that: 32 layers of 32 heads of size 128, and what stands in a layer.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import minilm
import torch

import attemper
from attemper.lab.model import shipped_text
from attemper.monitor.checked_model import computed_on


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--sizes", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    logging.disable(logging.WARNING)
    if given.sizes:
        _sizes()
        return
    print(f"{computed_on(None)}; load {os.getloadavg()[0]:.1f}\n")
    print("| model | fingerprint | scan | forward pass | fingerprint / scan | fingerprint / forward pass |")
    print("|---|---|---|---|---|---|")
    _row("the one that ships", *shipped(), given.rounds)
    for kernel in ("sdpa", "eager"):
        _row(f"all-MiniLM-L6-v2, {kernel}", *encoder(kernel), given.rounds)


def shipped() -> tuple[Any, torch.Tensor]:
    """The byte-level model, and 14 windows of 256 bytes."""
    from attemper.lab.model import load

    text = shipped_text()[: 14 * 256]
    return load().eval(), text.view(14, 256).long()


def encoder(kernel: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """all-MiniLM-L6-v2 with an attention of transformers, and 8 windows of 512 tokens of a text that begins again."""
    from transformers import AutoTokenizer

    words = bytes(shipped_text().tolist()).decode(errors="replace")
    tokenizer = AutoTokenizer.from_pretrained(minilm.folder())
    ids = torch.tensor(tokenizer(words, add_special_tokens=False)["input_ids"])
    ids = ids.repeat(1 + 4096 // len(ids))[:4096].view(8, 512)
    return minilm.pretrained(kernel), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


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


LAYERS = 32


def _sizes() -> None:
    print("| heads of keys | type | 16 rows | 32 rows | 64 rows |\n|---|---|---|---|---|")
    fields: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for groups in (32, 8):
            for dtype in (torch.bfloat16, torch.float32):
                model, ids = large(groups, dtype), torch.arange(2 * 256).view(2, 256) % 200
                sizes = []
                for rows in (16, 32, 64):
                    path = attemper.fingerprint(model, [ids], rows=rows).save(Path(folder) / "a.safetensors")
                    sizes.append(path.stat().st_size)
                    if rows == 32:
                        fields[f"{groups}, {str(dtype).removeprefix('torch.')}"] = _fields(path)
                cells = " | ".join(f"{size / 1e6:.1f} MB" for size in sizes)
                print(f"| {groups} | {str(dtype).removeprefix('torch.')} | {cells} |", flush=True)
    print(f"\n| a layer, 32 rows | {' | '.join(fields)} |\n|---|{'---|' * len(fields)}")
    names = dict.fromkeys(name for one in fields.values() for name in one)
    for name in sorted(names, key=lambda name: -max(one.get(name, 0.0) for one in fields.values())):
        print(f"| `{name}` | " + " | ".join(f"{one.get(name, 0.0):.1f} kB" for one in fields.values()) + " |")


def large(groups: int, dtype: torch.dtype) -> Any:
    """32 layers of 32 heads of size 128, with little else."""
    from transformers import LlamaConfig, LlamaModel

    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": LAYERS, "head_dim": 128}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=200, num_attention_heads=32, num_key_value_heads=groups, **sizes)
    model: Any = LlamaModel(config)
    return model.eval().to(dtype)


def _fields(path: Path) -> dict[str, float]:
    """Kilobytes of each field of a layer."""
    from safetensors import safe_open

    found: dict[str, float] = defaultdict(float)
    with safe_open(path, "np") as file:
        for name in file.keys():  # noqa: SIM118 (no mapping)
            found[name.split(".")[1]] += file.get_tensor(name).nbytes / 1000 / LAYERS
    return found


def _seconds(action: Callable[[], Any]) -> tuple[float, float]:
    """Of the process, and of the clock."""
    process, clock = time.process_time(), time.perf_counter()
    action()
    return time.process_time() - process, time.perf_counter() - clock


if __name__ == "__main__":
    main()
