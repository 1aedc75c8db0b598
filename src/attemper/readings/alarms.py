"""What is alarming in readings: plain limits on plain numbers, each alarm with what it may mean and what to do.

``ALARMS`` is the one list of them. Limits, advice, pages, tables, trackers and the command line iterate over it: to add
an alarm is to add a record to it. What each measures is a law of ``alarm_laws.py``; ``judge.py`` applies them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from attemper.readings.reading import Alarm, HeadReading, number
from attemper.readings.roles import ADVICE, BY_JOB, ROLE_OF
from attemper.readings.sample import JUDGED, RANK_DIFFERENCE, SURPLUS
from attemper.text import clean, first_of
from attemper.text import number as shown

SEVERITIES: tuple[str, ...] = ("notice", "warning", "critical")
VERDICT_FIELDS = (
    *("name", "statistic", "side", "limit", "severity", "law", "release", "until", "least_rows", "floor", "judged"),
    *("trained", "whole", "beside", "of_mean", "least_heads", "part_of"),
)
"""What an ``AlarmKind`` has beside words: a verdict that is kept with a run is of these."""
MEAN_OF = "mean of "
"""Before the name of a quantity: its mean over the heads of a site, at the first of them."""
LOSS = "loss"
"""What a loop's loss is called. Its alarms have this as their site."""
OF_ONE_SAMPLE = ("level", "nonfinite")
"""Laws that a single reading is enough for: those of a scan. All others need a history."""


