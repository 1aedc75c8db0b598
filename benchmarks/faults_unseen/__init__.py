"""Faults and harmless changes of models, written from the documentation of ``attemper.explain`` alone."""
