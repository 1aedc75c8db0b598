"""One table of texts: complete in both languages, and every sentence of alarms and notes is found in it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import attemper
from attemper.cli.show import Language
from attemper.monitor import live_sample, recorder, tap_sums
from attemper.readings.alarms import ALARMS
from attemper.readings.labels import LAYER_KINDS, reason_of
from attemper.report.texts import (
    LANGUAGES,
    Clauses,
    Date,
    Message,
    advice,
    keys_of,
    message,
    note,
    page_texts,
    places,
    reason,
    said,
    say,
    texts,
)  # fmt: skip
from attemper.sites import identity, names, softmax_by_hand
from attemper.sites.package_functions import TAP
from attemper.store.run import UNSAMPLED
from tests.report import readings


def test_the_command_line_offers_the_languages_of_pages() -> None:
    """Help names them, and must not wait for what pages load."""
    assert tuple(Language) == LANGUAGES


def test_every_text_is_there_in_every_language_with_the_same_places() -> None:
    english = texts("en")
    for language in LANGUAGES:
        assert texts(language).keys() == english.keys()
        assert {key: places(text) for key, text in texts(language).items()} == {
            k: places(t) for k, t in english.items()
        }


def test_chinese_is_chinese() -> None:
    plain = [text for text in texts("zh").values() if not re.search("[\u4e00-\u9fff]", str(text))]
    words = {word for text in plain for word in re.findall("[a-z]+", re.sub(r"{.*?}", "", str(text)))}
    assert words == {"nats", "log", "n", "logit", "query", "key"}, "units and the axes of a picture alone"


def test_chinese_has_its_own_words_for_places_and_shares() -> None:
    """Not the English in Chinese characters: "layer 0, head 1", a factor before a unit, a floor as of a house."""
    odd = re.compile("头 {|层 {|× log n|下限")
    assert {key: text for key, text in texts("zh").items() if odd.search(str(text))} == {
        key: texts("zh")[key] for key in ("heads.map_of",)
    }
    spoken = message("head.spoken", layer=message("head.layer", label="0"), head=1)
    assert say(spoken, "zh") == "第 0 层第 1 头"


FIGURES = {"now": 0.0123, "before": 0.456, "total": 12.0}


def test_every_alarm_is_said_in_every_language() -> None:
    for kind, origin in product(ALARMS, (None, (0.157, 260))):
        where = None if kind.whole else 3
        alarm = kind.alarm("layers.0.attn", where, 0.0321, kind.limit, origin, FIGURES, step=9, since=3)
        found = said(alarm)
        assert isinstance(found, Message)
        head = "" if kind.whole else " head 3"
        assert say(found) == alarm.message.removeprefix(f"layers.0.attn{head}: ")
        chinese = say(found, "zh")
        figures = re.findall(r"[0-9.]+%?", say(found))
        assert all(figure.rstrip(".") in chinese for figure in figures), chinese
        assert say(advice(alarm)) == alarm.advice
        for given in (
            alarm,
            kind.alarm("layers.0.attn", where, 0.0321, kind.limit, figures=FIGURES),
        ):  # of a run, and of a scan
            assert isinstance(advice(given), Message)
            assert say(advice(given)) == given.advice
            assert not re.search(r"[{}]", say(advice(given), "zh"))
        assert re.search("[\u4e00-\u9fff]", say(advice(alarm), "zh"))


def test_what_an_earlier_version_said_is_still_read_in_every_language() -> None:
    (spike, layer) = (next(one for one in ALARMS if one.name == name) for name in ("loss_spike", "layer_fallen"))
    alarm = spike.alarm("loss", None, 5.0, 3.0, None, FIGURES, step=9, since=9)
    earlier = replace(alarm, advice=alarm.advice.replace(" may have changed", " changed"))
    assert earlier.advice != alarm.advice
    assert advice(earlier) == advice(alarm)
    alarm = layer.alarm("layers.0.attn", None, 0.03, 0.1, None, FIGURES, step=9, since=9)
    earlier = replace(alarm, message=alarm.message.replace("all its heads", "all 2 heads"))
    assert said(earlier) == said(alarm)
    assert "所有头" in say(said(earlier), "zh")


def test_a_large_figure_of_an_alarm_is_the_number_that_the_page_has_elsewhere() -> None:
    (kind,) = (one for one in ALARMS if one.name == "logits")
    alarm = kind.alarm("a", 3, 1633.42, 100.0, (65.1, 170), FIGURES, step=235, since=180)
    assert say(said(alarm)) == "largest logit 1,633 (it was 65.1 at step 170)"


def test_a_share_that_is_next_to_nothing_is_0() -> None:
    (kind,) = (one for one in ALARMS if one.name == "fallen")
    alarm = kind.alarm("a", 3, 9.2e-17, 0.02, (3e-12, 170), {**FIGURES, "before": 0.89}, step=235, since=180)
    assert say(said(alarm)) == "normalised entropy has fallen from 0.89 at first to 0 (it was 0 at step 170)"


def test_an_alarm_with_words_of_its_own_keeps_them() -> None:
    odd = readings.alarm("drifting", "odd", "layer.0", 0, 1.0)
    assert said(odd) == "drifting 1.0"
    assert advice(odd) == "What to do: drifting."


NOTES = (
    "too few keys to judge (32 needed): 5 of 72 heads, at layer.0 (5); give longer inputs or lower fewest_keys.",
    "no valid row to judge: the only head.",
    "no valid row to judge: all 16 heads.",
    "not judged yet: drift (still changing: 6 of 16 heads).",
    "not judged: logits (needs max_logit).",
    "1 sample is lost: disk full",
)


def test_a_note_is_a_message() -> None:
    for text in NOTES:
        found = note(text)
        assert isinstance(found, Message)
        assert say(found) == text[:1].upper() + text[1:]
        assert re.search("[\u4e00-\u9fff]", say(found, "zh"))
        assert "drift" not in say(found, "zh")
        assert "max_logit" not in say(found, "zh")


def test_notes_of_readings_and_of_runs_are_among_them() -> None:
    short = replace(readings.site("layer.0", 1), heads=(replace(readings.head(0), judged=False),))
    shown = readings.reading(short, readings.silent("layer.1"), readings.site("layer.2", value=0.99), untrained_heads=4)
    assert len(shown.notes) == 3
    assert all(isinstance(note(one), Message) for one in shown.notes)


def test_lists_numbers_and_dates() -> None:
    three = Clauses([message("count.heads", n=n) for n in (1, 2, 12_345)])
    assert say(three) == "1 head, 2 heads, and 12,345 heads"
    assert say(Clauses(three.parts[:2])) == "1 head and 2 heads"
    assert say(Date("2026-01-31T09:30:00Z")) == "2026-01-31 09:30:00 UTC"


PACKAGE = Path(attemper.__file__).parent
REASON = r"reason|.*\.reason|.*\.refused\[.*|reasons\[.*"
"""What a reason is assigned to."""
SAYS_REASONS = ("refusal", "changed_heads", "conflicts", "real_queries", "coverage", "outside_registry")
"""Functions that give a reason, or put it into a table."""


def part_of(part: ast.expr) -> str:
    if isinstance(part, ast.FormattedValue):
        return TAP if ast.unparse(part.value) == "TAP" else "7"
    return str(ast.literal_eval(part))


def strings(node: ast.AST) -> Iterator[str]:
    """Literals in an expression; of an f-string with ``7`` in its places, but for the advice to put a tap."""
    match node:
        case ast.Constant(str(text)):
            yield text
        case ast.JoinedStr(parts):
            yield "".join(map(part_of, parts))
        case _:
            for child in ast.iter_child_nodes(node):
                yield from strings(child)


def given_reasons() -> Iterator[str]:
    """Every reason that the package's own code gives for a module that it does not measure."""
    yield from map(reason_of, LAYER_KINDS)
    yield from (live_sample.NO_SITE, f"{live_sample.NO_SITE}. Did you mean 'layers.0'?")
    yield from (names.COMPILED, names.SCRIPTED, recorder.UNSEEN, tap_sums.PADDED, UNSAMPLED)
    by_hand = vars(softmax_by_hand)
    for name in ("ROUTER", "CHANNELS", "FACTORED", "LEARNED", "MIXED", "OTHER_AXIS", "OVERWRITTEN"):
        yield by_hand[name]
    yield from (identity.FACTOR, identity.DIFFERENCE)
    yield from (softmax_by_hand.RANDOM.format("gumbel_softmax"), softmax_by_hand.CHANGED.format("mul"))
    for file in (
        *PACKAGE.glob("sites/*.py"),
        *(file for room in ("monitor", "distributed") for file in PACKAGE.glob(f"{room}/*.py")),
        PACKAGE / "readings/part.py",
    ):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            match node:
                case ast.Call(ast.Name("UnsupportedCallError"), [_, text, *_]):
                    yield from strings(text)
                case ast.Call(ast.Attribute(_, "unreadable") | ast.Name("refusing"), [text]):
                    yield from (f"{said}; {TAP}" for said in strings(text))
                case ast.Assign([target], value) if re.fullmatch(REASON, ast.unparse(target)):
                    yield from strings(value)
                case ast.FunctionDef(name) if name in SAYS_REASONS:
                    for inner in ast.walk(node):
                        if isinstance(inner, ast.Return | ast.Assign) and inner.value is not None:
                            yield from strings(inner.value)


