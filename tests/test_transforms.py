"""Forward mode, ``torch.func`` and derivatives of derivatives: right on every backend, or refused by name.

Tangents are held against central differences of the reference in float64, which no rule of differentiation enters;
what is mapped, against a loop of plain calls; Hessians, against the reference's, by plain autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import attemper
from attemper import BackendError, InputError, nn
from attemper.call.transforms import constant_in_graphs
from tests.support.calls import DTYPES, FEATURES, PRESENT, known

pytestmark = [
    pytest.mark.usefixtures("interpreted"),
    # PyTorch's own, when it loads its rules for forward mode.
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),
]

Tensors = tuple[Tensor, ...]
Function = Callable[..., Tensors]

BACKENDS = tuple(name for name in PRESENT if name != "reference")
NORMALIZERS: dict[str, Any] = {
    "softmax": "softmax", "softmax_plus_one": "softmax_plus_one", "scalable_softmax": "scalable_softmax",
    "sigmoid": "sigmoid", "sparsemax": "sparsemax", "entmax15": "entmax15", "entmax": None, "topk": nn.TopK(3),
    "threshold": nn.Threshold(0.1),
}  # fmt: skip
"""Of entmax, alpha is learned: one of the tensors."""
HEADS, KEYS = 4, 6
STEP = 1e-6
EXACT = 1e-8
"""Of a central difference in float64: 2^-53 / STEP times results of a few tens. Of fourth order, it knows a weight near
the edge of a support, where log w bends most, as well.
"""
ROUNDED = 2 * KEYS**2 * 2.0**-24
"""Of float32: a result and its tangent are rounded, and 1 / c^2, up to KEYS^2, multiplies that of the effective tokens.
"""


MORE = [pytest.mark.long("more cases in Triton's interpreter")]
QUICK = [pytest.param(name, marks=MORE if name == "triton" else []) for name in PRESENT]


def with_normalizers(names: Iterable[str], quick: tuple[str, ...] = ("softmax",)) -> pytest.MarkDecorator:
    """Every backend with every normalizer; of the interpreter, which is slow, all but ``quick`` wait for ``--long``."""
    pairs = [
        pytest.param(backend, name, marks=MORE if backend == "triton" and name not in quick else [])
        for backend in PRESENT
        for name in names
    ]
    return pytest.mark.parametrize(("backend", "name"), pairs)


def tensors(dtype: torch.dtype = torch.float64, seed: int = 0, batch: int = 2) -> Tensors:
    """Query, key, value, mask, temperature, and what is learned per head: sink, alpha or nothing."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((batch, HEADS, 5, 4), (batch, 2, KEYS, 4), (batch, 2, KEYS, 3), (1, HEADS, 5, KEYS), (HEADS, 1), (HEADS,))
    found = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    found[4] = found[4].abs() + 0.5
    found[5] = found[5].abs() / 4 + 1.2
    return tuple(tensor.to(dtype) for tensor in found)


def attended(backend: str, name: str, stats: Any = "all", **options: Any) -> Function:
    """Output and the statistics asked for that have a gradient, of a causal call with grouped heads and a softcap."""

    def call(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, temperature: Tensor, learned: Tensor) -> Tensors:
        given: dict[str, Any] = {"normalizer": NORMALIZERS[name], **options}
        if name == "softmax":
            given["sink_logits"] = learned
        if name == "entmax":
            given["normalizer"] = OfTensor(learned)
        found = attemper.attention(
            query, key, value, mask, is_causal=True, softcap=5.0, enable_gqa=True, temperature=temperature,
            stats=stats, backend=backend, **given,
        )  # fmt: skip
        measured = known(found.stats)
        asked = [each for each in measured if stats == "all" or each in stats]  # the rest is kept without a gradient
        values = [measured[each] for each in asked if measured[each].is_floating_point()]
        return (found.output, *values)

    return call


class OfTensor(torch.nn.Module):
    """Entmax of an alpha that is given."""

    def __init__(self, alpha: Tensor) -> None:
        super().__init__()
        self.given = (alpha,)

    def normalization(self) -> Any:
        from attemper.call.normalizer import entmax

        return entmax(self.given[0])


def type_of(backend: str) -> torch.dtype:
    return torch.float64 if "float64" in DTYPES[backend] else torch.float32


def differences(function: Function, at: Tensors, along: Tensors) -> Tensors:
    """The derivative of ``function`` along a direction, by central differences of fourth order."""
    near, far = (
        [
            (one - two) / (2 * step)
            for one, two in zip(*(function(*moved(at, along, way)) for way in (step, -step)), strict=True)
        ]
        for step in (STEP, 2 * STEP)
    )
    return tuple((4 * one - two) / 3 for one, two in zip(near, far, strict=True))


