"""Watching and scanning models: what their heads do, reduced while they run, and what is alarming about it."""
