"""Whether two trees of attemper give the same bits.

    python scripts/same_bits.py OLD NEW [--calls 5000] [--backend native]

OLD and NEW are checkouts of this repository, each with its native kernels built. Every tree draws the random calls of
its own ``tests/fuzz`` in a process of its own, for the native, the blocked and the reference backend or the one that is
named, and hashes what comes back: outputs, statistics, and gradients of them. Inputs are hashed too, so that two
different calls are never compared. A call whose bits differ is redone, and the largest difference of each of its
tensors is printed.

Calls ask for the statistics that the tests of both trees draw, in the order of the old one.

Exit status: 0 where all bits are the same, 1 where some differ, 2 where the trees drew different calls.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

BACKENDS = ("native", "blocked", "reference")
REFUSED = "error"
"""In the place of results: the type of what was raised."""
SHOWN = 20
"""How many differing calls are redone and printed."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--calls", type=int, default=5000, help="random calls for each backend")
    parser.add_argument("--backend", choices=BACKENDS, help="this one alone")
    given = parser.parse_args(arguments)
    backends = (given.backend,) if given.backend else BACKENDS
    trees = {"old": given.old.resolve(), "new": given.new.resolve()}
    with tempfile.TemporaryDirectory() as folder:
        statistics = shared_statistics(trees, Path(folder))
        found = hashes(trees, Path(folder), given.calls, backends, statistics)
    return report(trees, found["old"], found["new"], statistics)


def hashes(
    trees: dict[str, Path], folder: Path, calls: int, backends: Sequence[str], statistics: Sequence[str]
) -> dict[str, dict[str, dict[str, str]]]:
    """For each tree: "backend seed" -> name of a tensor -> hash. The two processes run side by side."""
    options = ["--calls", str(calls), "--backends", *backends, "--statistics", *statistics]
    running = {name: worker(tree, ["hash", *options, "--to", str(folder / name)]) for name, tree in trees.items()}
    failed = [name for name, process in running.items() if process.wait() != 0]
    if failed:
        raise SystemExit(f"the {' and the '.join(failed)} tree could not be run: see above")
    return {name: json.loads((folder / name).read_text("utf-8")) for name in trees}


def shared_statistics(trees: dict[str, Path], folder: Path) -> list[str]:
    """What the calls of both trees may ask for."""
    for name, tree in trees.items():
        worker(tree, ["statistics", "--to", str(folder / name)]).wait()
    old, new = (json.loads((folder / name).read_text("utf-8")) for name in ("old", "new"))
    return [name for name in old if name in new]


def worker(tree: Path, arguments: list[str]) -> subprocess.Popen[bytes]:
    """This file once more, with the package and the tests of ``tree``."""
    environment = os.environ | {"PYTHONPATH": f"{tree / 'src'}{os.pathsep}{tree}", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, __file__, "--worker", *arguments], cwd=tree, env=environment)


def report(
    trees: dict[str, Path], old: dict[str, dict[str, str]], new: dict[str, dict[str, str]], statistics: Sequence[str]
) -> int:
    """Prints what came out; the exit status."""
    counts: Counter[str] = Counter()
    differing: list[str] = []
    for call in old:
        backend = call.split()[0]
        if old[call].get("inputs") != new[call].get("inputs"):
            print(f"{call}: the trees drew different calls")
            return 2
        same = old[call] == new[call]
        refused = same and REFUSED in old[call]
        counts[f"{backend}: {'refused by both' if refused else 'the same bits' if same else 'other bits'}"] += 1
        if not same:
            differing.append(call)
    tensors = sum(len(parts) - 1 for parts in old.values())
    print(f"{len(old):,} calls, {tensors:,} tensors")
    for line, count in sorted(counts.items()):
        print(f"  {line}: {count:,}")
    for call in differing[:SHOWN]:
        print(call, *differences(trees, call, statistics), sep="\n    ")
    return int(bool(differing))


