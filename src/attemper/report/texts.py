"""What pages say in English and in Chinese: a table of texts for each, and messages that are said in either.

``texts/en.json`` and ``texts/zh.json`` hold the texts of pages. What alarms, roles, statistics and advice on two runs
say in English stands in their own tables (``readings/alarms.py``, ``readings/roles.py``, ``statistics.py``,
``fingerprints/advice.py``) and is added here; the Chinese of all of it is in ``zh.json``. A page is written in English
and carries both tables: its scripts say everything again in the language that is chosen.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup, escape

from attemper.fingerprints.advice import ADVICE as ADVICE_ON_RUNS
from attemper.fingerprints.advice import AGAIN
from attemper.readings.alarms import ALARMS, COURSE, KINDS, NO_THRESHOLD, course, with_course
from attemper.readings.reading import Alarm
from attemper.readings.roles import ADVICE, BY_JOB, ROLES
from attemper.statistics import SHOWN
from attemper.text import clean, cut, number

LANGUAGES = ("en", "zh")
_PLACE = re.compile(r"\{(\w+)(?::[^}]*)?\}")
Text = str | Mapping[str, str]
"""A text; or one for 1 and one for other numbers ``n``: English has both, Chinese has ``other`` alone."""


class Message(NamedTuple):
    """Something that can be said in every language: a key of the tables, and what is put in its places."""

    key: str
    values: Mapping[str, Any] = {}
    """Numbers, which are grouped and rounded to 4 digits; names, which stay; messages; ``Clauses``; ``Date``."""

    def __str__(self) -> str:
        return say(self)


class Clauses(NamedTuple):
    """``a``, ``a and b``, ``a, b, and c``."""

    parts: Sequence[Message]


class Within(NamedTuple):
    """A title in the middle of a sentence, where English begins it small."""

    said: Message


class Names(NamedTuple):
    """``a, b, c``."""

    parts: Sequence[Message | str]


class Date(NamedTuple):
    """A moment, as ISO 8601 in UTC."""

    iso: str


def message(key: str, /, **values: Any) -> Message:
    return Message(key, values)


def say(said: Any, language: str = "en") -> str:
    """What a message, a number or a name is in a language. Pages say dates by the reader's locale, this by ISO."""
    match said:
        case Message(key, values):
            text = texts(language)[key]
            if not isinstance(text, str):
                text = text["one"] if values.get("n", values.get("value")) == 1 and "one" in text else text["other"]
            return _PLACE.sub(lambda place: say(values[place[1]], language), text)
        case Clauses(parts):
            return _join([say(part, language) for part in parts], language)
        case Within(inner):
            return say(inner, language).lower()
        case Names(parts):
            return str(texts(language)["list.names"]).join(say(part, language) for part in parts)
        case Date(iso):
            return iso.replace("T", " ").replace("Z", " UTC")
        case int():
            return f"{said:,}"
        case float():
            return number(said)
        case _:
            return str(said)


def encode(said: Any) -> Any:
    """The same for the scripts of a page: ``[key, values]``, an object of one key for ``Clauses`` and the like, or as
    it is.
    """
    match said:
        case Message(key, values):
            return [key, {name: encode(value) for name, value in values.items()}]
        case Clauses(parts):
            return {"and": [encode(part) for part in parts]}
        case Within(inner):
            return {"within": encode(inner)}
        case Names(parts):
            return {"names": [encode(part) for part in parts]}
        case Date(iso):
            return {"date": iso}
        case _:
            return said


