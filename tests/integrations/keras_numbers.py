"""What the Keras layer computes on the backend that KERAS_BACKEND names, as one JSON document: each backend has a
process of its own, and this is what runs there.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

BATCH, QUERIES, KEYS, SIZE, CONTEXT, HEADS, HEAD = 2, 5, 7, 12, 10, 3, 4
PROJECTIONS = ("query", "key", "value", "output")
ALPHA, COEF, TOLERANCE, TEMPERATURE = 0.7, 0.5, 0.05, 0.6


def drawn() -> dict[str, np.ndarray]:
    """Inputs, masks and weights, the same in every process."""
    draw = np.random.RandomState(0)
    inner = HEADS * HEAD
    shapes = {"query": (SIZE, inner), "key": (CONTEXT, inner), "value": (CONTEXT, inner), "output": (inner, SIZE)}
    given = {"x": draw.randn(BATCH, QUERIES, SIZE), "context": draw.randn(BATCH, KEYS, CONTEXT)}
    for name, shape in shapes.items():
        given[f"{name}.kernel"] = draw.randn(*shape) * 0.25
        given[f"{name}.bias"] = draw.randn(shape[1]) * 0.3
    given = {name: value.astype("float32") for name, value in given.items()}
    # The second sample sees no key at all in one row of each mask, and its last query is padding.
    given["context_mask"] = np.array([[True] * 7, [True] * 4 + [False] * 3])
    given["attention_mask"] = draw.rand(BATCH, QUERIES, KEYS) < 0.7
    given["attention_mask"][1, 2] = False
    given["query_mask"] = np.array([[True] * 5, [True] * 4 + [False]])
    given["up"] = draw.randn(BATCH, QUERIES, SIZE).astype("float32")
    return given


def layer(dtype: str = "float32", alpha: Any = ALPHA) -> Any:
    """The layer, built, with the drawn weights."""
    from attemper.integrations.keras import CrossAttention, EntropyTarget

    given = drawn()
    made = CrossAttention(
        HEADS, HEAD, entropy_regularizer=EntropyTarget(alpha, COEF, tolerance=TOLERANCE), temperature=TEMPERATURE,
        dtype=dtype,
    )  # fmt: skip
    made.build(given["x"].shape, given["context"].shape)
    for name in PROJECTIONS:
        getattr(made, f"{name}_dense").set_weights([given[f"{name}.kernel"], given[f"{name}.bias"]])
    return made


MASKS = ("query_mask", "context_mask", "attention_mask")


def function(made: Any) -> Any:
    """``trainable variables -> (output, weights, [loss])``, compiled once where the backend is jax."""
    import keras

    given = drawn()
    masks = {name: given[name] for name in MASKS}

    def stateless(trainable: list[Any]) -> Any:
        (output, weights), _, losses = made.stateless_call(
            trainable, made.non_trainable_variables, given["x"], given["context"], return_attention_scores=True,
            return_losses=True, **masks,
        )  # fmt: skip
        return output, weights, losses

    def plain(_: list[Any]) -> Any:
        output, weights = made(given["x"], given["context"], return_attention_scores=True, **masks)
        return output, weights, made.losses

    if keras.backend.backend() != "jax":
        return plain
    import jax

    return jax.jit(stateless)


def called(made: Any) -> tuple[Any, Any, list[Any]]:
    """The output, the weights and the loss."""
    return function(made)([v.value for v in made.trainable_variables])


def gradients(made: Any) -> dict[str, list[float]]:
    """Of the penalty plus a linear loss of the output, with respect to every weight; and both values."""
    import keras
    from keras import ops

    up, call = ops.convert_to_tensor(drawn()["up"]), function(made)

    def total(trainable: list[Any]) -> Any:
        output, _, losses = call(trainable)
        return ops.sum(ops.multiply(output, up)) + sum(losses)

    values = [v.value for v in made.trainable_variables]
    if keras.backend.backend() == "jax":
        import jax

        found, gradients = jax.jit(jax.value_and_grad(total))(values)
    elif keras.backend.backend() == "torch":
        found = total(values)
        found.backward()
        gradients = [value.grad for value in values]
    else:
        import tensorflow as tf  # type: ignore[import-not-found]

        with tf.GradientTape() as tape:
            found = total(values)
        gradients = tape.gradient(found, values)
    names = [f"{name}.{part}" for name in PROJECTIONS for part in ("kernel", "bias")]
    lists = {name: flat(gradient) for name, gradient in zip(names, gradients, strict=True)}
    return lists | {"total": flat(found)}


def flat(tensor: Any) -> list[float]:
    from keras import ops

    return np.asarray(ops.convert_to_numpy(ops.cast(tensor, "float32")), "float64").flatten().tolist()


def hostile() -> dict[str, list[float]]:
    """Entropies of rows that break naive formulas."""
    from attemper.integrations.keras import attention_weights

    rows = np.array(
        [[1e4, 0, -1e4, 5], [3e38, -3e38, 0, 0], [0, 0, 0, 0], [-1e30, -1e30, -1e30, -1e30], [-1e9, 0, 0, 1]], "float32"
    )
    mask = np.array([[1, 1, 1, 1], [0, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]], bool)
    weights, entropy, valid = attention_weights(rows, mask)
    return {"weights": flat(weights), "entropy": flat(entropy), "valid": flat(valid)}


def saved_and_loaded() -> dict[str, Any]:
    """Whether a model with the layer, a schedule and an embedding's mask comes back the same; and its losses."""
    import keras

    from attemper import schedules
    from attemper.integrations.keras import CrossAttention, EntropyTarget, TabulatedSchedule

    falling = TabulatedSchedule.of(schedules.curriculum(1.5, 0.5), total_steps=4)
    query, context = keras.Input((None,), dtype="int32"), keras.Input((None,), dtype="int32")
    embed = keras.layers.Embedding(11, 8, mask_zero=True)
    attended = CrossAttention(2, 4, entropy_regularizer=EntropyTarget(falling))(embed(query), embed(context))
    model = keras.Model([query, context], keras.layers.Dense(3)(attended))
    draw = np.random.RandomState(1)
    ids = [draw.randint(1, 11, (4, 5)), draw.randint(1, 11, (4, 7))]
    ids[0][:, 3:], ids[1][:, 5:] = 0, 0
    model.compile("sgd", "mse")
    model.fit(ids, draw.randn(4, 5, 3), epochs=3, batch_size=4, verbose=0)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        model.save(path)
        again: Any = keras.models.load_model(path)
    find: Any = next(layer for layer in again.layers if isinstance(layer, CrossAttention))
    outputs = [flat(each(ids)) for each in (model, again)]
    # Padding of either side changes neither the loss nor the outputs of real tokens.
    longer = [np.pad(each, ((0, 0), (0, 3))) for each in ids]
    padded = again(longer)
    return {
        "steps": int(flat(find.steps)[0]), "same": outputs[0] == outputs[1], "losses": flat(again.losses[0]),
        "before": flat(model.losses[0]), "alpha": flat(find.entropy_regularizer.alpha(find.steps)),
        "padded": flat(padded[:, :3]), "plain": flat(again(ids)[:, :3]), "config": find.get_config(),
    }  # fmt: skip


