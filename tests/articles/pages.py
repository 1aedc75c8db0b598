"""Writes both pages from the cases and their runs, and compares a page with what the runs give now."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

from tests.articles.case import SNIPPETS, Case, Document, Step, Text
from tests.articles.cases import DOCUMENTS
from tests.articles.runner import MODEL, Run, run_of

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "en": ROOT / "docs" / "articles" / "from-article-to-library.md",
    "zh": ROOT / "docs" / "articles" / "from-article-to-library.zh-CN.md",
}
LONGEST_OUTPUT = 8
"""Lines of a snippet's own output that a page shows."""

TITLE = Text("From the article to the library", "从文章到本库")
OTHER = Text("[中文](from-article-to-library.zh-CN.md)", "[English](from-article-to-library.md)")
INTRO = (
    Text(
        "attemper grew out of five Chinese articles on attention, temperature and entropy. Below, each of their "
        "snippets has a verdict, which opens to the snippet, and the line of attemper that does the same. "
        "[The tests](../../tests/articles) check all that a verdict says. `python scripts/article_pages.py` writes "
        "this page from the runs. To follow along:",
        "这个库的背后是五篇讲注意力、温度和熵的中文文章。下面逐段给出结论（点开看片段），以及 attemper 里做同一件事的"
        "那一行。结论里的每一点都由[测试](../../tests/articles)核对。"
        "本页由 `python scripts/article_pages.py` 运行全部代码后写成。想跟着运行，先执行：",
    ),
)
PREAMBLE = "import math\nimport numpy as np\nimport torch\nimport attemper\nfrom attemper import functional"
ARTICLE = Text(
    "`article` is the snippet as a module, with its missing imports added and `torch.manual_seed(0)` before it. Some "
    "use this small model:",
    "`article` 是补上漏掉的 import 之后、当作模块载入的片段，每段之前都执行 `torch.manual_seed(0)`。有些片段要用这个"
    "小模型：",
)
NAMES = json.loads((ROOT / "src" / "attemper" / "article_names.json").read_text("utf-8"))
NAMES_SAY = Text(
    "You know a name from one of the articles: which line of attemper replaces it? `attemper.softmax` and the others "
    "raise an error that shows the same line. `scores` are logits, before softmax.",
    "文章里的名称，在 attemper 里怎样写？如果直接写 `attemper.softmax` 这样的名称，报错信息也会给出同一行。"
    "`scores` 是 softmax 之前的 logit：",
)
NAMES_HEAD = Text("| in the articles | here |", "| 文章里 | 在这里 |")
RUNS = Text("runs as printed", "可直接运行")
LACKS = Text("lacks", "缺少")
RESTORED = Text("(line breaks restored)", "（仅恢复换行）")
INPUTS = Text("It needs:", "片段默认这些已经存在：")
PRINTS = Text("It prints:", "输出：")
THEN = Text("Then it stops:", "随后报错：")
HERE = Text("**In attemper:**", "**在 attemper 里：**")
BETWEEN = Text(", ", "、")
STOP = Text(". ", "。")
COLON = Text(": ", "：")


def page(language: str) -> str:
    """The whole page in one language."""
    parts = [
        f"# {TITLE.of(language)}", OTHER.of(language), NAMES_SAY.of(language), names_table(language),
        *(text.of(language) for text in INTRO), _code(PREAMBLE),
        ARTICLE.of(language), _code(MODEL),
    ]  # fmt: skip
    for document in DOCUMENTS:
        parts += _document(document, language)
    return "\n\n".join(_wrapped(part, language) for part in parts) + "\n"


def names_table(language: str) -> str:
    """The names that the articles define, as the library's own table has them."""
    rows = (f"| `{name}` | `{line}` |" for name, line in NAMES.items())
    return "\n".join((NAMES_HEAD.of(language), "|---|---|", *rows))


def _wrapped(part: str, language: str) -> str:
    """A paragraph in lines of at most 120 characters; Chinese stays whole, where a break would show as a blank."""
    if language == "zh" or "\n" in part or part.startswith(("#", "|", "<")):
        return part
    return textwrap.fill(part, 120, break_long_words=False, break_on_hyphens=False)


def _document(document: Document, language: str) -> list[str]:
    parts = [f"## {document.number} · {document.title.of(language)}", document.about.of(language)]
    for case in document.cases:
        parts += section(case, language)
    return parts


