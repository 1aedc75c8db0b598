"""What is alarming in a reading: plain limits on plain numbers, each alarm with what it may mean and what to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from attemper.checks import one_of
from attemper.errors import InputError
from attemper.records import FEWEST_KEYS, Alarm, HeadReading, SiteReading

LIMITS = {"collapsed": 0.05, "diffuse": 0.95, "logits": 100.0, "first_token": 0.8}
"""collapsed: normalised entropy below; diffuse: above; logits: largest score above; first_token: weight on it above."""

WATCH_LIMITS = {**LIMITS, "fallen": 0.02}
"""Those of a watch. fallen: normalised entropy below this share of the head's own in the watch's first sample."""

_ADVICE = {
    "collapsed": (
        "Healthy models have sharp heads. If this one was not sharp before, look at the size of its logits and the "
        "learning rate; a temperature above 1 or a clip on query and key weights widens it."
    ),
    "diffuse": (
        "The head spreads its weight over all keys alike: common in first layers and for averaging heads. If it "
        "should select, a temperature below 1 sharpens it."
    ),
    "logits": (
        "Scores this large saturate the softmax and are where training in half precision breaks. Clip query and key "
        "weights, normalise queries and keys, or lower the learning rate."
    ),
    "first_token": (
        "The head rests on the first token (an attention sink): healthy in most decoders. Mind it before evicting or "
        "compressing the first keys of a cache."
    ),
    "fallen": (
        "The head has become much sharper than it was when the watch began. If the loss suffers too, lower the "
        "learning rate, or hold its entropy by a temperature above 1, a penalty on entropy or a clip of query and key "
        "weights."
    ),
    "nonfinite": (
        "Scores hold NaN or infinity: find the first layer where they appear, look for NaN weights and for overflow "
        "in half precision. These rows are left out of every mean."
    ),
}


def checked_limits(limits: Mapping[str, float] | None, known: Mapping[str, float] = LIMITS) -> dict[str, float]:
    """The default limits, ``known``, with those given in their place.

    Raises:
        InputError: a name that is not a limit, or a value that is not a number.
    """
    merged = dict(known)
    for name, value in (limits or {}).items():
        one_of("limits", name, known)
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
            raise InputError(f"limits[{name!r}] must be a number, got {value!r}.")
        merged[name] = float(value)
    return merged


def checked_fewest_keys(where: str, fewest_keys: int) -> int:
    """``fewest_keys`` if it is a whole number of at least 2.

    Raises:
        InputError: it is not.
    """
    if isinstance(fewest_keys, bool) or not isinstance(fewest_keys, int) or fewest_keys < 2:
        raise InputError(
            f"{where}(fewest_keys=...) must be a whole number of at least 2, got {fewest_keys!r}. It is how many keys "
            f"a row must see before its sharpness is judged ({FEWEST_KEYS} unless told); a row with one key has none."
        )
    return fewest_keys


def alarms(
    sites: tuple[SiteReading, ...], limits: Mapping[str, float] | None = None, fewest_keys: int = FEWEST_KEYS
) -> tuple[Alarm, ...]:
    """Alarms of a scan. Sharpness is a notice: only a history or a baseline tells trouble from a healthy sharp head.

    Args:
        sites: their buckets by visible keys have an edge at ``fewest_keys``.
        limits: by kind, in the place of ``LIMITS``.
        fewest_keys: rows that see fewer say nothing about sharpness or first tokens.
    """
    checked = checked_limits(limits, WATCH_LIMITS)
    return tuple(alarm for site in sites for head in site.heads for alarm in _of_head(site, head, checked, fewest_keys))


def _of_head(site: SiteReading, head: HeadReading, limits: Mapping[str, float], fewest_keys: int) -> Iterator[Alarm]:
    where = f"{site.name} head {head.head}"

    def alarm(kind: str, severity: str, value: float, limit: float | None, message: str) -> Alarm:
        return Alarm(site.name, head.head, kind, severity, value, limit, f"{where}: {message}", _ADVICE[kind])

    if head.nonfinite_rows:
        total = head.rows + head.empty_rows + head.nonfinite_rows
        yield alarm(
            "nonfinite",
            "critical",
            float(head.nonfinite_rows),
            None,
            f"{head.nonfinite_rows} of {total} rows have a NaN or infinite score",
        )
    entropy, first = (
        over_enough_keys(head, statistic, fewest_keys) for statistic in ("normalized_entropy", "first_token_mass")
    )
    if entropy is not None and entropy < limits["collapsed"]:
        yield alarm(
            "collapsed", "notice", entropy, limits["collapsed"], f"normalised entropy {entropy:.3f} is very low"
        )
    if entropy is not None and entropy > limits["diffuse"]:
        yield alarm(
            "diffuse", "notice", entropy, limits["diffuse"], f"normalised entropy {entropy:.3f} is near uniform"
        )
    if head.max_logit is not None and head.max_logit > limits["logits"]:
        yield alarm("logits", "warning", head.max_logit, limits["logits"], f"largest score {head.max_logit:.1f}")
    if first is not None and first > limits["first_token"]:
        yield alarm(
            "first_token", "notice", first, limits["first_token"], f"{first:.0%} of the weight rests on the first token"
        )


def fallen(site: SiteReading, head: HeadReading, now: float, before: float, limit: float) -> Alarm:
    """The alarm of a head whose normalised entropy is below ``limit`` times what it was before."""
    message = f"normalised entropy has fallen from {before:.2g} in the first sample to {now:.2g}"
    where = f"{site.name} head {head.head}: "
    return Alarm(site.name, head.head, "fallen", "warning", now, limit * before, where + message, _ADVICE["fallen"])


def over_enough_keys(head: HeadReading, statistic: str, fewest_keys: int) -> float | None:
    """Mean over rows that see at least ``fewest_keys`` keys; None if no row does."""
    buckets = [bucket for bucket in head.by_visible_keys if bucket.first >= fewest_keys]
    rows = sum(bucket.rows for bucket in buckets)
    values = [getattr(bucket, statistic) for bucket in buckets]
    if not rows or None in values:
        return None
    return sum(value * bucket.rows for value, bucket in zip(values, buckets, strict=True)) / rows
