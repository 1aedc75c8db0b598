"""Mutants of the kernels: each table breaks one thing at a time, and some test must notice."""
