"""Names that others chose, as they are shown."""

from __future__ import annotations

import json
import unicodedata

import pytest

from attemper.text import LONGEST_NAME, clean, clean_json, clean_name, cut, sparkline

CONTROLS = [*range(0x20), *range(0x7F, 0xA0)]
BIDIRECTIONAL = [0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]


@pytest.mark.parametrize("code", [*CONTROLS, *BIDIRECTIONAL, 0x2028, 0x2029, 0xDC80], ids=hex)
def test_what_cannot_be_seen_or_moves_its_neighbours_is_written_out(code: int):
    assert clean(f"a{chr(code)}b") == f"a\\u{code:04x}b"


@pytest.mark.parametrize("code", [*CONTROLS, *BIDIRECTIONAL, 0x2028, 0x2029], ids=hex)
def test_json_shows_what_cannot_be_seen_and_says_the_same(code: int):
    document = {"name": f"a{chr(code)}b\\", "plain": "模型\n"}
    shown = clean_json(json.dumps(document, ensure_ascii=False, indent=2))
    assert json.loads(shown) == document
    assert chr(code) not in shown.replace("\n", "")


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


def test_a_sparkline_is_blank_where_there_is_no_value_and_low_where_all_are_alike():
    assert sparkline([None, float("nan"), 1.0, float("inf"), 1.0], 9) == "  ▁ ▁"
    assert sparkline([], 5) == ""
    assert sparkline([None], 5) == " "


def test_a_sparkline_within_given_bounds_stays_within_its_bars():
    assert sparkline([-1.0, 0.0, 0.5, 1.0, 9.0], 5, low=0.0, high=1.0) == "▁▁▅██"
