"""Draws docs/pictures/normalizers.png: the weights that each normalizer gives to the same ten scores.

python scripts/normalizer_picture.py [FILE]
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
import torch

from attemper import nn

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SCORES = torch.tensor([3.0, 2.6, 2.6, 1.9, 1.2, 0.6, 0.0, -0.7, -1.5, -3.0])
NORMALIZERS = {
    "softmax": nn.Softmax(),
    "scalable softmax, s = 1": nn.ScalableSoftmax(),
    "softmax plus one": nn.SoftmaxPlusOne(),
    "sink, logit 3": nn.Sink(initial=3.0),
    "entmax, alpha 1.25": nn.Entmax(1.25),
    "entmax15": nn.Entmax15(),
    "sparsemax": nn.Sparsemax(),
    "top 3": nn.TopK(3),
    "threshold, 0.1": nn.Threshold(0.1),
    "sigmoid, bias -log 10": nn.Sigmoid(-2.302585),
}


def draw(path: Path) -> None:
    figure, axes = plt.subplots(2, 5, figsize=(12.5, 5), sharex=True, layout="constrained")
    for axis, (name, module) in zip(axes.flat, NORMALIZERS.items(), strict=True):
        with torch.no_grad():
            weights = module(SCORES[None, None])[0, 0]
        kept = (weights > 0).tolist()
        colours = ["#2f6db3" if one else "#c8c8c8" for one in kept]
        axis.bar(range(len(SCORES)), weights.tolist(), color=colours)
        for place, one in enumerate(kept):
            if not one:
                axis.text(place, 0.008, "0", ha="center", va="bottom", fontsize=8, color="#555555")
        axis.set_title(f"{name}\n{sum(kept)} keys, sum {weights.sum():.2f}", fontsize=10)
        axis.set_xticks(range(len(SCORES)), [f"{score:g}" for score in SCORES.tolist()], fontsize=7)
        axis.set_ylim(0, 0.75 if "sigmoid" not in name else 1.0)
        axis.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("score of the key", fontsize=10)
    figure.supylabel("weight", fontsize=10)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    root = Path(__file__).parents[1]
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else root / "docs" / "pictures" / "normalizers.png")
