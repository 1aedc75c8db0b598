"""Doctests are looked for in every module; those of the Triton kernels can only be imported where Triton is."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("triton") else ["attemper/kernels/triton/*"]