@dataclass(frozen=True)
class AlarmKind:
    """One kind of alarm: when it rings, and how it is reported.

    A message is a format of ``value``, ``now`` (the statistic), ``before`` (its baseline) and ``total`` (rows, or heads
    of a site).
    """

    name: str
    statistic: str
    """The number of a ``HeadReading`` that it judges."""
    side: Literal["above", "below"]
    """Where the statistic is alarming, or goes: on which side of the limit it rings, unless the law says otherwise."""
    limit: float | None
    """The default of ``limits={name: ...}``. None: it rings above 0, and has no limit that can be set."""
    severity: str
    message: str
    """What is said of a head, after its place."""
    clause: tuple[str, str]
    """What follows the number of heads in the sentence of the page: for one head, and for several."""
    title: str
    """The name on the card of the page."""
    advice: str
    line: str = ""
    """The one line that holds it for this model: the end of its advice in a run. A format of ``step`` and of
    ``threshold``. Empty for a notice.
    """
    others: tuple[str, ...] = ()
    """Kinds of which its advice says what to do if they ring, too."""
    alone: str = ""
    """Its advice in a table that has none of them."""
    unit: str = ""
    """Of its limit."""
    law: str = "level"
    """A name of ``alarm_laws.LAWS``: what is held against the limit."""
    release: float = 0.1
    """It ends where the value comes back by this share of the limit, so that one alarm is one alarm."""
    until: float | None = None
    """Nor does it end before there: for heads that stay near the limit, and would cross it with each batch."""
    least_rows: int = 1
    """A reading of fewer rows is not judged."""
    floor: float | None = None
    """It begins only where the statistic, as the median of three readings, is beyond this: speed says nothing of
    harmless values. Given for laws that look at earlier values.
    """
    worst: str = ""
    """What the sentence calls the largest value. Empty: it gives no value."""
    trained: bool = False
    """Whether it is held back while the model looks untrained."""
    whole: bool = False
    """Whether it is of a site all of whose heads are beyond the limit."""
    beside: str = ""
    """A quantity that the message has as ``before``; empty: the baseline."""
    of_mean: bool = False
    """Whether it judges the mean over all heads of a site, and no head by itself."""
    least_heads: int = 2
    """A whole site with fewer is not judged."""
    part_of: str = ""
    """The kind that takes its place while all heads of its site are alarming."""

    @property
    def judged(self) -> bool:
        """Whether it judges only rows that see enough keys: of other statistics these are not known."""
        return self.statistic in JUDGED

    @property
    def needs_history(self) -> bool:
        """Whether it compares samples: a scan, which is one, has no such alarm."""
        return self.law not in OF_ONE_SAMPLE or self.of_loss

    @property
    def of_loss(self) -> bool:
        """Whether it judges the loss that the loop gives, and no head."""
        return self.statistic == LOSS

    @property
    def is_ill(self) -> bool:
        """Whether a head with it is no part of what is normal: a warning, or a fall, which is no baseline."""
        return self.severity != SEVERITIES[0] or self.law == "fall_from_baseline"

    @property
    def needs_ranks(self) -> bool:
        """Whether it compares the ranks of a merged history: no other has such an alarm."""
        return self.statistic == RANK_DIFFERENCE

    @property
    def names_threshold(self) -> bool:
        """Whether its line is one of ``QKClip``."""
        return "{threshold}" in self.line

    @property
    def has_statistic(self) -> bool:
        """Whether the value of its alarms is the statistic itself, and not something measured over time."""
        of_time = ("doubling_time", "rate", "drift", "lasting_level", "shift", "apart")
        return self.law not in of_time and not self.of_loss

    @property
    def of_sharpness(self) -> bool:
        """Whether it says that a head is sharp: for some roles that is their job."""
        return self.statistic == "normalized_entropy" and self.side == "below" and not self.whole

    @property
    def unit_of_value(self) -> str:
        """Empty where the message names the statistic, and the value is one of it."""
        return "" if self.has_statistic else self.unit

    @property
    def quantity(self) -> str:
        """The quantity of a ``Sample`` that it judges, or ``MEAN_OF`` it."""
        return f"{MEAN_OF * self.of_mean}{'judged_' * self.judged}{self.statistic}"

    def value(self, head: HeadReading, fewest_keys: int) -> float | None:
        """The number that it judges in one reading; None where there is none."""
        if self.judged:
            return over_enough_keys(head, self.statistic, fewest_keys)
        value = getattr(head, self.statistic)
        return None if value is None else float(value)

    def rings(self, value: float, limit: float | None) -> bool:
        bound = 0.0 if limit is None else limit
        return value < bound if self.side == "below" else value > bound

    def end(self, limit: float, above: bool) -> float:
        """Where an alarm that rings above (or below) ``limit`` ends; an infinite limit never rings."""
        if math.isinf(limit):
            return limit
        room = self.release * abs(limit)
        back = limit - room if above else limit + room
        return back if self.until is None else (min if above else max)(back, self.until)

    def alarm(
        self,
        site: str,
        head: int | None,
        value: float,
        limit: float | None,
        origin: tuple[float, int] | None = None,
        figures: Mapping[str, float] | None = None,
        role: str | None = None,
        **history: Any,
    ) -> Alarm:
        """The alarm of a head, or of a whole site, whose ``value`` is beyond ``limit``.

        Args:
            origin: an earlier value of the statistic and its step, if it changed.
            figures: ``now``, ``before`` and ``total``, for the message; ``threshold``, for the line.
            role: of the head, where that is why it is sharp: then the alarm is a notice that says so.
            history: ``step`` and the fields of ``Alarm`` after it.
        """
        place = site if head is None else f"{site} head {head}"
        said = self.message.format(value=value, **(figures or {}))
        pace = "" if origin is None else f" (it was {origin[0]:.3g} at step {origin[1]})"
        if role is not None:
            said = BY_JOB.format(said=said, role=ROLE_OF[role].title)
            return Alarm(site, head, self.name, SEVERITIES[0], number(value), limit, f"{place}: {said}", ADVICE)
        told = (site, head, self.name, self.severity, number(value), limit, f"{place}: {said}{pace}")
        return Alarm(*told, self.advice_of((figures or {}).get("threshold", math.nan), history.get("step")), **history)

    def advice_of(self, threshold: float, step: int | None) -> str:
        """What to do, with the line of this run; of a scan, which has no step, without."""
        if not self.line or step is None:
            return self.advice
        line = NO_THRESHOLD if math.isnan(threshold) and self.names_threshold else self.line
        return f"{self.advice} {line.format(threshold=f'{threshold:.3g}', step=step)}"


