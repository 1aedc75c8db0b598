"""Random calls against an independent float64 oracle: ``pytest tests/fuzz --fuzz 20000``, from seed ``--fuzz-from``.

A failure prints the call and the command that redoes it. What a call may be stands in ``draws``, what may be wrong with
a right result in ``oracle.Rounding``.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

import attemper
from tests.fuzz.__main__ import backends
from tests.fuzz.check import findings

CHUNK = 20
"""Calls of one test. Tests of what is found begin a little before a seed that shows it."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "first" in metafunc.fixturenames:
        firsts = range(*_span(metafunc.config), CHUNK)
        metafunc.parametrize("first", firsts, ids=[f"seeds from {first}" for first in firsts])


def _span(config: pytest.Config) -> tuple[int, int]:
    """(first seed, the one after the last)."""
    calls = int(config.getoption("--fuzz") or (1000 if config.getoption("--all") else 40))
    start = int(str(config.getoption("--fuzz-from")))
    return start, start + calls


def test_random_calls_give_what_the_oracle_gives(first: int, interpreted: None, request: pytest.FixtureRequest):
    last = min(first + CHUNK, _span(request.config)[1])
    found = [line for seed in range(first, last) for line in findings(seed, backends())]
    wrong = [line for line in found if not line.startswith("refused")]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("factor", [1 + 1e-3, -1.0, float("nan")])
@pytest.mark.quick("1.001")
def test_a_wrong_output_is_found(factor: float, monkeypatch: pytest.MonkeyPatch):
    right = attemper.attention

    def wrong(*args: Any, **kwargs: Any) -> Any:
        result = right(*args, **kwargs)
        return result._replace(output=result.output * factor)

    monkeypatch.setattr(attemper, "attention", wrong)
    assert any("output is" in line for seed in range(3, 33) for line in findings(seed, ("blocked",)))


def test_the_weight_of_other_keys_than_the_marked_is_found(monkeypatch: pytest.MonkeyPatch):
    right = attemper.attention

    def wrong(*args: Any, **kwargs: Any) -> Any:
        spans = kwargs.get("spans")
        return right(*args, **kwargs | ({"spans": ~spans} if isinstance(spans, Tensor) else {}))

    monkeypatch.setattr(attemper, "attention", wrong)
    assert any(line.startswith("span_mass is off") for seed in range(44, 104) for line in findings(seed, ("blocked",)))


def test_a_wrong_gradient_is_found(monkeypatch: pytest.MonkeyPatch):
    right = attemper.attention

    def wrong(query: Any, *args: Any, **kwargs: Any) -> Any:
        if query.requires_grad:
            query = query * 1.0
            query.register_hook(lambda grad: grad * (1 + 2.0**-6))
        return right(query, *args, **kwargs)

    monkeypatch.setattr(attemper, "attention", wrong)
    lines = (line for seed in range(31, 71) for line in findings(seed, ("reference",)))
    assert any(line.startswith("gradient of query") for line in lines)
