"""Results of the sweep: one JSON line a model type, and the section of docs/models.md that is written from them."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results.jsonl")
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- sweep: begin -->", "<!-- sweep: end -->"
Row = Mapping[str, Any]
VERDICTS = ("exact", "skipped", "wrong", "not tried")
FLOAT32 = "does not run in float64"
"""Begins the note of a type that is held against float32."""
WITHOUT_CODE = re.compile(r"no class of transformers|missing the required .forward")
"""Reasons of a type that nobody can run."""
KNOWN = (
    "albert, bart, bert, bloom, clip, cohere2, dbrx, deberta-v2, deepseek_v3, deepseek_v32, distilbert, electra, "
    "ernie4_5, falcon, gemma, gemma2, gemma3, gemma4, glm4, glm4_moe, gpt2, gpt_neox, gpt_oss, gptj, granite, "
    "hunyuan_v1_moe, internvl, kimi_k25, lfm2, llama, llama4, llava, mimo_v2_flash, minimax_m2, mistral, mixtral, "
    "modernbert, olmo2, olmo3, opt, phi, phi3, qwen2, qwen2_5_vl, qwen2_moe, qwen3, qwen3_moe, qwen3_vl, roberta, "
    "seed_oss, siglip, smollm3, stablelm, starcoder2, swin, t5, vit, wav2vec2, whisper"
)
"""Exact types that the page names: those that readers look for most."""


def load(path: Path = RESULTS) -> list[dict[str, Any]]:
    """A dictionary for each type that has a result."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def save(path: Path, rows: Iterable[Row]) -> None:
    """Writes the results, one line a type, in the order of their names."""
    lines = [json.dumps(row, ensure_ascii=False) for row in sorted(rows, key=lambda row: row["type"])]
    path.write_text("\n".join(lines) + "\n", "utf-8")


def counts(rows: Iterable[Row]) -> str:
    """How many types there are of each verdict."""
    found = Counter(row["verdict"] for row in rows)
    parts = ", ".join(f"{found[name]} {name}" for name in VERDICTS)
    return f"{found.total()} model types: {parts}"


def section(rows: Iterable[Row]) -> str:
    """The results as Markdown."""
    rows = sorted(rows, key=lambda row: row["type"])
    by_verdict = {name: [row for row in rows if row["verdict"] == name] for name in VERDICTS}
    exact = {row["type"]: _layers(row) for row in by_verdict["exact"]}
    not_tried = [row for row in by_verdict["not tried"] if not _runs_never(row)]
    float32 = sum(any(note.startswith(FLOAT32) for note in row["notes"]) for row in by_verdict["exact"])
    known = ", ".join(name for name in KNOWN.split(", ") if not exact[name])
    lines = [f"**{counts(rows)}.** A type with code is *exact* in every layer if it is in none of these tables.", ""]
    lines += [f"These {sum(not kinds for kinds in exact.values())} types include {known}.", ""]
    lines += ["| exact, with layers without weights | model types |", "|---|---|"]
    lines += _grouped((kinds, name) for name, kinds in exact.items() if kinds)
    lines += ["", "| skipped, with the reason | model types |", "|---|---|"]
    lines += _grouped((_short(reason), row["type"]) for row in by_verdict["skipped"] for reason in row["reasons"])
    lines += ["", "| | model types |", "|---|---|", *_grouped(("not tried", row["type"]) for row in not_tried), ""]
    lines += [f"{len(by_verdict['not tried']) - len(not_tried)} more types have no code to run."]
    lines += [f"{float32} exact ones do not run in float64 and are compared in float32."]
    return "\n".join(lines)


def _runs_never(row: Row) -> bool:
    return any(map(WITHOUT_CODE.search, row["reasons"]))


def _short(reason: str) -> str:
    """Without the operation, and without what else the reason says; but layers that mix tokens are no lack of them."""
    return re.sub(r" \(\w+\)$|: (?!its layers).*", "", reason.partition(";")[0])


def _layers(row: Row) -> str:
    """Kinds of its layers without weights, which every reading names."""
    return ", ".join(sorted({_first(kind) for kind in row["layers"].values()}))


def _first(reason: str) -> str:
    return "router" if "router" in reason else reason.partition(";")[0].partition(" (")[0]


def _grouped(pairs: Iterable[tuple[str, str]]) -> list[str]:
    found: dict[str, list[str]] = {}
    for reason, name in pairs:
        found.setdefault(reason.partition(";")[0], []).append(name)
    ordered = sorted(found.items(), key=lambda pair: (-len(pair[1]), pair[0]))
    return [f"| {reason.replace('|', '/')} | {len(names)}: {', '.join(names)} |" for reason, names in ordered]


def written(rows: Iterable[Row], page: str) -> str:
    """The page with the results in their place."""
    head, tail = page[: page.index(BEGIN) + len(BEGIN)], page[page.index(END) :]
    return f"{head}\n\n{section(rows)}\n\n{tail}"


def write(rows: Iterable[Row]) -> None:
    """Puts the results into docs/models.md."""
    PAGE.write_text(written(rows, PAGE.read_text("utf-8")), "utf-8")