_CLIP = (
    "If queries and keys are not normalised, limit the logits: attemper.QKClip(model, threshold={threshold}), and call "
    "its step() after the optimizer's."
)
NO_THRESHOLD = (
    "attemper names no threshold for QKClip: max_logit is not known here, or is below 10, and a threshold below 5 "
    "would flatten healthy heads."
)
"""In place of that line. Scores in [-5, 5] give one of 1,024 keys 0.956 of the weight at most."""
_THRESHOLD = re.compile(r"(?<=QKClip\(model, threshold=)[\d.]+")
_CHANGED = "attemper has no line that helps: {what} may have changed at step {{step}}."
_SHARP = (
    "If the loss suffers, lower the learning rate. You can also keep its entropy up: with a temperature above 1, an "
    "entropy penalty, or a clip of the query and key weights."
)
ALARMS = (
    AlarmKind(
        name="nonfinite",
        statistic="nonfinite_rows",
        law="nonfinite",
        side="above",
        limit=None,
        least_rows=0,
        severity="critical",
        message="rows with a NaN or infinite score: {value:.0f} of {total:.0f}",
        clause=("has NaN or infinite scores", "have NaN or infinite scores"),
        title="NaN or infinite scores",
        advice="Find the first layer with NaN or infinite scores. Look there for NaN weights and for overflow in half "
        "precision. Means leave these rows out.",
        line="attemper has no line that helps: NaN stays NaN. Go back to a checkpoint before step {step}.",
    ),
    AlarmKind(
        name="collapsed",
        statistic="normalized_entropy",
        side="below",
        limit=0.05,
        unit="of log n",
        release=1.0,
        severity="notice",
        message="normalised entropy {value:.3f} is very low",
        clause=("is nearly one-hot", "are nearly one-hot"),
        title="nearly one-hot",
        part_of="layer_fallen",
        advice="Healthy models have sharp heads, too. If this head was not sharp before, check its logits and the "
        "learning rate. A temperature above 1 or a clip of the query and key weights makes it wider.",
    ),
    AlarmKind(
        name="diffuse",
        statistic="normalized_entropy",
        side="above",
        limit=0.95,
        unit="of log n",
        trained=True,
        release=0.05,
        severity="notice",
        message="normalised entropy {value:.3f} is near uniform",
        clause=("is nearly uniform", "are nearly uniform"),
        title="nearly uniform",
        advice="The head weights all keys almost equally. This is common in first layers and in averaging heads. If "
        "the head should select tokens, sharpen it with a temperature below 1.",
    ),
    AlarmKind(
        name="logits",
        statistic="max_logit",
        side="above",
        limit=100.0,
        unit="score",
        release=0.5,
        severity="warning",
        message="largest logit {value:.1f}",
        clause=("has logits", "have logits"),
        worst="the largest",
        title="large logits",
        advice="Logits this large saturate the softmax: gradients of the scores vanish, and bfloat16 rounds a score "
        "above 128 to whole numbers. If the loss rises, lower the learning rate.",
        line=_CLIP,
    ),
    AlarmKind(
        name="first_token",
        statistic="first_token_mass",
        side="above",
        limit=0.8,
        unit="of the weight",
        release=0.2,
        severity="notice",
        message="{value:.0%} of the weight rests on the first token",
        clause=("rests on the first token", "rest on the first token"),
        title="on the first token",
        advice="The head puts most of its weight on the first token (an attention sink). This is healthy in most "
        "decoders. Keep the first keys when you evict or compress a cache.",
    ),
    AlarmKind(
        name="layer_fallen",
        statistic="normalized_entropy",
        law="fall_from_baseline",
        side="below",
        limit=0.1,
        unit="of the baseline",
        release=0.5,
        until=0.7,
        least_rows=8,
        whole=True,
        severity="warning",
        message="normalised entropy of all its heads has fallen, in the mean from {before:.2g} to {value:.2g}",
        clause=("layer has collapsed", "layers have collapsed"),
        title="layer collapsed",
        advice="All heads of this layer are far sharper than at first: attention collapses. If the loss rises, lower "
        "the learning rate.",
        line=_CLIP,
    ),
    AlarmKind(
        name="entropy_shift",
        statistic="normalized_entropy",
        law="shift",
        side="above",
        limit=5.0,
        unit="spreads of the readings before",
        release=0.5,
        least_rows=8,
        whole=True,
        of_mean=True,
        least_heads=1,
        severity="warning",
        message="normalised entropy has left its range within three readings, in the mean over heads to {now:.2g}",
        clause=("layer has left the range of its entropy", "layers have left the range of their entropy"),
        title="entropy has shifted",
        part_of="layer_fallen",
        advice="The heads of this layer changed within three readings. If an alarm of logits starts as well, follow "
        "its advice.",
        others=("logits", "logit_growth"),
        alone="The heads of this layer changed within three readings.",
        line=_CHANGED.format(what="the data, the learning rate or the scale of the scores"),
    ),
    AlarmKind(
        name="fallen",
        statistic="normalized_entropy",
        law="fall_from_baseline",
        side="below",
        limit=0.02,
        unit="of the baseline",
        release=0.5,
        until=0.7,
        least_rows=8,
        severity="notice",
        message="normalised entropy has fallen from {before:.2g} at first to {value:.2g}",
        clause=("is far sharper than at first", "are far sharper than at first"),
        title="fallen",
        part_of="layer_fallen",
        advice=f"The head is much sharper than at first. {_SHARP}",
    ),
    AlarmKind(
        name="falling",
        statistic="normalized_entropy",
        law="rate",
        side="below",
        limit=0.25,
        unit="of log n in 100 steps",
        release=0.5,
        floor=0.05,
        least_rows=8,
        severity="warning",
        message="normalised entropy {now:.2g} is falling fast",
        clause=("loses its entropy fast", "lose their entropy fast"),
        title="falling fast",
        part_of="layer_fallen",
        advice=f"The head became nearly one-hot within a few steps. {_SHARP}",
        line=_CLIP,
    ),
    AlarmKind(
        name="logit_growth",
        statistic="max_logit",
        law="doubling_time",
        side="above",
        limit=20.0,
        unit="steps",
        release=1.0,
        floor=50.0,
        severity="warning",
        message="largest logit {now:.1f} doubles in {value:.1f} steps",
        clause=("has logits that double within few steps", "have logits that double within few steps"),
        title="growing logits",
        advice="At this pace the logits soon saturate the softmax. If the loss rises, lower the learning rate, "
        "or warm up longer.",
        line=_CLIP,
    ),
    AlarmKind(
        name="spread_growth",
        statistic="logit_std",
        law="doubling_time",
        side="above",
        limit=20.0,
        unit="steps",
        release=1.0,
        floor=5.0,
        severity="notice",
        message="logit spread {now:.2f} doubles in {value:.1f} steps",
        clause=(
            "has a logit spread that doubles within few steps",
            "have a logit spread that doubles within few steps",
        ),
        title="growing logit spread",
        advice="The variance of the scores grows faster than training needs. Clip the query and key weights, or "
        "normalise queries and keys.",
    ),
    AlarmKind(
        name="drift",
        statistic="normalized_entropy",
        law="drift",
        side="above",
        limit=10.0,
        unit="spreads of a settled stretch",
        release=0.3,
        least_rows=8,
        trained=True,
        severity="notice",
        message="normalised entropy has drifted from {before:.2f} to {now:.2f}",
        clause=("has drifted from where it had settled", "have drifted from where they had settled"),
        title="drifted",
        advice="The head no longer attends where it had settled. In fine-tuning this may be what you want. If not, "
        "compare it with the checkpoint before, and check what changed in the data or the learning rate at that step.",
    ),
    AlarmKind(
        name="dead",
        statistic="normalized_entropy",
        law="dead",
        side="above",
        limit=0.999,
        unit="of log n",
        release=0.001,
        least_rows=8,
        trained=True,
        severity="notice",
        message="weights are uniform in each of the last 20 readings: scores do not depend on the key",
        clause=("is dead: uniform whatever it reads", "are dead: uniform whatever they read"),
        title="dead",
        advice="The head averages all keys, whatever they are. Look for query or key weights near 0 (weight decay, a "
        "missing gradient) and for a temperature that is too high. You can prune a dead head.",
    ),
    AlarmKind(
        name="rank_differs",
        statistic="rank_difference",
        law="lasting_level",
        side="above",
        limit=0.1,
        unit="of log n",
        release=0.5,
        whole=True,
        least_heads=1,
        beside="farthest_rank",
        severity="warning",
        message="normalised entropy on rank {before:.0f} is {value:.2g} from the mean of all ranks, in three readings",
        clause=("site differs on one rank", "sites differ on one rank"),
        title="a rank differs",
        advice="Data-parallel ranks have the same weights, so only their examples can differ. Check the device of "
        "that rank (memory errors, heat, clocks), its part of the data, and whether its weights still equal those of "
        "the others.",
        line=_CHANGED.format(what="that rank"),
    ),
    AlarmKind(
        name="leak",
        statistic="leaked_keys",
        side="above",
        limit=0.01,
        unit="keys",
        whole=True,
        least_heads=1,
        severity="warning",
        message="rows see {value:.4g} keys of other documents, in the mean",
        clause=("site sees other documents", "sites see other documents"),
        title="documents leak",
        advice="The batch declares documents (position_ids that restart, cu_seq_lens, or a mask of document numbers), "
        "but the mask lets them see each other. In transformers, pass use_cache=False and no attention_mask of ones, "
        "or choose an attention implementation that reads cu_seq_lens.",
        line="attemper has no line that helps: documents see each other since step {step}.",
    ),
    AlarmKind(
        name="visible_keys",
        statistic=SURPLUS,
        law="apart",
        side="above",
        limit=0.01,
        unit="keys",
        whole=True,
        least_heads=1,
        beside="visible_keys",
        part_of="leak",
        severity="warning",
        message="rows see {before:.4g} keys in the mean, {now:+.4g} against what they should",
        clause=("site sees other keys than it should", "sites see other keys than they should"),
        title="other keys are visible",
        advice="A mask changed, or it is not what the model declares. Too many keys: causality, a window, documents "
        "or padding got lost. Check the code that builds the mask, the attention implementation and its kernel. Too "
        "few keys: somebody added a mask.",
        line=_CHANGED.format(what="the mask"),
    ),
    AlarmKind(
        name="loss_spike",
        statistic=LOSS,
        law="spike",
        side="above",
        limit=3.0,
        unit="standard deviations",
        release=0.5,
        whole=True,
        least_rows=0,
        severity="warning",
        message="{now:.4g} is far from its mean over the 50 steps before, {before:.4g}",
        clause=("time the loss has jumped", "times the loss has jumped"),
        title="loss has jumped",
        advice="If alarms of heads start at these steps too, lower the learning rate or go back to a checkpoint first. "
        "If not, check the data of these steps: another file, repeated or shuffled texts, wrong labels. Skip them if "
        "they are bad.",
        others=("logits", "logit_growth", "layer_fallen", "entropy_shift", "falling"),
        alone="Check the data of these steps: another file, repeated or shuffled texts, wrong labels. Skip them if "
        "they are bad.",
        line=_CHANGED.format(what="the data or the learning rate"),
    ),
    AlarmKind(
        name="nonfinite_loss",
        statistic=LOSS,
        law="nonfinite",
        side="above",
        limit=None,
        whole=True,
        least_rows=0,
        severity="critical",
        message="it is NaN or infinite",
        clause=("time the loss was NaN or infinite", "times the loss was NaN or infinite"),
        title="NaN or infinite loss",
        advice="If heads have NaN or infinite scores, start with the first layer that has them. If not, look for "
        "labels that are all masked, and for overflow in half precision.",
        others=("nonfinite",),
        alone="Look for labels that are all masked, and for overflow in half precision.",
        line="attemper has no line that helps: NaN stays NaN. Go back to a checkpoint before step {step}.",
    ),
)
OF_HEADS = tuple(kind for kind in ALARMS if not kind.of_loss)
"""Those that judge heads."""
KINDS = {kind.name: kind for kind in ALARMS}

