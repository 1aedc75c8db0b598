"""Functions of tensors: attention with statistics, and measures of scores and weights."""

from attemper.functional.attention import attention, attention_statistics, dense_weights, varlen_attention
from attemper.functional.information import (
    RateDistortion,
    kl_to_uniform,
    mutual_information,
    pac_bayes_bound,
    rate_distortion,
)
from attemper.functional.length import length_temperature
from attemper.functional.losses import entropy_bonus, entropy_diversity, entropy_target, z_loss
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
from attemper.functional.slope import entropy_slope
from attemper.functional.solve import SolvedTemperature, temperature_for_entropy
from attemper.functional.stats import AttentionOutput, AttentionStats, HeadSummary, VisibleKeyCurve

__all__ = [
    "AttentionOutput",
    "AttentionStats",
    "HeadSummary",
    "RateDistortion",
    "SolvedTemperature",
    "VisibleKeyCurve",
    "attention",
    "attention_statistics",
    "dense_weights",
    "effective_tokens",
    "entropy",
    "entropy_bonus",
    "entropy_diversity",
    "entropy_of",
    "entropy_slope",
    "entropy_target",
    "gini",
    "kl_to_uniform",
    "length_temperature",
    "logit_variance",
    "max_weight",
    "mutual_information",
    "pac_bayes_bound",
    "rate_distortion",
    "softmax",
    "softmax_jacobian",
    "statistics",
    "temperature_for_entropy",
    "varlen_attention",
    "z_loss",
]
