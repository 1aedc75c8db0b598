"""How often a run measures: steps between two measurements of each group of signals. The first is at step 0."""

from __future__ import annotations

ATTENTION = 5
"""Of what is read from scores and weights, per head."""
COSTLY = 10
"""Of ranks and spectra."""
HELD_OUT = 25

SPACING = {
    "loss": 1,
    "gradient_norm": 1,
    "update_norm": 1,
    "output_rank": COSTLY,
    "increment_entropy": COSTLY,
}
"""Signal -> steps, of those that are not read from scores and weights."""
