"""Counts the English of every page and message: words, sentences, and phrases that must be read twice.

python scripts/words.py                # a table of all pages; for the product's own texts, those with refused phrases
python scripts/words.py PAGE ...       # the longest sentences and each refused phrase of these, with its line
python scripts/words.py --lower        # lowers the limits in tests/docs/words.txt to what there is now; raises none

Prose is running text: no headings, tables, code blocks, formulas, HTML, nor what stands between ``begin`` and ``end``
markers. Messages are the strings of Python files, their docstrings left out, and the texts of pages.
"""

from __future__ import annotations

import ast
import json
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMITS = ROOT / "tests" / "docs" / "words.txt"
STEP, FREE = 25, 1.1
"""Limits of words are multiples of the first, a tenth above the count: a few sentences more are no matter."""
MEAN, LARGEST = 18.0, 40
"""Words of a sentence, on average and at most, below which no limit goes."""
SHOWN = 5

REFUSED = {
    r"(?:is|are|was|were|be|been) (?:\w+ly |also |never |not |then |both )?told": "shows, prints, reports",
    r"of (?:its|their) own(?= ?(?:[^\w\s]|$)| (?:and|or|with|to|in|for|at|on|by|as|that|is|are|was|has|have)\b)": (
        "separate; or leave it out"
    ),
    r"otherwise than": "differently from",
    r"what (?:was|were) (?!wrong|missing|that|this|it )\w+": "name the thing",
    r"(?:is|are) (?:no|another|a) (?:repair|remedy|cure|trouble)": "does not help",
    r"(?<!there )is no (?!longer|more|less|better|worse|larger|smaller|faster|slower|different)\w+": "is not",
    r"is (?:of no use|for nothing)": "does nothing; needs",
    r"begins? to ring": "starts",
    r"(?:alarms?|it|that|which|watch|none|nothing|something) (?:never |also |then )?(?:rings?|rang|rung)": "fires",
    r"ring(?:s|ing)? (?:when|if|at|once|on|for)": "fires",
    r"(?:tells?|told) (?:\w+ ){0,3}(?:apart|from)": "distinguish",
    r"take(?:s|n)? apart": "split",
    r"h(?:olds?|eld) back": "stop",
    r"what there is": "name the thing",
    r"what of": "name the thing",
    r"(?:for|by|of|to|from) (?:who|whoever)": "name the reader: you",
    r"(?:if|when|as|what|how|where|than|in which) one (?:meets|sees|wants|knows|gets|reads|asks|needs|looks)": "you",
    r"(?:is|are|was|were) (?:that|those) of": "equals; comes from",
    r"by trade": "by design",
    r"asked of": "needed from",
    r"(?:nothing|none) (?:is|was) said of": "does not report",
    r"is had": "use another verb",
    r"may be had": "is available",
    r"rooms": "packages",
    r"(?:thereof|therein|whereof|hereby|heretofore|hitherto|whence|wherefrom)": "a common word",
    r"(?:teh|recieve\w*|seperat\w+|occured|lenght|accross|neccessary|dependan\w+|wich|untill|paramter\w*)": "spelling",
    r"(?<!-)(?:(?:behavior|color|center)(?:s|ed)?|(?:un)?(?:normal|initial|quant)ized|(?:min|max)imiz\w+)": (
        "British spelling"
    ),
}
"""Phrase -> what to say instead. Grown from sentences that readers had to read twice."""
_SENTENCE_START = {r"(?:who|whoever) (?!is\b|are\b)\w+s\b[^?]*$": "If you ..."}
"""The same, where a sentence or a clause after a colon starts."""
_PATTERNS = [
    *((re.compile(rf"\b(?:{phrase})\b", re.IGNORECASE), say) for phrase, say in REFUSED.items()),
    *((re.compile(rf"(?:^|[:;] ){phrase}", re.IGNORECASE), say) for phrase, say in _SENTENCE_START.items()),
]

