"""Tests of what was read."""
