"""Modules that hold options of attention: temperatures in every form."""

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
    "FixedTemperature",
    "LearnedTemperature",
    "LengthTemperature",
    "ProductTemperature",
    "ScheduledTemperature",
    "Temperature",
    "bounded_exponential",
]
