"""Clipping of attention logits through the weights that make them (QK-Clip, of the MuonClip optimizer)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from attemper.checks import positive_number, whole_number
from attemper.control.handle import NAMED, Handle, former_close, warn_idle
from attemper.control.query_key_weights import HeadsError, Projections, normalises, projections_of
from attemper.distributed.data_parallel import check_reduce, device_of_group, weight_ranks
from attemper.errors import InputError
from attemper.monitor.options import NO_ALARMS
from attemper.monitor.watch import watch
from attemper.sites.find import all_sites
from attemper.sites.names import SiteNames, check_matches, check_sites, class_name, is_wanted, names_of, unwrap
from attemper.text import count, first_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_ADVICE = "MuonClip uses 100."

_COMPILED = (
    "QKClip reads every pass of training and adds none, so in a compiled model it needs attemper.tap(query, key, "
    "name=...) beside each attention."
)


class QKClip(Handle):
    r"""Clips each head's largest attention logit by scaling its query and key weights.

    With :math:`S_h` the largest logit of head h since the last step and :math:`\gamma_h = \min(1, t / S_h)`: the key
    weights of a group g of heads are multiplied by :math:`\sqrt{\gamma_g}`, :math:`\gamma_g = \min_{h \in g} \gamma_h`,
    and the query weights of head h by :math:`\gamma_h / \sqrt{\gamma_g}`; biases with them. Heads below the threshold
    are not touched to the bit, unless they share a key head with one above it: then their queries make up for the
    keys. In latent attention (DeepSeek, Kimi) the features that meet the shared rotated key are scaled by
    :math:`\gamma_h` alone.

    ::

        clip = attemper.QKClip(model, threshold=100.0)
        for batch in loader:
            loss(model, batch).backward()
            optimizer.step()
            clip.step()

    Args:
        model: watched as by :func:`attemper.watch`, on every forward pass.
        threshold: t, in logits after the scale.
        sites: names of modules whose attention to clip, with all below them; None for all.
        heads: how many query heads an attention has, where no attribute of it says so (``num_heads`` and the like) or
            a wrong one does: a number for all, or a mapping from names (of modules, for all below them) to numbers.
            None takes what the module says, or else what its forward passes show.
        rows: measure only this many query rows of each sequence: cheaper, but the largest logit may be missed.
        reduce: "data" for the largest logits over the data-parallel ranks, which are told by how the model is wrapped
            or sharded at the first step; or these ranks as a process group or a DeviceMesh; None for each rank alone,
            which lets copies of a weight drift apart.

    Raises:
        InputError: the threshold is not above 0; a name in ``sites`` matches no attention; ``heads`` is no number of at
            least 1, does not divide a projection, or names no attention whose projections are known; or an attention
            of the model normalises its queries or keys after their projection, so that scaling weights does nothing
            (such logits are bounded already; name other ``sites``).

    Source:
        Kimi K2 (arXiv 2507.20534), section on MuonClip. A logit that has a bias or a softcap is not linear in these
        weights: it falls, but not exactly to the threshold.
    """

    def __init__(
        self,
        model: nn.Module,
        threshold: float = 100.0,
        *,
        sites: Iterable[str] | None = None,
        heads: int | Mapping[str, int] | None = None,
        rows: int | None = None,
        reduce: str | ProcessGroup | DeviceMesh | None = "data",
    ) -> None:
        self.threshold = positive_number("QKClip(threshold=...)", threshold, _ADVICE)
        self.model = model
        self._wanted: SiteNames = None
        title = class_name(unwrap(model))
        self._modules = {own or title: module for module, own in names_of(model).items()}
        self._heads: dict[str, int] = {}
        """Of modules: as they were given, or seen where no attribute says it."""
        known = [*(site.name for site in all_sites(names_of(model))), *self._attentions()] if sites is not None else ()
        self._wanted = check_sites("QKClip", sites)
        check_matches("QKClip", self._wanted, dict.fromkeys(known))
        found = self._attentions()
        self._heads |= _check_heads(heads, {name: self._modules[name] for name in found})
        self._refuse_normalised(found)
        check_reduce(reduce, "QKClip")
        self._reduce = reduce
        self._projections: dict[str, Projections] = {}
        self._seen = False
        """Whether any rank has seen an attention so far."""
        self._told = False
        """Whether what cannot be clipped was looked for."""
        self.steps = self.clipped = 0
        """Steps so far, and heads that were clipped in them."""
        self._watch = watch(model, rows=rows, sites=self._wanted, observe="beside", limits=NO_ALARMS)
        self._watch.step()  # from now on steps are counted, so that all passes of one are read together

    def remove(self) -> None:
        """Removes every hook from the model. Weights stay as they are. You may call it again."""
        self._watch.close()

    close = former_close

    def step(self) -> dict[str, Tensor]:
        """Clips heads whose logits exceeded the threshold since the last step.

        Call it after ``optimizer.step()``, on all ranks, also where one of them had no batch.

        Returns:
            The factors gamma [heads] of each module in which a head was clipped, of all its heads on every rank.

        Raises:
            InputError: no rank has seen any attention so far, the layout of a module that must be clipped is not known,
                or the data-parallel ranks cannot be told; nothing was changed then, on no rank.
        """
        clipped, parts = self._over_ranks()
        for name, gamma in clipped.items():
            _scale(parts[name], gamma)
        self.steps += 1
        self.clipped += sum(int((gamma < 1).sum()) for gamma in clipped.values())
        self._watch.step()
        return clipped

    def state_dict(self) -> dict[str, Any]:
        """The counts and the threshold, for a checkpoint."""
        return {"threshold": self.threshold, "steps": self.steps, "clipped": self.clipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a checkpoint.

        Raises:
            InputError: the state is not one of ``QKClip``.
        """
        if set(state) != {"threshold", "steps", "clipped"}:
            raise InputError(
                f"QKClip.load_state_dict(state) must have threshold, steps and clipped, got {sorted(state)}."
            )
        self.threshold = positive_number("QKClip's threshold in the checkpoint", state["threshold"], _ADVICE)
        self.steps, self.clipped = int(state["steps"]), int(state["clipped"])

    def _over_ranks(self) -> tuple[dict[str, Tensor], dict[str, Projections]]:
        """Factors of the modules that must be clipped, and their projections, the same on all ranks."""
        groups, found = self._ranks
        self._learn_heads(found)
        known = {name: parts for name, parts in found.items() if parts is not None}
        if not groups:
            own = self._largest({})
            self._check_seen(bool(own))
            return self._must_clip(own)
        heads = {name: parts.query.heads for name, parts in known.items()}
        own, failure = {}, None
        try:
            own = self._largest(known)
            self._must_clip({name: logits for name, logits in own.items() if len(logits) != heads.get(name)})
        except InputError as error:  # raised when all ranks have met: none may wait for this one
            own, failure = {}, error
        parts = [own.get(name, torch.full((many,), -math.inf)) for name, many in heads.items()]
        packed = torch.cat([*parts, torch.tensor([float(failure is not None), float(bool(own))])])
        *largest, failed, seen = self._max(packed).split([*heads.values(), 1, 1])
        if bool(failed):
            raise failure or InputError("QKClip: another rank could not clip its heads, see its error.")
        self._check_seen(bool(seen))
        return self._must_clip(dict(zip(heads, largest, strict=True)))

    def _max(self, packed: Tensor) -> Tensor:
        """The largest of each number over all ranks. A collective."""
        home = next(self.model.parameters(), packed).device
        for group in self._ranks[0]:
            packed = packed.to(device_of_group(group, home))
            dist.all_reduce(packed, dist.ReduceOp.MAX, group)
        return packed.cpu()

    def _learn_heads(self, known: dict[str, Projections | None]) -> None:
        """Takes the heads of modules that do not say how many they have from what a rank has seen. A collective, while
        there are such modules that no rank has seen.

        Both the number and the size must fit the projection: a module that folds heads into its batch shows one.
        """
        seen = {name: (0, 0) for name, found in known.items() if found is None}
        for site in self._watch.current if seen else ():
            name = self._watch.observer.module_of(site.name)
            if name in seen:
                most = max(head.head for head in site.heads)
                seen[name] = most + 1, self._watch.observer.head_sizes.get(name, 0)
        every: list[list[int]] = self._max(torch.tensor(list(seen.values()))).tolist() if seen else []
        for name, (heads, size) in zip(seen, every, strict=True):
            with suppress(InputError):
                found = projections_of(self._modules[name], heads) if heads else None
                if found is not None and size in (0, found.size):  # 0: of a tap in compiled code
                    known[name], self._heads[name] = found, heads

    def _check_seen(self, now: bool) -> None:
        """Raises InputError, with the reason, if no rank has seen any attention, ``now`` or before: nothing can be
        clipped then, ever. A step without a pass is nothing to raise for.
        """
        if not now and not self._seen:
            try:
                self._watch.table()
            except InputError as error:
                raise InputError(f"QKClip has no logits to clip by: {error} {_COMPILED}") from error
        if not self._told and self._watch.current:
            self._told = True
            if unseen := self._unseen():
                warn_idle("QKClip", f"{count(len(unseen), 'site')} cannot be clipped", unseen)
        self._seen = True

    def _unseen(self) -> dict[str, str]:
        """Modules that attend by their code, or seem to, and showed no logits; with the reason."""
        seen = {self._watch.observer.module_of(site.name) for site in self._watch.current}
        attending = all_sites({module: name for name, module in self._modules.items()})
        found = {site.name: "did not run" for site in attending if is_wanted(site.name, self._wanted)}
        found |= {skipped.name: skipped.reason for skipped in self._watch.table().skipped}
        return {name: reason for name, reason in found.items() if name in self._modules and name not in seen}

    @cached_property
    def _ranks(self) -> tuple[list[ProcessGroup], dict[str, Projections | None]]:
        """The groups over which the largest logits are found, and the modules that may be clipped, in one order."""
        found = self._attentions()
        return weight_ranks(self.model, [self._modules[name] for name in found], self._reduce), found

    def _attentions(self) -> dict[str, Projections | None]:
        """Wanted modules whose layout is known, with their projections; None where nobody has said how many heads."""
        found: dict[str, Projections | None] = {}
        for name, module in self._modules.items():
            if is_wanted(name, self._wanted):
                with suppress(InputError):
                    try:
                        found[name] = projections_of(module, self._heads.get(name))
                    except HeadsError:
                        found[name] = None
        return found

    def _largest(self, known: Mapping[str, Projections]) -> dict[str, Tensor]:
        """The largest logit of each head [heads] by module since the last step, over all calls of a module.

        Args:
            known: modules of which the heads here may be some of those of the whole model: these get all of them,
                -inf where a head is on another rank.
        """
        joined: dict[str, Tensor] = {}
        for site in self._watch.current:
            name = self._watch.observer.module_of(site.name)
            logits = torch.tensor([-math.inf if head.max_logit is None else head.max_logit for head in site.heads])
            numbers = [head.head for head in site.heads]
            if name in known and known[name].query.is_split and max(numbers) < known[name].query.heads:
                here, logits = logits, torch.full((known[name].query.heads,), -math.inf)
                logits[numbers] = here
            joined[name] = torch.maximum(joined[name], logits) if name in joined else logits
        return joined

    def _must_clip(self, largest: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Projections]]:
        most = self.threshold
        found = {name: torch.where(logits > most, most / logits, 1.0) for name, logits in largest.items()}
        clipped = {name: gamma for name, gamma in found.items() if bool((gamma < 1).any())}
        return clipped, {name: self._projections_of(name, len(gamma)) for name, gamma in clipped.items()}

    def _projections_of(self, name: str, heads: int) -> Projections:
        if name not in self._projections:
            if name not in self._modules:
                raise InputError(
                    f"QKClip: the tap {name!r} was seen in compiled code, which does not show the module that holds "
                    "its projections: give the tap the name of that module."
                )
            try:
                found = projections_of(self._modules[name], self._heads.get(name))
            except HeadsError as error:
                raise InputError(f"QKClip: {error} Say it: QKClip(model, heads={{{name!r}: ...}}).") from error
            if found.query.heads != heads:
                raise InputError(
                    f"QKClip: the heads of {name} are {heads}, and {found.query.heads} in its query projection."
                )
            for part in (found.query, found.key):
                if is_parametrized(part.module, part.weight):
                    raise InputError(
                        f"QKClip: the weights of {name} are parametrised (sigma_reparam_ does so) and computed anew at "
                        "each pass, so that scaling them would do nothing. Use one of the two."
                    )
            self._projections[name] = found
        return self._projections[name]

    def _refuse_normalised(self, found: Iterable[str]) -> None:
        for name in found:
            if normalises(self._modules[name]):
                raise InputError(
                    f"QKClip: {name} normalises its queries or keys after their projection: scaling the weights would "
                    "do nothing, and such logits are bounded. Name other modules with sites=, or leave QKClip out."
                )


