"""Tensors that put off writing their numbers: a sign (``conj().imag``), or zeros, that are not in their memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attemper
from attemper import functional
from tests.support.calls import attended, packed
from tests.support.fixtures import BACKENDS

pytestmark = [pytest.mark.each, pytest.mark.hostile]

SHAPES = {
    "query": (1, 2, 5, 8), "key": (1, 2, 6, 8), "value": (1, 2, 6, 4), "attn_mask": (5, 6), "temperature": (2, 5),
    "sink_logits": (2,),
}  # fmt: skip
PLACES = (*SHAPES, "upstream")


def negated(tensor: Tensor, *, contiguous: bool = False) -> Tensor:
    """The same numbers, whose sign is not in memory: every other number of a complex tensor, or one after another."""
    every_other = torch.complex(torch.zeros(tensor.shape), -tensor.float()).conj().imag
    lazy = torch._neg_view(-tensor) if contiguous else every_other  # pyright: ignore[reportPrivateImportUsage]
    assert lazy.is_neg()
    assert torch.equal(lazy, tensor)
    return lazy


def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    drawn = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    return drawn | {"temperature": drawn["temperature"].abs() + 0.5, "upstream": torch.randn(1, 2, 5, 4)}


def results(backend: str, given: dict[str, Tensor], normalizer: str = "softmax") -> list[Tensor]:
    """Output, statistics and gradients, and the output again without a graph."""
    leaves = {name: given[name].detach().requires_grad_() for name in SHAPES if name in given}
    options: dict[str, Any] = {"normalizer": normalizer}
    output, stats = attended(backend, **leaves, **options)
    grads = torch.autograd.grad(output, list(leaves.values()), given["upstream"])
    with torch.no_grad():
        plain = {name: given[name] for name in leaves}
        return [output, *(stats[name] for name in stats), *grads, attended(backend, **plain, **options).output]


def assert_same(found: list[Tensor], wanted: list[Tensor]) -> None:
    for one, two in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, two)


def assert_signs_are_read(backend: str, places: tuple[str, ...]) -> None:
    given = tensors()
    wanted = results(backend, given)
    for contiguous in (True, False):
        lazy = {name: negated(given[name], contiguous=contiguous) for name in places}
        assert_same(results(backend, given | lazy), wanted)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.turns(2)
def test_a_tensor_that_is_negated_lazily_is_read_with_its_sign(place: str, backend: str):
    assert_signs_are_read(backend, (place,))


def test_all_tensors_together_are_read_with_their_signs(backend: str):
    assert_signs_are_read(backend, PLACES)


@pytest.mark.parametrize("place", [place for place in PLACES if place != "temperature"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.turns(2)
def test_zeros_that_have_no_memory_are_zeros(place: str, backend: str):
    given = tensors()
    shape = given[place].shape
    nothing = torch._efficientzerotensor(shape)  # pyright: ignore[reportPrivateImportUsage]
    assert_same(results(backend, given | {place: nothing}), results(backend, given | {place: torch.zeros(shape)}))


def test_rowwise_normalizers_read_the_sign_too(backend: str):
    given = {name: tensor for name, tensor in tensors().items() if name != "sink_logits"}
    lazy = {name: negated(tensor) for name, tensor in given.items()}
    assert_same(results(backend, lazy, "entmax15"), results(backend, given, "entmax15"))


def test_packed_documents_read_signs_and_offsets(backend: str):
    given = tensors()
    q, k, v = (given[name][0].transpose(0, 1) for name in ("query", "key", "value"))
    starts = torch.tensor([0, 2, 5]), torch.tensor([0, 4, 6])
    wanted = packed(backend, q, k, v, *starts)
    lazy = (negated(part, contiguous=True) for part in starts)
    found = packed(backend, negated(q), negated(k), negated(v), *lazy)
    assert_same([found.output, found.stats.entropy], [wanted.output, wanted.stats.entropy])


def test_a_gradient_comes_back_through_the_lazy_view():
    imaginary = torch.randn(1, 1, 5, 8)
    real = imaginary.clone().requires_grad_()
    leaf = torch.complex(torch.zeros_like(imaginary), -imaginary).requires_grad_()
    for query in (leaf.conj().imag, real):
        attemper.attention(query, query, query).output.square().sum().backward()
    assert leaf.grad is not None
    assert real.grad is not None
    torch.testing.assert_close(-leaf.grad.imag, real.grad)


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    **{name: getattr(functional, name) for name in ("softmax", "sparsemax", "entmax15", "sigmoid", "entropy")},
    "entmax": lambda scores: functional.entmax(scores, alpha=negated(torch.tensor([1.3]), contiguous=True)),
    "topk_softmax": lambda scores: functional.topk_softmax(scores, 3),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.turns(2)
def test_functions_on_scores_read_the_sign(name: str):
    scores = torch.randn(4, 7)
    above = torch.randn(FUNCTIONS[name](scores).shape)
    found = []
    lazily = partial(negated, contiguous=True)
    for given, upstream in ((scores, above), (lazily(scores), lazily(above))):
        leaf = given.detach().requires_grad_()
        result = FUNCTIONS[name](leaf)
        found.append([result, *torch.autograd.grad(result, leaf, upstream)])
    assert_same(*found)


def test_addresses_are_taken_in_one_place_which_knows_of_lazy_tensors():
    """Or where two addresses are compared, or one is part of a key together with the sign."""
    root = Path(attemper.__file__).parent
    taken = [
        f"{path.relative_to(root)}: {line.strip()}"
        for path in sorted(root.rglob("*.py"))
        for line in path.read_text("utf-8").splitlines()
        if "data_ptr(" in line and ".data_ptr() == " not in line and "is_neg()" not in line
    ]
    assert taken == ["backends/native/arguments.py: return tensor.data_ptr()"]
