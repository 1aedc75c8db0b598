"""Every model type of transformers: read exactly, named with the reason, or not tried, and why."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attemper

tf = pytest.importorskip("transformers")

from tests.sweep import page  # noqa: E402
from tests.sweep.__main__ import all_types, run  # noqa: E402
from tests.sweep.judge import Reading, Verdict, faults_of, judge  # noqa: E402
from tests.sweep.weights import weights_of  # noqa: E402

SAMPLE = {
    "bert": "exact", "gpt_oss": "exact", "t5": "exact", "vit": "exact", "bloom": "exact",
    "nystromformer": "multiplied with each other", "diffllama": "subtracted", "big_bird": "weights are changed",
    "inkling2_text": "the same along the axis of heads", "mamba": "no attention in it",
}  # fmt: skip
"""Type -> exact, or words of the reason for which it is skipped."""


@pytest.mark.parametrize("name", SAMPLE)
def test_a_model_that_is_made_small_by_rule_is_read_exactly_or_named_with_the_reason(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # models warn of what this is not about
        found = judge(name)
    expected = SAMPLE[name]
    assert found.verdict == ("exact" if expected == "exact" else "skipped")
    assert expected == "exact" or expected in "; ".join(found.reasons)


@pytest.mark.slow("every model type of transformers, one after the other: most of an hour")
def test_no_model_type_of_transformers_is_read_wrongly() -> None:
    rows = list(run(all_types()))
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


class _Attention(nn.Module):
    num_heads = 4

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.attend = attend
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))


def _faults(attend: Callable[[Tensor, Tensor, Tensor], Tensor], change: Callable[[Reading], Reading]) -> str:
    model, x = nn.Sequential(_Attention(attend)).eval(), torch.randn(2, 12, 32)
    with weights_of(model) as oracle:
        model(x)
    plain = nn.Sequential(_Attention(F.scaled_dot_product_attention)).eval()
    plain.load_state_dict(model.state_dict())
    scan = attemper.scan(plain, [x])
    return "; ".join(faults_of(change(Reading("eager", "scan", scan.sites)), oracle, Verdict("test"), 1e-5))


def test_the_oracle_finds_nothing_wrong_with_a_right_reading() -> None:
    assert _faults(F.scaled_dot_product_attention, lambda reading: reading) == ""


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
    assert fault in _faults(attend, change)
