"""Measurements, each a program.

A package: one of this name in an environment (pyarrow 17 brings it) would otherwise be imported in its place.
"""