def moved(at: Tensors, along: Tensors, step: float) -> Tensors:
    return tuple(each + step * way for each, way in zip(at, along, strict=True))


def duals(function: Function, at: Tensors, along: Tensors) -> Tensors:
    """Tangents by ``forward_ad``; zeros where there is none."""
    with forward_ad.dual_level():
        found = function(*(forward_ad.make_dual(each, way) for each, way in zip(at, along, strict=True)))
        parts = [forward_ad.unpack_dual(each) for each in found]
        return tuple(torch.zeros_like(part.primal) if part.tangent is None else part.tangent for part in parts)


def tangent_of(dual: Tensor) -> Tensor:
    """What ``forward_ad`` knows of a tensor that has a tangent."""
    found = forward_ad.unpack_dual(dual).tangent
    assert found is not None
    return found


def assert_near(found: Any, expected: Any, tolerance: float) -> None:
    """Each within ``tolerance`` of its largest entry, or of 1."""
    assert len(found) == len(expected)
    for place, (one, two) in enumerate(zip(found, expected, strict=True)):
        assert one.shape == two.shape
        assert one.isfinite().all(), place
        allowed = tolerance * (1 + float(two.abs().amax())) if two.numel() else 0.0
        torch.testing.assert_close(one.double(), two.double(), rtol=0, atol=allowed, msg=lambda m, p=place: f"{p}: {m}")


def tolerance_of(backend: str) -> float:
    return EXACT if type_of(backend) == torch.float64 else ROUNDED


@with_normalizers(NORMALIZERS, quick=())
@pytest.mark.quick("blocked", "native-softmax", "native-entmax15", "reference-softmax")
@pytest.mark.turns(2)
def test_tangents_of_output_and_statistics_are_differences_of_the_reference(backend: str, name: str):
    at, along = tensors(), tensors(seed=1)
    want = differences(attended("reference", name), at, along)
    dtype = type_of(backend)
    at, along = tuple(each.to(dtype) for each in at), tuple(each.to(dtype) for each in along)
    call = attended(backend, name)
    results, tangents = torch.func.jvp(call, at, along)[:2]
    assert_near(tangents, want, tolerance_of(backend))
    assert all(tangent.dtype == result.dtype for tangent, result in zip(tangents, results, strict=True))
    for one, two in zip(duals(call, at, along), tangents, strict=True):
        assert torch.equal(one, two)
    assert_near(results, call(*at), 1e-6)


@pytest.mark.parametrize("backend", [name for name in PRESENT if "second_pass" in FEATURES[name]])
@pytest.mark.parametrize("name", ["softmax", "entmax15"])
def test_tangents_of_gini_key_mass_and_distance_are_differences(backend: str, name: str):
    at, along = tensors(), tensors(seed=1)
    stats = ("gini", "key_mass", "mean_distance")
    want = differences(attended("reference", name, stats), at, along)
    assert_near(torch.func.jvp(attended(backend, name, stats), at, along)[1], want, EXACT)


@pytest.mark.parametrize("name", ["softmax", "entmax15"])
def test_the_tangent_under_dropout_is_that_of_the_weights_that_were_kept(name: str):
    at, along = tensors(), tensors(seed=1)
    dropped = attended("blocked", name, dropout_p=0.4)

    def call(*given: Tensor) -> Tensors:
        torch.manual_seed(5)
        return dropped(*given)

    assert_near(torch.func.jvp(call, at, along)[1], differences(call, at, along), EXACT)


def test_a_tangent_in_tiles_is_that_of_the_whole(tiled: Any):
    at, along = tensors(), tensors(seed=1)
    stats = ("entropy", "gini", "key_mass")
    want = torch.func.jvp(attended("blocked", "softmax", stats), at, along)[1]
    tiled(2, 3, 12)
    assert_near(torch.func.jvp(attended("blocked", "softmax", stats), at, along)[1], want, EXACT)