def _check_heads(heads: Any, attentions: Mapping[str, nn.Module]) -> dict[str, int]:
    """The number of heads of each of these modules that ``heads`` names."""
    where, found = "QKClip(heads=...)", {}
    if heads is None:
        return found
    if not isinstance(heads, Mapping):
        number = whole_number(where, heads, none=", or a mapping from names to such")
        if not attentions:
            raise InputError(f"QKClip: heads={number} has no effect: no attention here has known projections.")
        found = dict.fromkeys(attentions, number)
    for key, value in heads.items() if isinstance(heads, Mapping) else ():
        number = whole_number(f"{where}[{key!r}]", value)
        below = [name for name in attentions if is_wanted(name, (key,))]
        if not below:
            raise InputError(
                f"{where} names {key!r}, which holds no attention whose projections are known. They are: "
                f"{first_of(list(attentions), NAMED)}."
            )
        found |= dict.fromkeys(below, number)
    for name, number in found.items():
        try:
            projections_of(attentions[name], number)
        except InputError as error:
            raise InputError(f"{where}: {name}: {error} For single modules: heads={{'NAME': {number}}}.") from error
    return found


def _scale(found: Projections, gamma: Tensor) -> None:
    group = gamma.view(-1, found.repeats).amin(1)
    of_key = group.sqrt()
    found.key.scale_(of_key)
    found.query.scale_(gamma / of_key.repeat_interleave(found.repeats))
    if found.query_alone is not None:
        found.query_alone.scale_(gamma)
