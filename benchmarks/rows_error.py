"""How far a mean over sampled rows lies from the mean over all rows: all-MiniLM-L6-v2 on real text.

Run: ``python benchmarks/rows_error.py [--png FILE]``. Normalised entropy of every head at 512 tokens, and at 2,048 with
the position table stretched linearly; ``watch(rows=...)`` against all rows, over several offsets of the rows.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import minilm
import torch

import attemper

OFFSETS = 8
"""Offsets of the first row tried for each number of rows."""


def stretched(model: Any, tokens: int) -> Any:
    """The model with its table of positions interpolated to ``tokens``."""
    table = model.embeddings.position_embeddings
    longer = torch.nn.functional.interpolate(
        table.weight.detach().T[None], size=tokens, mode="linear", align_corners=True
    )[0].T
    model.embeddings.position_embeddings = torch.nn.Embedding.from_pretrained(longer.contiguous())
    model.embeddings.position_ids = torch.arange(tokens)[None]
    model.embeddings.token_type_ids = torch.zeros(1, tokens, dtype=torch.long)
    return model


def all_rows(model: Any, inputs: dict[str, torch.Tensor]) -> list[attemper.types.AttentionStats]:
    """Statistics of every row, a site each."""
    with torch.no_grad(), attemper.watch(model) as watch:
        model(**inputs)
    table = watch.table()
    return [table.row_statistics(site.name) for site in table.sites]


def samples(stats: attemper.types.AttentionStats, rows: int) -> torch.Tensor:
    """Means [OFFSETS, H] over evenly strided rows with offsets of their own, as ``watch(rows=...)`` takes them."""
    entropy = stats.normalized_entropy[0].double()
    queries = entropy.shape[1]
    offsets = torch.linspace(0, 1, OFFSETS + 1)[:OFFSETS]
    places = [((torch.arange(rows) + offset) * queries / rows).long() for offset in offsets]
    return torch.stack([entropy[:, place].mean(-1) for place in places])


def curve(model: Any, inputs: dict[str, torch.Tensor]) -> dict[int, dict[str, float]]:
    """Rows -> mean and largest absolute error over heads and offsets."""
    stats = all_rows(model, inputs)
    exact = torch.stack([part.normalized_entropy[0].double().mean(-1) for part in stats])
    queries = stats[0].lse.shape[2]
    found = {}
    for rows in (2**power for power in range(2, queries.bit_length() - 1)):
        error = torch.stack([samples(part, rows) for part in stats], 1) - exact
        found[rows] = {"mean": float(error.abs().mean()), "largest": float(error.abs().max())}
    return found


def draw(curves: dict[int, dict[int, dict[str, float]]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for (tokens, points), mark in zip(curves.items(), ("o", "s"), strict=True):
        rows = list(points)
        axes.plot(rows, [points[r]["mean"] for r in rows], f"-{mark}", color="black", label=f"{tokens} tokens, mean")
        axes.plot(
            rows, [points[r]["largest"] for r in rows], f":{mark}", color="0.5", label=f"{tokens} tokens, largest"
        )
    axes.set(
        xscale="log", yscale="log", xlabel="measured rows of each sequence (queries)",
        ylabel="error of a head's mean normalised entropy (no unit)",
    )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.legend()
    axes.grid(True, which="both", linewidth=0.3)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--png", type=Path)
    options = parser.parse_args()
    model = minilm.pretrained()
    curves = {512: curve(model, minilm.batch(512, 1))}
    curves[2048] = curve(stretched(model, 2048), minilm.batch(2048, 1))
    print(json.dumps({"curves": curves, "environment": minilm.environment()}, indent=2))
    if options.png:
        draw(curves, options.png)


if __name__ == "__main__":
    main()
