"""Small experiments that show why attention is scaled and what temperature does, on the functions that users call.

One file an experiment, one function of the same name: ``run("scaling", seed=0)`` is ``scaling.scaling(seed=0)``. The
small model and the text that scans read by default live here, too.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from attemper._checks import one_of
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
}
"""Name -> what it shows."""


def run(name: str, *, seed: int = 0) -> Experiment:
    """Runs the experiment ``name``: the same seed gives the same result, but for what is measured on this machine.

    Computed with one thread of torch, so that the number of cores changes no bit; what is measured takes those of the
    process.

    Raises:
        InputError: no experiment has this name, or the seed is not an int of at least 0.
    """
    one_of("lab experiment", name, EXPERIMENTS)
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise InputError(f"lab {name}: seed must be an int of at least 0, got {seed!r}.")
    return getattr(import_module(f"attemper.lab.{name}"), name)(seed=seed)
