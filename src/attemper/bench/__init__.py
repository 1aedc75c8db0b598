"""Attention with statistics beside what people run without them, measured on this machine.

``attention`` checks one call against float64 and times it beside others; ``timing`` runs ways in turns, and a training
step with and without a watch; ``hardware`` is the machine. ``attemper bench`` and ``benchmarks/`` print what they find.
"""
