"""``attemper.Thermostat``: holds the entropy of each head at a target while a model trains."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attemper.call.normalizer import normalization
from attemper.checks import one_of, positive_number, whole_number
from attemper.control.entropy_meter import EntropyMeter, Sums, refusal
from attemper.control.handle import Handle, IdleSites, former_close
from attemper.control.temper import Tempered
from attemper.distributed.data_parallel import check_reduce, weight_ranks
from attemper.errors import InputError
from attemper.nn.temperature import ACTIONS, CEILING, FLOOR, FixedTemperature, Temperature, fits, wide
from attemper.sites.actions import listen, normalizer_of, unlisten
from attemper.sites.entry_points import OWN
from attemper.sites.find import Site, chosen_sites
from attemper.sites.sharded import heads_like, is_dtensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

Target = float | tuple[float, float] | Callable[[int, int], float]
_FLAT = 1e-3
"""A slope (nats per unit of log T) below this does not say how far to go."""


class HeldTemperature(Temperature):
    """A temperature per head that a thermostat sets; not trained. It has its heads from the first step on."""

    log_temperature: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("log_temperature", torch.zeros(1), persistent=False)
        self.logs = torch.zeros(1, dtype=torch.float64)
        """The same as the thermostat set them: a model in half precision rounds the buffer."""

    def forward(
        self, query: Tensor, *, hidden: Tensor | None = None, visible_keys: Tensor | int | None = None
    ) -> Tensor:
        if is_dtensor(query):
            return heads_like(query, wide(self.log_temperature).exp()[None, :, None])
        fits("Thermostat", self.log_temperature, query)
        return wide(self.log_temperature).exp()[None, :, None]

    def value(self) -> Tensor:
        """[heads or 1], in the type of the model."""
        return self.log_temperature.exp()

    def saved_as(self) -> Temperature:
        """The temperatures as they are: the thermostat is not part of a saved model."""
        return FixedTemperature(self.logs.exp())

    def set(self, logs: Tensor) -> None:
        """Takes log temperatures [heads]."""
        self.logs = logs.detach().double().cpu()
        self.log_temperature = self.logs.to(self.log_temperature)


@dataclass(frozen=True)
class Reading:
    """What a thermostat found and did at one site in a step; tensors [heads], float64 on the CPU."""

    entropy: Tensor
    """Mean over rows; NaN where no row counted."""
    slope: Tensor
    """dH / d log T, nats (or shares of log n)."""
    temperature: Tensor
    """After the step."""
    bounded: Tensor
    """Whether the temperature stands at its floor or ceiling: the target may be out of reach."""


class Thermostat(Handle):
    r"""Keeps each head's (or layer's) entropy at a target or in a band, by temperature.

    .. math:: \log T \leftarrow \log T + \mathrm{clip}\left(rate \cdot \frac{\alpha - \bar H}{d\bar H / d \log T},\
              \pm max\_step\right)

    The slope is exact: the variance of the logits, or, with a bias or a softcap, their covariance with what the
    temperature divides. Newton's step, damped and bounded: it does not swing. Where a bias makes the entropy fall with
    temperature the step turns, and where it turns it stands still.

    ::

        thermostat = attemper.Thermostat(model, target_entropy=(0.3, 0.9), unit="normalized")
        for batch in loader:
            loss(model, batch).backward()
            optimizer.step()
            thermostat.step()

    Args:
        model: as for :func:`attemper.temper`, before torch.compile. Only modules in training mode are measured.
        target_entropy: a number, a band (low, high) inside which nothing is done, or a schedule
            ``(step, total_steps) -> number``.
        per: "head" or "layer".
        unit: "nats"; or "normalized" for H / log n with n the keys that a row sees, from 0 to 1.
        rows: query rows of each sequence that are measured; None for all.
        rate: share of Newton's step that is taken.
        max_step: largest change of log T in one step.
        floor, ceiling: bounds of T.
        sites: names of modules, with all below them; None for all.
        total_steps: of the training, for a schedule.
        reduce: "data" for entropies over the data-parallel ranks, which are told by how the model is wrapped or
            sharded at the first step; or these ranks as a process group or a DeviceMesh; None for each rank alone,
            which lets temperatures of a head drift apart. Under tensor parallelism each rank holds the temperatures
            of its own heads, and ``per="layer"`` is over those of all.

    Raises:
        InputError: an argument has no meaning; a module attends by another normalizer than softmax; another Thermostat
            holds one of the sites; or as :func:`attemper.temper`.

    Warns:
        once, of a step in which no site was measured; and once, of sites that were not measured so far.
    """

    def __init__(
        self,
        model: nn.Module,
        target_entropy: Target,
        *,
        per: str = "head",
        unit: str = "nats",
        rows: int | None = 128,
        rate: float = 0.5,
        max_step: float = 0.1,
        floor: float = FLOOR,
        ceiling: float = CEILING,
        sites: Iterable[str] | None = None,
        total_steps: int | None = None,
        reduce: str | ProcessGroup | DeviceMesh | None = "data",
    ) -> None:
        one_of("Thermostat(per=...)", per, ("head", "layer"))
        one_of("Thermostat(unit=...)", unit, ("nats", "normalized"))
        self.per, self.unit, self.target, self.total_steps = per, unit, target_entropy, total_steps
        check_reduce(reduce, "Thermostat")
        self.model, self._reduce = model, reduce
        self.rate = positive_number("Thermostat(rate=...)", rate, "It is the share of Newton's step, up to 1.")
        self.max_step = positive_number("Thermostat(max_step=...)", max_step, "It bounds the change of log T.")
        floor, ceiling = (
            positive_number(f"Thermostat({name}=...)", value, "Temperatures are above 0.")
            for name, value in (("floor", floor), ("ceiling", ceiling))
        )
        if not floor <= 1 <= ceiling:
            raise InputError(f"Thermostat(floor={floor}, ceiling={ceiling}): they must have 1 between them.")
        self._logs = math.log(floor), math.log(ceiling)
        if rows is not None:
            whole_number("Thermostat(rows=...)", rows)
        self.steps = 0
        self._band(0)
        found = chosen_sites("Thermostat", model, sites)
        _check(found)
        self._temperatures = {site.name: HeldTemperature() for site in found}
        self._tempered = Tempered(model, found, self._temperatures)
        self._meters = {site.name: EntropyMeter(site.module, f"Thermostat ({site.name})", rows, unit) for site in found}
        self._sites = found
        self._idle = IdleSites("Thermostat", found)
        for site in found:
            listen(site, self._meters[site.name])
        self.readings: dict[str, Reading] = {}
        """What the last step found and did, by site."""

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of the modules that are held, in the order of the model."""
        return tuple(site.name for site in self._sites)

    @property
    def temperatures(self) -> dict[str, Tensor]:
        """The temperatures [heads] of each site ([1] before its first step)."""
        return {name: part.value().detach().clone() for name, part in self._temperatures.items()}

    def step(self) -> dict[str, Reading]:
        """Moves the temperatures after an optimizer step. It uses the forward passes since the last call.

        Under torch.distributed every rank must call it; temperatures of one head move alike on all of them.

        Returns:
            What was found and done, by site; sites that did not run are left out.
        """
        low, high = self._band(self.steps)
        measured = {name: meter.sums.on_host() for name, meter in self._meters.items() if meter.sums is not None}
        for meter in self._meters.values():
            meter.sums = None
        self.readings = {}
        joined = self._over_ranks(measured)
        self._idle.note(joined)
        for name, parts in ((name, joined[name]) for name in self._meters if name in joined):
            first = self._meters[name].first_head
            own = parts.get(first) if first is not None else next(iter(parts.values())) if len(parts) == 1 else None
            if own is not None:  # heads of a layer that ran on other ranks only are theirs
                layer = torch.stack([sums.total.sum(1) for sums in parts.values()]).sum(0)
                self.readings[name] = self._move(self._temperatures[name], own, layer, low, high)
        self.steps += 1
        return self.readings

    def state_dict(self) -> dict[str, Any]:
        """Steps and log temperatures, for a checkpoint."""
        logs = {name: part.logs.clone() for name, part in self._temperatures.items()}
        return {"steps": self.steps, "log_temperatures": logs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a checkpoint.

        Raises:
            InputError: the state is not one of ``Thermostat``, or its sites are not these.
        """
        if set(state) != {"steps", "log_temperatures"}:
            raise InputError(
                f"Thermostat.load_state_dict(state) must have steps and log_temperatures, got {sorted(state)}."
            )
        if set(state["log_temperatures"]) != set(self._temperatures):
            raise InputError(
                f"Thermostat.load_state_dict(state) is of other sites: {sorted(state['log_temperatures'])[:4]}, here "
                f"{sorted(self._temperatures)[:4]}."
            )
        for name, logs in state["log_temperatures"].items():
            here = len(self._temperatures[name].logs)
            if logs.dim() != 1 or (1 not in (here, len(logs)) and here != len(logs)):
                raise InputError(
                    f"Thermostat.load_state_dict(state): the heads of {name} are {here}, and {list(logs.shape)} there."
                )
        for name, logs in state["log_temperatures"].items():
            self._temperatures[name].set(logs)
        self.steps = int(state["steps"])

    def remove(self) -> None:
        """Removes the temperatures and hooks from the model. You may call it again."""
        for site in self._sites:
            unlisten(site, self._meters[site.name])
        self._tempered.remove()

    close = former_close

    def _band(self, step: int) -> tuple[float, float]:
        target = self.target
        if callable(target):
            if not isinstance(self.total_steps, int) or self.total_steps < 1:
                raise InputError("Thermostat(target_entropy=schedule) needs total_steps=, those of the training.")
            target = target(step, self.total_steps)
        band = tuple(target) if isinstance(target, (tuple, list)) else (target, target)
        ceiling = 1.0 if self.unit == "normalized" else math.inf
        numbers = all(isinstance(side, (int, float)) and not isinstance(side, bool) for side in band)
        if len(band) != 2 or not numbers or not 0 <= band[0] <= band[1] <= ceiling or math.isinf(band[0]):
            raise InputError(
                f"Thermostat(target_entropy=...) must be a number or a band (low, high) of at least 0"
                f"{' and at most 1' if self.unit == 'normalized' else ''}, got {target!r}."
            )
        return float(band[0]), float(band[1])

    @cached_property
    def _groups(self) -> list[ProcessGroup]:
        return weight_ranks(self.model, [site.module for site in self._sites], self._reduce)

    def _over_ranks(self, measured: dict[str, Sums]) -> dict[str, dict[int | None, Sums]]:
        """Site -> first head of a part of its heads -> their sums over all ranks that have them.

        Ranks that have the same heads move their temperatures alike.
        """
        found = {name: {self._meters[name].first_head: sums} for name, sums in measured.items()}
        for group in self._groups:
            found = _sum_over(group, found)
        return found

    def _move(self, part: HeldTemperature, sums: Sums, layer: Tensor, low: float, high: float) -> Reading:
        """``layer``: the sums [3] over all heads of the layer."""
        total, rows = sums.total, sums.total[2]
        pooled = total if self.per == "head" else layer[:, None].expand_as(total)
        entropy, slope = pooled[0] / pooled[2], pooled[1] / pooled[2]
        wrong = (low - entropy).clamp(min=0) - (entropy - high).clamp(min=0)
        step = self.rate * wrong / torch.where(slope.abs() > _FLAT, slope, 1.0)
        # Flat: a row that is one-hot or uniform. Without a bias the way out is known; with one it is not.
        flat = slope.abs() <= _FLAT
        step = torch.where(flat, wrong.sign() * self.max_step if sums.monotone else 0.0, step)
        step = torch.where(torch.isfinite(step), step, 0.0).clamp(-self.max_step, self.max_step)
        before = part.logs.expand(total.shape[1])
        logs = (before + step).clamp(*self._logs)
        part.set(logs)
        bounded = (logs <= self._logs[0]) | (logs >= self._logs[1])
        return Reading(torch.where(rows > 0, entropy, math.nan), slope, logs.exp(), bounded)


def _check(sites: list[Site]) -> None:
    """Raises at once what the first forward pass would raise; and for a site that another thermostat holds: both would
    move its temperature for the same error.
    """
    for site in sites:
        own = site.module.normalizer if site.entry is OWN else None
        attends_by = normalizer_of(site.module) or own
        if attends_by is not None and not normalization("Thermostat", attends_by).plain:
            raise InputError(refusal(f"Thermostat ({site.name})", site.module))
        actions = getattr(site.module, ACTIONS, None)
        if actions is not None and any(isinstance(listener, EntropyMeter) for listener in actions.listeners):
            raise InputError(
                f"Thermostat: another Thermostat controls {site.name}, and two would correct the same error twice. "
                "Call remove() on the other one first, or give each different sites=."
            )


def _sum_over(group: ProcessGroup, mine: dict[str, dict[int | None, Sums]]) -> dict[str, dict[int | None, Sums]]:
    """The sums of all ranks of a group; those of the same heads added up."""
    gathered: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(gathered, mine, group)
    joined: dict[str, dict[int | None, Sums]] = {}
    for found in gathered:
        for name, parts in found.items():
            for first, sums in parts.items():
                before = joined.setdefault(name, {}).setdefault(first, Sums(torch.zeros_like(sums.total), True))
                before.add(sums)
    return joined
