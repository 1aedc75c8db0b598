"""Runs a case: the snippet as printed, then with the imports that it forgets, then every step."""

from __future__ import annotations

import io
import math
import warnings
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import attemper
from attemper import functional
from tests.articles.case import SNIPPETS, Case, Step

IMPORTS = {
    "torch": "import torch",
    "F": "import torch.nn.functional as F",
    "nn": "from torch import nn",
    "math": "import math",
    "np": "import numpy as np",
    "sqrt": "from math import sqrt",
    "defaultdict": "from collections import defaultdict",
    "tf": "from tests.articles.tensorflow_stand_in import tf",
    "layers": "from tests.articles.tensorflow_stand_in import layers",
}
"""What an article may take for granted: the name, and how it comes."""

MODEL = """\
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.3)).eval()
tokens = torch.randint(50, (2, 12))
"""
"""The small model of the cases that need one."""


@dataclass
class Run:
    """What came of a case."""

    complaints: list[str] = field(default_factory=list)
    """Errors of the snippet as printed, in the order in which they show, each mended before the next."""
    forgotten: list[str] = field(default_factory=list)
    """Names that it takes for granted, of :data:`IMPORTS`."""
    failure: str = ""
    """The error that is left, imports and inputs given."""
    printed: str = ""
    """What the snippet itself prints."""
    outputs: list[str] = field(default_factory=list)
    """Of each step."""
    here: str = ""
    names: dict[str, Any] = field(default_factory=dict)
    """What the steps hold at the end: ``article`` is the snippet as a module."""


class _MissingName(Exception):
    """The snippet asks for a name that it never made."""

    def __init__(self, error: NameError) -> None:
        super().__init__(said(error))
        self.name = error.name


@cache
def run_of(case: Case) -> Run:
    """Runs it once; the runs of a process share the result."""
    run = Run()
    if not case.snippet:
        _play(case, run)
        return run
    if case.restored is not None:
        run.complaints.append(_syntax_error(case))
    inputs = ""
    while True:
        try:
            _play(case, run, inputs)
            return run
        except _MissingName as missing:
            run.complaints.append(str(missing))
            if missing.name in IMPORTS:
                run.forgotten.append(missing.name)
            else:
                inputs = case.inputs


def require_empty_weights() -> None:
    """Skips where this transformers gives None for the weights of an SDPA model, on which the articles' code fails."""
    names: dict[str, Any] = {"torch": torch}
    exec(MODEL, names)
    if names["model"](names["tokens"], output_attentions=True).attentions is None:
        pytest.skip("this transformers gives None for the weights of an SDPA model; the pages have what () gives")


def said(error: BaseException) -> str:
    """The last line of its traceback."""
    return f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}"


def _syntax_error(case: Case) -> str:
    try:
        compile(case.file.read_text(encoding="utf-8"), case.name, "exec")
    except SyntaxError as error:
        return said(error)
    raise AssertionError(f"{case.name} compiles as printed: it needs no restored version")


def _play(case: Case, run: Run, inputs: str = "") -> None:
    torch.manual_seed(0)
    run.outputs, run.failure, run.printed = [], "", ""
    run.names = {"math": math, "np": np, "torch": torch, "attemper": attemper, "functional": functional}
    if case.snippet:
        run.names["article"] = _loaded(case, run, inputs)
    elif case.file.exists():
        run.printed = run.names["printed"] = case.source
    if case.needs_model:
        exec(MODEL, run.names)
    run.outputs = [_output(case, run, step, inputs) for step in case.steps]
    run.here = _output(case, run, case.here, inputs)


def _loaded(case: Case, run: Run, inputs: str) -> ModuleType:
    """The snippet as a module, as a script would be run."""
    article = ModuleType("__main__")
    for name in run.forgotten:
        exec(IMPORTS[name], article.__dict__)
    for name in case.builds_on:
        article.__dict__.update(_definitions(name))
    printed = io.StringIO()
    with redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(inputs, article.__dict__)
        run.failure = _guarded(case, run, inputs, case.source, article.__dict__)
    run.printed = printed.getvalue()
    return article


def _definitions(name: str) -> dict[str, Any]:
    """What an earlier snippet of the document defines, its own imports seen to."""
    names: dict[str, Any] = {}
    for line in IMPORTS.values():
        exec(line, names)
    given = set(names)
    restored = SNIPPETS / f"{name}.restored.txt"
    path = restored if restored.exists() else SNIPPETS / f"{name}.txt"
    exec(compile(path.read_text(encoding="utf-8"), f"<{name}>", "exec"), names)
    return {defined: value for defined, value in names.items() if defined not in given}


def _output(case: Case, run: Run, step: Step, inputs: str) -> str:
    printed = io.StringIO()
    with redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        error = _guarded(case, run, inputs, step.code, run.names)
    return "\n".join(part for part in (printed.getvalue().rstrip(), error) if part)


def _guarded(case: Case, run: Run, inputs: str, code: str, names: dict[str, Any]) -> str:
    """Runs code; what it raises comes back as text, unless the article forgot a name that can be given."""
    try:
        exec(compile(code, f"<{case.name}>", "exec"), names)
    except NameError as error:
        given = error.name in run.forgotten or (error.name not in IMPORTS and (inputs or not case.inputs))
        if not given:
            raise _MissingName(error) from error
        return said(error)
    except Exception as error:
        return said(error)
    return ""
