"""No page or message gets longer or harder to read than tests/docs/words.txt allows: a tripwire, not the goal."""

from __future__ import annotations

import pytest

from scripts import words

LIMITS = words.limits()


@pytest.mark.parametrize("name", words.pages())
def test_a_page_is_as_short_and_plain_as_its_limits_ask(name: str) -> None:
    assert name in LIMITS, f"give {name} its row: python scripts/words.py --lower"
    above = words.count(name).above(LIMITS[name])
    assert not above, f"{name}: {', '.join(above)}. Shorten it: python scripts/words.py {name} shows where."


def test_no_message_has_more_refused_phrases_than_its_file_had() -> None:
    none = words.Count(0, 0.0, 0, 0)
    above = {name: words.count(name).above(LIMITS.get(name, none)) for name in words.messages()}
    found = [name for name, what in above.items() if what]
    assert not found, f"say it in other words: python scripts/words.py {' '.join(found)} shows where"


@pytest.mark.parametrize(
    ("sentence", "phrase"),
    [
        ("Every statistic of such a call is a tensor of its own: take one.", "of its own"),
        ("Take one: who keeps the largest logit no longer keeps the state.", ": who keeps the largest logit no longer"),
        ("What was written, and where, is told on stderr.", "is told"),
        ("One temperature for the whole model was not told from none.", "told from"),
        ("These are another trouble than dilution.", "are another trouble"),
        ("Such a head averages by trade: sharpening it is no repair.", "is no repair"),
        ("The head attends otherwise than where it had settled.", "otherwise than"),
        ("This is what there is, as one meets it.", "as one meets"),
        ("It rings when a head goes wrong.", "It rings"),
        ("The alarm begins to ring at step 3.", "begins to ring"),
        ("This is of no use without --texts.", "is of no use"),
        ("It is for who can wait.", "for who"),
        ("Outputs are those of the tempered model.", "are those of"),
        ("Seperate the two.", "Seperate"),
        ("The behavior differs.", "behavior"),
    ],
)
def test_a_phrase_that_must_be_read_twice_is_found(sentence: str, phrase: str) -> None:
    assert any(found.startswith(phrase) for found, _ in words.refused(sentence))


@pytest.mark.parametrize(
    "sentence",
    [
        "There is no mask, so every token sees all others.",
        "Each layer has its own temperature; a rank writes its own file.",
        "Which one is right? Who sees what comes after?",
        "The alarm fires when one of its heads stays flat.",
        "Ring attention passes keys around a ring of devices.",
        "The largest logit is no longer stored. It is no larger than 10.",
        "The person who runs the job sees one line.",
        "Say what was wrong, and what that costs.",
        "Compile it with -Wno-maybe-uninitialized.",
    ],
)
def test_plain_english_passes(sentence: str) -> None:
    assert words.refused(sentence) == []


def test_prose_is_what_is_left_without_code_tables_headings_and_generated_blocks() -> None:
    page = (
        "# A heading\n\nOne `long bit of code` and [a link](x.md). Two\nsentences, e.g. this.\n\n- an item\n- another\n"
        "```python\nprint(1)\n```\n| a | table |\n<!-- output: begin -->\nnot this\n<!-- output: end -->\n"
    )
    found = [sentence for paragraph in words.paragraphs(page) for sentence in words.split(paragraph)]
    assert found == ["One `code` and a link.", "Two sentences, e.g. this.", "an item", "another"]
    assert [words.size(sentence) for sentence in found] == [5, 4, 2, 1]


def test_messages_are_strings_and_the_help_of_commands_but_no_other_docstring() -> None:
    source = '"""A module."""\ndef scan():\n    """Help of it."""\n    raise ValueError(f"{x} is not a model")\n'
    assert list(words.python_strings(source, "src/attemper/cli/scan.py")) == ["Help of it.", "`x` is not a model"]
    assert list(words.python_strings(source, "src/attemper/sites/scan.py")) == ["`x` is not a model"]


def test_of_two_rows_for_a_page_the_lower_limits_count(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "LIMITS", tmp_path / "words.txt")
    words.LIMITS.write_text("# said\na.md 100 20 50 3\na.md 125 18 40 0\n")
    assert words.limits() == {"a.md": words.Count(100, 18.0, 40, 0)}
