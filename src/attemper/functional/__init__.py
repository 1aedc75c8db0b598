"""Functions of tensors: attention with statistics, and measures of scores and weights."""

from attemper.call.result import AttentionOutput, AttentionStats, HeadSummary, VisibleKeyCurve
from attemper.former import FormerModule
from attemper.functional.attention import attention, attention_statistics, dense_weights, varlen_attention
from attemper.functional.information import (
    RateDistortion,
    kl_to_uniform,
    mutual_information,
    pac_bayes_bound,
    rate_distortion,
)
from attemper.functional.linear import LinearOutput, linear_attention
from attemper.functional.linear_state import LinearState
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
from attemper.functional.normalizers import (
    entmax,
    entmax15,
    entmax_iterations,
    scalable_softmax,
    sigmoid,
    softmax_plus_one,
    softmax_with_sink,
    sparsemax,
    threshold_softmax,
    topk_softmax,
)
from attemper.functional.temperature_of_entropy import entropy_slope, length_temperature, temperature_for_entropy
from attemper.functional.temperature_search import SolvedTemperature

FormerModule("attemper.functional.sparse", "attemper.functional.normalizers")

__all__ = [
    "AttentionOutput",
    "AttentionStats",
    "HeadSummary",
    "LinearOutput",
    "LinearState",
    "RateDistortion",
    "SolvedTemperature",
    "VisibleKeyCurve",
    "attention",
    "attention_statistics",
    "dense_weights",
    "effective_tokens",
    "entmax",
    "entmax15",
    "entmax_iterations",
    "entropy",
    "entropy_bonus",
    "entropy_diversity",
    "entropy_of",
    "entropy_slope",
    "entropy_target",
    "gini",
    "kl_to_uniform",
    "length_temperature",
    "linear_attention",
    "logit_variance",
    "max_weight",
    "mutual_information",
    "pac_bayes_bound",
    "rate_distortion",
    "scalable_softmax",
    "sigmoid",
    "softmax",
    "softmax_jacobian",
    "softmax_plus_one",
    "softmax_with_sink",
    "sparsemax",
    "statistics",
    "temperature_for_entropy",
    "threshold_softmax",
    "topk_softmax",
    "varlen_attention",
    "z_loss",
]