def fitted() -> dict[str, Any]:
    """What ``fit`` and ``evaluate`` log of the layer, and the same from its weights, by hand."""
    import keras

    from attemper.integrations.keras import CrossAttention, EntropyTarget

    draw = np.random.RandomState(2)
    inputs = [draw.randn(6, 4, 5).astype("float32"), draw.randn(6, 7, 5).astype("float32")]
    query, context = keras.Input((4, 5)), keras.Input((7, 5))
    attention = CrossAttention(2, 4, entropy_regularizer=EntropyTarget(0.5, 2.0), name="cross")
    output, weights = attention(query, context, return_attention_scores=True)
    model = keras.Model([query, context], keras.layers.Dense(1)(output))
    looked = keras.Model([query, context], weights)

    def entropies() -> np.ndarray:
        p = np.asarray(keras.ops.convert_to_numpy(looked(inputs)), "float64")
        return -(p * np.log(p)).sum(-1)

    # No learning: every batch of an epoch meets the same weights.
    model.compile(keras.optimizers.SGD(0.0), "mse")
    before = len(attention.weights)
    history = model.fit(inputs, np.zeros((6, 4, 1)), epochs=2, batch_size=3, verbose=0, validation_data=(  # type: ignore[arg-type]
        [part[:2] for part in inputs], np.zeros((2, 4, 1)),
    ))  # fmt: skip
    found = entropies()
    evaluated = model.evaluate([part[:2] for part in inputs], np.zeros((2, 4, 1)), verbose=0, return_dict=True)  # type: ignore[arg-type]
    return {
        "logs": {name: [float(value) for value in values] for name, values in history.history.items()},
        "evaluated": {name: float(value) for name, value in evaluated.items()},
        "entropy": float(found.mean()), "first_two": float(found[:2].mean()),
        "term": float(2 * np.square(found - 0.5).mean()), "weights": [before, len(attention.weights)],
    }  # fmt: skip


def mistakes() -> list[str]:
    """What is said to calls that have no meaning."""
    from attemper.integrations.keras import CrossAttention, EntropyTarget, TabulatedSchedule

    said = []
    for make in (
        lambda: EntropyTarget(-1), lambda: EntropyTarget(0.1, tolerance=-1), lambda: CrossAttention(0, 4),
        lambda: CrossAttention(2, 4, temperature=0), lambda: TabulatedSchedule([]),
        lambda: CrossAttention(1.5, 4), lambda: CrossAttention(2, True),  # type: ignore[arg-type]
    ):  # fmt: skip
        try:
            make()
        except ValueError as error:
            said.append(f"{type(error).__name__} {error}")
    return said


def main() -> None:
    import keras

    keras.utils.set_random_seed(0)
    output, weights, losses = called(layer())
    low = {}
    for dtype in ("mixed_bfloat16", "mixed_float16"):
        _, there, loss = called(layer(dtype))
        low[dtype] = {"weights": flat(there), "losses": flat(loss[0])}
        low[dtype]["dtype"] = keras.backend.standardize_dtype(there.dtype)
    found = {
        "backend": keras.backend.backend(), "output": flat(output), "weights": flat(weights),
        "losses": flat(losses[0]), "gradients": gradients(layer()), "hostile": hostile(), "mistakes": mistakes(),
        "saved": saved_and_loaded(), "low": low, "fitted": fitted(),
    }  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main()
