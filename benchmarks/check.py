"""What ``attemper check`` costs: forward passes by rule, seconds and memory beside one bare pass of the same batch.

    OMP_NUM_THREADS=1 python benchmarks/check.py [CASE ...] [--json FILE]

``minilm``: all-MiniLM-L6-v2 at 4 x 512 tokens, some of them padded; ``decoder``: a random Llama of 24 layers of width
256 at 4 x 512; ``long``: 2 of its layers at one document of 8,192 tokens; ``leak``: the same, two documents that see
each other. Seconds are of the processor, since other work may run beside; memory is the largest the process has held
beyond the model and one pass. Each case is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import minilm
import torch

import attemper
from attemper.monitor.checked_model import computed_on

CASES = ("minilm", "decoder", "long", "leak")


def case(name: str) -> tuple[Any, dict[str, Any]]:
    """A model and a batch."""
    torch.manual_seed(0)
    if name == "minilm":
        batch = {key: part.clone() for key, part in minilm.batch(512, 4).items()}
        batch["attention_mask"][1::2, 400:] = 0
        return minilm.pretrained(), batch
    from transformers import LlamaConfig, LlamaForCausalLM

    layers = 24 if name == "decoder" else 2
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
    config = LlamaConfig(vocab_size=1000, num_hidden_layers=layers, max_position_embeddings=16384, **sizes)
    model = LlamaForCausalLM(config).eval()
    if name == "decoder":
        mask = torch.ones((4, 512), dtype=torch.int64)
        mask[1::2, 400:] = 0
        return model, {"input_ids": torch.randint(3, 1000, (4, 512)), "attention_mask": mask}
    batch = {"input_ids": torch.randint(3, 1000, (1, 8192))}
    if name == "leak":
        batch["position_ids"] = torch.arange(4096).repeat(2)[None]
    return model, batch


def measured(name: str) -> dict[str, Any]:
    """Seconds, bytes and passes of one case."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    model, batch = case(name)
    with torch.no_grad():
        model(**batch)
        before = time.process_time()
        model(**batch)
    one = time.process_time() - before
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    before = time.process_time()
    report = attemper.check(model, batch)
    seconds = time.process_time() - before
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held) * 1024
    return {
        "case": name,
        "verdicts": {rule.name: rule.verdict for rule in report.rules},
        "forwards": {rule.name: rule.forwards for rule in report.rules} | {"all": report.forwards},
        "check_s": round(seconds, 2),
        "forward_s": round(one, 3),
        "passes_worth": round(seconds / one, 1),
        "more_peak_bytes": peak,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", choices=CASES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measured(given.one)))
        return
    rows = []
    for name in given.cases or CASES:
        done = subprocess.run([sys.executable, __file__, "--one", name], capture_output=True, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(rows[-1], flush=True)
    if given.json:
        about = {"processor": computed_on(None), "torch": torch.__version__, "load": round(os.getloadavg()[0], 1)}
        given.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
