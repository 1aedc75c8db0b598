"""What a call of the native kernels does without memory, and which libraries are refused when they are loaded."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attemper
from attemper import BackendError, functional
from attemper.backends.native import build, library
from tests.support.calls import PRESENT

pytestmark = [pytest.mark.each, pytest.mark.skipif("native" not in PRESENT, reason="native is not built")]


@pytest.fixture
def no_memory() -> Iterator[Callable[[int], None]]:
    """From the call on, no allocation of the library above so many bytes succeeds."""
    limit = library.library().attemper_limit_allocations
    yield limit
    limit(2**62)


def tensors(rows: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(1, 2, n, 16).to(dtype).requires_grad_() for n in (rows, 300, 300)]


def forward(rows: int, **options: object) -> Callable[[], object]:
    given = [tensor.detach() for tensor in tensors(rows)]
    return lambda: attemper.attention(*given, backend="native", **options)  # pyright: ignore[reportArgumentType]


def backward(rows: int, **options: object) -> Callable[[], object]:
    given = tensors(rows)
    output = attemper.attention(*given, backend="native", **options).output  # pyright: ignore[reportArgumentType]
    return lambda: torch.autograd.grad(output.sum(), given, retain_graph=True)


def half_precision() -> Callable[[], object]:
    query, key, value = tensors(40, torch.bfloat16)
    return lambda: attemper.attention(query, key, value, backend="native")


def gradient_of_scores() -> Callable[[], object]:
    scores = torch.randn(4, 2000, requires_grad=True)
    weights, above = functional.entmax15(scores), torch.randn(4, 2000)
    return lambda: torch.autograd.grad(weights, scores, above, retain_graph=True)


CALLS: dict[str, Callable[[], Callable[[], object]]] = {
    "tiles": lambda: forward(40),
    "half precision": half_precision,
    "few rows": lambda: forward(1),
    "rowwise": lambda: forward(40, normalizer="entmax15"),
    "gradient": lambda: backward(40),
    "gradient of few rows": lambda: backward(1),
    "gradient, rowwise": lambda: backward(40, normalizer="entmax15"),
    "weights of scores": lambda: lambda: functional.entmax15(torch.zeros(4, 2000)),
    "gradients of scores": gradient_of_scores,
}
ROOM = 1000


def first_of(result: Any) -> Tensor:
    """The weights of rows, or the first of several results."""
    return result if isinstance(result, Tensor) else result[0]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_gets_no_memory_says_so_and_the_next_one_computes_what_it_should(
    name: str, threads: int, no_memory: Callable[[int], None]
):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        call = CALLS[name]()
        want = first_of(call())
        no_memory(ROOM)
        with pytest.raises(MemoryError, match=r"'native'.*got no memory.*backend='blocked'"):
            call()
        no_memory(2**62)
        assert torch.equal(first_of(call()), want)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("optimize", [0, 2])
@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        (1, BackendError, r"attemper_forward.*was built for another version of attemper.*build_native\.py"),
        (2, MemoryError, r"attemper_forward.*no memory"),
        (3, BackendError, r"attemper_forward.*returned 3.*please report"),
    ],
)
def test_what_a_function_returns_is_checked_under_python_O_too(
    code: int, error: type[Exception], message: str, optimize: int
):
    compiled = compile(inspect.getsource(library), "library.py", "exec", optimize=optimize)
    names: dict = {"__file__": library.__file__, "__name__": "library"}
    exec(compiled, names)
    with pytest.raises(error, match=message):
        names["check"]("attemper_forward", code)
    names["check"]("attemper_forward", 0)


def test_the_layout_of_another_version_is_refused():
    with pytest.raises(BackendError, match="was built for another version of attemper"):
        library.run("attemper_forward", bytes(1000))


def test_the_loaded_library_is_of_the_sources_beside_it():
    stamp = library.stamp_of(library.library())
    assert stamp.split("-")[0] == build.hash_of_sources()
    assert stamp.endswith(f"-{attemper.__version__}")


@pytest.mark.parametrize("stamp", [f"0123456789abcdef-01-{attemper.__version__}", ""])
def test_a_library_from_other_sources_is_refused_with_what_to_do(stamp: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(library, "stamp_of", lambda loaded: stamp)
    library._load.cache_clear()
    try:
        told = re.escape(stamp[:12] or "?")
        with pytest.warns(RuntimeWarning, match=rf"not used.*built from other sources.*{told}.*build_native\.py"):
            reason = library.why_unusable()
        assert reason is not None
        with pytest.raises(BackendError, match=r"other sources.*pip install --force-reinstall attemper"):
            library.library()
    finally:
        library._load.cache_clear()


def test_an_install_without_sources_takes_libraries_of_its_own_version_only(tmp_path: Path):
    path = Path("attemper_native_avx2.so")
    assert library.why_foreign(path, f"0123-01-{attemper.__version__}", tmp_path) is None
    for stamp, told in {"0123-01-0.0.9": "0.0.9", "0123-01": r"\?", "": r"\?"}.items():
        reason = library.why_foreign(path, stamp, tmp_path)
        assert re.search(rf"says version {told}, and version {attemper.__version__} is needed", str(reason))
