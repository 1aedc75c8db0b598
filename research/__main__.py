"""``python -m research``: runs the experiments of this folder, or shows what they came to."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from attemper import InputError
from attemper.cli.lab import print_experiment
from attemper.cli.output import INTERRUPTED, say
from attemper.lab import read_results, train
from attemper.lab.draw import draw
from attemper.lab.experiment import Experiment
from research import EXPERIMENTS, RESULTS, TAKES, module_of
from research.packed import unpack

KEPT = Path("lab-runs")
"""Where runs are kept, in a folder of the experiment's name. Git ignores it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 1 for a mistake of the caller that is told, 2 for bad usage, 130 for an interrupt."""
    options = _parser().parse_args(arguments)
    if options.experiment is None:
        for name, shows in EXPERIMENTS.items():
            print(f"{name}: {shows}; {TAKES[name]}")
        return 0
    try:
        result = _result(options)
        if options.png is not None:
            say(f"drawn: {draw(result, options.png)}")
    except InputError as error:
        say(f"research: {error}")
        return 1
    except KeyboardInterrupt:
        say("research: interrupted; call the same command again, and it goes on from the runs that are done.")
        return INTERRUPTED
    if options.json:
        print(result.to_json(indent=2))
    else:
        print_experiment(result)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m research", description="Experiments that judge attemper.")
    add = parser.add_argument
    add("experiment", nargs="?", choices=list(EXPERIMENTS), help="which one; without it, they are listed")
    add("--out", type=Path, metavar="FOLDER", help=f"keep the runs there; default {KEPT}/NAME, with the packed ones")
    add("--workers", type=int, default=2, help="processes that train, with a thread each: 2")
    add("--steps", type=int, help="of each training run")
    add("--seeds", type=int, help="how many seeds are trained")
    add("--at-most", type=int, help="train at most so many of the missing runs, then show what is there")
    add("--quick", action="store_true", help="train a few steps only, to see that it works")
    add("--results", type=Path, metavar="FILE", help="show a results.json, and train nothing")
    add("--json", action="store_true", help="print one JSON document instead of tables")
    add("--png", type=Path, metavar="FILE", help="draw the charts into a .png file")
    return parser


def _result(options: argparse.Namespace) -> Experiment:
    """Read from a file of results, or trained: what is missing in the folder, after the packed runs were put there."""
    name = options.experiment
    if options.results is not None:
        return read_results(module_of(name), options.results)
    out, packed = options.out or KEPT / name, RESULTS / f"{name}.zip"
    if options.out is None and not options.quick and packed.is_file():
        say(f"{unpack(packed, out)} runs of {packed.name} put into {out}")
    how = {key: getattr(options, key) for key in ("workers", "steps", "seeds", "quick", "at_most")}
    say(f"{name}: {EXPERIMENTS[name]}; all of it takes {TAKES[name]}. Stopped, it goes on when called again.")
    return train(module_of(name), out=out, report=say, **how)


if __name__ == "__main__":
    sys.exit(main())
