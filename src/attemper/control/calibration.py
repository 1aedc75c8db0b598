"""The temperatures that a calibration found, and what they are worth on held-out data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attemper.checks import indentation
from attemper.control.fold import fold_
from attemper.control.saved_model import place, read, write
from attemper.control.temper import Tempered, temper
from attemper.errors import InputError
from attemper.file_schema import check_document, load_record
from attemper.nn.temperature import FixedTemperature
from attemper.sites.find import chosen_sites
from attemper.text import clean, count, first_of, plain_table, plain_text

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

_KIND = "attemper-calibration"
_AT_A_BOUND = 1.02
"""A ratio to a bound under which a temperature counts as held by it."""


@dataclass(frozen=True)
class Calibration:
    """The result of :func:`attemper.calibrate`. ``print(calibration)`` shows a table.

    Losses are means over the held-out batches, in the unit of the user's loss (nats, for a cross-entropy).
    """

    temperatures: Mapping[str, tuple[float, ...]]
    """[heads], or one for all heads, by the name of the attention module; they multiply the model's own."""
    before: float
    """Held-out loss of the model as it came."""
    after: float
    """Held-out loss with the temperatures."""
    interval: tuple[float, float]
    """Of ``after - before``, 95%: bootstrap over held-out batches, paired."""
    per: str
    method: str
    fitting: int
    """Batches that the temperatures were fitted on."""
    held_out: int
    """Batches that they were judged on."""
    evaluations: int
    """Passes over the fitting batches that the search took."""
    converged: bool
    """Whether the search ended by itself; False if ``steps`` cut it off."""
    bounds: tuple[float, float]

    @property
    def tells(self) -> bool:
        """Whether held-out batches show a difference in loss: the interval excludes 0."""
        return self.interval[0] > 0 or self.interval[1] < 0

    @property
    def at_bounds(self) -> tuple[str, ...]:
        """Sites whose temperature is at a bound of the search. A smaller loss may lie beyond."""
        low, high = self.bounds[0] * _AT_A_BOUND, self.bounds[1] / _AT_A_BOUND
        return tuple(site for site, found in self.temperatures.items() if min(found) < low or max(found) > high)

    def apply(self, model: nn.Module) -> Tempered:
        """Gives a model these temperatures, as :func:`attemper.temper` does; ``.remove()`` takes them off.

        Raises:
            InputError: a site is not one of the model, or what ``temper`` raises.
        """
        given = {site: FixedTemperature(found) for site, found in self._tensors().items()}
        chosen_sites("Calibration.apply", model, given, calls=True)
        return temper(model, temperature=given, sites=tuple(given))

    @property
    def doubt(self) -> str | None:
        """Why you should not use these temperatures as they are, or None."""
        low, high = self.interval
        if not self.tells:
            return (
                f"the {self.held_out} held-out batches cannot tell whether the temperatures help: the 95% interval of "
                f"the change of the loss, {low:+.4f} to {high:+.4f}, holds 0. Calibrate on more batches"
            )
        if self.after > self.before:
            return (
                f"the held-out loss rises, {self.before:.4f} -> {self.after:.4f}: the temperatures suit only the "
                "batches that they were fitted on. Calibrate on more batches"
            )
        if self.at_bounds:
            return (
                f"temperatures are held by a bound of {self.bounds}, at {first_of(self.at_bounds, 4)}: the least loss "
                "may lie beyond, or the temperature does not matter there. Calibrate with wider bounds= or other sites="
            )
        return None

    def fold(self, model: nn.Module, *, force: bool = False) -> None:
        """Multiplies what makes each head's queries by 1/T, in place: exact, and nothing of ours is left in the model.

        Plain transformers, or an inference engine that reads its checkpoint, then gives what the tempered model gives,
        but for one rounding of the weights. Into the query projection, its bias with it; in latent attention into both
        parts of it. Where queries are normalised after their projection, into the gain of that norm: each head's slice
        of it, where the norm runs over all heads (OLMo 2 and 3) or has a gain per head; where heads share the gain, all
        heads of the layer must have one temperature.

        Call it once: a second call multiplies again. Nothing is changed if it raises.

        Args:
            model: the model that was calibrated, or one of its kind.
            force: fold although :attr:`doubt` says why not to.

        Raises:
            InputError: the held-out batches cannot tell whether the temperatures help, or say that they harm, or a
                temperature is held by a bound, and ``force`` is not given; a site is not one of the model, or has
                another number of heads; the layout of its projections is not known; a weight is shared with another
                module, quantised, parametrised, under an adapter or split over processes; or the queries pass something
                on their way that a factor does not: a norm without a gain that fits, clipping, scores of
                relative positions.
        """
        if self.doubt is not None and not force:
            raise InputError(f"Calibration.fold: {self.doubt}, or pass force=True. The model was not changed.")
        fold_("Calibration.fold", model, self._tensors())

    def to_dict(self) -> dict[str, Any]:
        """Returns everything in JSON types, schema 1."""
        judged = {"tells": self.tells, "at_bounds": list(self.at_bounds), "doubt": self.doubt}
        return {"schema": 1, **asdict(self), **judged}

    def to_json(self, indent: int | None = None) -> str:
        """:meth:`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=indentation(indent, "found"), allow_nan=False)

    def save(self, path: str | Path) -> Path:
        """Writes it as safetensors: to the file, or as ``attemper.safetensors`` into the folder."""
        about = {name: value for name, value in asdict(self).items() if name != "temperatures"}
        tensors = self._tensors()
        return write(path, tensors, _KIND, {**about, "sites": list(tensors)})

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Reads what ``save`` wrote.

        Raises:
            InputError: the file is missing, of another kind, or damaged.
        """
        tensors, about = read(path, _KIND)
        try:
            sites = check_document(about, {"sites": [str]}, "its metadata")["sites"]
            if sorted(sites) != sorted(tensors):
                raise InputError("its metadata names other sites than it has temperatures of.")
            for site, found in tensors.items():
                if found.dtype != torch.float64 or found.dim() != 1 or not len(found) or not (found > 0).all():
                    raise InputError(f"temperatures of {clean(site)} are no numbers above 0.")
            temperatures = {site: tuple(tensors[site].tolist()) for site in sites}
            return load_record(cls, about, "its metadata", temperatures=temperatures)
        except InputError as error:
            raise InputError(f"{place(path)} is damaged: {error}") from error

    def _tensors(self) -> dict[str, Tensor]:
        return {site: torch.tensor(found, dtype=torch.float64) for site, found in self.temperatures.items()}

    def table(self) -> RenderableType:
        """For rich: the temperatures by site, then the loss before and after and whether the data can tell."""
        from rich.console import Group
        from rich.text import Text

        grid = plain_table(("site", "temperature" if self.per != "head" else "temperature of each head"))
        for site, found in self.temperatures.items():
            grid.add_row(Text(clean(site)), " ".join(f"{value:.3f}" for value in found))
        return Group(grid, *(Text(clean(line)) for line in _sentences(self)))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.table()

    def __str__(self) -> str:
        return plain_text(self)


def _sentences(calibration: Calibration) -> list[str]:
    """What a calibration is worth, and what to beware of, one sentence a line."""
    low, high = calibration.interval
    change = calibration.after - calibration.before
    lines = [
        f"loss of {calibration.held_out} held-out batches: {calibration.before:.4f} -> {calibration.after:.4f} "
        f"({change:+.4f}, 95% interval {low:+.4f} to {high:+.4f})",
        f"one temperature per {calibration.per}, by {calibration.method}: {count(calibration.evaluations, 'pass')} "
        f"over {count(calibration.fitting, 'batch')}",
    ]
    if not calibration.tells:
        lines.append("These batches cannot tell whether the temperatures help: take more of them before using any.")
    elif change > 0:
        lines.append("The loss rises where it was not fitted: do not use these temperatures; take more batches.")
    if not calibration.converged:
        lines.append("The search was cut off by steps= before it settled.")
    if calibration.at_bounds:
        lines.append(f"Held by a bound of {calibration.bounds}: {', '.join(calibration.at_bounds)}.")
    return lines
