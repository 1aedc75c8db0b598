"""What a reading amounts to, in one sentence: the worst first, and never more than the numbers say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from attemper.readings.alarms import KINDS, is_heard, level_of, value_at
from attemper.readings.reading import Alarm, HeadReading, Reading
from attemper.report.texts import Clauses, Message, message, say
from attemper.text import clean, cut

MOST_KINDS = 5


@dataclass(frozen=True)
class Verdict:
    """``level`` is the worst severity, as on the cards below it: critical, warning, notice, or fine without an alarm.
    A run whose warnings have all ended is a notice: what they told of may have stayed. untrained: a watched model
    looks it; unjudged: no row sees enough keys; empty: nothing was measured.
    """

    level: str
    said: Message

    @property
    def sentence(self) -> str:
        """In English."""
        return say(self.said)


def verdict(reading: Reading, past: Sequence[Alarm] = ()) -> Verdict:
    """One sentence on the whole reading.

    Args:
        past: alarms of a run that have ended.
    """
    heads = [head for site in reading.sites for head in site.heads]
    alarms = {severity: _of(reading, severity) for severity in ("critical", "warning", "notice")}
    if not any(head.rows for head in heads) and not alarms["critical"]:
        return Verdict("empty", _nothing(reading, heads))
    history = {"past": _past(past), "before": _before((*reading.alarms, *past))}
    parts = {"total": _total(reading, heads), "gaps": _gaps(reading, heads), **history}
    is_bound = reading.sampled_rows is not None
    if alarms["critical"]:
        others = [*_clauses(alarms["warning"], is_bound), *_clauses(alarms["notice"], is_bound)]
        parts["rest"] = message("verdict.besides", others=Clauses(others)) if others else ""
        found = Clauses(_clauses(alarms["critical"], is_bound))
        return Verdict("critical", message("verdict.broken", found=found, where=_first(alarms["critical"]), **parts))
    if alarms["warning"]:
        noticed = [*_clauses(alarms["warning"], is_bound), *_clauses(alarms["notice"], is_bound)]
        return Verdict("warning", message("verdict.sentence", found=Clauses(noticed), end="", **parts))
    short = [head for head in heads if head.rows and not head.judged]
    calm = [
        *_clauses(alarms["notice"], is_bound),
        *_uniform_heads(reading),
        *_largest_logit(heads, is_bound),
        *_short_rows(reading, short),
    ]
    level, end = "fine", message("verdict.others" if short else "verdict.nothing")
    if alarms["notice"]:
        level, end = "notice", message("verdict.notices", n=len(alarms["notice"]))
    elif reading.untrained_heads:
        level, end = "untrained", ""
    elif not any(head.judged for head in heads):
        level, end = "unjudged", ""
    elif history["past"]:
        level, end = "notice", message("verdict.now")
    return Verdict(level, message("verdict.sentence", found=Clauses(calm), end=end, **parts))


def _total(reading: Reading, heads: list[HeadReading]) -> Message:
    return message(
        "verdict.total",
        heads=message("count.heads", n=len(heads)),
        layers=message("count.layers", n=len(reading.sites)),
    )


def _nothing(reading: Reading, heads: list[HeadReading]) -> Message:
    skipped = message("verdict.skipped_only", n=len(reading.skipped)) if reading.skipped else ""
    if not heads:
        return message("verdict.nothing_measured", skipped=skipped)
    subject = message("verdict.no_number", n=len(heads))
    return message("verdict.no_row", total=_total(reading, heads), subject=subject, skipped=skipped)


def _of(reading: Reading, severity: str) -> list[Alarm]:
    return [alarm for alarm in reading.alarms if level_of(alarm.severity) == severity]


def _clauses(alarms: list[Alarm], is_bound: bool) -> list[Message]:
    """One clause a kind, in the order in which kinds are first met; after ``MOST_KINDS`` the rest are counted."""
    kinds = list(dict.fromkeys(alarm.kind for alarm in alarms))
    told = [_clause(kind, [alarm for alarm in alarms if alarm.kind == kind], is_bound) for kind in kinds[:MOST_KINDS]]
    rest = sum(alarm.kind not in kinds[:MOST_KINDS] for alarm in alarms)
    return [*told, message("verdict.more", n=rest)] if rest else told


def _clause(name: str, alarms: list[Alarm], is_bound: bool) -> Message:
    """``is_bound``: whether the worst value is a bound; else it is exact."""
    many, kind = len(alarms), KINDS.get(name)
    steps = [alarm.since for alarm in alarms if alarm.since is not None]
    began = "since" if len(set(steps)) == 1 else "first"
    since = message(f"verdict.{began}", step=min(steps)) if len(steps) == many else ""
    if kind is None:
        return message("verdict.unknown", n=many, kind=cut(clean(name), 40), since=since)
    clause, limit, worst = message(f"alarm.{name}.clause", n=many), "", ""
    if kind.worst:
        bound = alarms[0].limit
        limit = message("verdict.beyond") if bound is None else message(f"verdict.{kind.side}", limit=float(bound))
        value = max((one for one in (value_at(alarm, "latest") for alarm in alarms) if one is not None), default=None)
        worst = "" if value is None else message(f"alarm.{name}.worst", value=_worst(value, is_bound))
    return message("verdict.clause", clause=clause, limit=limit, worst=worst, since=since)


def _worst(value: float, is_bound: bool) -> Message | float:
    return message("number.at_least", value=float(value)) if is_bound else float(value)


def _first(alarms: list[Alarm]) -> Message:
    """Where trouble that spreads from layer to layer begins."""
    site = cut(clean(alarms[0].site), 80)
    return message("verdict.in" if len(alarms) == 1 else "verdict.first_in", site=site)


def _largest_logit(heads: list[HeadReading], is_bound: bool) -> Iterator[Message]:
    logits = [head.max_logit for head in heads if head.max_logit is not None]
    if logits:
        yield message("verdict.largest_logit", value=_worst(max(logits), is_bound))


def _uniform_heads(reading: Reading) -> Iterator[Message]:
    if reading.untrained_heads:
        yield message("verdict.uniform", n=reading.untrained_heads)


def _short_rows(reading: Reading, short: list[HeadReading]) -> Iterator[Message]:
    if short:
        yield message("verdict.short", n=len(short), needed=reading.fewest_keys)


def _gaps(reading: Reading, heads: list[HeadReading]) -> Message | str:
    """What the sentence does not cover."""
    silent = sum(not head.rows for head in heads)
    parts = [message("verdict.silent", n=silent)] if silent else []
    if reading.skipped:
        parts.append(message("verdict.skipped", n=len(reading.skipped)))
    return message("verdict.gaps", parts=Clauses(parts)) if parts else ""


def _past(alarms: Sequence[Alarm]) -> Message | str:
    """Warnings and worse that came and went."""
    ended = [alarm.ended for alarm in alarms if alarm.ended is not None and is_heard(alarm)]
    return message("verdict.past", n=len(ended), step=max(ended)) if ended else ""


def _before(alarms: Sequence[Alarm]) -> Message | str:
    """Which checkpoints come before every warning, where warnings began at several steps."""
    begun = {alarm.since for alarm in alarms if alarm.since is not None and is_heard(alarm)}
    return message("verdict.before", step=min(begun)) if len(begun) > 1 else ""
