"""Cross attention with a target entropy for Keras 3, on any of its backends. Needs the extra ``keras``.

Only ``keras.ops`` is used, so gradients come from the backend that ``KERAS_BACKEND`` names: torch, jax or tensorflow.

``import attemper.integrations.keras`` registers the classes here with Keras. A process that loads a saved model with
one of them needs that line before ``keras.models.load_model(path)``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from attemper.checks import positive_number, whole_number
from attemper.errors import InputError, MissingExtraError

try:
    import keras
except ModuleNotFoundError as error:
    if error.name != "keras":
        raise  # Keras is there; what its KERAS_BACKEND names is not, and it says so
    raise MissingExtraError("attemper.integrations.keras", "keras", "keras") from error
from keras import ops
from keras.src.backend.common.stateless_scope import in_stateless_scope

_PACKAGE = "attemper"
Target = float | Callable[[Any], Any]
"""A number, or ``step -> number`` in ``keras.ops``: any ``keras.optimizers.schedules.LearningRateSchedule``."""


def attention_weights(scores: Any, mask: Any = None) -> tuple[Any, Any, Any]:
    r"""Softmax over the last axis, and its entropy from the logarithm of the softmax.

    .. math:: H = -\sum_j p_j \log p_j, \quad \log p_j = z_j - \max z - \log \sum_k e^{z_k - \max z}

    No small number stands in the logarithm: a weight that underflows to 0 adds 0, and its gradient is finite.

    Args:
        scores: [..., K], floating. Half precision is computed in float32.
        mask: bool, broadcastable to the scores: True for keys that the query sees.

    Returns:
        ``(weights [..., K], entropy [...] in nats, valid [...])``. ``valid`` is False where a query sees no key: its
        weights and its entropy are 0 there.
    """
    scores = ops.cast(scores, _statistics_dtype(scores.dtype))
    seen = ops.ones_like(scores, dtype="bool")
    if mask is not None:
        seen = ops.logical_and(seen, ops.cast(mask, "bool"))
    valid = ops.any(seen, axis=-1)
    # Hidden scores go before anything is computed with them: even an infinite one leaves no NaN in gradients.
    shown = ops.where(seen, scores, ops.zeros_like(scores))
    lowest = ops.full_like(scores, -3e38)
    largest = ops.max(ops.where(seen, scores, lowest), axis=-1, keepdims=True)
    largest = ops.stop_gradient(ops.where(ops.expand_dims(valid, -1), largest, ops.zeros_like(largest)))
    away = ops.where(seen, shown - largest, ops.zeros_like(scores))
    parts = ops.where(seen, ops.exp(away), ops.zeros_like(scores))
    total = ops.sum(parts, axis=-1, keepdims=True)
    total = ops.where(ops.expand_dims(valid, -1), total, ops.ones_like(total))
    weights = parts / total
    entropy = ops.sum(weights * ops.where(seen, ops.log(total) - away, ops.zeros_like(away)), axis=-1)
    return weights, entropy, valid


@keras.saving.register_keras_serializable(package=_PACKAGE)
class TabulatedSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """Numbers for steps 0, 1, ...; the last one holds from there on.

    It makes a schedule of ``attemper.schedules`` one that a compiled Keras step can follow: ::

        TabulatedSchedule.of(attemper.schedules.curriculum(1.7, 0.2), total_steps=1000)

    Args:
        values: at least one, each finite and above 0.
    """

    def __init__(self, values: Sequence[float]) -> None:
        super().__init__()
        advice = "An entropy of 0 has no gradient to reach it; 0.05 nats is nearly one-hot."
        self.values = [positive_number("TabulatedSchedule(values)", float(value), advice) for value in values]
        if not self.values:
            raise InputError("TabulatedSchedule(values) must have at least one number, got none.")

    @classmethod
    def of(cls, schedule: Callable[[int, int], float], total_steps: int) -> TabulatedSchedule:
        """The schedule ``(step, total_steps) -> number`` at each step, and at its end."""
        return cls([schedule(step, total_steps) for step in range(total_steps + 1)])

    def __call__(self, step: Any) -> Any:
        place = ops.clip(ops.cast(step, "int32"), 0, len(self.values) - 1)
        return ops.take(ops.convert_to_tensor(self.values, "float32"), place)

    def get_config(self) -> dict[str, Any]:
        return {"values": self.values}


@keras.saving.register_keras_serializable(package=_PACKAGE)
class EntropyTarget(keras.regularizers.Regularizer):
    r"""How far the rows of an attention are from an entropy, as a loss to add.

    .. math:: coef \cdot \operatorname{mean} \max(|H - \alpha| - tolerance, 0)^2

    Args:
        alpha: the target in nats, from 0 (one key) to log n (all n alike): a number, or a function of the step in
            ``keras.ops``: a schedule of ``keras.optimizers.schedules``, or :class:`TabulatedSchedule`.
        coef: what a square nat is worth.
        tolerance: nats around the target that cost nothing.

    Raises:
        InputError: alpha is negative, or the tolerance is.
    """

    def __init__(self, alpha: Target, coef: float = 1.0, *, tolerance: float = 0.0) -> None:
        if not callable(alpha) and not 0 <= alpha < float("inf"):
            raise InputError(
                f"EntropyTarget(alpha=...) must be a number of nats, at least 0, or a function of the step; got "
                f"{alpha}."
            )
        if not tolerance >= 0:
            raise InputError(f"EntropyTarget(tolerance=...) must be at least 0 nats, got {tolerance!r}.")
        self.alpha, self.coef, self.tolerance = alpha, coef, tolerance

    @property
    def scheduled(self) -> bool:
        """Whether the target changes with the step."""
        return callable(self.alpha)

    def __call__(self, x: Any, valid: Any = None, step: Any = 0) -> Any:
        """The loss of entropies ``x`` in nats, of any shape; ``valid``: bool, rows that count, None for all.

        ``step`` is given to a scheduled alpha. 0 where no row counts.
        """
        alpha = self.alpha(step) if callable(self.alpha) else self.alpha
        away = ops.maximum(ops.abs(x - ops.cast(alpha, x.dtype)) - self.tolerance, 0.0)
        counted = ops.ones_like(x) if valid is None else ops.cast(ops.broadcast_to(valid, ops.shape(x)), x.dtype)
        squares = ops.where(ops.cast(counted, "bool"), ops.square(away), ops.zeros_like(away))
        return self.coef * ops.sum(squares) / ops.maximum(ops.sum(counted), 1.0)

    def get_config(self) -> dict[str, Any]:
        alpha = keras.saving.serialize_keras_object(self.alpha) if callable(self.alpha) else self.alpha
        return {"alpha": alpha, "coef": self.coef, "tolerance": self.tolerance}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> EntropyTarget:
        alpha = config["alpha"]
        if isinstance(alpha, dict):
            alpha = keras.saving.deserialize_keras_object(alpha)
        return cls(**config | {"alpha": alpha})


class RowMeans:
    """Sums over the calls since the last reset, in variables that a compiled step can update."""

    def __init__(self) -> None:
        self.entropy, self.rows, self.term, self.calls = (
            keras.Variable(0.0, dtype="float32", trainable=False, name=name)
            for name in ("entropy_sum", "entropy_rows", "term_sum", "term_calls")
        )

    @property
    def variables(self) -> list[Any]:
        return [self.entropy, self.rows, self.term, self.calls]

    def add_entropy(self, entropy: Any, counted: Any) -> None:
        """Adds the rows of ``entropy`` in nats where ``counted`` (bool) says so."""
        if _keeps(entropy):
            rows = ops.cast(counted, "float32")
            entropy = ops.where(counted, ops.cast(entropy, "float32"), ops.zeros_like(rows))
            self.entropy.assign_add(ops.sum(ops.stop_gradient(entropy)))
            self.rows.assign_add(ops.sum(rows))

    def add_term(self, term: Any) -> None:
        """Adds the penalty of one call."""
        if _keeps(term):
            self.term.assign_add(ops.cast(ops.stop_gradient(term), "float32"))
            self.calls.assign_add(1.0)


class RowMean(keras.metrics.Metric):
    """A mean that a layer keeps itself, as a metric of ``fit`` and ``evaluate``: over an epoch, or one evaluation.

    On jax a compiled step cannot show a layer's sums: the progress bar has NaN, and the logs of the epoch the mean.
    """

    def __init__(self, name: str, variables: Callable[[], tuple[Any, Any]]) -> None:
        super().__init__(name=name)
        self._sum_and_count = variables

    def update_state(self, *args: Any, **kwargs: Any) -> None:
        raise InputError(f"{self.name} is kept by its layer: it takes no labels. Leave it out of compile(metrics=...).")

    def result(self) -> Any:
        if in_stateless_scope():
            return ops.convert_to_tensor(float("nan"), "float32")
        total, count = self._sum_and_count()
        return total / ops.maximum(count, 1.0)

    def reset_state(self) -> None:
        for variable in self._sum_and_count():
            variable.assign(0.0)


@keras.saving.register_keras_serializable(package=_PACKAGE)
class CrossAttention(keras.layers.Layer):
    """Attention of one sequence to another that adds the loss of its entropies to the model.

    As ``attemper.nn.CrossAttention``; its Dense layers hold the transposed weights of that. The loss is among
    ``model.losses`` after a call, and ``fit`` adds it; a training loop of your own adds ``sum(model.losses)`` inside
    the gradient's scope. ::

        layer = CrossAttention(num_heads=3, key_dim=16, entropy_regularizer=EntropyTarget(alpha=0.2))
        output, weights = layer(query, context, return_attention_scores=True)

    Args:
        num_heads: how many.
        key_dim: size of a head.
        entropy_regularizer: an :class:`EntropyTarget`, a number for its alpha in nats, or None for no loss.
        temperature: above 0; divides the scores. Below 1 sharpens.
        dropout: of the weights, in training; entropies are those before it.
        use_bias: of the projections.

    Metrics:
        ``fit`` and ``evaluate`` show two, named after the layer: ``NAME_entropy_nats``, the mean over heads and real
        queries that see a key, and, with a regulariser, ``NAME_entropy_term``, the mean of its loss over the batches.

    Attributes:
        steps: calls in training so far, if the target follows a schedule; saved with the model.

    Raises:
        InputError: a number of heads or a size that is not an int of at least 1, or a temperature that is not above 0.
    """

    def __init__(
        self,
        num_heads: int,
        key_dim: int,
        *,
        entropy_regularizer: EntropyTarget | float | None = None,
        temperature: float = 1.0,
        dropout: float = 0.0,
        use_bias: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        for name, value in (("num_heads", num_heads), ("key_dim", key_dim)):
            whole_number(f"CrossAttention({name}=...)", value)
        self.temperature = positive_number("CrossAttention(temperature=...)", temperature, "Below 1 sharpens.")
        if isinstance(entropy_regularizer, dict):
            entropy_regularizer = keras.saving.deserialize_keras_object(entropy_regularizer)
        elif isinstance(entropy_regularizer, int | float):
            entropy_regularizer = EntropyTarget(entropy_regularizer)
        self.num_heads, self.key_dim, self.use_bias, self.dropout = num_heads, key_dim, use_bias, dropout
        self.entropy_regularizer: Any = entropy_regularizer
        self.supports_masking = True
        self._means = RowMeans()
        self._entropy_metric = RowMean(f"{self.name}_entropy_nats", lambda: (self._means.entropy, self._means.rows))
        if entropy_regularizer is not None:
            self._term_metric = RowMean(f"{self.name}_entropy_term", lambda: (self._means.term, self._means.calls))

    @property
    def variables(self) -> list[Any]:
        """As of any layer, and the sums behind its metrics: state of a step, no weights, and not saved."""
        return [*super().variables, *self._means.variables]

    def build(self, query_shape: Sequence[int | None], context_shape: Sequence[int | None]) -> None:
        size = self.num_heads * self.key_dim
        inputs = {"query": query_shape, "key": context_shape, "value": context_shape}
        for name, shape in (inputs | {"output": (*query_shape[:-1], size)}).items():
            features = query_shape[-1] if name == "output" else size
            dense = keras.layers.Dense(features, use_bias=self.use_bias, dtype=self.dtype_policy, name=name)
            dense.build(shape)
            setattr(self, f"{name}_dense", dense)
        self.dropout_layer = keras.layers.Dropout(self.dropout, dtype=self.dtype_policy)
        self.steps = None
        if self.entropy_regularizer is not None and self.entropy_regularizer.scheduled:
            self.steps = self.add_weight(
                shape=(), initializer="zeros", dtype="int32", trainable=False, autocast=False, name="steps"
            )

    def call(
        self,
        query: Any,
        context: Any,
        query_mask: Any = None,
        context_mask: Any = None,
        attention_mask: Any = None,
        return_attention_scores: bool = False,
        training: bool | None = None,
    ) -> Any:
        """
        Args:
            query: [B, Q, features].
            context: [B, K, features of its own].
            query_mask: [B, Q] bool, True for real tokens: the others cost nothing. Keras passes it on from an
                embedding, and ``context_mask`` likewise.
            context_mask: [B, K] bool, True for real tokens: the others are not seen.
            attention_mask: bool, broadcastable to [B, heads, Q, K], or [B, Q, K]: True where a query sees a key.
            return_attention_scores: the weights, too.

        Returns:
            [B, Q, features], or ``(that, weights [B, heads, Q, K])``; weights are float32, before dropout.
        """
        q, k, v = (
            self._heads(dense(x))
            for dense, x in ((self.query_dense, query), (self.key_dense, context), (self.value_dense, context))
        )
        # In float32 from here to the weights, whatever the policy: a product in half precision overflows.
        wide = _statistics_dtype(self.compute_dtype)
        scores = ops.matmul(ops.cast(q, wide), ops.transpose(ops.cast(k, wide), (0, 1, 3, 2)))
        scores = scores * (self.key_dim**-0.5 / self.temperature)
        weights, entropy, valid = attention_weights(scores, _join_masks(context_mask, attention_mask))
        if query_mask is not None:
            valid = ops.logical_and(valid, ops.expand_dims(ops.cast(query_mask, "bool"), 1))
        counted = ops.broadcast_to(valid, ops.shape(entropy))
        self._means.add_entropy(entropy, counted)
        if self.entropy_regularizer is not None:
            self._add_entropy_loss(entropy, counted, bool(training))
        dropped = self.dropout_layer(ops.cast(weights, self.compute_dtype), training=training)
        heads = ops.transpose(ops.matmul(dropped, v), (0, 2, 1, 3))
        shape = ops.shape(heads)
        output = self.output_dense(ops.reshape(heads, (shape[0], shape[1], self.num_heads * self.key_dim)))
        return (output, weights) if return_attention_scores else output

    def compute_mask(self, inputs: Any, previous_mask: Any = None) -> Any:
        """That of the queries: the output has their tokens."""
        return previous_mask

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {
            "num_heads": self.num_heads,
            "key_dim": self.key_dim,
            "entropy_regularizer": keras.saving.serialize_keras_object(self.entropy_regularizer),
            "temperature": self.temperature,
            "dropout": self.dropout,
            "use_bias": self.use_bias,
        }

    def _heads(self, x: Any) -> Any:
        """[B, tokens, heads * size] -> [B, heads, tokens, size]."""
        shape = ops.shape(x)
        return ops.transpose(ops.reshape(x, (shape[0], shape[1], self.num_heads, self.key_dim)), (0, 2, 1, 3))

    def _add_entropy_loss(self, entropy: Any, counted: Any, training: bool) -> None:
        term = self.entropy_regularizer(entropy, counted, 0 if self.steps is None else self.steps)
        self._means.add_term(term)
        self.add_loss(term)
        if self.steps is not None and training:
            self.steps.assign(self.steps + 1)


def _join_masks(context_mask: Any, attention_mask: Any) -> Any:
    """Both masks as one, broadcastable to [B, H, Q, K]; None for none."""
    parts = []
    if context_mask is not None:
        parts.append(ops.expand_dims(ops.cast(context_mask, "bool"), (1, 2)))
    if attention_mask is not None:
        mask = ops.cast(attention_mask, "bool")
        parts.append(ops.expand_dims(mask, 1) if len(mask.shape) == 3 else mask)
    return ops.logical_and(*parts) if len(parts) == 2 else parts[0] if parts else None


def _keeps(value: Any) -> bool:
    """Whether a variable may take ``value``: not one that jax traces outside Keras's own steps, which would leak."""
    if keras.backend.backend() != "jax" or in_stateless_scope():
        return True
    import jax

    return not isinstance(value, jax.core.Tracer)


def _statistics_dtype(dtype: Any) -> str:
    return "float64" if keras.backend.standardize_dtype(dtype) == "float64" else "float32"
