"""The table of backends: what is resolved, what is refused, and that a refusal names one that can."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

import attemper
from attemper import BackendError, InputError
from attemper.backends import blocked, table
from attemper.backends.reference import softmax
from attemper.backends.table import BACKENDS, FEATURES, Inputs, resolve
from attemper.call import known_requests

TRITON = ["triton"] if find_spec("triton") else []
PRESENT = [backend.name for backend in BACKENDS if backend.missing is None]
MISSING = [backend.name for backend in BACKENDS if backend.missing is not None]


ON_CPU = "native" if "native" in PRESENT else "blocked"


def install(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A machine that has this backend, whatever this one has."""
    there = tuple(replace(backend, missing=None) if backend.name == name else backend for backend in BACKENDS)
    monkeypatch.setattr(table, "BACKENDS", there)


@pytest.fixture(autouse=True)
def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call is checked against the table as it is then."""
    monkeypatch.setattr(known_requests, "KNOWN", known_requests.KnownRequests())


def test_auto_takes_the_first_of_the_table_that_can():
    assert ["blocked", "reference", *TRITON] == [name for name in PRESENT if name != "native"]
    assert resolve("auto", frozenset()).name == ON_CPU
    of_formulas = {"second_derivative", "derivative_in_graph"}
    assert resolve("auto", frozenset(FEATURES) - of_formulas).name == "blocked"
    assert {resolve("auto", frozenset({feature})).name for feature in of_formulas} == {"reference"}
    assert resolve("auto", frozenset({"second_derivative"})).name == "reference"


def test_auto_takes_the_native_kernels_on_a_cpu_for_what_they_can_do(monkeypatch: pytest.MonkeyPatch):
    install(monkeypatch, "native")
    assert resolve("native", frozenset({"causal"})).name == "native"
    assert resolve("auto", frozenset({"causal"})).name == "native"
    for needed, given in (
        ({"dropout"}, Inputs()),
        ({"second_pass"}, Inputs()),
        (set(), Inputs("float64")),
        (set(), Inputs(size=257)),
        (set(), Inputs(device="mps")),
        ({"normalizer"}, Inputs(normalizer="relu")),
    ):
        assert resolve("auto", frozenset(needed), given).name == "blocked"


@pytest.mark.parametrize("name", MISSING)
def test_a_backend_that_is_not_there_is_refused_and_one_that_can_is_named(name: str):
    query = torch.zeros(1, 1, 2, 4)
    reason = {"triton": "the package triton is not installed: pip install", "native": "not built"}[name]
    with pytest.raises(
        BackendError, match=rf"backend='{name}' cannot serve this call: {reason}.*Use backend='blocked' or 'auto'"
    ):
        attemper.attention(query, query, query, backend=name)


@pytest.mark.parametrize(
    ("name", "needed", "message"),
    [
        ("auto", {"mask", "flying"}, "no backend can do flying, mask in one call"),
        ("blocked", {"mask", "second_derivative"}, r"it has no second_derivative\. Use backend='reference'"),
        ("reference", {"flying"}, r"it has no flying\. No other backend can either"),
    ],
)
def test_a_backend_without_a_feature_is_refused_and_one_that_has_it_is_named(name: str, needed: set[str], message: str):
    refused = "" if name == "auto" else f"backend='{name}' cannot serve this call: "
    with pytest.raises(BackendError, match=refused + message):
        resolve(name, frozenset(needed))


@pytest.mark.parametrize("function", ["attention", "attention_statistics", "varlen_attention"])
def test_an_unknown_backend_is_a_mistake_of_the_caller(function: str):
    dense, packed, offsets = torch.zeros(1, 1, 2, 4), torch.zeros(2, 1, 4), torch.tensor([0, 2])
    arguments = {
        "attention": (dense, dense, dense),
        "attention_statistics": (dense, dense),
        "varlen_attention": (packed, packed, packed, offsets, offsets),
    }[function]
    with pytest.raises(
        InputError, match=r"backend must be 'auto' or one of 'blocked', 'reference', .*got 'cuda'\. `attemper doctor`"
    ):
        getattr(attemper, function)(*arguments, backend="cuda")


CALLS = {
    "mask": {"attn_mask": torch.ones(2, 2, dtype=torch.bool)},
    "bias": {"attn_mask": torch.zeros(2, 2)},
    "causal": {"is_causal": True},
    "window": {"window_size": (1, 1)},
    "softcap": {"softcap": 5.0},
    "sink": {"sink_logits": torch.zeros(2)},
    "dropout": {"dropout_p": 0.5},
    "temperature": {"temperature": torch.ones(2, 1)},
    "second_pass": {"stats": ("gini",)},
    "score_variance": {"stats": ("score_variance",)},
    "self_weight": {"stats": ("self_weight",)},
    "span_mass": {"stats": ("span_mass",), "spans": [(0, 0)]},
    "gqa": {"enable_gqa": True},
}


@pytest.mark.parametrize("feature", CALLS)
def test_a_call_asks_for_the_features_that_it_uses(feature: str, monkeypatch: pytest.MonkeyPatch):
    without = tuple(replace(backend, features=backend.features - {feature}) for backend in BACKENDS)
    monkeypatch.setattr(table, "BACKENDS", without)
    query = torch.zeros(1, 2, 2, 4)
    with pytest.raises(BackendError, match=rf"no backend can do .*{feature}"):
        attemper.attention(query, query, query, **CALLS[feature])
    attemper.attention(query, query, query, stats="all")


def test_what_a_backend_claims_is_known():
    for backend in BACKENDS:
        assert backend.features <= set(FEATURES), backend.name
        assert bool(backend.missing) == (backend.name in MISSING)


def test_explicit_backends_are_never_replaced(monkeypatch: pytest.MonkeyPatch):
    used, kernel, scores = [], blocked.forward, softmax.scores
    monkeypatch.setattr(blocked, "forward", lambda problem: used.append("blocked") or kernel(problem))
    monkeypatch.setattr(softmax, "scores", lambda *args: used.append("reference") or scores(*args))
    query = torch.zeros(1, 1, 2, 4)
    for name in ("reference", "blocked", "auto"):
        attemper.attention(query, query, query, stats=("entropy", "gini"), backend=name)  # gini: not for native
    assert used == ["reference", "blocked", "blocked"]


GPU = Inputs("bfloat16", "cuda", 128)


@pytest.fixture
def with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "triton")


def test_auto_takes_triton_on_a_gpu_and_never_on_a_cpu(with_triton: None):
    assert resolve("auto", frozenset({"causal", "varlen", "statistics_gradient"}), GPU).name == "triton"
    assert resolve("auto", frozenset(), replace(GPU, device="cpu")).name == ON_CPU
    assert resolve("auto", frozenset(), replace(GPU, device="mps")).name == "blocked"


@pytest.mark.parametrize(
    ("needed", "given", "reason"),
    [
        ({"dropout"}, GPU, "it has no dropout"),
        ({"second_pass"}, GPU, "it has no second_pass"),
        (set(), replace(GPU, dtype="float64"), "it takes float16, bfloat16, float32, not float64"),
        (set(), replace(GPU, size=257), "it takes head sizes up to 256, not 257"),
        ({"normalizer"}, replace(GPU, normalizer="relu"), "it has no normalizer 'relu'"),
        (set(), replace(GPU, device="cpu"), "its tensors must be on cuda, and these are on cpu"),
    ],
    ids=["dropout", "second pass", "float64", "head size", "normalizer", "device"],
)
def test_triton_refuses_what_it_cannot_do_by_name_and_blocked_does_it_on_a_gpu_too(
    needed: set[str], given: Inputs, reason: str, with_triton: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(
        BackendError, match=rf"'triton' cannot serve this call: {reason}\. Use backend='(blocked|native)'"
    ):
        resolve("triton", frozenset(needed), given)
    assert resolve("auto", frozenset(needed), given).name == (ON_CPU if given.device == "cpu" else "blocked")


def test_interpreted_triton_takes_tensors_of_the_cpu_where_it_is_named(with_triton: None, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert resolve("triton", frozenset(), replace(GPU, device="cpu")).name == "triton"
    assert resolve("auto", frozenset(), replace(GPU, device="cpu")).name == ON_CPU


@pytest.mark.parametrize(("dtype", "size"), [(torch.float64, 4), (torch.float32, 257)], ids=["float64", "head size"])
def test_a_call_tells_the_backend_what_its_tensors_are(dtype: torch.dtype, size: int, with_triton: None):
    query = torch.zeros(1, 1, 2, size, dtype=dtype)
    with pytest.raises(BackendError, match=r"backend='triton' cannot serve this call: it takes .*, not (float64|257)"):
        attemper.attention(query, query, query, backend="triton")
    small, wide = torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 257)
    with pytest.raises(BackendError, match=r"not 257"):
        attemper.attention(small, small, wide, backend="triton")


def test_a_library_that_cannot_be_loaded_leaves_auto_to_blocked_and_is_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    install(monkeypatch, "native")
    assert resolve("auto", frozenset()).name == "native"
    monkeypatch.setitem(table.UNUSABLE, "native", "its library cannot be loaded (no symbol)")
    assert resolve("auto", frozenset()).name == "blocked"
    query = torch.zeros(1, 1, 2, 4)
    assert attemper.attention(query, query, query).output.shape == query.shape
    with pytest.raises(BackendError, match=r"cannot be loaded \(no symbol\)\. Use backend='blocked'"):
        attemper.attention(query, query, query, backend="native")
