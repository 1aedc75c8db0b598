"""Modules for attention: temperatures, normalizers, and attention layers that use them."""

from attemper.nn.attention import CrossAttention, MultiheadAttention
from attemper.nn.bounds import bounded_exponential
from attemper.nn.linear import LinearAttention
from attemper.nn.normalizers import (
    Entmax,
    Entmax15,
    Normalizer,
    ScalableSoftmax,
    Sigmoid,
    Sink,
    Softmax,
    SoftmaxPlusOne,
    Sparsemax,
    Threshold,
    TopK,
)
from attemper.nn.temperature import (
    ConditionalTemperature,
    FixedTemperature,
    LearnedTemperature,
    LengthTemperature,
    ProductTemperature,
    ScheduledTemperature,
    Temperature,
)

__all__ = [
    "ConditionalTemperature",
    "CrossAttention",
    "Entmax",
    "Entmax15",
    "FixedTemperature",
    "LearnedTemperature",
    "LengthTemperature",
    "LinearAttention",
    "MultiheadAttention",
    "Normalizer",
    "ProductTemperature",
    "ScalableSoftmax",
    "ScheduledTemperature",
    "Sigmoid",
    "Sink",
    "Softmax",
    "SoftmaxPlusOne",
    "Sparsemax",
    "Temperature",
    "Threshold",
    "TopK",
    "bounded_exponential",
]
