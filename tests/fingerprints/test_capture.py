"""What a fingerprint keeps, against direct computations on the model's own attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import attemper
from attemper.errors import InputError
from attemper.fingerprints.site import GRAMS, OFFSETS, VECTOR_ROWS, projection
from tests.support.engine_faults import FAULTS
from tests.support.engine_models import padded, tiny, tokens


def test_rows_are_those_of_eager_attention():
    model = tiny("llama", layers=2, kernel="eager").model
    batch = tokens()
    found = attemper.fingerprint(model, [batch])
    with torch.no_grad():
        weights = model(**batch, output_attentions=True).attentions
    for site, expected in zip(found.sites, weights, strict=True):
        for row, (sequence, place) in enumerate(site.rows):
            own = expected[sequence, :, place].double()
            np.testing.assert_allclose(site.statistics["self_weight"][:, row], own[:, place], atol=2e-6)
            np.testing.assert_allclose(site.statistics["first_token_mass"][:, row], own[:, 0], atol=2e-6)
            assert (site.counts["argmax"][:, row] == own.argmax(-1).numpy()).all()
            assert (site.counts["visible_keys"][:, row] == place + 1).all()
            final, lse = site.final[:, row, 0], site.statistics["lse"][:, row]
            np.testing.assert_allclose(np.exp(final - lse), own[:, place], atol=2e-6)
            assert site.pair_keys[row, 1] == place - OFFSETS[1]
        np.testing.assert_allclose(site.output, site.recomputed, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_the_vectors_and_final_scores_follow_from_them(dtype: torch.dtype):
    site = attemper.fingerprint(tiny("gemma2", layers=2, dtype=dtype).model, [tokens(sequences=1)]).sites[0]
    places, compared = site.rows[:, 1].tolist(), 0
    for number, place in enumerate(VECTOR_ROWS):
        if place not in places:
            continue
        row, key = places.index(place), np.repeat(site.key, site.heads // site.kv_heads, 0)[:, number]
        own = (site.query[:, number].astype(np.float64) * key).sum(-1)
        limit = np.nanmax(np.abs(site.raw[:, row]), -1) * (2.0**-15 if dtype == torch.bfloat16 else 2.0**-23)
        assert (np.abs(site.raw[:, row, 0] - own) <= limit).all()
        compared += 1
    assert compared >= 3
    multiplier, shown = site.statistics["multiplier"].astype(np.float64)[..., None], np.isfinite(site.final)
    assert site.softcap is not None
    expected = site.softcap * np.tanh(multiplier * site.raw / site.softcap)
    np.testing.assert_array_equal(site.final[shown], expected.astype(np.float32)[shown])


def test_what_another_grouping_would_give_is_kept_where_an_output_is_not_its_own():
    model, batch = tiny("llama", layers=2, kernel="eager"), tokens()
    assert all(np.isnan(site.tiled).all() for site in attemper.fingerprint(model.model, [batch]).sites)
    fault = next(one for one in FAULTS if one.kind == "grouping")
    with fault.patch(model, [0, 1], 0.0):
        site = attemper.fingerprint(model.model, [batch]).sites[0]
    np.testing.assert_allclose(site.output, site.tiled, rtol=1e-4, atol=1e-4)
    assert not np.allclose(site.output, site.recomputed, rtol=1e-2)


def test_padding_and_its_side_and_the_split_of_batches_change_no_row():
    model = tiny("qwen3", layers=2).model
    left, right = padded(side="left"), padded(side="right")
    lengths = left["attention_mask"].sum(1).tolist()
    for number, length in enumerate(lengths):
        right["input_ids"][number, :length] = left["input_ids"][number, -length:]
    one, other = (attemper.fingerprint(model, [batch]) for batch in (left, right))
    alone = [{"input_ids": left["input_ids"][number : number + 1, -length:]} for number, length in enumerate(lengths)]
    apart = attemper.fingerprint(model, alone)
    assert one.lengths == other.lengths == apart.lengths == tuple(lengths)
    assert one.tokens == other.tokens == apart.tokens
    for b in (other, apart):
        for first, second in zip(one.sites, b.sites, strict=True):
            np.testing.assert_array_equal(first.rows, second.rows)
            for name in first.counts:
                np.testing.assert_array_equal(first.counts[name], second.counts[name], err_msg=name)
            np.testing.assert_allclose(first.raw, second.raw, rtol=1e-4, atol=1e-4)
        assert attemper.explain(one, b).kind in ("none", "rounding")
        assert one.output is not None
        assert b.output is not None
        np.testing.assert_array_equal(one.output.rows, b.output.rows)
        np.testing.assert_allclose(one.output.sketch, b.output.sketch, rtol=1e-3, atol=1e-3)


def test_the_model_and_its_output_are_left_as_they_were():
    model, batch = tiny("gpt2", layers=2).model, tokens()
    with torch.no_grad():
        before = model(**batch).last_hidden_state
        attemper.fingerprint(model, [batch])
        after = model(**batch).last_hidden_state
    assert torch.equal(before, after)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_what_a_block_adds_and_what_the_model_gives_are_those_of_its_hidden_states():
    model, batch = tiny("llama", layers=2).model, tokens()
    found = attemper.fingerprint(model, [batch])
    with torch.no_grad():
        kept = model(**batch, output_hidden_states=True)
    assert found.output is not None
    assert (found.output.name, found.output.width) == ("last_hidden_state", 96)
    # The last of the hidden states has gone through the norm of the model: the first block is compared.
    change = kept.hidden_states[1] - kept.hidden_states[0]
    for name, sketch, states in (
        ("change", found.sites[0].change, change),
        ("residual", found.sites[0].residual, kept.hidden_states[0]),
        ("output", found.output.sketch, kept.last_hidden_state),
    ):
        rows = torch.stack([states[sequence, place] for sequence, place in found.sites[0].rows]).numpy()
        np.testing.assert_allclose(sketch[:, 0], np.linalg.norm(rows, axis=1), rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(sketch[:, 1:], rows @ projection(96), rtol=1e-4, atol=1e-4, err_msg=name)
        if name == "output":
            continue
        grams = found.sites[0].grams[:, GRAMS.index(name)]
        for own, part in ((rows, grams[:, 0]), (rows - rows.mean(1, keepdims=True), grams[:, 1])):
            anchors = states[0, list(VECTOR_ROWS)].numpy()
            anchors = anchors if own is rows else anchors - anchors.mean(1, keepdims=True)
            directions = anchors / np.linalg.norm(anchors, axis=1, keepdims=True)
            np.testing.assert_allclose(part[:, 0], np.linalg.norm(own, axis=1), rtol=1e-5)
            np.testing.assert_allclose(part[:, 1:], own @ directions.T, rtol=1e-4, atol=1e-4, err_msg=name)


def test_batches_of_which_no_row_is_kept_leave_what_the_model_gives_known():
    batch = tokens(sequences=6)
    alone = [{"input_ids": batch["input_ids"][number : number + 1]} for number in range(6)]
    found = attemper.fingerprint(tiny("llama", layers=2).model, alone, rows=3).output
    assert found is not None
    assert found.rows.tolist() == [[0, 95], [2, 95], [4, 95]]


class Given(nn.Module):
    """Attention of plain torch behind which something else is given."""

    def __init__(self, give: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.attend, self.give = Plain(), give

    def forward(self, x: torch.Tensor) -> Any:
        return self.give(self.attend(x))


@pytest.mark.parametrize(
    ("give", "name", "width", "places"),
    [
        (lambda x: x.mean(1), "", 32, [-1, -1]),
        (lambda x: (None, x[:, :5], x), "1", 160, [-1, -1]),
        (lambda x: {"loss": x.mean(), "classes": x[:, 0]}, "classes", 32, [-1, -1]),
        (lambda x: x.argmax(-1), None, 0, []),
        (lambda x: x[:1, 0], None, 0, []),
    ],
)
def test_what_a_model_gives_may_be_of_any_shape(give, name, width, places):
    torch.manual_seed(0)
    found = attemper.fingerprint(Given(give), [torch.randn(2, 40, 32)]).output
    assert (found is None) == (name is None)
    if found is not None:
        assert (found.name, found.width, found.rows[:, 1].tolist()) == (name, width, places)
        assert np.isfinite(found.sketch).all()


class Plain(nn.Module):
    """A model of plain torch whose attention is softmaxed by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 32
        self.project = nn.Linear(32, 96)
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.project(x).chunk(3, -1))
        scores = q @ k.transpose(2, 3) * self.factor
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def test_attention_by_hand_has_scores_and_no_queries():
    torch.manual_seed(0)
    model, x = Plain(), torch.randn(2, 40, 32)
    one = attemper.fingerprint(model, [x])
    assert one.tokens is None
    assert np.isnan(one.sites[0].raw).all()
    assert np.isfinite(one.sites[0].final).any()
    model.factor = 1.5
    found = attemper.explain(one, attemper.fingerprint(model, [x]))
    assert (found.kind, found.stage) == ("scale", "final score")
    assert found.value == pytest.approx(1.5, rel=1e-5)


