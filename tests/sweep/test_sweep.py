"""Every model type of transformers: read exactly, named with the reason, or not tried, and why."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attemper

tf = pytest.importorskip("transformers")

from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402

from tests.support.attention import Attention  # noqa: E402
from tests.sweep import page  # noqa: E402
from tests.sweep.__main__ import all_types, run  # noqa: E402
from tests.sweep.judge import Reading, Verdict, faults_of, judge  # noqa: E402
from tests.sweep.shrink import shrunk  # noqa: E402
from tests.sweep.weights import weights_of  # noqa: E402

SAMPLE = {
    "bert": "exact", "gpt_oss": "exact", "t5": "exact", "vit": "exact", "bloom": "exact",
    "dots1": "exact", "squeezebert": "exact",
    "nystromformer": "multiplied with each other", "diffllama": "subtracted", "big_bird": "weights are changed",
    "inkling2_text": "the same along the axis of heads", "mamba": "no attention in it",
}  # fmt: skip
"""Type -> exact, or words of the reason for which it is skipped."""
PARTS = 6
"""Of all types: each worker of a run takes some."""


@pytest.mark.parametrize("name", SAMPLE)
@pytest.mark.quick("gpt_oss", "t5", "diffllama")
def test_a_model_that_is_made_small_by_rule_is_read_exactly_or_named_with_the_reason(name: str) -> None:
    if name not in all_types():
        pytest.skip(f"this transformers has no {name}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # models warn of what this is not about
        found = judge(name)
    expected = SAMPLE[name]
    assert found.verdict == ("exact" if expected == "exact" else "skipped")
    assert expected == "exact" or expected in "; ".join(found.reasons)


@pytest.mark.long("every model type of transformers that can be tried: three quarters of an hour")
@pytest.mark.parametrize("part", range(PARTS))
def test_no_model_type_of_transformers_is_read_wrongly(part: int) -> None:
    """What could not be tried is left to ``python -m tests.sweep``: the longest takes a quarter of an hour."""
    in_vain = {row["type"] for row in page.load() if row["verdict"] == "not tried"}
    rows = list(run([name for name in all_types() if name not in in_vain][part::PARTS]))
    print(page.counts(rows))
    assert [row["type"] for row in rows if row["verdict"] == "wrong"] == []


def test_every_model_type_has_a_result_and_none_is_wrong() -> None:
    rows = page.load()
    assert [row["type"] for row in rows if row["verdict"] == "wrong"] == []
    assert all(row["reasons"] for row in rows if row["verdict"] in ("skipped", "not tried"))
    if tf.__version__ == "5.23.0":
        assert [row["type"] for row in rows] == all_types()


def test_the_page_is_what_the_results_say() -> None:
    text = page.PAGE.read_text("utf-8")
    assert page.written(page.load(), text) == text, "write it anew: python -m tests.sweep --write-page"


def _read(model: nn.Module, x: Tensor) -> Reading:
    scan = attemper.scan(model, [x])
    return Reading("eager", "scan", scan.sites, {skip.name: skip.reason for skip in scan.skipped})


def _faults(model: nn.Module, reading: Reading, x: Tensor) -> str:
    with weights_of(model) as oracle:
        model(x)
    return "; ".join(faults_of(reading, oracle, Verdict("test"), 1e-5))


def _one_by_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([F.scaled_dot_product_attention(part, k, v) for part in q.split(1, 2)], 2)


def _pooled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    means = torch.eye(q.shape[2] // 4).repeat_interleave(4, 0).repeat_interleave(4, 1) / 4
    return F.scaled_dot_product_attention(q, k, v) + means @ v


class _Heads(Attention):
    """Returns each head's own rows, [B, H, N, D]."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).unflatten(-1, (4, 8)).transpose(1, 2)


@pytest.mark.parametrize(
    ("model", "tokens"),
    [
        (Attention(F.scaled_dot_product_attention), 12),
        (_Heads(F.scaled_dot_product_attention), 12),
        (Attention(_pooled), 12),
        (Attention(_one_by_one), 70),
    ],
    ids=["plain", "heads apart", "means over places", "one site of more calls than are told apart"],
)
def test_the_oracle_finds_nothing_wrong_with_a_right_reading(model: nn.Module, tokens: int) -> None:
    model, x = nn.Sequential(model).eval(), torch.randn(2, tokens, 32)
    assert _faults(model, _read(model, x), x) == ""


def _difference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v) - 0.1 * F.scaled_dot_product_attention(q, k, v.flip(2))


def _rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    parts = (F.scaled_dot_product_attention(part, k, v) for part in (q[:, :, :4], q[:, :, 4:]))
    return torch.cat(tuple(parts), 2)


@pytest.mark.parametrize(
    ("attend", "change", "fault"),
    [
        (F.scaled_dot_product_attention, lambda reading: replace(reading, sites=()), "neither read nor named"),
        (lambda q, k, v: F.scaled_dot_product_attention(q * 2, k, v), lambda reading: reading, "entropies differ"),
        (_difference, lambda reading: reading, "subtracts what two weights give"),
        (_rows, lambda reading: reading, "entropies differ"),
    ],
    ids=["missed", "other numbers", "difference", "part of the rows"],
)
def test_the_oracle_finds_what_is_wrong(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], change: Callable[[Reading], Reading], fault: str
) -> None:
    model, x = nn.Sequential(Attention(attend)).eval(), torch.randn(2, 12, 32)
    plain = nn.Sequential(Attention(F.scaled_dot_product_attention)).eval()
    plain.load_state_dict(model.state_dict())
    assert fault in _faults(model, change(_read(plain, x)), x)


@pytest.mark.parametrize(
    ("name", "recipe", "read", "expected"),
    [
        ("paligemma", "small", lambda made: made.text_config.num_key_value_heads, 1),
        ("depth_anything", "small", lambda made: len(made.backbone_config.out_indices), 4),
        ("rt_detr", "small", lambda made: list(made.decoder_in_channels), [64] * 3),
        ("glm4v_text", "filled", lambda made: sum(made.rope_parameters["mrope_section"]), 8),
        ("nemotron", "small", lambda made: made.num_key_value_heads, None),
        ("nemotron", "filled", lambda made: made.num_key_value_heads, 2),
    ],
)
def test_a_configuration_that_is_made_small_keeps_what_belongs_together(
    name: str, recipe: str, read: Callable[[Any], Any], expected: Any
) -> None:
    assert read(shrunk(CONFIG_MAPPING[name], recipe)) == expected
