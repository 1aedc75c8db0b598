"""Attention held at an entropy while it learns: the smallest case, in Keras 3, on whichever backend it has.

The same as ``entropy_target.py``: four queries, six keys, three heads, 1,000 steps. The layer adds (H - alpha)^2 to the
model's losses and ``fit`` trains on their sum; in a training loop of your own, ``sum(model.losses)`` is read after the
call and inside the gradient's scope.

    pip install '.[keras]'  # in a clone of the repository
    KERAS_BACKEND=torch python examples/entropy_target_keras.py
    KERAS_BACKEND=jax python examples/entropy_target_keras.py 0.2 schedule
"""

from __future__ import annotations

import math
import sys
from typing import Any

import keras
import numpy as np

from attemper import schedules
from attemper.integrations.keras import CrossAttention, EntropyTarget, TabulatedSchedule

STEPS = 1000
ALPHAS = ("0.05", "0.2", "1.0", f"{math.log(6) - 0.05:.6f}", "schedule")
"""log 6 is the entropy of six equal weights."""


def target(alpha: str) -> float | TabulatedSchedule:
    """A number for all steps; or from nearly uniform to sharp in a straight line, which then holds."""
    if alpha == "schedule":
        return TabulatedSchedule.of(schedules.piecewise([(0.0, math.log(6) - 0.05), (0.7, 0.2)]), STEPS)
    return float(alpha)


def built(alpha: str) -> tuple[keras.Model, keras.Model]:
    """The classifier, and the same layers up to the weights of its attention."""
    query, context = keras.Input((4, 16)), keras.Input((6, 16))
    attention = CrossAttention(3, 16, entropy_regularizer=EntropyTarget(target(alpha)))
    output, weights = attention(query, context, return_attention_scores=True)
    flat = keras.layers.Flatten()(keras.layers.Add()([output, query]))
    classify = keras.layers.Dense(2)
    return keras.Model([query, context], classify(flat)), keras.Model([query, context], weights)


def trained(alpha: str) -> tuple[float, float, float]:
    """(mean |H - alpha|, mean H, loss of the classifier) after training."""
    keras.utils.set_random_seed(0)
    draw = np.random.default_rng(0)
    inputs: Any = [draw.random((1, 4, 16), "float32"), draw.random((1, 6, 16), "float32")]
    labels: Any = np.array([[0.0, 1.0]], "float32")
    model, attention = built(alpha)
    classified = keras.losses.BinaryCrossentropy(from_logits=True)
    # The second moment must forget the first, steep steps: with 0.999 it remembers them to the end, steps stay small,
    # and rows near alpha = 0.05 stay about 0.015 nats away, some far more.
    model.compile(keras.optimizers.Adam(0.01, beta_2=0.99), classified)
    # The one sample a thousand times: a step for each.
    model.fit([np.repeat(x, STEPS, 0) for x in inputs], np.repeat(labels, STEPS, 0), batch_size=1, verbose=0)  # type: ignore[arg-type]
    weights = np.asarray(keras.ops.convert_to_numpy(attention(inputs)), "float64")
    entropy = -(weights * np.log(np.maximum(weights, 1e-300))).sum(-1)
    alpha_at_end = 0.2 if alpha == "schedule" else float(alpha)
    loss = float(keras.ops.convert_to_numpy(classified(labels, model(inputs))))
    return float(np.abs(entropy - alpha_at_end).mean()), float(entropy.mean()), loss


def main() -> None:
    for alpha in sys.argv[1:] or ALPHAS:
        away, entropy, loss = trained(alpha)
        print(f"alpha {alpha}: mean |H - alpha| {away:.4f}, mean H {entropy:.4f}, loss {loss:.4f}")


if __name__ == "__main__":
    main()