def test_torch_layers_are_seen():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(), torch.randn(2, 30, 32)
    found = attemper.fingerprint(model, [x])
    assert [site.heads for site in found.sites] == [4, 4]
    assert np.isfinite(found.sites[1].residual).all()


def test_heads_are_thinned_by_whole_groups_and_keep_their_numbers():
    model, batch = tiny("llama", layers=2).model, tokens()
    whole, thin = attemper.fingerprint(model, [batch]), attemper.fingerprint(model, [batch], heads=[2])
    for site, full in zip(thin.sites, whole.sites, strict=True):
        assert (site.heads, site.kv_heads, site.numbers, site.key_numbers) == (4, 2, (2, 3), (1,))
        for name in ("raw", "final", "query", "output", "recomputed", "tiled"):
            np.testing.assert_array_equal(getattr(site, name), getattr(full, name)[2:], err_msg=name)
        np.testing.assert_array_equal(site.key, full.key[1:])
        np.testing.assert_array_equal(site.statistics["lse"], full.statistics["lse"][2:])
        np.testing.assert_array_equal(site.residual, full.residual)
    assert all(site.kept_heads is None for site in attemper.fingerprint(model, [batch], heads=range(4)).sites)


@pytest.mark.parametrize(
    ("batches", "options", "message"),
    [
        ([torch.zeros(1, 4, dtype=torch.int64)], {"rows": 0}, r"rows=\.\.\.\) must be an int of at least 1"),
        ([], {}, "batches is empty"),
        (torch.zeros(1, 4), {}, r"write \[batch\]"),
        ([tokens()], {"heads": [4]}, r"layers\.0\.self_attn has no head 4, its 4 are 0 to 3"),
        ([tokens()], {"heads": []}, r"heads=\.\.\.\) must be numbers of heads, such as \[0, 3\], got \[\]"),
        ([tokens()], {"heads": [-1]}, "got -1"),
        ([tokens()], {"heads": [True]}, "got True"),
        ([tokens()], {"heads": "01"}, "got '01'"),
        ([tokens()], {"heads": 1}, "got 1"),
    ],
)
def test_what_cannot_be_taken_is_refused(batches, options, message):
    with pytest.raises(InputError, match=message):
        attemper.fingerprint(tiny("llama", layers=1).model, batches, **options)
    with pytest.raises(InputError, match=r"call model\.eval\(\)"):
        attemper.fingerprint(nn.Sequential(nn.Dropout(0.1)).train(), [torch.zeros(1, 2)])
