"""``attemper.compare``: what changed between two scans, runs, models or fingerprints."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, overload

from attemper.errors import InputError
from attemper.fingerprints.record import Fingerprint
from attemper.readings.reading import Reading
from attemper.results.comparison import Comparison, HasReading, compare_readings

if TYPE_CHECKING:
    from torch import nn

    from attemper.results.explanation import Explanation

    Side = HasReading | Reading | Mapping[str, Any] | str | os.PathLike[str] | nn.Module


@overload
def compare(before: Fingerprint, after: Fingerprint) -> Explanation: ...


@overload
def compare(
    before: Side, after: Side, batches: Iterable[Any] | None = None, *, names: tuple[str, str] | None = None
) -> Comparison: ...


def compare(
    before: Any, after: Any, batches: Iterable[Any] | None = None, *, names: tuple[str, str] | None = None
) -> Comparison | Explanation:
    """Returns what changed between two results of one kind, head by head. Compare a checkpoint with a later one, or a
    model before and after a fix.

    Sites are matched by name, kind and mode, heads by number. ::

        print(attemper.compare(attemper.scan(old, batches), attemper.scan(new, batches)))
        print(attemper.compare(old, new, batches))

    Args:
        before, after: a ``Scan``, a run (its last sample; the page of two runs shows their histories), their
            ``reading``, the document of ``to_dict``, the JSON of ``scan --json``, or the path of a file that holds it.
            Compare scans of the same texts: other texts change the numbers, too. Two models are scanned over
            ``batches``. Two fingerprints are explained, as by :func:`attemper.explain`.
        batches: what two models read, as of :func:`attemper.scan`; nothing else takes it.
        names: what to call the two sides; None for the names of their models.

    Returns:
        A :class:`attemper.types.Comparison`, which lists sites that only one has; of fingerprints what
        :func:`attemper.explain` returns.

    Raises:
        InputError: a site has not the same number of heads in both; the two have no site in common; they are of two
            kinds, or of none that compares; or models were given without ``batches``.
    """
    prints = [isinstance(side, Fingerprint) for side in (before, after)]
    models = [hasattr(side, "named_modules") for side in (before, after)]
    for kind, are in (("fingerprint", prints), ("model", models)):
        if any(are) and not all(are):
            other = type(before if are[1] else after).__name__
            raise InputError(f"compare(before, after): one is a {kind} and the other is {other}: give two of one kind.")
    if batches is not None and not any(models):
        raise InputError("compare(batches=...) is what two models read: scans, runs and fingerprints have read theirs.")
    if all(prints):
        if names is not None:
            raise InputError("compare(names=...): an explanation of two fingerprints calls them run a and run b.")
        from attemper.results.explanation import explain

        return explain(before, after)
    if all(models):
        if batches is None:
            raise InputError("compare(model, model) scans both: pass what they read, compare(old, new, batches).")
        from attemper.monitor.scan import scan

        read = batches if isinstance(batches, list | tuple | Mapping) else list(batches)
        found = compare_readings(scan(before, read), scan(after, read), names=names)
        return replace(found, texts="same")
    return compare_readings(before, after, names=names)
