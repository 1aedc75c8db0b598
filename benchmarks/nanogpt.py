"""nanoGPT's public training script, compiled, with a watch and without: is every head seen, is the training the same?

    git clone https://github.com/karpathy/nanoGPT
    python benchmarks/nanogpt.py nanoGPT [--steps 100] [--every 10] [--json FILE]

``train.py`` runs as it is, three times, each in a process of its own: alone, with the watch opened before the script
compiles its model, and with the watch opened after that. Two lines are added: one that opens the watch, and
``watch.step()`` at the end of an iteration. Settings are those that its README gives for a computer without a GPU, but
for ``--compile=True``, a dropout of 0.1 and an evaluation every 50 steps. The corpus is the source of this Python's
library, as characters. Losses are compared to the last bit, and weights by their digest. The clone is not written to.
"""

from __future__ import annotations

import argparse
import builtins
import hashlib
import json
import pickle
import runpy
import shutil
import subprocess
import sys
import tempfile
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attemper.bench.hardware import machine
from attemper.lab.corpus import standard_library

LAYERS, HEADS = 4, 4
CHARACTERS = 1_000_000
SETTINGS = {
    "dataset": "standard_library", "out_dir": "out", "device": "cpu", "compile": True, "eval_iters": 20,
    "log_interval": 1, "eval_interval": 50, "block_size": 64, "batch_size": 12, "n_layer": LAYERS, "n_head": HEADS,
    "n_embd": 128, "dropout": 0.1,
}  # fmt: skip
COMPILES, ENDS = "# compile the model\n", "    iter_num += 1\n"
"""Lines of the script: before the first it compiles nothing, before the second it has finished an iteration."""
LOOP = "# training loop\n"
RUN = "run"
"""The first word of a process that runs one script."""


def write_corpus(folder: Path) -> None:
    """Writes what the script reads of a corpus of characters."""
    folder.mkdir(parents=True)
    corpus = standard_library()
    texts = [bytes(part[:CHARACTERS].tolist()).decode(errors="ignore") for part in (corpus.training, corpus.held_out)]
    numbers = {character: number for number, character in enumerate(sorted(set("".join(texts))))}
    for name, text in zip(("train", "val"), texts, strict=True):
        np.array([numbers[character] for character in text], np.uint16).tofile(folder / f"{name}.bin")
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(numbers)}))


def with_watch(script: str, place: str, every: int) -> str:
    """The script with a watch that is opened before the line ``place``."""
    opened = f"import attemper; watch = attemper.watch(model, every={every})\n"
    for line, added in ((place, opened), (ENDS, "    watch.step()\n")):
        assert script.count(line) == 1, f"train.py has another line than {line!r}"
        script = script.replace(line, added + line)
    return script


def run(script: Path, found: Path, settings: list[str]) -> None:
    """Runs a script of this folder and writes what came out. A loss is read where the script prints it, rounded."""
    losses: list[float] = []
    write = builtins.print

    def note(*words: Any, **options: Any) -> None:
        own = sys._getframe(1).f_globals
        kind = str(words[0]).partition(" ")[0] if words else ""
        if kind == "iter":
            losses.append(own["lossf"])
        elif kind == "step":
            losses.extend(own["losses"][split].item() for split in ("train", "val"))
        write(*words, **options)

    builtins.print = note
    sys.path.insert(0, str(script.parent))
    sys.argv = [script.name, "config/train_shakespeare_char.py", *settings]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        own = runpy.run_path(str(script), run_name="__main__")
    digest = hashlib.sha256()
    for value in own["raw_model"].state_dict().values():
        digest.update(value.numpy().tobytes())
    counters = torch._dynamo.utils.counters
    row: dict[str, Any] = {
        "losses": losses,
        "weights": digest.hexdigest(),
        "random numbers": torch.rand(4).tolist(),
        "compilations": {name: dict(counters[name]) for name in ("stats", "frames", "graph_break")},
    }
    if (watch := own.get("watch")) is not None:
        row["failures"] = watch.failures
        row["heads"] = {f"{site.name} ({site.mode})": len(site.heads) for site in watch.table().sites}
        row["steps"] = watch.history("entropy").steps.tolist()
        row["said"] = [str(one.message) for one in caught if "attemper" in str(one.message)]
        watch.close()
    found.write_text(json.dumps(row))


def results(clone: Path, steps: int, every: int) -> dict[str, dict[str, Any]]:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "config").mkdir()
        for name in ("train.py", "model.py", "configurator.py", "config/train_shakespeare_char.py"):
            shutil.copy(clone / name, folder / name)
        write_corpus(folder / "data" / str(SETTINGS["dataset"]))
        public = (folder / "train.py").read_text()
        scripts = {
            "alone": public,
            "watched before it compiles": with_watch(public, COMPILES, every),
            "watched after": with_watch(public, LOOP, every),
        }
        # Its last iteration is the one numbered max_iters.
        numbers = {"max_iters": steps - 1, "lr_decay_iters": steps}
        settings = [f"--{name}={value}" for name, value in {**SETTINGS, **numbers}.items()]
        found: dict[str, dict[str, Any]] = {}
        for number, (name, text) in enumerate(scripts.items()):
            script, out = folder / f"train_{number}.py", folder / f"{number}.json"
            script.write_text(text)
            subprocess.run(
                [sys.executable, Path(__file__).resolve(), RUN, script, out, *settings], cwd=folder, check=True
            )
            found[name] = json.loads(out.read_text())
        return found


def compared(alone: dict[str, Any], watched: dict[str, Any]) -> dict[str, Any]:
    """What is equal with a watch and without, and what the watch has seen."""
    equal = {f"{name} equal": watched[name] == value for name, value in alone.items()}
    seen = watched["heads"] == {f"transformer.h.{layer}.attn (train)": HEADS for layer in range(LAYERS)}
    right = all(equal.values()) and seen and not watched["failures"]
    told = {name: watched[name] for name in ("heads", "steps", "failures", "said")}
    return {"right": right, **equal, **told}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = results(options.clone, options.steps, options.every)
    alone = found.pop("alone")
    row: dict[str, Any] = {
        "machine": asdict(machine()),
        "train.py": hashlib.sha256((options.clone / "train.py").read_bytes()).hexdigest(),
        "settings": SETTINGS,
        "steps": options.steps,
        "every": options.every,
        "losses": len(alone["losses"]),
        "compilations": alone["compilations"],
        "last loss": alone["losses"][-1],
        "watched": {name: compared(alone, one) for name, one in found.items()},
    }
    print(json.dumps(row, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(row, indent=2) + "\n")
    sys.exit(not all(one["right"] for one in row["watched"].values()))


if __name__ == "__main__":
    if sys.argv[1:2] == [RUN]:
        run(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
    else:
        main()
