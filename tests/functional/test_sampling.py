"""``attention_statistics(rows=)``: which rows are read, that the estimate has no bias, and that its error is told."""

import math
from typing import Any

import numpy as np
import pytest
import torch

import attemper
from attemper import InputError
from attemper.call.attention import measurement, run
from attemper.call.packing import Packing
from attemper.call.request import Options
from tests.support.calls import had

pytestmark = pytest.mark.each

Q, K = 23, 29


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 3, Q, 8, generator=generator) * 2, torch.randn(2, 3, K, 8, generator=generator)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "bottom-right": {"is_causal": True, "causal_alignment": "bottom-right"},
    "window": {"window_size": (3, 2), "causal_alignment": "bottom-right"},
    "mask": {"attn_mask": torch.arange(Q * K).view(Q, K) % 3 > 0},
    "bias per head": {"attn_mask": torch.linspace(-2, 2, 3 * Q * K).view(3, Q, K)},
    "temperature per row": {"temperature": torch.linspace(0.5, 2, Q).view(1, 1, Q)},
    "temperature per head": {"temperature": torch.tensor([[0.5], [1.0], [2.0]])},
    "sink, softcap": {"sink_logits": torch.zeros(3), "softcap": 4.0},
}


@pytest.mark.parametrize("what", OPTIONS)
@pytest.mark.parametrize("rows", [1, 5, 22])
@pytest.mark.turns(2)
def test_sampled_rows_read_as_they_do_among_all(what: str, rows: int, backend: str):
    query, key = tensors()
    names = ("all", *had(backend, ("mean_distance", "gini", "entropy_with_sink")))
    whole = attemper.attention_statistics(query, key, stats=names, backend=backend, **OPTIONS[what])
    part = attemper.attention_statistics(query, key, stats=names, backend=backend, rows=rows, **OPTIONS[what])
    assert part.rows is not None
    assert whole.rows is None
    assert len(part.rows) == rows == len(part.rows.unique())
    assert part.rows.tolist() == sorted(part.rows.tolist())
    assert 0 <= part.rows.min() <= part.rows.max() < Q
    assert (part.lower_bounds, whole.lower_bounds) == (("max_logit",), ())
    for name in part:
        torch.testing.assert_close(part[name], whole[name][:, :, part.rows], rtol=1e-5, atol=1e-6, msg=name)


def test_a_sample_of_all_rows_or_more_is_all_rows(backend: str):
    query, key = tensors()
    whole = attemper.attention_statistics(query, key, backend=backend)
    for rows in (Q, Q + 1, 10**6):
        part = attemper.attention_statistics(query, key, rows=rows, backend=backend)
        assert part.rows is None
        assert part.lower_bounds == ()
        assert torch.equal(part.entropy, whole.entropy)
        assert (part.standard_error()["entropy"] == 0).all()


@pytest.mark.parametrize("rows", [1, 7, 22])
@pytest.mark.quick("7")
def test_every_row_is_read_equally_often(rows: int):
    query, key = torch.zeros(1, 1, Q, 1), torch.zeros(1, 1, 2, 1)
    generator, runs = torch.Generator().manual_seed(0), 800
    counts = np.zeros(Q)
    for _ in range(runs):
        sample = attemper.attention_statistics(query, key, stats=("lse",), rows=rows, generator=generator).rows
        assert sample is not None
        counts[sample.numpy()] += 1
    # Each row is in a sample with probability rows / Q: binomial, 5 standard deviations of the worst of 23.
    share = rows / Q
    assert np.abs(counts - runs * share).max() <= 5 * math.sqrt(runs * share * (1 - share))


