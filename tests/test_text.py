"""Names that others chose, as they are shown."""

from __future__ import annotations

import ast
import json
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.text import Text

from attemper.text import LONGEST_NAME, clean, clean_json, clean_name, count, counts, cut, plain_text, sparkline

SRC = Path(__file__).parents[1] / "src" / "attemper"

CONTROLS = [*range(0x20), *range(0x7F, 0xA0)]
BIDIRECTIONAL = [0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
UNSEEN = [*CONTROLS, *BIDIRECTIONAL, 0x2028, 0x2029]


def test_what_cannot_be_seen_or_moves_its_neighbours_is_written_out():
    for code in (*UNSEEN, 0xDC80):
        assert clean(f"a{chr(code)}b") == f"a\\u{code:04x}b"


def test_json_shows_what_cannot_be_seen_and_says_the_same():
    for code in UNSEEN:
        document = {"name": f"a{chr(code)}b\\", "plain": "模型\n"}
        shown = clean_json(json.dumps(document, ensure_ascii=False, indent=2))
        assert json.loads(shown) == document, hex(code)
        assert chr(code) not in shown.replace("\n", ""), hex(code)


def test_json_of_a_name_that_is_no_text_is_one_that_every_reader_takes():
    shown = clean_json(json.dumps({"name": "a\udcff"}, ensure_ascii=False))
    assert json.loads(shown) == {"name": clean("a\udcff")}


def test_letters_of_every_script_stay_as_they_are():
    text = "model é ß 模型 אבג نموذج 🙂 – x"
    assert clean(text) == text


def test_an_escape_sequence_cannot_reach_the_terminal():
    assert clean("\x1b[2J\x1b]0;title\x07") == "\\u001b[2J\\u001b]0;title\\u0007"
    assert not any(unicodedata.category(character) == "Cc" for character in clean("\x1b[31m\x9b31m\r\n"))


def test_a_name_that_is_too_long_to_read_is_cut():
    assert clean_name("a" * 5000) == "a" * (LONGEST_NAME - 1) + "…"
    assert clean_name("a" * LONGEST_NAME) == cut("a" * LONGEST_NAME, LONGEST_NAME) == "a" * LONGEST_NAME


def test_a_sparkline_has_a_bar_a_value_and_means_where_there_are_too_many():
    assert sparkline([1.0, 2.0, 8.0], 10) == "▁▂█"
    assert sparkline([0.0, 0.0, 4.0, 8.0, 8.0, 8.0], 3) == sparkline([0.0, 6.0, 8.0], 3) == "▁▇█"

    assert sparkline([None, float("nan"), 1.0, float("inf"), 1.0], 9) == "  ▁ ▁", "blank where there is no value"
    assert sparkline([], 5) == ""
    assert sparkline([None], 5) == " "
    assert sparkline([-1.0, 0.0, 0.5, 1.0, 9.0], 5, low=0.0, high=1.0) == "▁▁▅██", "within given bounds"


# --- one and several ---


@pytest.mark.parametrize(
    ("many", "said"),
    {
        (0, "head"): "0 heads", (1, "head"): "1 head", (1024, "head"): "1,024 heads", (2, "query"): "2 queries",
        (1, "query"): "1 query", (2, "key"): "2 keys", (3, "batch"): "3 batches", (2, "pass"): "2 passes",
        (2, "entry"): "2 entries", (2, "more site"): "2 more sites", (2, "box"): "2 boxes",
    }.items(),
)  # fmt: skip
def test_a_number_has_its_noun_in_the_singular_or_the_plural(many: tuple[int, str], said: str):
    assert count(*many) == said


def test_several_numbers_stand_side_by_side():
    assert counts(site=1, head=16, query=2) == "1 site, 16 heads, 2 queries"
    assert count(2, "head is", "heads are") == "2 heads are"


NOUNS = (
    "alarms batches bytes calls columns features files groups heads keys layers modules numbers parameters parts "
    "passes places queries ranks readings rows runs samples seeds sequences shards sites statistics steps strings "
    "temperatures texts threads tokens vectors weights windows"
).replace(" ", "|")
SEVERAL = rf" (?:(?:more|other|new|query|key|padded|attention|special|empty) )?(?:{NOUNS})\b"
AT_LEAST_TWO = {
    "bench/timing.py": "a benchmark has many tokens",
    "call/request.py": "heads that are more than those that share them",
    "call/result.py": "rows that some were chosen from",
    "cli/lab.py": "a name, which runs",
    "call/spans.py": "a label that the scans of two releases compare",
    "control/saved_model.py": "bytes beyond a limit",
    "fingerprints/causes/rotary.py": "features that turn in pairs",
    "fingerprints/align.py": "a name of what counts places",
    "lab/": "experiments have many of everything",
    "distributed/data_parallel.py": "ranks of a mesh",
    "monitor/pattern.py": "more than the largest number of weights",
    "distributed/reduction.py": "ranks that are merged",
    "distributed/merged_sample.py": "ranks that are merged",
    "nn/normalizers.py": "one value for each of several heads",
    "nn/temperature.py": "one temperature for each of several heads",
    "readings/part_file.py": "shards of which one is missing",
}
"""Where a number stands beside a plural, and why it cannot be 1."""


def made_by_hand(path: Path) -> Iterator[str]:
    """Numbers beside a plural, and plurals that are put together."""
    text = path.read_text("utf-8")
    yield from re.findall(r"""['"]e?s['"] if [^\n]*|else ['"]e?s['"]""", text)
    if not re.search(r"""\}['"\sfr]*""" + SEVERAL.strip(), text):
        return
    for node in ast.walk(ast.parse(text)):
        for one, after in zip(node.values, node.values[1:], strict=False) if isinstance(node, ast.JoinedStr) else ():
            if isinstance(one, ast.FormattedValue) and isinstance(after, ast.Constant):
                if not re.match(SEVERAL, str(after.value)):
                    continue
                said = ast.unparse(one.value)
                decimals = one.format_spec is not None and "." in ast.unparse(one.format_spec)
                constant = said.startswith("count(") or re.fullmatch(r"[A-Z_\d]+", said.split(".")[-1])
                if not (decimals or constant):
                    yield f"{said}{after.value}"


def test_no_plural_is_made_by_hand():
    places = {path.relative_to(SRC).as_posix(): [*made_by_hand(path)] for path in sorted(SRC.rglob("*.py"))}
    del places["text.py"]
    found = {place: said for place, said in places.items() if said}
    assert {place: said for place, said in found.items() if not place.startswith(tuple(AT_LEAST_TWO))} == {}
    assert all(any(place.startswith(one) for place in found) for one in AT_LEAST_TWO), "an entry without need"


def test_a_result_as_text_is_plain_in_a_terminal_and_in_a_notebook(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert plain_text(Text("broken", style="bold red")) == "broken"


def test_texts_of_pages_have_a_singular_beside_each_plural():
    texts = json.loads((SRC / "report" / "texts" / "en.json").read_text("utf-8"))
    beside = {key for key, text in texts.items() if re.search(r"\}" + SEVERAL, str(text))}
    alone = {key for key in beside if not isinstance(texts[key], dict)}
    several = {"extent.all", "extent.some", "reason.failures", "compared.more", "explained.extent.some"}
    several |= {"alarms.of_layer", "alarms.of_rows"}
    as_rules_say = {"checked.said.sees", "checked.said.lacks"}
    assert alone == several | as_rules_say, "these are of at least two, or what a rule of a check says"
