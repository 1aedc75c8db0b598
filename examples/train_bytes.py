"""Train the byte-level model that ships with attemper on the sources of Python's standard library.

    python examples/train_bytes.py --bfloat16 --out bytes.safetensors

made the weights that ship: 1.538 bits a byte on held-out files (Python 3.11.7, torch 2.13.0 on a CPU, 2 threads).

Read are the *.py files of this interpreter's library, but for tests, tables (encodings, pydoc_data) and files written
when it was built. About 5% of the files, chosen by a hash of their names, are held out and never trained on. The same
seed, Python, torch and threads give the same bits, interrupted and resumed (``--resume``) or not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import sysconfig
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from attemper.lab.model import ByteConfig, ByteModel, bits_per_byte, save

LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}


@dataclass(frozen=True)
class Recipe:
    """What the weights follow from, beside the bytes and the machine."""

    steps: int = 4000
    batch: int = 16
    """Windows a step, each of the model's context."""
    rate: float = 3e-3
    """Learning rate at its peak: a linear warm-up leads to it, half a cosine from there to 0."""
    warmup: int = 200
    decay: float = 0.1
    """Weight decay of matrices; gains of norms have none."""
    clip: float = 1.0
    """Bound of the norm of the whole gradient."""
    seed: int = 0
    bfloat16: bool = False
    """Matrix products and attention in bfloat16 (autocast); weights stay float32."""

    def learning_rate(self, step: int) -> float:
        """At ``step``, from 0."""
        if step < self.warmup:
            return self.rate * (step + 1) / self.warmup
        return self.rate * (1 + math.cos(math.pi * (step - self.warmup) / max(1, self.steps - self.warmup))) / 2


def stdlib_files(root: Path) -> tuple[list[Path], list[Path]]:
    """Sorted files to train on, and held-out files: one in twenty, by the SHA-256 of its path below ``root``."""
    kept: tuple[list[Path], list[Path]] = ([], [])
    for path in sorted(root.rglob("*.py")):
        below = path.relative_to(root)
        built = below.parts[0].startswith(("config-", "_sysconfigdata"))
        if not built and not LEFT_OUT & set(below.parts):
            kept[int(hashlib.sha256(below.as_posix().encode()).hexdigest(), 16) % 20 == 0].append(path)
    return kept


def read(files: list[Path]) -> Tensor:
    """Bytes of all ``files``, int64 [n], each file ended by a zero byte."""
    data = b"".join(path.read_bytes() + b"\0" for path in files)
    return torch.from_numpy(np.frombuffer(data, np.uint8).astype(np.int64))


def adamw(model: ByteModel, recipe: Recipe) -> torch.optim.AdamW:
    """The optimizer; it decays matrices only."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": recipe.decay},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.rate, betas=(0.9, 0.98), fused=True)


def identity(config: ByteConfig, recipe: Recipe, ids: Tensor) -> dict[str, object]:
    """What must agree for a checkpoint to be continued."""
    digest = hashlib.sha256(ids.numpy().tobytes()).hexdigest()
    return {"config": asdict(config), "recipe": asdict(recipe), "bytes": digest, "threads": torch.get_num_threads()}


def write_checkpoint(
    path: Path, step: int, run: dict[str, object], model: ByteModel, optimizer: torch.optim.AdamW
) -> None:
    """Weights and moments as safetensors, the rest as JSON in its metadata: one file, replaced whole or not at all."""
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[f"weight/{name}"] = parameter.detach()
        for moment in ("exp_avg", "exp_avg_sq"):
            tensors[f"{moment}/{name}"] = optimizer.state[parameter][moment]
    part = path.with_name(path.name + ".part")
    save_file(tensors, part, metadata={"step": str(step), "run": json.dumps(run)})
    os.replace(part, path)


def read_checkpoint(path: Path, run: dict[str, object], model: ByteModel, optimizer: torch.optim.AdamW) -> int:
    """Puts weights and moments back; the number of steps that were done."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        stored = json.loads(metadata["run"])
        changed = [name for name in run if stored.get(name) != run[name]]
        if changed:
            raise SystemExit(f"{path} is of another run ({', '.join(changed)}). Leave out --resume to start anew.")
        step = int(metadata["step"])
        for name, parameter in model.named_parameters():
            parameter.data.copy_(file.get_tensor(f"weight/{name}"))
            moments = {moment: file.get_tensor(f"{moment}/{name}") for moment in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.tensor(float(step)), **moments}
    return step


