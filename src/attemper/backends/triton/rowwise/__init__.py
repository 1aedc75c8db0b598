"""Kernels of normalizers that need all keys of a row."""
