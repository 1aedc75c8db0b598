"""Modules that hold options of attention: temperatures in every form, and attention layers that take them."""

from attemper.nn.attention import CrossAttention, MultiheadAttention
from attemper.nn.bounded import bounded_exponential
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
    "FixedTemperature",
    "LearnedTemperature",
    "LengthTemperature",
    "MultiheadAttention",
    "ProductTemperature",
    "ScheduledTemperature",
    "Temperature",
    "bounded_exponential",
]
