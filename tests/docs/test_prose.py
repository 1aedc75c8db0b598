"""Docstrings, comments and messages are wrapped by whole phrases."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.prose import findings, findings_in

ROOT = Path(__file__).parents[2]
LONG = "a line that is as long as lines are when they are broken because nothing more had room on them, as here"


@pytest.mark.quick("src", "examples")
@pytest.mark.parametrize("folder", ["src", "tests", "scripts", "benchmarks", "examples"])
def test_no_word_stands_alone_and_no_message_is_cut_inside_a_phrase(folder: str):
    assert findings_in(ROOT / folder) == []


@pytest.mark.parametrize(
    ("source", "finding"),
    [
        (f'"""{LONG}\nword\n"""', "one word on a line: 'word'"),
        (f'"""{LONG}\nword\nand so on.\n"""', "one word on a line: 'word'"),
        (f'"""{LONG}\nin a\n{LONG}\n"""', "a leftover of a line: 'in a'"),
        (f"# {LONG}\n# word\n", "one word on a line: 'word'"),
        (f'"""Args:\n    name: {LONG}\n        word\n"""', "one word on a line: 'word'"),
        (f'"""Args:\n    name: {LONG}\n        in a\n        {LONG}\n"""', "a leftover of a line: 'in a'"),
        (f'"""Args:\n    name: (True = seen) {LONG}\n        word\n"""', "one word on a line: 'word'"),
        (
            'x = (\n    "a message that is broken where its line was full, of "\n    "learning "\n    "rates"\n)',
            "learning ",
        ),
        (f'"""{LONG}\nand two words.\n"""', None),
        ('"""Short.\nword\n"""', None),
        (f'"""{LONG}\n\n- word\n"""', None),
        (f'"""{LONG}\n>>> word\n"""', None),
        (f'"""Args:\n    name: {LONG}\n        and two words.\n"""', None),
        (f'"""Args:\n    name: {LONG}\n    other: word\n"""', None),
        (f'"""\nname = function({LONG})\nprint(name)\n"""', None),
        ('x = (\n    "one line\\n"\n    "another\\n"\n)', None),
    ],
)
def test_the_check_finds_what_it_is_for_and_leaves_whole_phrases_alone(source: str, finding: str | None):
    found = findings(source)
    assert len(found) == (finding is not None)
    assert finding is None or finding in found[0]


def test_the_printed_law_of_the_blocked_kernel_is_the_law_of_merging():
    """Each sum of the docstring on one line with its own right side: a re-wrap once moved e^2 from C to O."""
    from attemper.backends import blocked

    law = blocked.__doc__ or ""
    for equation in (
        "Z = r Z + sum e ", "A = r (A + t Z) + sum e d ", "B = r (B + 2 t A + t^2 Z) + sum e d^2\n", "C = r^2 C + sum e^2 ",
        " O = r O + e V ",
    ):  # fmt: skip
        assert equation in law
