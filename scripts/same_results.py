"""Whether two trees of attemper give the same readings, alarms, tables and pages, and read each other's files.

    python scripts/same_results.py OLD NEW [--each 10]

OLD and NEW are checkouts of this repository, each with its native kernels built. Each tree stores so many trainings and
scans of small random models, by seed, in a process of its own. Then what the old tree reads in its own files is held
against what the new one reads in them, and against what the new one reads in its own: histories, alarms and sums to the
bit, tables and pages as text. Times, folders, versions and names of processes are masked.

Exit status: 0 where all is the same, 1 where something differs; the first difference of each is printed.
"""

from __future__ import annotations

import argparse
import base64
import difflib
import gzip
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

MASKED = (
    (re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d(\.\d+)?)?(\+00:00|Z)?( UTC)?"), "TIME"),
    (re.compile(r"(?<![\d.])0\.[23]\.0(?![\d.])"), "VERSION"),
    (re.compile(r'"(time|started|pid|process|host|seconds|modified|attemper)": ?("[^"]*"|[\d.e+-]+)'), r'"\1": MASKED'),
    (re.compile(r"[\w./-]*/(run|scan)-(\d+)"), r"FOLDER/\1-\2"),
    (re.compile(r"\b\d{10}\.\d+\b"), "TIME"),
)
"""What no two trainings share."""
PACKED = re.compile(r"H4sI[A-Za-z0-9+/]+=*")
"""Documents that a page carries: JSON, with the version in it."""
STEPS = 12
SHOWN = 3
"""Lines that are printed of a difference."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--each", type=int, default=10, help="trainings, and scans")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder, name) for name in ("old", "new")}
        for name, tree in (("old", given.old), ("new", given.new)):
            work_in(tree, "write", files[name], str(given.each))
        wanted = work_in(given.old, "read", files["old"])
        found = {"files of the old tree": files["old"], "files of its own": files["new"]}
        return max(report(wanted, work_in(given.new, "read", where), which) for which, where in found.items())


def work_in(tree: Path, what: str, folder: Path, *more: str) -> dict[str, str]:
    """This file once more, with the package of ``tree``."""
    environment = os.environ | {"PYTHONPATH": str(tree.resolve() / "src"), "OMP_NUM_THREADS": "1", "COLUMNS": "140"}
    command = [sys.executable, "-W", "ignore", __file__, "--worker", what, str(folder), *more]
    done = subprocess.run(command, cwd=folder.parent, env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def report(wanted: dict[str, str], found: dict[str, str], which: str) -> int:
    """Prints what the new tree reads otherwise; the exit status."""
    differing = [name for name in sorted(wanted | found) if wanted.get(name) != found.get(name)]
    kinds = Counter(name.rpartition(" ")[2] for name in wanted)
    print(
        f"{which}: {len(wanted):,} results, {len(differing)} differ ({', '.join(f'{n} {k}' for k, n in kinds.items())})"
    )
    for name in differing:
        one, two = (side.get(name, "nothing").splitlines() for side in (wanted, found))
        lines = [line[:300] for line in difflib.unified_diff(one, two, lineterm="", n=0)][2:]
        print(f"  {name}", *lines[:SHOWN], sep="\n    ")
    return int(bool(differing))


def work(what: str, folder: str, *more: str) -> None:
    """In the process of one tree."""
    import torch

    torch.set_num_threads(1)
    if what == "write":
        for seed in range(int(more[0])):
            write_run(Path(folder, f"run-{seed}"), seed)
            write_scan(Path(folder, f"scan-{seed}"), seed)
        print("{}")
        return
    found: dict[str, str] = {}
    for path in sorted(Path(folder).iterdir()):
        read = read_run if path.name.startswith("run") else read_scan
        found |= {f"{path.name} {kind}": masked(text) for kind, text in read(path).items()}
    print(json.dumps(found))


def model_of(seed: int) -> Any:
    """One of five small models, of as many kinds of attention."""
    import torch
    import transformers as tf

    torch.manual_seed(seed)
    sizes = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "vocab_size": 97,
    }
    made = (
        lambda: tf.LlamaForCausalLM(tf.LlamaConfig(num_key_value_heads=2, **sizes)),
        lambda: tf.BertForMaskedLM(tf.BertConfig(**sizes)),
        lambda: tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=32, n_head=4, n_layer=2, vocab_size=97, n_positions=128)),
        lambda: tf.MistralForCausalLM(tf.MistralConfig(num_key_value_heads=2, sliding_window=8, **sizes)),
        lambda: tf.Gemma2ForCausalLM(tf.Gemma2Config(num_key_value_heads=2, head_dim=8, **sizes)),
    )
    return made[seed % len(made)]()


def batch_of(seed: int) -> dict[str, Any]:
    """Tokens, with padding behind every second batch."""
    import torch

    ids = torch.randint(0, 97, (3, 24), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    if seed % 2:
        mask[1, 17:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def write_run(path: Path, seed: int) -> None:
    """A training whose rate rises: some of its alarms ring."""
    import torch

    import attemper

    model = model_of(seed).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5 * (1 + seed))
    watch = attemper.watch(model, every=1 + seed % 2, store=path)
    watch.step()
    for step in range(STEPS * (1 + seed)):
        optimizer.zero_grad()
        model(**batch_of(1000 * seed + step)).loss.backward()
        optimizer.step()
        watch.step()
    watch.close()


def write_scan(path: Path, seed: int) -> None:
    """A scan as JSON and as its sums."""
    import attemper

    found = attemper.scan(model_of(seed).eval(), [batch_of(seed), batch_of(seed + 1)])
    path.mkdir()
    (path / "scan.json").write_text(found.to_json(), "utf-8")
    found.save(path / "scan.safetensors")


def read_run(path: Path) -> dict[str, str]:
    import attemper

    run = getattr(attemper, "open", None) or attemper.open_run
    with run(path) as opened:
        histories = [
            f"{name} {site.name} {digest(opened.history(name, site.name))}"
            for name in opened.statistics
            for site in opened.sites
        ]
        alarms = [json.dumps(asdict(alarm), sort_keys=True, default=str) for alarm in opened.alarms()]
        page = opened.to_html(path / "page.html").read_text("utf-8")
    return {
        "histories": "\n".join(histories),
        "alarms": "\n".join(alarms),
        "table": printed("show", str(path)),
        "json": printed("show", str(path), "--json"),
        "page": page,
    }


def read_scan(path: Path) -> dict[str, str]:
    import attemper

    load = getattr(attemper, "open", None) or attemper.load_scan
    sums = load(path / "scan.safetensors")
    return {
        "readings": sums.to_json(1),
        "stored": load(path / "scan.json").to_json(1),
        "table": str(sums),
        "page": sums.to_html(path / "page.html").read_text("utf-8"),
    }


def printed(*arguments: str) -> str:
    """What the command line prints."""
    command = [sys.executable, "-W", "ignore", "-m", "attemper", *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout


def digest(history: Any) -> str:
    """Of its steps and values, to the bit."""
    return hashlib.sha256(history.steps.tobytes() + history.values.tobytes()).hexdigest()[:16]


def masked(text: str) -> str:
    text = PACKED.sub(lambda found: gzip.decompress(base64.b64decode(found[0])).decode("utf-8", "replace"), text)
    for pattern, word in MASKED:
        text = pattern.sub(word, text)
    return text


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(*sys.argv[2:])
    else:
        raise SystemExit(main())
