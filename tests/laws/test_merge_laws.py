"""The law of merging: parts of the keys, in any grouping, give what the whole gives, results and gradients."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attemper.statistics import ONE_PASS, TABLE
from tests.laws.rows import BACKENDS, attended, close, rows
from tests.support.calls import Result

NAMES = ONE_PASS + ("support_size", "entropy_with_sink", "score_variance")
pytestmark = [pytest.mark.parametrize("backend", BACKENDS), pytest.mark.quick("blocked")]


@st.composite
def parts(draw: st.DrawFn, number: int) -> list[Tensor]:
    """Scores of ``number`` consecutive groups of keys, of the same rows, some groups hidden from some rows."""
    whole = draw(rows(least=number, most=4 * number))
    sizes = [1 + draw(st.integers(0, 3)) for _ in range(number)]
    cut = torch.cat([whole] * 4, 1)[:, : sum(sizes)]
    result = list(cut.split(sizes, 1))
    hidden = draw(st.lists(st.integers(0, number - 1), max_size=number))
    for group in hidden:
        result[group] = result[group].clone()
        result[group][draw(st.integers(0, len(whole) - 1))] = -torch.inf
    return result


def values_of(groups: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 1, g.shape[1], 3, dtype=torch.float64, generator=generator) for g in groups]


def same(one: Result, two: Result, but: tuple[str, ...] = ()) -> None:
    close(one.output, two.output, "output")
    assert one.stats.names == two.stats.names
    for name in one.stats:
        if name not in but:
            close(one.stats[name], two.stats[name], name, 1e-11)
    assert torch.equal(one.stats.valid, two.stats.valid)


@given(groups=parts(2))
def test_two_parts_merge_to_the_whole(backend: str, groups: list[Tensor]):
    values = values_of(groups)
    one, two = (attended(g, backend, v, stats=NAMES) for g, v in zip(groups, values, strict=True))
    whole = attended(torch.cat(groups, 1), backend, torch.cat(values, 2), stats=NAMES)
    same(one.merge(two), whole)


@given(groups=parts(1))
def test_a_part_that_sees_nothing_is_the_identity(backend: str, groups: list[Tensor]):
    value = values_of(groups)[0]
    one = attended(groups[0], backend, value, stats=NAMES)
    nothing = attended(torch.full_like(groups[0], -torch.inf), backend, value, stats=NAMES)
    for merged in (one.merge(nothing), nothing.merge(one)):
        same(merged, one)
    both = nothing.merge(nothing)
    assert both.stats.empty.all()
    assert (both.output == 0).all()
    assert (both.stats.lse == -math.inf).all()


@given(groups=parts(2), gap=st.sampled_from([0.0, 50.0, 1e3, 1e6]))
def test_parts_far_apart_merge_without_overflow(backend: str, groups: list[Tensor], gap: float):
    groups = [groups[0], groups[1] + gap]
    values = values_of(groups)
    one, two = (attended(g, backend, v, stats=NAMES) for g, v in zip(groups, values, strict=True))
    whole = attended(torch.cat(groups, 1), backend, torch.cat(values, 2), stats=NAMES)
    merged = one.merge(two)
    close(merged.output, whole.output, "output", 1e-9)
    for name in whole.stats:
        close(merged.stats[name], whole.stats[name], name, 1e-9)


@given(groups=parts(2), sunk=st.integers(0, 1), sink=st.floats(-20, 20, width=32))
def test_a_sink_given_to_one_part_counts_once(backend: str, groups: list[Tensor], sunk: int, sink: float):
    values, logit = values_of(groups), torch.tensor([sink], dtype=torch.float64)
    options = [{"sink_logits": logit} if place == sunk else {} for place in range(2)]
    one, two = (attended(g, backend, v, stats=NAMES, **o) for g, v, o in zip(groups, values, options, strict=True))
    whole = attended(torch.cat(groups, 1), backend, torch.cat(values, 2), stats=NAMES, sink_logits=logit)
    same(one.merge(two), whole)


@given(groups=parts(2), seed=st.integers(0, 9))
def test_gradients_flow_through_a_merge_as_through_the_whole(backend: str, groups: list[Tensor], seed: int):
    generator = torch.Generator().manual_seed(seed)
    leaves = [g.clone().requires_grad_() for g in groups]
    values = [v.requires_grad_() for v in values_of(groups)]
    one, two = (attended(g, backend, v, stats=NAMES) for g, v in zip(leaves, values, strict=True))
    whole = attended(torch.cat(leaves, 1), backend, torch.cat(values, 2), stats=NAMES)
    names = [name for name in (*ONE_PASS, "score_variance") if name not in ("visible_keys", "mass")]
    above = {name: torch.randn(whole.stats.lse.shape, generator=generator, dtype=torch.float64) for name in names}
    # Rows that see nothing have no gradient; a tie for the maximum between parts has no single one.
    tied = leaves[0].max(1).values == leaves[1].max(1).values
    keep = ((whole.stats.visible_keys > 0) & ~tied).double()
    grads = []
    for result in (one.merge(two), whole):
        results = [result.output, *(result.stats[name] for name in names)]
        upstream = [torch.ones_like(result.output) * keep[..., None], *(above[name] * keep for name in names)]
        grads.append(torch.autograd.grad(results, [*leaves, *values], upstream))
    for merged, direct in zip(*grads, strict=True):
        close(merged, direct, "gradient", 1e-9)


@given(groups=parts(2))
def test_max_logit_of_a_merge_has_its_gradient_or_none_at_all(backend: str, groups: list[Tensor]):
    # Kept for merging but not asked for, it may be detached; a gradient of 0 would be silently wrong.
    leaves = [g.masked_fill(g == -torch.inf, 0.0).requires_grad_() for g in groups]
    values = values_of(groups)
    one, two = (attended(g, backend, v, stats=("entropy",)) for g, v in zip(leaves, values, strict=True))
    maximum = one.merge(two).stats.max_logit
    if maximum.requires_grad:
        grads = torch.autograd.grad(maximum.sum(), leaves, allow_unused=True)
        assert sum(0.0 if g is None else g.sum().item() for g in grads) == len(leaves[0])


@pytest.mark.parametrize("name", [row.name for row in TABLE if not row.mergeable])
def test_what_two_parts_do_not_determine_is_refused(backend: str, name: str):
    one = attended(torch.zeros(3, 3, dtype=torch.float64), backend, stats=(name,))
    with pytest.raises(ValueError, match=rf"{name} cannot be merged over keys"):
        one.merge(one)
