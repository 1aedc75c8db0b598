"""Fingerprints of a model's attention over some tokens, and what explains the difference of two. Loads no torch."""