_NOT_PROSE = re.compile(
    r"<!-- (?P<block>[\w-]+): begin -->.*?<!-- (?P=block): end -->"
    r"|^(?P<indent> *)(?P<fence>```+|~~~+).*?^(?P=indent)(?P=fence) *$|^\$\$.*?\$\$ *$"
    r"|<!--.*?-->|<summary>.*?</summary>|<[^>\n]+>",
    re.MULTILINE | re.DOTALL,
)
_MARKUP = re.compile(r"<[^>]+>|<\w.*|[\w-]+:[^ ;]+;\S*")
"""HTML and CSS in a message."""
_ITEM = re.compile(r"^\s*(?:[-*+]|\d+\.) ")
_END = re.compile(r"(?<!e\.g\.)(?<!i\.e\.)(?<!\bal\.)(?<!vs\.)(?<=[.!?])[)\"”*_]* +(?=[\W_]*(?:[A-Z`\d]|attemper\b))")
_WORD = re.compile(r"[^\W_]")


@dataclass(frozen=True)
class Count:
    """What a page or a file of messages has, or may have."""

    words: int
    mean: float
    largest: int
    phrases: int

    def limit(self) -> Count:
        """The limits that this passes, not below those that every page has."""
        mean = max(MEAN, math.ceil(10 * self.mean) / 10)
        return Count(STEP * math.ceil(FREE * self.words / STEP), mean, max(LARGEST, self.largest), self.phrases)

    def least(self, other: Count) -> Count:
        return Count(*map(min, astuple(self), astuple(other)))

    def above(self, limits: Count) -> list[str]:
        """``words 310 > 300`` for each limit that this is above."""
        pairs = zip(("words", "mean", "largest", "phrases"), astuple(self), astuple(limits), strict=True)
        return [f"{name} {value:.4g} > {limit:g}" for name, value, limit in pairs if value > limit]


def main(arguments: list[str]) -> int:
    if arguments == ["--lower"]:
        lower()
    elif arguments:
        for name in arguments:
            show((ROOT / name).resolve().relative_to(ROOT).as_posix())
    else:
        overview()
    return 0


def pages() -> list[str]:
    """Every English page, by its path."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "research").rglob("*.md")]
    return [path.relative_to(ROOT).as_posix() for path in sorted(found) if not path.name.endswith(".zh-CN.md")]


def messages() -> list[str]:
    """Every file with texts that the product shows."""
    package = ROOT / "src" / "attemper"
    found = [*package.rglob("*.py"), package / "report/texts/en.json", package / "lab/pages/texts.json"]
    return [path.relative_to(ROOT).as_posix() for path in sorted(found)]


def sentences(name: str) -> list[str]:
    """Those of a page, or the messages of a file of the package."""
    text = (ROOT / name).read_text("utf-8")
    if name.endswith(".md"):
        return [sentence for paragraph in paragraphs(text) for sentence in split(paragraph)]
    strings = python_strings(text, name) if name.endswith(".py") else json_strings(json.loads(text))
    said = [" ".join(_MARKUP.sub("", string).split()) for string in strings]
    return [sentence for string in said if " " in string for sentence in split(string)]


def split(paragraph: str) -> list[str]:
    return [sentence for sentence in _END.split(paragraph) if _WORD.search(sentence)]


def paragraphs(text: str) -> Iterator[str]:
    """Running text of a page, an item of a list at a time. Code in a line is one word, a link is its text."""
    kept: list[str] = []
    for line in [*_NOT_PROSE.sub("", text).splitlines(), ""]:
        code = not kept and line.startswith("    ") and not _ITEM.match(line)
        apart = not line.strip() or code or line.lstrip().startswith(("#", "|"))
        if kept and (apart or _ITEM.match(line)):
            yield plain(" ".join(kept))
            kept = []
        if not apart:
            kept.append(_ITEM.sub("", line).strip())


def plain(paragraph: str) -> str:
    text = re.sub(r"``.+?``|`[^`]+`", "`code`", paragraph)
    text = re.sub(r"!\[[^]]*\]\([^)]*\)", "", text)
    return re.sub(r"\[([^]]*)\](?:\([^)]*\)|\[[^]]*\])", r"\1", text).strip()


def python_strings(source: str, name: str) -> Iterator[str]:
    """Strings of a file; of docstrings only those of commands, which are their help."""
    nodes = list(ast.walk(ast.parse(source)))
    alone = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    inside = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.FunctionDef) and "/cli/" in name and node.name[0] != "_":
            yield ast.get_docstring(node) or ""
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "`x`" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not {id(node)} & (alone | inside):
            yield node.value


def json_strings(value: object) -> Iterator[str]:
    """Every text of a table but the Chinese ones."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            if key != "zh":
                yield from json_strings(inner)


