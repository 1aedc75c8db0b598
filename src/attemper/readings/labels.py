"""What the name of a site says: the stack of like sites that it is one of, the block that it is in, its own numbers,
and which call of its module it is. Where the calls of a module are one site: in parts that were read apart (ranks,
blocks of texts, files) and in readings of earlier versions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from attemper.readings.sample import SiteKey, SiteLabel
from attemper.text import call_of

if TYPE_CHECKING:
    from attemper.readings.reading import SiteReading

LAYER_KINDS = {
    "delta rule": "a state that every token corrects",
    "state space": "a state that decays from token to token",
    "linear attention": "sums of keys times values, without a softmax",
    "recurrence": "a state that goes from token to token",
    "Fourier transform": "the same mixture of tokens for every text",
    "convolution": "the same mixture of near tokens for every text",
    "no softmax": "its name says attention, and no softmax over keys was seen in it; if it has one, put attemper.tap "
    "beside it",
}
"""Kinds of layers that have no attention weights to measure, and what stands behind the kind in the reason."""
_BLOCKS = re.compile(r"(?:.*(?:layer|block|group|stage)s?|h)")
"""Names of lists that hold the blocks of a model: ``layers``, ``resblocks``, GPT-2's ``h``."""
_INDEX = re.compile(r"[0-9]{1,9}")
JOINED = "#*"
"""Stands behind a module's name where it is told why its calls are one site."""
_SUBLAYER = re.compile(r"(?:^|\.)block\.([0-9]{1,9})\.layer\.[0-9]{1,9}(?:\.|$)")
"""T5 numbers the parts of a block as well."""
Modules: TypeAlias = frozenset[tuple[str, str]]
"""(Name, mode) of modules, or taps."""


def layer_of(name: str) -> int | None:
    """The number of the block that a site is in, from its name. None where there is none, or several might be meant.

    A lone number is that of the block. Of several it is the one after a list of blocks (``layers``, ``blocks``, ``h``),
    if there is one such list; T5's ``block.3.layer.0`` is block 3. Towers of one model keep their own numbers.

    Example:
        >>> [layer_of(name) for name in ("model.layers.7.self_attn", "blocks.2.attn.0#2", "stages.1.blocks.0.attn")]
        [7, 2, None]
    """
    name = name.partition("#")[0]
    if sublayer := _SUBLAYER.search(name):
        name = name[: sublayer.end(1)]
    parts = name.split(".")
    numbered = [place for place, part in enumerate(parts) if _INDEX.fullmatch(part)]
    in_lists = [place for place in numbered if place and _BLOCKS.fullmatch(parts[place - 1])]
    meant = numbered if len(numbered) == 1 else in_lists
    return int(parts[meant[0]]) if len(meant) == 1 else None


def pattern_of(name: str) -> str:
    """A site's name with its numbers starred: what the sites of a stack share."""
    return re.sub(r"\d+", "*", name)


def label_of(name: str) -> str:
    """The numbers that tell a site from the others of its stack; a dash if its name has none.

    Example:
        >>> label_of("encoder.block.3.layer.0.SelfAttention")
        '3.0'
        >>> label_of("attention"), label_of("attention#2"), label_of("blocks.1.attention#2")
        ('–', '#2', '1#2')
    """
    name, call, number = name.partition("#")
    numbers = ".".join(re.findall(r"\d+", name))
    return f"{numbers}{call}{number}" or "–"


def reason_of(kind: str) -> str:
    """Why a layer of this kind is not measured: its kind, a colon, and what it computes."""
    return f"{kind}: {LAYER_KINDS[kind]}"


def kind_of(reason: str) -> str | None:
    """The kind of a layer that was not measured for this reason; None where it attends, or may."""
    kind = reason.partition(":")[0]
    return kind if kind in LAYER_KINDS else None


def by_reason(skipped: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Pairs of name and reason, with one pair for all that share a stack and a reason.

    Example:
        >>> by_reason([(f"layers.{n}.mixer", "why") for n in (0, 1, 2, 4)])
        [('layers.*.mixer (0 to 2, 4)', 'why')]
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for name, reason in skipped:
        groups.setdefault((pattern_of(name), reason), []).append(name)
    return [
        (names[0] if len(names) == 1 else f"{pattern} ({_ranges([label_of(name) for name in names])})", reason)
        for (pattern, reason), names in groups.items()
    ]


def runs(labels: Iterable[str]) -> list[list[str]]:
    """Labels in groups, of which each holds numbers (``7``, ``3/64``) that follow one another, or a single label."""
    found: list[list[str]] = []
    for label in labels:
        last, own = (one.partition("/") for one in (found[-1][-1] if found else "", label))
        follows = last[0].isdecimal() and own[0].isdecimal() and int(own[0]) == int(last[0]) + 1
        found[-1].append(label) if follows and own[1:] == last[1:] else found.append([label])
    return found


def _ranges(labels: list[str]) -> str:
    """Labels as a list, in which three or more numbers that follow one another are a range."""
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(run) for run in runs(labels))


# --- calls of a module ---


def first_call(name: str, kind: str, mode: str) -> SiteKey:
    """The site of the first call of a module; of all of them, where they are one site."""
    return call_of(name)[0], kind, mode


def apart(sites: Iterable[SiteLabel | SiteReading]) -> set[SiteKey]:
    """First calls of modules each of whose forwards is a site: those have a layer by the order of calls."""
    later = (site for site in sites if call_of(site.name)[1] > 1 and site.layer != layer_of(site.name))
    return {first_call(*site.key) for site in later}


def uneven(parts: Iterable[Iterable[SiteLabel]]) -> Modules:
    """Modules that ran several times, and in some part another number of times than in another."""
    several: set[SiteKey] = set()
    calls: dict[SiteKey, set[frozenset[str]]] = {}
    for part in map(tuple, parts):
        several |= apart(part)
        here: dict[SiteKey, set[str]] = {}
        for label in part:
            here.setdefault(first_call(*label.key), set()).add(label.name)
        for key, names in here.items():
            calls.setdefault(key, set()).add(frozenset(names))
    return frozenset((key[0], key[2]) for key in several if len(calls[key]) > 1)


def joint_label(label: SiteLabel, modules: Modules) -> SiteLabel:
    """The site that a call is a part of, where the calls of ``modules`` are one site each."""
    name = call_of(label.name)[0]
    return replace(label, name=name, layer=layer_of(name)) if (name, label.mode) in modules else label


def reasons(modules: Modules, where: str) -> dict[str, str]:
    """``name#*`` -> why the calls of these modules are one site. ``where``: in which other part they differ."""
    why = f"it attended another number of times {where}: the site {{0}} is the mean over its calls"
    return {f"{name}{JOINED}": why.format(name) for name, _ in modules}
