"""What a reading amounts to, in one sentence: the worst first, and never more than the numbers say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from attemper.readings.alarms import KINDS, level_of
from attemper.readings.reading import Alarm, HeadReading, Reading
from attemper.text import clean, count, cut, number

MOST_KINDS = 5


@dataclass(frozen=True)
class Verdict:
    """``level`` is the worst severity, as on the cards below it: critical, warning, notice, or fine without an
    alarm; untrained, where a watched model looks it; unjudged, where no row sees enough keys; or empty, where
    nothing was measured.
    """

    level: str
    sentence: str


def verdict(reading: Reading) -> Verdict:
    """One sentence on the whole reading."""
    heads = [head for site in reading.sites for head in site.heads]
    alarms = {severity: _of(reading, severity) for severity in ("critical", "warning", "notice")}
    if not any(head.rows for head in heads) and not alarms["critical"]:
        return Verdict("empty", _nothing(reading, heads))
    total = f"{count(len(heads), 'head')} in {count(len(reading.sites), 'layer')}"
    unknown = _gaps(reading, heads)
    bound = "" if reading.sampled_rows is None else "at least "
    if alarms["critical"]:
        others = [*_clauses(alarms["warning"], bound), *_clauses(alarms["notice"], bound)]
        rest = f"; besides, {_join(others)}" if others else ""
        found = _join(_clauses(alarms["critical"], bound))
        return Verdict("critical", f"{total}: {found}{_first(alarms['critical'])}{rest}{unknown}.")
    if alarms["warning"]:
        noticed = [*_clauses(alarms["warning"], bound), *_clauses(alarms["notice"], bound)]
        return Verdict("warning", f"{total}: {_join(noticed)}{unknown}.")
    short = [head for head in heads if head.rows and not head.judged]
    calm = [
        *_clauses(alarms["notice"], bound),
        *_uniform_heads(reading),
        *_largest_logit(heads, bound),
        *_short_rows(reading, short),
    ]
    if alarms["notice"]:
        notices = count(len(alarms["notice"]), "notice")
        return Verdict("notice", f"{total}: {_join(calm)}{unknown}; {notices}, no warning.")
    if reading.untrained_heads:
        return Verdict("untrained", f"{total}: {_join(calm)}{unknown}.")
    if not any(head.judged for head in heads):
        return Verdict("unjudged", f"{total}: {_join(calm)}{unknown}.")
    others = " in the others" if short else ""
    return Verdict("fine", f"{total}: {_join(calm)}{unknown}; nothing needs attention{others}.")


def _nothing(reading: Reading, heads: list[HeadReading]) -> str:
    skipped = f"; {count(len(reading.skipped), 'module was', 'modules were')} skipped" if reading.skipped else ""
    if not heads:
        return f"No attention was measured{skipped}."
    subject = "it has no number" if len(heads) == 1 else "none of them has a number"
    return f"{count(len(heads), 'head')} in {count(len(reading.sites), 'layer')}: {subject}, no row was valid{skipped}."


def _of(reading: Reading, severity: str) -> list[Alarm]:
    return [alarm for alarm in reading.alarms if level_of(alarm.severity) == severity]


def _clauses(alarms: list[Alarm], bound: str) -> list[str]:
    """One clause a kind, in the order in which kinds are first met; after ``MOST_KINDS`` the rest are counted."""
    kinds = list(dict.fromkeys(alarm.kind for alarm in alarms))
    told = [_clause(kind, [alarm for alarm in alarms if alarm.kind == kind], bound) for kind in kinds[:MOST_KINDS]]
    rest = sum(alarm.kind not in kinds[:MOST_KINDS] for alarm in alarms)
    return [*told, f"there {'is' if rest == 1 else 'are'} {count(rest, 'more alarm')}"] if rest else told


def _clause(name: str, alarms: list[Alarm], bound: str) -> str:
    """``bound``: what stands before the worst value; empty where it is exact."""
    many, kind = len(alarms), KINDS.get(name)
    if kind is None:
        return f"{many:,} raised the alarm “{cut(clean(name), 40)}”"
    clause = f"{many:,} {kind.clause[many > 1]}"
    if not kind.worst:
        return clause
    worst = max((alarm.value for alarm in alarms if alarm.value is not None), default=None)
    limit = "beyond the limit" if alarms[0].limit is None else f"{kind.side} {number(alarms[0].limit)}"
    return f"{clause} {limit}" + ("" if worst is None else f", {kind.worst} {bound}{number(worst)}")


def _first(alarms: list[Alarm]) -> str:
    """Where trouble that spreads from layer to layer begins."""
    if len(alarms) == 1:
        return f", in {cut(clean(alarms[0].site), 80)}"
    return f", the first in {cut(clean(alarms[0].site), 80)}"


def _largest_logit(heads: list[HeadReading], bound: str) -> Iterator[str]:
    logits = [head.max_logit for head in heads if head.max_logit is not None]
    if logits:
        yield f"the largest logit is {bound}{number(max(logits))}"


def _uniform_heads(reading: Reading) -> Iterator[str]:
    if reading.untrained_heads:
        yield f"{reading.untrained_heads:,} near uniform, as in a model that is not trained yet"


def _short_rows(reading: Reading, short: list[HeadReading]) -> Iterator[str]:
    if short:
        sees = "sees" if len(short) == 1 else "see"
        yield f"{len(short):,} {sees} too few keys to judge sharpness ({reading.fewest_keys:,} needed)"


def _gaps(reading: Reading, heads: list[HeadReading]) -> str:
    """What the sentence does not cover."""
    silent = sum(not head.rows for head in heads)
    parts = []
    if silent:
        parts.append(f"{count(silent, 'head has', 'heads have')} no valid row")
    if reading.skipped:
        parts.append(f"{count(len(reading.skipped), 'module was', 'modules were')} skipped and not measured")
    return f"; {_join(parts)}" if parts else ""


def _join(parts: list[str]) -> str:
    """``a``, ``a and b``, ``a, b, and c``."""
    if len(parts) < 3:
        return " and ".join(parts)
    return f"{', '.join(parts[:-1])}, and {parts[-1]}"