def section(case: Case, language: str) -> list[str]:
    """The part of a page about one case: its verdict, the checks folded, the library's way."""
    run = run_of(case)
    checks = _as_printed(case, run, language) if case.file.exists() else []
    for step, output in zip(case.steps, run.outputs, strict=True):
        checks += _step(step, output, language) if step.say else []
    verdict = case.verdict.of(language)
    summary = re.sub(r"`([^`]+)`", r"<code>\1</code>", verdict)  # Markdown is not read there
    folded = [f"<details><summary>{summary}</summary>", *checks, "</details>"] if checks else [verdict]
    assert case.here.say
    said = Text(*(f"{HERE.of(name)} `{case.line}`{STOP.of(name)}{case.here.say.of(name)}" for name in ("en", "zh")))
    missing = [case.missing.say.of(language)] if case.missing else []
    return [
        f"### {case.title.of(language)}",
        *folded,
        *_step(Step(said, case.here.code), run.here, language),
        *missing,
    ]


def _as_printed(case: Case, run: Run, language: str) -> list[str]:
    """Where the snippet is, and what happens when it runs as the article prints it."""
    parts = [f"[`{case.file.name}`](../../{case.file.relative_to(ROOT)})"]
    if case.snippet:
        parts[0] += f"{COLON.of(language)}{_complaints(run, language)}"
    if case.restored:
        parts[0] += " " + RESTORED.of(language)
    if case.inputs:
        parts += [INPUTS.of(language), _code(case.inputs)]
    if case.snippet and run.printed and run.printed.count("\n") <= LONGEST_OUTPUT:
        parts += [PRINTS.of(language), _text(run.printed)]
    if case.snippet and run.failure and run.complaints:
        parts += [THEN.of(language), _text(run.failure)]
    return parts


def _complaints(run: Run, language: str) -> str:
    errors = [error for error in run.complaints or [run.failure] if error]
    names = [found[1] for error in errors if (found := re.fullmatch(r"NameError: name '(\w+)' is not defined", error))]
    rest = [f"`{error}`" for error in errors if not error.startswith("NameError: name ")]
    lacks = [f"{LACKS.of(language)} {BETWEEN.of(language).join(f'`{name}`' for name in names)}"] if names else []
    return BETWEEN.of(language).join(lacks + rest) or RUNS.of(language)


def _step(step: Step, output: str, language: str) -> list[str]:
    said = [step.say.of(language)] if step.say else []
    return [*said, _code(step.code), *([_text(output)] if output else [])]


def _code(code: str) -> str:
    return f"```python\n{code.strip(chr(10))}\n```"


def _text(output: str) -> str:
    return "```text\n" + "\n".join(line.rstrip() for line in output.strip("\n").split("\n")) + "\n```"


_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


def same(a: str, b: str) -> bool:
    """Equal texts, but for the last printed digit of a number: processors round ``exp`` differently."""
    if _NUMBER.sub("#", a) != _NUMBER.sub("#", b):
        return False
    return all(_close(x, y) for x, y in zip(_NUMBER.findall(a), _NUMBER.findall(b), strict=True))


def _close(a: str, b: str) -> bool:
    if a == b:
        return True
    if "." not in a or "." not in b:
        return False
    digits, _, exponent = a.partition("e")
    last = 10.0 ** (int(exponent or 0) - len(digits.split(".")[1]))
    # Two steps of float32 for what is printed to more digits than it has.
    return abs(float(a) - float(b)) <= 1.01 * max(last, 2 * 2.0**-23 * abs(float(a)))


def differences(language: str) -> list[str]:
    """Where the page on disk says something else than the runs."""
    path, now = PAGES[language], page(language).split("\n")
    if not path.exists():
        return [f"{path.name} is missing"]
    stands = path.read_text(encoding="utf-8").split("\n")
    if len(stands) != len(now):
        return [f"{path.name} has {len(stands)} lines, the runs give {len(now)}"]
    pairs = enumerate(zip(stands, now, strict=True), 1)
    return [f"{path.name}:{number}: {a!r} is now {b!r}" for number, (a, b) in pairs if not same(a, b)]


def unused_snippets() -> set[str]:
    """Files of snippets that no case runs."""
    named = {case.name for document in DOCUMENTS for case in document.cases}
    return {path.name.split(".")[0] for path in SNIPPETS.glob("*.txt")} - named