DEFAULT_LIMITS = {kind.name: kind.limit for kind in ALARMS if kind.limit is not None}
"""Name -> limit of all kinds that have one."""

LIMITS = {name: limit for name, limit in DEFAULT_LIMITS.items() if not KINDS[name].needs_history}
"""Those of a scan, which has no history."""


def over_enough_keys(head: HeadReading, statistic: str, fewest_keys: int) -> float | None:
    """Mean over rows that see at least ``fewest_keys`` keys; None if no row does."""
    buckets = [bucket for bucket in head.by_visible_keys if bucket.first >= fewest_keys]
    rows = sum(bucket.rows for bucket in buckets)
    values = [getattr(bucket, statistic) for bucket in buckets]
    if not rows or None in values:
        return None
    return sum(value * bucket.rows for value, bucket in zip(values, buckets, strict=True)) / rows


def level_of(severity: str) -> str:
    """The severity, or warning for one that this version does not know: better looked at than missed."""
    return severity if severity in SEVERITIES else "warning"


def is_by_job(alarm: Alarm) -> bool:
    """Whether an alarm is of a head that is sharp because its role is."""
    return alarm.advice == ADVICE


def rings_above(kind: AlarmKind) -> bool:
    """Whether it rings where its measure, not the statistic, is above the limit."""
    from attemper.readings.alarm_laws import LAWS  # NumPy: a list of alarms is read without

    return (LAWS[kind.law].side or kind.side) == "above"


