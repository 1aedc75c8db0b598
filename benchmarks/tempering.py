"""What an entropy penalty and a learned temperature cost a training step, in time and memory.

Run: ``python benchmarks/tempering.py [--tokens 4096] [--pairs 7] [--cpu-time]``. A tiny random Llama (hidden size 256,
4 layers, 8 heads of 32), one sequence: ``regularize`` with EntropyTarget; and the byte-level model at 256 tokens:
``temper`` with one learned temperature per head. Paired steps in one process, in turns, median of ratios; first a check
that the penalty's gradient is that of dense float64 weights. Peak memory is that of a process of its own each.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import minilm
import torch

import attemper
from attemper.bench.hardware import resident_bytes
from attemper.lab.model import ByteModel

WAYS = ("plain", "replace", "beside")


def llama(tokens: int) -> tuple[Any, dict[str, Any]]:
    """A random Llama in training mode, and a batch of one sequence."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=8192, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(0, 256, (1, tokens))
    return LlamaForCausalLM(config).train(), {"input_ids": ids, "labels": ids}


def step_of(model: Any, batch: dict[str, Any], penalty: Any) -> Callable[[], None]:
    """Forward and backward of one training step."""

    def step() -> None:
        model.zero_grad()
        loss = model(**batch).loss
        (loss if penalty is None else penalty.attach(loss)).backward()

    return step


def regularized(model: Any, way: str) -> Any:
    penalty = attemper.EntropyTarget(0.6, 0.1, unit="normalized")
    return None if way == "plain" else attemper.regularize(model, penalty, observe=way)


def check() -> float:
    """Largest relative error of a gradient, at 64 tokens, against float64 and dense weights."""
    model, batch = llama(64)
    twin = copy.deepcopy(model).double()
    twin.set_attn_implementation("eager")
    found = twin(**batch, output_attentions=True)
    terms = []
    for p in found.attentions:
        visible = torch.arange(1, 65).double().expand(p.shape[:-1])
        entropy = -torch.where(p > 0, p * p.clamp(min=1e-300).log(), 0.0).sum(-1)
        terms.append((entropy / visible.clamp(min=2).log() - 0.6).square()[visible > 1].mean())
    (found.loss + 0.1 * torch.stack(terms).mean()).backward()
    wanted = {name: p.grad for name, p in twin.named_parameters()}
    worst = 0.0
    for way in WAYS[1:]:
        with regularized(model, way) as penalty:
            step_of(model, batch, penalty)()
        for name, p in model.named_parameters():
            worst = max(worst, ((p.grad.double() - wanted[name]).norm() / wanted[name].norm()).item())
    return worst


def times(tokens: int, pairs: int) -> dict[str, Any]:
    """Ratios of a step with the penalty to one without, each way in its turn."""
    model, batch = llama(tokens)
    result = {}
    for way in WAYS[1:]:
        twin = copy.deepcopy(model)
        step = step_of(twin, batch, regularized(twin, way))
        result[way] = minilm.paired(step, step_of(model, batch, None), pairs)
    return result


def learned_temperature(pairs: int) -> dict[str, Any]:
    """A training step of the byte-level model, 8 sequences of 256 bytes, with a learned temperature per head."""
    torch.manual_seed(0)
    model = ByteModel().train()
    twin = copy.deepcopy(model)
    attemper.temper(twin, temperature=attemper.nn.LearnedTemperature(4))
    ids = torch.randint(0, 256, (8, 257))

    def step(one: ByteModel) -> Callable[[], None]:
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-4)

        def run() -> None:
            optimizer.zero_grad()
            one.loss(ids).backward()
            optimizer.step()

        return run

    return minilm.paired(step(twin), step(model), pairs)


def peak(way: str, tokens: int) -> int:
    """Peak bytes of one step beyond the model and its gradients, in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--peak-of", way, "--tokens", str(tokens)],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout.split()[-1])


def print_peak(way: str, tokens: int) -> None:
    model, batch = llama(tokens)
    small = {name: value[:, :32] for name, value in batch.items()}
    penalty = regularized(model, way)
    step_of(model, small, penalty)()
    # 5 sets the high-water mark to what is resident now.
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    before = resident_bytes("VmRSS")
    step_of(model, batch, penalty)()
    print(resident_bytes("VmHWM") - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--cpu-time", action="store_true", help="process time on one thread, for a busy machine")
    parser.add_argument("--peak-of", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak_of:
        print_peak(options.peak_of, options.tokens)
        return
    if options.cpu_time:
        torch.set_num_threads(1)
        minilm.CLOCK[:] = [time.process_time]
    worst = check()
    if worst > 1e-5:
        sys.exit(
            f"the penalty's gradient differs from dense float64 weights' by {worst:.1e}: no timing of a wrong result"
        )
    peaks = {way: peak(way, options.tokens) for way in WAYS}
    row = {
        "tokens": options.tokens,
        "gradient_error": worst,
        "peak_bytes_of_a_step": peaks,
        "peak_ratio": {way: peaks[way] / peaks["plain"] for way in WAYS[1:]},
        "regularize": times(options.tokens, options.pairs),
        "learned_temperature": learned_temperature(3 * options.pairs),
        "clock": "process time" if options.cpu_time else "wall",
        "environment": minilm.environment(),
    }
    print(json.dumps(row, indent=2))


if __name__ == "__main__":
    main()