def train(
    config: ByteConfig, ids: Tensor, recipe: Recipe, *, checkpoint: Path | None = None, every: int = 500,
    resume: bool = False, report: Callable[[int, float, ByteModel], None] | None = None,
) -> ByteModel:  # fmt: skip
    """A model trained on random windows of ``ids`` [n].

    The generator starts anew at each step, from the seed and the step: nothing but weights and moments is carried
    from one step to the next. Every ``every`` steps the checkpoint is written and ``report(step, loss, model)`` called.
    """
    run = identity(config, recipe, ids)
    torch.manual_seed(recipe.seed)
    model = ByteModel(config)
    optimizer = adamw(model, recipe)
    done = read_checkpoint(checkpoint, run, model, optimizer) if resume and checkpoint and checkpoint.exists() else 0
    window = torch.arange(config.context + 1)
    losses: list[float] = []
    for step in range(done, recipe.steps):
        torch.manual_seed(recipe.seed * 2**32 + step + 1)
        starts = torch.randint(len(ids) - config.context, (recipe.batch, 1))
        with torch.autocast("cpu", torch.bfloat16, enabled=recipe.bfloat16):
            loss = model.loss(ids[starts + window])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate(step)
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % every == 0 or step + 1 == recipe.steps:
            if checkpoint:
                write_checkpoint(checkpoint, step + 1, run, model, optimizer)
            if report:
                report(step + 1, sum(losses) / len(losses), model.eval())
                model.train()
            losses.clear()
    return model.eval()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="float16 safetensors to write")
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--batch", type=int, default=Recipe.batch, help="windows a step")
    parser.add_argument("--rate", type=float, default=Recipe.rate, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--bfloat16", action="store_true", help="autocast: faster on a CPU with bfloat16 instructions")
    parser.add_argument("--threads", type=int, default=2, help="of torch; other sums, so other bits")
    parser.add_argument("--every", type=int, default=500, help="steps between two checkpoints")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint beside --out, if any")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    trained, held_out = stdlib_files(Path(sysconfig.get_paths()["stdlib"]))
    ids, unseen = read(trained), read(held_out)
    recipe = Recipe(options.steps, options.batch, options.rate, seed=options.seed, bfloat16=options.bfloat16)
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {torch.get_num_threads()} threads; {recipe}")
    print(f"training: {len(trained)} files, {len(ids):,} bytes; held out: {len(held_out)} files, {len(unseen):,} bytes")
    began = time.monotonic()

    def report(step: int, loss: float, model: ByteModel) -> None:
        bits = bits_per_byte(model, unseen[:65_536])
        print(
            f"step {step}: training {loss / math.log(2):.3f} bits a byte, first 64 KiB held out {bits:.3f}, "
            f"{(time.monotonic() - began) / 60:.1f} minutes",
            flush=True,
        )

    checkpoint = options.out.with_suffix(".state.safetensors")
    model = train(
        ByteConfig(), ids, recipe, checkpoint=checkpoint, every=options.every, resume=options.resume, report=report
    )
    save(model, options.out)
    model.load_state_dict({name: tensor.half().float() for name, tensor in model.state_dict().items()})
    context = model.config.context
    print(
        f"held out: {bits_per_byte(model, unseen):.4f} bits a byte over {len(unseen) - 1:,} bytes of {len(held_out)} "
        f"files (weights as stored, in float16; windows of {context} bytes side by side, each byte predicted once)"
    )
    checkpoint.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
