"""Small experiments that show why attention is scaled and what temperature does, on the functions that users call.

One file an experiment, one function of the same name: ``run("scaling", seed=0)`` is ``scaling.scaling(seed=0)``. One
that trains models, for half an hour, is planned in a file and run by ``train``; what it found is kept in a small file
of results, which ``read_results`` reads. The small model and the text that scans read by default live here, too.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from attemper.checks import one_of, whole_number
from attemper.errors import InputError

if TYPE_CHECKING:
    from attemper.lab.experiment import Experiment

EXPERIMENTS: dict[str, str] = {
    "scaling": "why scores are divided by sqrt(d): their variance for every head size and divisor",
    "saturation": "what large scores do to a softmax: its weights, its gradients, its Jacobian",
    "temperature": "what temperature does: limits, entropy and slope, a Gaussian kernel, where a bias breaks monotony",
    "entropy": "what entropy says of a row: bounds, nats and bits, and what the usual formula with an eps gets wrong",
    "complexity": "what attention costs over length: operations and bytes counted, time and memory measured",
    "information": "mutual information, rate and distortion over temperature, and two readings of a PAC-Bayes bound",
    "representation": "what temperature does to the shipped model: effective rank, cosine, loss and calibration",
    "regularization": "a penalty that brings attention to an entropy: four targets, two optimizers, an article's demo",
}
"""Name -> what it shows."""

TRAINED: dict[str, str] = {
    "collapse": "training in which attention collapses, and the same held in eight ways",
}
"""Name -> what it shows, of experiments that train models."""

RESEARCH = ("lr-sensitivity", "length", "early-warning")
"""Experiments that left the package in 0.3. Until 0.4 their names say where they went."""

TAKES: dict[str, str] = {
    "scaling": "some seconds",
    "saturation": "some seconds",
    "temperature": "some seconds",
    "entropy": "some seconds",
    "complexity": "up to a minute",
    "information": "some seconds",
    "representation": "up to a minute",
    "regularization": "a quarter of a minute",
    "collapse": "about half an hour on two cores",
}
"""Name -> how long it takes on a machine of today."""

RESULTS = "results.json"
"""In the folder of an experiment that trains: what its runs came to."""


def run(name: str, *, seed: int = 0) -> Experiment:
    """Runs the experiment ``name``: the same seed gives the same result, but for what is measured on this machine.

    Computed with one thread of torch, so that the number of cores changes no bit; what is measured takes those of
    the process.

    Raises:
        InputError: no experiment has this name, or the seed is not an int of at least 0; or it trains models, which
            :func:`train` does.
    """
    if name in RESEARCH:
        raise InputError(new_place(name))
    if name in TRAINED:
        raise InputError(f"lab {name}: it trains models. Take attemper.lab.train({name!r}, out=...).")
    one_of("lab experiment", name, EXPERIMENTS)
    seed = whole_number(f"lab {name}: seed", seed, least=0)
    return getattr(import_module(f"attemper.lab.{name}"), name)(seed=seed)


def new_place(name: str) -> str:
    """Where an experiment of ``RESEARCH`` is now, and the line that runs it."""
    return (
        f"lab {name}: it has moved out of the package. Run it from a clone of attemper's repository, with the same "
        f"options: `python -m research {name}`."
    )


def train(
    name: str | ModuleType,
    *,
    out: Path,
    workers: int = 2,
    steps: int | None = None,
    seeds: int | None = None,
    quick: bool = False,
    at_most: int | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Experiment:
    """Runs an experiment that trains models, or goes on with it: runs that are in ``out`` are not done again.

    Args:
        name: of ``TRAINED``, or the module of an experiment beside them.
        out: folder for a file of each run and, at the end, ``results.json``.
        workers: processes, each with one thread of torch. Their number changes no digit.
        steps: of each run; None for the experiment's own.
        seeds: how many; None for the experiment's own.
        quick: a few steps of a very small model: a look at whether it works, not a result.
        at_most: so many of the runs that are missing are trained, and what is there then is shown; None for all.
        report: is told a line for each run that is done.

    Raises:
        InputError: no experiment that trains has this name, a number is not above 0, the folder cannot be written, or
            nothing is to be trained and it has nothing.
    """
    from attemper.lab.trained import summary

    name, module = _trained_module(name)
    given = {
        key: whole_number(f"lab {name}: {key}", value)
        for key, value in (("steps", steps), ("seeds", seeds))
        if value is not None
    }
    if at_most == 0 and not (out.is_dir() and any(out.iterdir())):
        raise InputError(
            f"lab {name}: there are no runs in {str(out)!r}, and at_most=0 trains none. Name the folder that has them, "
            "or let it train."
        )
    planned = module.plan(quick=quick, **given)
    content = module.results(planned, out, quick=quick, workers=workers, at_most=at_most, report=report)
    report(f"written: {summary.write_results(content, out / RESULTS)}")
    return read_results(module, out / RESULTS)


def read_results(name: str | ModuleType, results: Path) -> Experiment:
    """An experiment that trains, from a file of results that :func:`train` wrote.

    Raises:
        InputError: no experiment that trains has this name, or the file is none of its results, or lacks some of them.
    """
    from attemper.lab.trained.summary import read_summary

    name, module = _trained_module(name)
    content = read_summary(results, name)
    try:
        return module.experiment(content)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise InputError(
            f"lab {name}: {str(results)!r} cannot be shown, it was cut or is of another version of attemper "
            f"({type(error).__name__}: {error}). Make it anew from its runs: --out FOLDER --at-most 0."
        ) from error


def _trained_module(name: str | ModuleType) -> tuple[str, Any]:
    """The name and the module of an experiment that trains: ``NAME``, ``plan``, ``results`` and ``experiment``."""
    if isinstance(name, str):
        if name in RESEARCH:
            raise InputError(new_place(name))
        one_of("lab experiment that trains", name, TRAINED)
        name = import_module(f"attemper.lab.trained.{name}")
    return name.NAME, name