def worst_first(alarm: Alarm) -> int:
    """By what alarms are sorted: the worst severity is the least."""
    return -SEVERITIES.index(level_of(alarm.severity))


def urgency(alarm: Alarm) -> tuple[int, int, float]:
    """What comes first is least: the step at which it began, then the worst severity, then the value furthest beyond
    its limit at the beginning, as a ratio. What is alike stands in the order of the model.
    """
    value, limit = math.inf if alarm.value is None else alarm.value, alarm.limit or 1.0
    if alarm.value is not None and alarm.kind in KINDS and not rings_above(KINDS[alarm.kind]):
        value, limit = limit, value
    ratio = value / limit if limit else math.inf
    return alarm.since or 0, worst_first(alarm), -math.inf if math.isnan(ratio) else -ratio


def by_kind(alarms: tuple[Alarm, ...]) -> dict[tuple[str, str, bool], list[Alarm]]:
    """Alarms by severity and kind, and apart those of heads that are sharp by their job: the worst severity first, then
    in the order in which kinds are first met. Each in the order of ``urgency``.
    """
    groups: dict[tuple[str, str, bool], list[Alarm]] = {}
    for alarm in sorted(alarms, key=lambda alarm: (worst_first(alarm), is_by_job(alarm))):
        groups.setdefault((alarm.severity, alarm.kind, is_by_job(alarm)), []).append(alarm)
    return {key: sorted(found, key=urgency) for key, found in groups.items()}


