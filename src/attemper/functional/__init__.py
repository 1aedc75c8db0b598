"""Functions of tensors: attention with statistics, and measures of scores and weights."""

from attemper.functional.attention import attention, attention_statistics, dense_weights, varlen_attention
from attemper.functional.measures import (
    effective_tokens,
    entropy,
    entropy_of,
    gini,
    logit_variance,
    max_weight,
    softmax,
    softmax_jacobian,
    statistics,
)
from attemper.functional.stats import AttentionOutput, AttentionStats, HeadSummary, VisibleKeyCurve

__all__ = [
    "AttentionOutput",
    "AttentionStats",
    "HeadSummary",
    "VisibleKeyCurve",
    "attention",
    "attention_statistics",
    "dense_weights",
    "effective_tokens",
    "entropy",
    "entropy_of",
    "gini",
    "logit_variance",
    "max_weight",
    "softmax",
    "softmax_jacobian",
    "statistics",
    "varlen_attention",
]
