"""What a reading amounts to, in one sentence: the worst first, and never more than the numbers say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from attemper.readings.alarms import KINDS, is_by_job, is_heard, level_of, value_at
from attemper.readings.reading import Alarm, HeadReading, Reading
from attemper.report.texts import Clauses, Message, Names, alarm_title, message, place_of_alarm, say
from attemper.text import clean, cut

MOST_KINDS = 5
LEVELS = ("critical", "warning", "empty", "untrained", "unjudged", "notice", "fine")
"""Of verdicts, the worst first."""
LONGEST = 160
"""Characters of the sentence, in English: what it has no room for is said behind it, folded on a phone."""


@dataclass(frozen=True)
class Verdict:
    """``level`` is the worst severity, as on the cards below it: critical, warning, notice, or fine without an alarm.
    A run whose warnings have all ended is a notice: what they told of may have stayed. untrained: a watched model
    looks it; unjudged: no row sees enough keys; empty: nothing was measured.
    """

    level: str
    said: Message
    rest: tuple[Message, ...] = ()
    """Further sentences."""


def verdict(reading: Reading, past: Sequence[Alarm] = ()) -> Verdict:
    """What the whole reading amounts to. ``past``: alarms of a run that have ended."""
    heads = reading.heads
    alarms = {
        severity: [alarm for alarm in reading.alarms if level_of(alarm.severity) == severity]
        for severity in ("critical", "warning", "notice")
    }
    if not any(head.rows for head in heads) and not alarms["critical"]:
        return Verdict("empty", _nothing(reading, heads))
    is_bound = reading.sampled_rows is not None
    level = next((severity for severity, found in alarms.items() if found), "fine")
    clauses = [clause for found in alarms.values() for clause in _clauses(found, is_bound)]
    history, gaps = [*_past(past), *_before((*reading.alarms, *past))], _gaps(reading, heads)
    if level == "critical":
        clauses[0] = message("verdict.placed", clause=clauses[0], where=_first(alarms["critical"]))
    if level in ("critical", "warning"):
        return _fit(level, "ill", clauses, (), [*gaps, *history])
    short = [head for head in heads if head.rows and not head.judged]
    uniform, logits = reading.untrained_heads, [head.max_logit for head in heads if head.max_logit is not None]
    calm = [message("verdict.uniform", n=uniform)] if uniform else []
    calm += [message("verdict.largest_logit", value=_worst(max(logits), is_bound))] if logits else []
    calm += [message("verdict.short", n=len(short), needed=reading.fewest_keys)] if short else []
    if level == "fine" and uniform:
        level = "untrained"
    elif level == "fine" and len(short) == sum(bool(head.rows) for head in heads):
        level = "unjudged"
    elif history:
        level = "notice"
    if level == "notice" and history:
        return _fit(level, "passed", [*clauses, *calm], gaps, history[1:], said=history[0])
    # What was not measured stands in the sentence itself: without it, "nothing looks wrong" says too much.
    return _fit(level, level, [*clauses, *calm], gaps, history, total=_total(reading, heads))


def _fit(
    level: str,
    opening: str,
    clauses: Sequence[Message],
    always: Sequence[Message],
    rest: Sequence[Message],
    **parts: Message,
) -> Verdict:
    """As many of the clauses as there is room for, at least one; the others behind it."""

    def lead(many: int) -> Message:
        return message(f"verdict.{opening}", found=Clauses([*clauses[:many], *always]), **parts)

    many = next((many for many in range(len(clauses), 1, -1) if len(say(lead(many))) <= LONGEST), 1)
    others = clauses[many:]
    more = [message("verdict.besides", others=Clauses(others))] if others else []
    return Verdict(level, lead(many), (*more, *(message("verdict.said", said=one) for one in rest)))


def _total(reading: Reading, heads: Sequence[HeadReading]) -> Message:
    return message(
        "verdict.total",
        heads=message("count.heads", n=len(heads)),
        layers=message("count.layers", n=len(reading.sites)),
    )


def _nothing(reading: Reading, heads: Sequence[HeadReading]) -> Message:
    skipped = message("verdict.skipped_only", n=len(reading.skipped)) if reading.skipped else ""
    if not heads:
        return message("verdict.nothing_measured", skipped=skipped)
    subject = message("verdict.no_number", n=len(heads))
    return message("verdict.no_row", total=_total(reading, heads), subject=subject, skipped=skipped)


def _clauses(alarms: list[Alarm], is_bound: bool) -> list[Message]:
    """One clause a kind, in the order in which kinds are first met; after ``MOST_KINDS`` the rest are counted."""
    plain = [alarm for alarm in alarms if not is_by_job(alarm)]
    kinds = list(dict.fromkeys(alarm.kind for alarm in plain))
    told = [_clause(kind, [alarm for alarm in plain if alarm.kind == kind], is_bound) for kind in kinds[:MOST_KINDS]]
    if by_job := len(alarms) - len(plain):
        told.append(message("verdict.by_job", n=by_job))
    rest = sum(alarm.kind not in kinds[:MOST_KINDS] for alarm in plain)
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
        known = [(one, alarm.worst_step) for alarm in alarms if (one := value_at(alarm, "worst")) is not None]
        value, step = max(known, key=lambda one: one[0], default=(None, None))
        worst = "" if value is None else message(f"alarm.{name}.worst", value=_worst(value, is_bound))
        worst = worst if step is None else message("verdict.worst_at", worst=worst, step=step)
    return message("verdict.clause", clause=clause, limit=limit, worst=worst, since=since)


def _worst(value: float, is_bound: bool) -> Message | float:
    return message("number.at_least", value=float(value)) if is_bound else float(value)


def _first(alarms: list[Alarm]) -> Message | str:
    """Where trouble that spreads from layer to layer begins."""
    if place_of_alarm(alarms[0]).key == "loss.title":  # its clause says so
        return ""
    site = cut(clean(alarms[0].site), 80)
    return message("verdict.in" if len(alarms) == 1 else "verdict.first_in", site=site)


def _gaps(reading: Reading, heads: Sequence[HeadReading]) -> list[Message]:
    """What the numbers do not cover."""
    silent = sum(not head.rows for head in heads)
    found = [message("verdict.silent", n=silent)] if silent else []
    return [*found, message("verdict.skipped", n=len(reading.skipped))] if reading.skipped else found


def distinct_warnings(alarms: Sequence[Alarm]) -> list[Alarm]:
    """Warnings and worse, but for those that another took the place of: they go on as that one."""
    return [alarm for alarm in alarms if alarm.continues_as is None and is_heard(alarm)]


def _past(alarms: Sequence[Alarm]) -> Iterator[Message]:
    """Warnings and worse that came and went."""
    ended = {alarm: alarm.ended for alarm in distinct_warnings(alarms) if alarm.ended is not None}
    if ended:
        kinds = [alarm_title(kind) for kind in dict.fromkeys(alarm.kind for alarm in ended)]
        yield message("verdict.past", n=len(ended), step=max(ended.values()), kinds=Names(kinds[:3]))


def _before(alarms: Sequence[Alarm]) -> Iterator[Message]:
    """Which checkpoints come before every warning, where warnings began at several steps."""
    begun = {alarm.since for alarm in alarms if alarm.since is not None and is_heard(alarm)}
    if len(begun) > 1:
        yield message("verdict.before", step=min(begun))
