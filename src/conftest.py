"""Doctests are looked for in every module; some can only be imported where a package of theirs is."""

from __future__ import annotations

from importlib.util import find_spec

_NEEDS = {"triton": "attemper/backends/triton/*", "keras": "attemper/integrations/keras.py"}
collect_ignore_glob = [path for package, path in _NEEDS.items() if find_spec(package) is None]
