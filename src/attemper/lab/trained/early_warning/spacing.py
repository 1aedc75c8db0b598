"""How often a run measures: steps between two measurements of each group of signals. The first is at step 0."""

from __future__ import annotations

ATTENTION = 5
"""Of what is read from scores and weights, per head."""
COSTLY = 10
"""Of ranks and spectra."""
HELD_OUT = 25

SPACING = {
    "": 1,
    "gradient_norm": 1,
    "update_norm": 1,
    "attention": ATTENTION,
    "output_rank": COSTLY,
    "increment_entropy": COSTLY,
}
"""Group of signals (a key of ``seconds`` in the file of a run; empty: the training loss) -> steps."""