def with_shared_advice(alarms: Iterable[Alarm], among: Iterable[Alarm]) -> tuple[Alarm, ...]:
    """Alarms with their advice as a table says it that has those ``among`` which they are: all lines name the least
    threshold of any, which acts on every head, and what to do beside others is said where there are any.
    """
    alarms = tuple(alarms)
    every = (*alarms, *among)
    least = min((one for alarm in every for one in _THRESHOLD.findall(alarm.advice)), key=float, default="")
    found = {alarm.kind for alarm in every}

    def advice(alarm: Alarm) -> str:
        kind = KINDS.get(alarm.kind)
        if kind is not None and kind.alone and found.isdisjoint(kind.others):
            return alarm.advice.replace(kind.advice, kind.alone)
        return _THRESHOLD.sub(least, alarm.advice)

    return tuple(replace(one, advice=advice(one)) for one in alarms)


def is_heard(alarm: Alarm) -> bool:
    """Whether an alarm is a warning or worse."""
    return level_of(alarm.severity) != SEVERITIES[0]


COURSE = {
    "since": "since step {since:,}",
    "span": "steps {since:,} to {ended:,}",
    "goes_on": "continues as {kind} since step {since:,}",
    "worst": "worst {value} at step {step:,}",
    "latest": "latest {value} at step {step:,}",
}
"""What is said of an alarm beside its message, which is of its beginning."""


def course(alarm: Alarm, unit: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Keys of ``COURSE`` and what is put into them: when it stood; its worst and latest value, if of later steps."""
    if alarm.since is not None:
        yield "since" if alarm.ended is None else "span", {"since": alarm.since, "ended": alarm.ended}
    if alarm.continues_as is not None:
        yield "goes_on", {"kind": alarm.continues_as, "since": alarm.continues_since}
    for name, value, step in ("worst", alarm.worst, alarm.worst_step), ("latest", alarm.latest, alarm.latest_step):
        if step is not None and step != alarm.since:
            share = alarm.kind in KINDS and KINDS[alarm.kind].judged
            said = round(value, 4) if share and value is not None else value  # less of a share is 0 for a reader
            yield name, {"value": f"{shown(said)} {unit}".rstrip(), "step": step}


def value_at(alarm: Alarm, when: Literal["worst", "latest"]) -> float | None:
    """Its value then; of an alarm of one sample, which has no other, its value."""
    return alarm.value if alarm.latest_step is None else getattr(alarm, when)


def with_course(alarm: Alarm) -> str:
    """Its message, then how it went on."""
    unit = KINDS[alarm.kind].unit_of_value if alarm.kind in KINDS else ""
    said = ", ".join(COURSE[key].format(**values) for key, values in course(alarm, unit))
    return f"{alarm.message}; {said}" if said else alarm.message


_SENTENCE_END = re.compile(r"(?<=\.) (?=[A-Z]|attemper )")
MOST_PLACES = 3
"""Alarms of a kind that a line of log has in full."""


def lines(alarms: Iterable[Alarm], told: set[str]) -> Iterator[tuple[str, bool]]:
    """A line of log for each kind of alarm, worst first, and whether it is a warning or worse. ``told``: sentences of
    advice that the log has already, which are not said again; grows.
    """
    for (severity, kind, _), found in by_kind(tuple(alarms)).items():
        where = first_of([alarm.message for alarm in found], MOST_PLACES, "; ")
        advice = [one for one in _SENTENCE_END.split(found[0].advice) if one not in told]
        told.update(advice)
        yield clean(" ".join([f"{severity} {kind}: {where}.", *advice])), is_heard(found[0])
