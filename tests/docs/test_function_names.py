"""Functions are verbs or quantities: ``round_digits`` and ``held_out_loss``, not ``rounded`` and ``held``."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "attemper"
IRREGULAR = {
    "bought", "broken", "brought", "built", "caught", "chosen", "done", "drawn", "fallen", "felt", "forgotten", "found",
    "frozen", "given", "gone", "grown", "held", "hidden", "kept", "known", "laid", "left", "lost", "made", "meant",
    "met", "paid", "rebuilt", "seen", "sent", "shown", "sold", "spent", "taken", "thought", "thrown", "told", "torn",
    "undone", "won", "worn", "written",
}  # fmt: skip
VERBS = {"embed", "feed", "need", "proceed", "seed", "speed"}
STAY = {
    "lab/trained/training.py: trained"  # names the files of results that are kept
}
PROPERTIES = {"property", "cached_property"}


def is_participle(name: str) -> bool:
    """Whether a name is a participle alone, or one that says what was done to its argument: ``checked_limits``."""
    words = name.strip("_").split("_")
    if words[0] == "checked":
        return True
    return len(words) == 1 and (words[0] in IRREGULAR or (words[0].endswith("ed") and words[0] not in VERBS))


def snake(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def participles(source: str) -> Iterator[str]:
    """Functions and classes that are named so. A property may be: it is a state, ``packed`` or ``scheduled``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            if is_participle(snake(node.name)) and node.name not in RECORDS:
                yield node.name
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and is_participle(node.name):
            if PROPERTIES.isdisjoint(ast.unparse(decorator) for decorator in node.decorator_list):
                yield node.name


RECORDS = {"Lost", "Skipped", "Tempered"}
"""Records that people meet: parts of results, named as the field that holds them."""


def test_no_function_is_named_by_a_participle():
    texts = {path.relative_to(SOURCE).as_posix(): path.read_text("utf-8") for path in SOURCE.rglob("*.py")}
    found = {
        f"{path}: {name}"
        for path, text in texts.items()
        if any(is_participle(snake(name)) for name in re.findall(r"(?:def|class) (\w+)", text))
        for name in participles(text)
    }
    assert found == STAY


def test_participles_are_found_and_verbs_and_quantities_left_alone():
    wrong, right = ["rounded", "_kept", "checked_limits"], ["round_digits", "held_out_loss", "need", "refuse_nested"]
    source = "\n".join([*(f"def {name}(): ..." for name in wrong + right), "class Wanted: ...", "class Tempered: ..."])
    assert list(participles(source)) == [*wrong, "Wanted"]