@with_normalizers(["softmax", "sparsemax"])
def test_rows_without_keys_and_what_is_hidden_have_no_part_in_a_tangent(backend: str, name: str):
    dtype = type_of(backend)
    query, key, value, *_ = (each.detach().clone() for each in tensors(dtype))
    key[:, :, -1] = torch.nan
    seen = torch.ones(5, KEYS, dtype=torch.bool)
    seen[:, -1], seen[2] = False, False

    def call(query: Tensor, key: Tensor) -> Tensors:
        found = attemper.attention(
            query, key, value, seen, enable_gqa=True, normalizer=name, stats=("entropy", "mean_logit"), backend=backend
        )
        return found.output, known(found.stats).entropy, known(found.stats).mean_logit

    along = tensors(dtype, seed=1)[:2]
    for tangent in torch.func.jvp(call, (query, key), along)[1]:
        assert tangent.isfinite().all()
        assert not tangent[:, :, 2].any()
        assert tangent[:, :, 1].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tangent_of_half_precision_is_rounded_once(backend: str):
    at, along = tensors(torch.bfloat16), tensors(torch.bfloat16, seed=1)
    want = torch.func.jvp(
        attended("reference", "softmax"), tuple(each.double() for each in at), tuple(each.double() for each in along)
    )[1]
    tangents = torch.func.jvp(attended(backend, "softmax"), at, along)[1]
    assert tangents[0].dtype == torch.bfloat16
    assert_near(tangents[:1], want[:1], 2.0**-8)


MAPPED = ((0,) * 6, (0, 0, 0, None, None, None), (1, 0, 0, 0, None, None), (None, 0, None, None, 0, None),
          (None, None, None, 0, None, 0))  # fmt: skip


@with_normalizers(["softmax", "scalable_softmax", "sigmoid", "entmax"], quick=())
@pytest.mark.quick("blocked", "native-softmax")
@pytest.mark.turns(2)
def test_mapped_calls_and_gradients_per_sample_are_those_of_a_loop(backend: str, name: str):
    call = attended(backend, name, ("entropy", "max_weight", "first_token_mass"))
    samples = [tensors(torch.float32, seed) for seed in range(2)]

    def loss(*given: Tensor) -> Tensor:
        return sum((part.square() * 0.5).sum() for part in call(*given))  # pyright: ignore[reportReturnType]

    grads = torch.func.grad(loss, argnums=tuple(range(6)))
    for places in MAPPED if backend != "triton" else MAPPED[:1]:
        each = [
            tuple(
                mine if place is not None else all_ for mine, all_, place in zip(some, samples[0], places, strict=True)
            )
            for some in samples
        ]
        given = [
            samples[0][number] if place is None else torch.stack([some[number] for some in samples], place)
            for number, place in enumerate(places)
        ]
        together = torch.func.vmap(call, in_dims=places)(*given)
        assert_near(together, [torch.stack(parts) for parts in zip(*(call(*some) for some in each), strict=True)], 1e-6)
        per_sample = torch.func.vmap(grads, in_dims=places)(*given)
        loops = [plain_gradient(loss, some) for some in each]
        assert_near(per_sample, [torch.stack(parts) for parts in zip(*loops, strict=True)], 1e-6)


def plain_gradient(loss: Callable[..., Tensor], at: Tensors) -> Tensors:
    leaves = [each.detach().clone().requires_grad_() for each in at]
    found = torch.autograd.grad(loss(*leaves), leaves, allow_unused=True)
    return tuple(torch.zeros_like(leaf) if part is None else part for part, leaf in zip(found, leaves, strict=True))


def small_loss(backend: str, name: str = "softmax", stats: Any = ("entropy",)) -> Callable[[Tensor], Tensor]:
    """Of one tensor as query, key and value."""

    def loss(x: Tensor) -> Tensor:
        found = attemper.attention(x, x.sin(), x, normalizer=NORMALIZERS[name], stats=stats, backend=backend)
        return (found.output.sin().sum() + known(found.stats).entropy.square().sum()).to(x.dtype)

    return loss


def hessian_of(name: str, x: Tensor) -> Tensor:
    return torch.autograd.functional.hessian(small_loss("reference", name), x.double())  # pyright: ignore


ORDERS: dict[str, Callable[..., Any]] = {
    "tangent of a gradient": torch.func.hessian,
    "tangent of a tangent": lambda f: torch.func.jacfwd(torch.func.jacfwd(f)),
    "gradient of a tangent": lambda f: torch.func.jacrev(torch.func.jacfwd(f)),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["softmax", "entmax15"])