def differences(trees: dict[str, Path], call: str, statistics: Sequence[str]) -> Iterator[str]:
    """A line for each tensor of a call that differs between the trees."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        for name, tree in trees.items():
            worker(tree, ["save", "--call", call, "--statistics", *statistics, "--to", f"{folder}/{name}"]).wait()
        old, new = (torch.load(f"{folder}/{name}", weights_only=True) for name in trees)
    for name in sorted(old.keys() | new.keys()):
        one, two = old.get(name), new.get(name)
        if one is None or two is None or one.shape != two.shape or one.dtype != two.dtype:
            yield f"{name}: {describe(one)} became {describe(two)}"
        elif digest(one) != digest(two):
            gap = (one.double() - two.double()).abs().nan_to_num(0.0)
            size = float(one.double().abs().nan_to_num(0.0, 0.0, 0.0).max()) if one.numel() else 0.0
            yield f"{name}: largest difference {float(gap.max()):.3g}, values up to {size:.3g}"


def describe(tensor: Any) -> str:
    return "nothing" if tensor is None else f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def digest(tensor: Any) -> str:
    """Of the bytes; -0.0 and NaN have theirs."""
    import torch

    data = tensor.detach().as_subclass(torch.Tensor).resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    head = f"{list(tensor.shape)} {tensor.dtype}".encode()
    return hashlib.sha256(head + data.numpy().tobytes()).hexdigest()[:16]


def work(arguments: Sequence[str]) -> int:
    """In the process of one tree: hashes of all calls, or the tensors of one."""
    import torch

    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("statistics", "hash", "save"))
    parser.add_argument("--calls", type=int)
    parser.add_argument("--backends", nargs="+")
    parser.add_argument("--call")
    parser.add_argument("--statistics", nargs="+")
    parser.add_argument("--to", type=Path, required=True)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    from tests.fuzz import draws

    if given.what == "statistics":
        before = getattr(draws, "ONE_PASS", ()) + getattr(draws, "WHOLE_ROWS", ())
        given.to.write_text(json.dumps(getattr(draws, "STATISTICS", before)), encoding="utf-8")
        return 0
    draws.STATISTICS = tuple(given.statistics)
    if given.what == "save":
        backend, seed = given.call.split()
        found = tensors(backend, int(seed)).items()
        torch.save({name: part.as_subclass(torch.Tensor).clone() for name, part in found}, given.to)
        return 0
    found = {
        f"{backend} {seed}": {name: digest(part) for name, part in tensors(backend, seed).items()}
        for seed in range(given.calls)
        for backend in given.backends
    }
    given.to.write_text(json.dumps(found), encoding="utf-8")
    return 0


def tensors(backend: str, seed: int) -> dict[str, Any]:
    """What the call of a seed gives on a backend, by name, and its inputs in one tensor; an error by its type."""
    import torch
    from tests.fuzz import check, draws

    torch.manual_seed(seed)
    made = draws.draw(seed, (backend,))
    made.transform = ""
    inputs = torch.cat([part.detach().reshape(-1).double() for part in made.tensors.values()])
    given = {name: check._passed(made, name, tensor) for name, tensor in made.tensors.items()}
    found = {"inputs": inputs}
    try:
        results = check._results(made, given)
        found |= results
        wanted = [results[name] for name in made.wanted if results[name].requires_grad]
        if wanted:
            found |= gradients(wanted, given, seed)
    except Exception as error:
        found[REFUSED] = torch.tensor(list(type(error).__name__.encode()))
    return {name: part.detach() for name, part in found.items()}


def gradients(wanted: list[Any], given: dict[str, Any], seed: int) -> dict[str, Any]:
    """Gradients of every input, under random gradients from above."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    above = [torch.randn(part.shape, generator=generator).to(part.dtype) for part in wanted]
    parts = torch.autograd.grad(wanted, list(given.values()), above, allow_unused=True)
    return {f"gradient of {name}": part for name, part in zip(given, parts, strict=True) if part is not None}


if __name__ == "__main__":
    sys.exit(work(sys.argv[2:]) if sys.argv[1:2] == ["--worker"] else main())