def mark(said: Any, attribute: str = "") -> Markup:
    """Attributes of an element whose text, or whose ``attribute``, the page says again in another language."""
    if not isinstance(said, Message):
        return Markup("")
    name = f"data-say-{attribute}" if attribute else "data-say"
    told = json.dumps(encode(said), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # In single quotes, so that the many double ones of JSON need not be escaped: a run's page is short of room.
    return Markup(" {}='{}'").format(Markup(name), Markup(html.escape(told, quote=False).replace("'", "&#39;")))


def span(said: Any) -> Markup:
    """A message as an element of its own; a name that nobody translates as its text."""
    if not isinstance(said, Message):
        return escape(say(said))
    return Markup("<span{}>{}</span>").format(mark(said), say(said))


@cache
def texts(language: str) -> dict[str, Text]:
    """Key -> text of a language."""
    found: dict[str, Text] = json.loads((Path(__file__).parent / "texts" / f"{language}.json").read_text("utf-8"))
    if language == "en":
        advised = {f"explained.advice.{key}": text for key, text in (*ADVICE_ON_RUNS.items(), ("again", AGAIN))}
        return {**_of_alarms(), **_of_statistics(), **_of_roles(), **advised, **found}
    named = [*(f"alarm.{name}" for name in KINDS), *(f"statistic.{name}" for name in SHOWN)]
    return found | {f"{one}.name": found[f"{one}.title"] for one in named}


def _of_alarms() -> dict[str, Text]:
    found: dict[str, Text] = {"alarm.no_threshold": f"{{said}} {NO_THRESHOLD}"}
    for kind in ALARMS:
        of = f"alarm.{kind.name}"
        one, other = kind.clause if kind.whole else (f"head {kind.clause[0]}", f"heads {kind.clause[1]}")
        found |= {f"{of}.name": kind.name, f"{of}.title": kind.title, f"{of}.advice": kind.advice}
        found[f"{of}.clause"] = {"one": f"{{n}} {one}", "other": f"{{n}} {other}"}
        found[f"{of}.message"] = _PLACE.sub(r"{\1}", kind.message)
        if kind.unit_of_value:
            found[f"{of}.unit"] = kind.unit_of_value
        if kind.line:
            found[f"{of}.line"] = f"{kind.advice} {kind.line}"
        if kind.alone:
            found |= {f"{of}.alone": kind.alone, f"{of}.alone_line": f"{kind.alone} {kind.line}"}
        if kind.worst:
            found[f"{of}.worst"] = f", {kind.worst} {{value}}"
    return found | {f"alarm.{key}": _PLACE.sub(r"{\1}", text) for key, text in COURSE.items()}


def _of_statistics() -> dict[str, Text]:
    found: dict[str, Text] = {}
    for name, shown in SHOWN.items():
        of = f"statistic.{name}"
        found |= {
            f"{of}.name": name,
            f"{of}.title": shown.title,
            f"{of}.meaning": shown.meaning,
            f"{of}.superlative": shown.superlative,
        }
        if shown.unit:
            found[f"{of}.unit"] = shown.unit
    return found


def _of_roles() -> dict[str, Text]:
    found: dict[str, Text] = {"role.by_job": BY_JOB, "role.advice": ADVICE}
    for role in ROLES:
        of = f"role.{role.key}"
        found |= {f"{of}.name": role.name, f"{of}.title": role.title, f"{of}.meaning": role.meaning}
        found[f"{of}.needs"] = role.needs
    return found


def places(text: Text) -> set[str]:
    """Names of what is put into a text."""
    return {name for one in ([text] if isinstance(text, str) else text.values()) for name in _PLACE.findall(one)}


def recognise(sentence: str, keys: Sequence[str]) -> Message | None:
    """The message of ``keys`` that gives this English sentence; None if none does. What is ``said`` within one is of
    them, too.

    Readings and stored runs hold sentences, and no figures beside them.
    """
    for key in keys:
        text = texts("en")[key]
        for one in [text] if isinstance(text, str) else text.values():
            found = _pattern(one).fullmatch(sentence)
            values: dict[str, Any] = found.groupdict() if found else {}
            values |= {name: recognise(value, keys) for name, value in values.items() if name == "said"}
            if found and None not in values.values():
                return Message(key, {name: _number(value) if name == "n" else value for name, value in values.items()})
    return None


@cache
def keys_of(family: str) -> tuple[str, ...]:
    """Keys of the messages of a family, such as "checked.said". Reading a check asks for them thousands of times."""
    return tuple(key for key in texts("en") if key.startswith(f"{family}."))


def message_of(text: str, family: str, fills: Mapping[str, str] = {}, free: Container[str] = ()) -> Message | None:
    """The message of a family, such as "checked.said", that gives this English sentence, with all that is put into it
    found in its own family; None if none does.

    Args:
        fills: place of a text -> the family that fills it; others are filled by the family of their own name, if there
            is one.
        free: places that may hold words of others as well.
    """
    root = family.partition(".")[0]

    def filling(name: str, value: Any) -> Any:
        own = f"{root}.{fills.get(name, name)}"
        if isinstance(value, int) or not keys_of(own):
            return value
        return message_of(value, own, fills, free) or (reason(value) if name in free else None)

    for key in keys_of(family):
        found = recognise(clean(text), [key])
        values = {} if found is None else {name: filling(name, value) for name, value in found.values.items()}
        if found is not None and None not in values.values():
            return Message(key, values)
    return None


def _number(text: str) -> int | str:
    """A count, by which texts tell one from several."""
    digits = text.replace(",", "")
    return int(digits) if digits.isdecimal() else text


@cache
def _pattern(text: str) -> re.Pattern[str]:
    parts, seen = [], set()
    for plain, name in zip(_PLACE.split(text)[::2], [*_PLACE.split(text)[1::2], ""], strict=True):
        group = f"(?P={name})" if name in seen else f"(?P<{name}>.+?)"
        parts += [re.escape(plain), *([group] if name else [])]
        seen.add(name)
    return re.compile("".join(parts), re.DOTALL)


LONGEST_MESSAGE = 600
_EARLIER = (
    (r"(?<! may have) changed at step", " may have changed at step"),
    (r"of all \d+ heads has", "of all its heads has"),
)
"""How readings of 0.2 and before say it, as patterns, and how it is said now."""


def alarm_title(kind: str) -> Message | str:
    """The name of a kind of alarm; of one that this version does not know, its own."""
    return message(f"alarm.{kind}.title") if kind in KINDS else clean(kind)


def alarm_name(kind: str) -> Message | str:
    """The word for a kind of alarm in a list; of one that this version does not know, its own."""
    return message(f"alarm.{kind}.name") if kind in KINDS else kind


def severity_title(severity: str) -> Message | str:
    """ "warning"; of a severity that this version does not know, its own word."""
    known = f"severity.{severity}"
    return message(known) if known in texts("en") else clean(severity)


def advice(alarm: Alarm) -> Message | str:
    """What to do. An alarm that says something else than its kind keeps its own words."""
    of_kind = (f"alarm.{alarm.kind}.{part}" for part in ("advice", "line", "alone", "alone_line"))
    keys = [key for key in ("role.advice", *of_kind, "alarm.no_threshold") if key in texts("en")]
    return recognise(_as_now(alarm.advice), keys) or clean(alarm.advice)


def _as_now(text: str) -> str:
    for earlier, now in _EARLIER:
        text = re.sub(earlier, now, text)
    return text


def said(alarm: Alarm) -> Message | str:
    """An alarm's message without the place, which is shown beside it."""
    head = "" if alarm.head is None else f" head {alarm.head}"
    text = cut(clean(alarm.message.removeprefix(f"{alarm.site}{head}: ")), LONGEST_MESSAGE)
    if alarm.kind not in KINDS:
        return text
    found = recognise(_as_now(text), ["alarm.pace", "role.by_job", f"alarm.{alarm.kind}.message"])
    if found is not None and found.key == "role.by_job":
        role = recognise(str(found.values["role"]), [f"role.{one.key}.title" for one in ROLES])
        found = Message(found.key, {**found.values, "role": role or found.values["role"]})
    return text if found is None else _for_people(found, KINDS[alarm.kind].judged)


def duration(alarm: Alarm) -> Message | str:
    """When an alarm stood, and its worst and latest value."""
    parts = [message(f"alarm.{key}", **_with_unit(alarm.kind, values)) for key, values in course(alarm)]
    return message("as_is", said=Names(parts)) if parts else ""


def brief(alarm: Alarm) -> tuple[Message | str, Message | str, Message | str]:
    """What a page says of an alarm: its beginning with its worst value, when it stood, and the rest, which it folds."""
    words, rest = said(alarm), []
    parts = {key: message(f"alarm.{key}", **_with_unit(alarm.kind, values)) for key, values in course(alarm)}
    if isinstance(words, Message) and words.key == "alarm.pace":
        rest.append(message("alarm.before", **{name: words.values[name] for name in ("before", "step")}))
        words = words.values["said"]
    if "worst" in parts:
        words = message("show.line", said=words, when=parts.pop("worst"))
    rest += [parts.pop("latest")] if "latest" in parts else []
    when = next(iter(parts.values()), "") if len(parts) < 2 else message("as_is", said=Names([*parts.values()]))
    return words, when, message("as_is", said=Names(rest)) if rest else ""


def basis(kind: str, fewest_keys: int) -> Message | str:
    """Over what the values of a kind of alarm are; empty where that is all rows of a head, as in a page's numbers."""
    if kind not in KINDS or not KINDS[kind].judged:
        return ""
    return message("alarms.of_layer" if KINDS[kind].whole else "alarms.of_rows", n=fewest_keys)


def few_rows(alarms: Iterable[Alarm], fewest_keys: int) -> Message | str:
    """Which kinds of alarms judge fewer rows than a table shows; empty where none does."""
    kinds = dict.fromkeys(alarm.kind for alarm in alarms if basis(alarm.kind, fewest_keys))
    return message("alarms.few_rows", n=fewest_keys, kinds=Names([alarm_name(kind) for kind in kinds])) if kinds else ""


def place_said(site: str, head: int | None, longest: int = 300) -> Message:
    """A head, or a site where ``head`` is None."""
    name = cut(clean(site), longest)
    return message("head.site", site=name) if head is None else message("head.named", site=name, head=head)


def place_of_alarm(alarm: Alarm) -> Message:
    """The head, the site, or the loss that an alarm is of."""
    if alarm.kind in KINDS and KINDS[alarm.kind].of_loss:
        return message("loss.title")
    return place_said(alarm.site, alarm.head)


def alarm_line(alarm: Alarm, language: str) -> str:
    """Place, message, and how it went on, in one line."""
    if language == "en":
        return with_course(alarm)
    told = message("head.alarm", place=place_of_alarm(alarm), said=said(alarm))
    whole = message("show.line", said=told, when=duration(alarm))
    return clean(say(whole, language))


def _with_unit(kind: str, values: dict[str, Any]) -> dict[str, Any]:
    if "kind" in values:
        return values | {"kind": alarm_title(values["kind"])}
    if "value" not in values or kind not in KINDS or not KINDS[kind].unit_of_value:
        return values
    unit = message(f"alarm.{kind}.unit")
    return values | {"value": message("unit.after", value=values["value"], unit=unit)}


_THOUSANDS, _TINY = re.compile(r"\d{4,}\.\d+"), re.compile(r"[\d.]+e-\d+")


def _for_people(found: Message, share: bool) -> Message:
    """Numbers as a page has them everywhere: ``1,633``, where the message says 1633.4; of a ``share`` 0 for 9.2e-17."""

    def rewrite(value: Any) -> Any:
        if isinstance(value, Message):
            return _for_people(value, share)
        return (
            0 if share and _TINY.fullmatch(str(value)) else float(value) if _THOUSANDS.fullmatch(str(value)) else value
        )

    return Message(found.key, {name: rewrite(value) for name, value in found.values.items()})


def own_name(name: str) -> Message | str:
    """A name as it is, or a message where ``attemper`` gave it."""
    return recognise(name, keys_of("name")) or name


def note(text: str) -> Message | str:
    """A note of a reading or a remark of a run as a message, if it is one of those that are known."""
    capital = clean(text[:1].upper() + text[1:])
    found = recognise(capital, (*keys_of("note"), *keys_of("remark")))
    if found is None:
        return capital
    return Message(found.key, {name: _inner_message(name, value) for name, value in found.values.items()})


def _inner_message(name: str, value: Any) -> Any:
    """What stands in a note: an extent, names of kinds of alarms, a statistic, or what nobody translates."""
    if name == "who":
        return recognise(value, keys_of("extent")) or value
    if name in ("kind", "kinds", "quantity"):
        of = "statistic" if name == "quantity" else "alarm"
        keys = [f"{of}.{one}.name" for one in str(value).split(", ")]
        if all(key in texts("en") for key in keys):
            return Names([message(key) for key in keys])
    return value


def reason(text: str) -> Message | str:
    """Why a module was not measured as a message, if it is a reason that attemper gives; others' words as they are."""
    text = cut(clean(text), LONGEST_MESSAGE)
    return recognise(text, keys_of("reason")) or text


def why(text: str) -> Message | str:
    """Why nothing was measured in a run, as ``reason`` says it."""
    return recognise(text, keys_of("why")) or reason(text)


def page_texts(said: Iterable[Message | str] = (), *, of: str = "") -> dict[str, dict[str, Text]]:
    """The tables that a page carries, by language: of the reasons only those that it says.

    Args:
        of: "compared" for the page of a comparison, "explained" of an explanation, "checked" of a check, "runs" of
            several runs, "grid" of all heads on a text: each alone says what begins with that.
    """
    other = tuple(f"{one}." for one in ("live", "compared", "explained", "checked", "runs", "grid") if one != of)
    used = {inner.key for one in said for inner in inner_messages(one)}
    return {
        language: {
            key: text
            for key, text in texts(language).items()
            if (key in used or not key.startswith(("reason.", "why."))) and not key.startswith(other)
        }
        for language in LANGUAGES
    }


def inner_messages(said: Any) -> Iterator[Message]:
    """A message and all that is put into it."""
    if isinstance(said, Message):
        yield said
        for value in said.values.values():
            yield from inner_messages(value)


def live_texts() -> dict[str, dict[str, Text]]:
    """What the script of a page that is served says, by language."""
    return {
        language: {key: text for key, text in texts(language).items() if key.startswith("live.")}
        for language in LANGUAGES
    }


def _join(parts: Sequence[str], language: str) -> str:
    separator, two, last = (str(texts(language)[f"list.{name}"]) for name in ("separator", "two", "last"))
    if len(parts) < 3:
        return two.join(parts)
    return f"{separator.join(parts[:-1])}{last}{parts[-1]}"