@pytest.mark.parametrize("backend", [*(name for name in BACKENDS if name != "triton"), "auto"])
@pytest.mark.grid
@pytest.mark.turns(2)
def test_second_derivatives_with_forward_mode_are_the_hessian(backend: str, name: str, order: str):
    dtype = torch.float32 if backend == "auto" else type_of(backend)
    x = torch.randn(1, 1, 4, 3, dtype=dtype)
    want = hessian_of(name, x)
    tolerance = EXACT if dtype == torch.float64 else ROUNDED
    assert_near([ORDERS[order](small_loss(backend, name))(x)], [want], tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_gradient_of_a_gradient_is_refused_by_name_and_taken_by_auto(backend: str):
    x = torch.randn(1, 1, 4, 3)
    with pytest.raises(BackendError, match=r"second_derivative.*backend='reference'"):
        torch.func.jacrev(torch.func.jacrev(small_loss(backend)))(x)
    found = torch.func.jacrev(torch.func.jacrev(small_loss("auto")))(x)
    assert_near([found], [hessian_of("softmax", x)], ROUNDED)


@pytest.mark.parametrize("backend", [name for name in PRESENT if name != "triton"])
def test_duals_meet_plain_autograd_in_both_orders(backend: str):
    dtype = type_of(backend)
    x, way = torch.randn(1, 1, 4, 3, dtype=dtype), torch.randn(1, 1, 4, 3, dtype=dtype)
    want = (hessian_of("softmax", x).reshape(12, 12) @ way.double().flatten()).view_as(x)
    loss, leaf = small_loss(backend), x.clone().requires_grad_()
    with forward_ad.dual_level():
        tangent = tangent_of(loss(forward_ad.make_dual(leaf, way)))
        (reverse_of_forward,) = torch.autograd.grad(tangent, leaf)
        dual = forward_ad.make_dual(leaf, way)
        (gradient,) = torch.autograd.grad(loss(dual), dual, create_graph=True)
        forward_of_reverse = tangent_of(gradient)
    assert_near([reverse_of_forward, forward_of_reverse], [want, want], tolerance_of(backend))


@pytest.mark.parametrize("backend", [name for name in PRESENT if name != "triton"])
def test_a_tangent_that_comes_from_above_passes_through_a_graph_made_before(backend: str):
    x = torch.randn(1, 2, 4, 3, dtype=type_of(backend)).requires_grad_()
    output = attemper.attention(x, x, x, backend=backend).output
    above = torch.randn_like(output)
    (want,) = torch.autograd.grad(output, x, above, retain_graph=True)
    with forward_ad.dual_level():
        (found,) = torch.autograd.grad(output, x, forward_ad.make_dual(torch.ones_like(above), above))
        tangent = tangent_of(found)
    assert_near([tangent], [want], tolerance_of(backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_batch_of_gradients_in_one_backward_pass_is_refused(backend: str):
    x = torch.randn(1, 2, 4, 3).requires_grad_()
    output = attemper.attention(x, x, x, backend=backend).output
    with pytest.raises(BackendError, match=r"is_grads_batched.*torch\.func\.jacrev.*backend='reference'"):
        torch.autograd.grad(output, x, torch.ones(2, *output.shape), is_grads_batched=True)


OFFSETS = torch.tensor([0, 2, 2, 5], dtype=torch.int32)


def packed(backend: str) -> Callable[[Tensor], Tensors]:
    def call(x: Tensor) -> Tensors:
        found = attemper.varlen_attention(
            x, x.sin(), x, OFFSETS, OFFSETS, is_causal=True, causal_alignment="bottom-right", stats="all",
            backend=backend,
        )  # fmt: skip
        return found.output, known(found.stats).entropy, known(found.stats).max_weight

    return call


@pytest.mark.parametrize("backend", QUICK)
def test_packed_documents_have_tangents_and_gradients_per_sample(backend: str):
    dtype = type_of(backend)
    x, way = torch.randn(2, 5, 2, 4, dtype=dtype), torch.randn(5, 2, 4, dtype=dtype)
    want = differences(packed("reference"), (x[0].double(),), (way.double(),))
    assert_near(torch.func.jvp(packed(backend), (x[0],), (way,))[1], want, tolerance_of(backend))

    def loss(x: Tensor) -> Tensor:
        return sum(part.square().sum() for part in packed(backend)(x))  # pyright: ignore[reportReturnType]

    per_sample = torch.func.vmap(torch.func.grad(loss))(x)
    assert_near(per_sample, [plain_gradient(loss, (each,))[0] for each in x], 1e-6)


@pytest.mark.parametrize("backend", PRESENT)
def test_offsets_of_documents_cannot_be_mapped(backend: str):
    def call(x: Tensor, offsets: Tensor) -> Tensor:
        return attemper.varlen_attention(x, x, x, offsets, offsets, backend=backend).output

    with pytest.raises(InputError, match=r"cu_seqlens_q=\.\.\.\) must be the same.*in_dims=None"):
        torch.func.vmap(call)(torch.randn(2, 5, 2, 4), OFFSETS.expand(2, 4))


@pytest.mark.parametrize("rows", [None, 3])
@pytest.mark.parametrize("backend", PRESENT)
@pytest.mark.turns(2)
def test_statistics_alone_have_tangents_and_are_mapped(backend: str, rows: int | None):
    dtype = type_of(backend)

    def measured(chosen: str) -> Callable[..., Tensors]:
        def call(query: Tensor, key: Tensor) -> Tensors:
            start = torch.Generator().manual_seed(3)
            stats = attemper.attention_statistics(
                query, key, is_causal=True, rows=rows, generator=start, backend=chosen
            )
            return stats.entropy, stats.logit_variance, stats.effective_tokens

        return call

    (query, key, way_q, way_k) = torch.randn(4, 2, 1, 2, 7, 4, dtype=dtype)
    at, along = (query[0], key[0]), (way_q[0], way_k[0])
    want = differences(measured("reference"), (at[0].double(), at[1].double()), (along[0].double(), along[1].double()))
    assert_near(torch.func.jvp(measured(backend), at, along)[1], want, tolerance_of(backend))
    loops = [measured(backend)(*pair) for pair in zip(query, key, strict=True)]
    if rows is None:  # torch.vmap lets nobody draw a number
        together = torch.func.vmap(measured(backend))(query, key)
        assert_near(together, [torch.stack(parts) for parts in zip(*loops, strict=True)], 1e-6)


@pytest.mark.parametrize("name", ["softmax", "topk"])
def test_dense_weights_have_tangents_and_are_mapped(name: str):
    def call(query: Tensor, key: Tensor) -> Tensors:
        return (attemper.functional.dense_weights(query, key, enable_gqa=True, normalizer=NORMALIZERS[name]),)

    at, along = tensors()[:2], tensors(seed=1)[:2]
    assert_near(torch.func.jvp(call, at, along)[1], differences(call, at, along), EXACT)
    given = [torch.stack(pair) for pair in zip(at, along, strict=True)]
    assert_near(torch.func.vmap(call)(*given)[0], [call(*at)[0], call(*along)[0]], 1e-12)


SHARED: dict[str, Callable[[], Tensor]] = {
    "a mask for the batch": lambda: torch.rand(2, 1, 1, KEYS) < 0.7,
    "a mask for all": lambda: torch.randn(5, KEYS),
    "a bias for the batch": lambda: torch.randn(2, HEADS, 5, KEYS),
}


@pytest.mark.parametrize("mask", SHARED)
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "triton"])
def test_what_samples_share_has_its_own_gradient_in_each(backend: str, mask: str):
    shared = SHARED[mask]()

    def call(query: Tensor, key: Tensor, shared: Tensor) -> Tensors:
        found = attemper.attention(
            query, key, key, shared, enable_gqa=True, stats=("entropy", "first_token_mass"), backend=backend
        )
        return found.output, known(found.stats).entropy, known(found.stats).first_token_mass

    def loss(*given: Tensor) -> Tensor:
        return sum(part.square().sum() for part in call(*given))  # pyright: ignore[reportReturnType]

    given = [torch.stack(pair) for pair in zip(tensors(torch.float32)[:2], tensors(torch.float32, 1)[:2], strict=True)]
    loops = [call(query, key, shared) for query, key in zip(*given, strict=True)]
    together = torch.func.vmap(call, (0, 0, None))(given[0], given[1], shared)
    assert_near(together, [torch.stack(parts) for parts in zip(*loops, strict=True)], 1e-6)
    wanted = (0, 1, 2) if shared.dtype.is_floating_point else (0, 1)
    gradients: Any = torch.func.grad(loss, wanted)
    per_sample = torch.func.vmap(gradients, (0, 0, None))(*given, shared)
    loops = [gradients(query, key, shared) for query, key in zip(*given, strict=True)]
    assert_near(per_sample, [torch.stack(parts) for parts in zip(*loops, strict=True)], 1e-6)


def test_the_mark_is_that_of_pytorch():
    ours, theirs = (lambda: 1), (lambda: 1)
    assert constant_in_graphs(ours) is ours
    assert vars(ours) == vars(torch.compiler.assume_constant_result(theirs))
    assert vars(ours)


def test_a_graph_holds_the_answer_and_not_the_question():
    asked: list[int] = []

    @constant_in_graphs
    def many() -> int:
        asked.append(1)
        return 3

    compiled = torch.compile(lambda x: x * many(), fullgraph=True, backend="eager")
    for _ in range(2):
        assert compiled(torch.ones(())) == 3
    assert len(asked) == 1