def test_the_mean_of_samples_is_the_mean_of_all_rows_and_the_standard_error_covers_it():
    generator = torch.Generator().manual_seed(1)
    query, key = torch.randn(1, 1, 2000, 8, generator=generator) * 2, torch.randn(1, 1, 50, 8, generator=generator)
    truth = attemper.attention_statistics(query, key, stats=("entropy",)).per_head()["entropy"].mean.item()
    means, errors = [], []
    for _ in range(200):
        stats = attemper.attention_statistics(query, key, stats=("entropy",), rows=20, generator=generator)
        means.append(stats.per_head()["entropy"].mean.item())
        errors.append(stats.standard_error()["entropy"].item())
    means, errors = np.array(means), np.array(errors)
    standard = means.std() / math.sqrt(len(means))
    assert abs(means.mean() - truth) <= 4 * standard, (
        f"mean of samples {means.mean()}, of all rows {truth} +- {standard}"
    )
    covered = (np.abs(means - truth) <= 2 * errors).mean()
    assert covered >= 0.9, f"two standard errors covered {covered:.0%} of the samples"
    # A stride of 100 makes 100 different samples: their spread is known to 1 / sqrt(2 x 99) = 7%, taken twice.
    ratio = errors.mean() / means.std()
    assert 0.79 <= ratio <= 1.21, f"the standard error is {ratio} times the spread of the samples"


def test_the_standard_error_is_that_of_a_sample_without_replacement():
    query, key = tensors()
    stats = attemper.attention_statistics(query, key, is_causal=True, rows=6, stats=("entropy", "normalized_entropy"))
    for name, error in stats.standard_error().items():
        for head in range(3):
            values = stats[name][:, head][stats.defined_rows(name)[:, head]].double()
            want = values.std(correction=1) / math.sqrt(len(values)) * math.sqrt(1 - 6 / Q)
            torch.testing.assert_close(error[head], want, msg=name)


def test_a_generator_makes_the_sample_repeatable():
    query, key = tensors()

    def rows(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        sample = attemper.attention_statistics(query, key, rows=4, generator=generator).rows
        assert sample is not None
        return sample.tolist()

    assert rows(1) == rows(1)
    assert len({tuple(rows(seed)) for seed in range(20)}) > 1
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    rows(3)
    assert torch.equal(torch.random.get_rng_state(), before), "a generator was given, and the global one was used"


@pytest.mark.parametrize("rows", [0, -1, 2.5, True, "8"], ids=repr)
def test_a_number_of_rows_that_is_none_is_refused(rows: Any):
    with pytest.raises(
        InputError, match=r"attention_statistics\(rows=\.\.\.\) must be an int of at least 1, or None for all rows, got"
    ):
        attemper.attention_statistics(*tensors(), rows=rows)


def test_padding_is_told_from_all_rows_and_not_from_the_sampled_ones(backend: str):
    # Key 0 is seen by row 0 alone: no padding, even where row 0 is not in the sample.
    mask = torch.ones(Q, K, dtype=torch.bool)
    mask[1:, 0] = False
    query, key = tensors()
    part = attemper.attention_statistics(
        query, key, mask, rows=3, generator=torch.Generator().manual_seed(0), backend=backend
    )
    assert part.rows is not None
    assert part.rows[0] > 0
    assert (part.first_token_mass == 0).all()


@pytest.mark.parametrize("alignment", ["top-left", "bottom-right"])
@pytest.mark.parametrize("rows", [1, 2, 5, 19])
@pytest.mark.parametrize("name", ["reference", "blocked", "triton"])
@pytest.mark.usefixtures("interpreted")
def test_sampled_rows_of_packed_documents_read_as_they_do_among_all(name: str, rows: int, alignment: str):
    if name == "triton":
        pytest.importorskip("triton")
    generator = torch.Generator().manual_seed(1)
    query, key = (torch.randn(1, 2, tokens, 16, generator=generator) for tokens in (20, 24))
    # One document has no queries, one is shorter than the distance between sampled rows.
    packing = Packing(torch.tensor([0, 7, 7, 9, 20]), torch.tensor([0, 9, 10, 14, 24]))
    options = Options(
        stats="all", is_causal=True, causal_alignment=alignment, window_size=(4, -1), first_tokens=2, backend=name
    )
    whole = run(measurement(query, key, None, options, packing=packing)).stats
    part = run(measurement(query, key, None, options, packing=packing, rows=rows)).stats
    assert whole is not None
    assert part is not None
    assert part.rows is not None
    assert len(part.rows) == rows == len(part.rows.unique())
    for statistic in part:
        torch.testing.assert_close(part[statistic], whole[statistic][:, :, part.rows], rtol=1e-5, atol=1e-6)
