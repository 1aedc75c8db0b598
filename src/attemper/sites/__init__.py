"""Attention sites of models that exist: find them, name them, see what they compute."""