def test_every_reason_of_a_skipped_module_is_said_in_every_language() -> None:
    found = {text for text in given_reasons() if " " in text.strip()}
    said_by = {text: reason(text) for text in found}
    unknown = [text for text, one in said_by.items() if not isinstance(one, Message) or say(one) != text]
    assert unknown == []
    messages = [one for one in said_by.values() if isinstance(one, Message)]
    assert all(re.search("[\u4e00-\u9fff]", say(one, "zh")) for one in messages)
    used = {one.key for one in messages} | {one.values["said"].key for one in messages if "said" in one.values}
    assert set(keys_of("reason")) - used == set()


def test_a_reason_of_others_keeps_its_words_and_a_page_carries_only_the_reasons_it_says() -> None:
    assert reason("it is Tuesday <b>") == "it is Tuesday <b>"
    one = reason(f"its qkv is [1, 2]; {TAP}")
    carried = page_texts([one])["zh"]
    assert {key for key in carried if key.startswith("reason.")} == {"reason.tap", "reason.qkv"}


def test_no_space_stands_between_two_sentences_in_chinese() -> None:
    templates = Path(attemper.__file__).parent / "report" / "templates"
    for path in templates.glob("*.j2"):
        for key in re.findall(r'[}%]} {{ span\(t\("([\w.]+)"', path.read_text("utf-8")):
            assert not str(texts("zh").get(key, "")).endswith("。"), f"{path.name}: {key} is a sentence: use then()"