def refused(sentence: str) -> list[tuple[str, str]]:
    """Phrase -> what to say, for every refused phrase of a sentence."""
    return [(found[0], say) for pattern, say in _PATTERNS for found in pattern.finditer(sentence)]


def size(sentence: str) -> int:
    return sum(1 for word in sentence.split() if _WORD.search(word))


def count(name: str) -> Count:
    """Of a page; of messages the phrases alone."""
    found = sentences(name)
    phrases = sum(len(refused(sentence)) for sentence in found)
    if not name.endswith(".md"):
        return Count(0, 0.0, 0, phrases)
    sizes = [size(sentence) for sentence in found]
    return Count(sum(sizes), sum(sizes) / max(1, len(sizes)), max(sizes, default=0), phrases)


def limits() -> dict[str, Count]:
    """Limits by path. Of two rows for a path the lower values count, so a merge may keep both."""
    found: dict[str, Count] = {}
    for line in LIMITS.read_text("utf-8").splitlines():
        if line and not line.startswith("#"):
            name, words, mean, largest, phrases = line.split()
            row = Count(int(words), float(mean), int(largest), int(phrases))
            found[name] = row.least(found.get(name, row))
    return found


def lower() -> None:
    """Writes the limits anew: lowered where there is less now, with rows for new pages, without those of gone files."""
    before = limits() if LIMITS.exists() else {}
    rows = {name: count(name).limit() for name in [*pages(), *messages()]}
    rows = {name: row.least(before.get(name, row)) for name, row in rows.items()}
    kept = {name: row for name, row in rows.items() if name.endswith(".md") or row.phrases}
    lines = [
        "# page: prose words, mean and largest sentence, refused phrases, at most (python scripts/words.py --lower)",
        *(f"{name} {row.words} {row.mean:g} {row.largest} {row.phrases}" for name, row in kept.items()),
    ]
    LIMITS.write_text("\n".join(lines) + "\n", encoding="utf-8")


def overview() -> None:
    print(f"{'prose':>6} {'all':>6} {'sentences':>9} {'mean':>5} {'largest':>7} {'refused':>7}")
    totals: dict[str, list[int]] = {}
    for name in pages():
        row, everything = count(name), len((ROOT / name).read_text("utf-8").split())
        numbers = f"{row.words:>6} {everything:>6} {len(sentences(name)):>9} {row.mean:>5.1f} {row.largest:>7}"
        print(f"{numbers} {row.phrases:>7}  {name}")
        total = totals.setdefault(kind(name), [0, 0])
        total[:] = total[0] + row.words, total[1] + everything
    for name, (words, everything) in totals.items():
        print(f"{words:>6} {everything:>6} {'':>31}  {name}")
    for name in messages():
        if phrases := count(name).phrases:
            print(f"{phrases:>45}  {name}")


def kind(name: str) -> str:
    if name.startswith("docs/design/"):
        return "design notes"
    return "pages for users" if name == "README.md" or name.startswith("docs/") else "beside the pages"


def show(name: str) -> None:
    """The longest sentences of a page, and each refused phrase."""
    print(f"{name}: {count(name)}")
    found = sentences(name)
    if name.endswith(".md"):
        for sentence in sorted(found, key=size, reverse=True)[:SHOWN]:
            print(f"  {size(sentence)} words: {sentence}")
    for sentence in found:
        for phrase, say in refused(sentence):
            print(f"  {phrase!r} (say: {say}): {sentence}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
