"""On a device that works behind the host, calls on Triton are launched and left alone: nothing is read back.

Two proofs without a GPU. Tensors on ``meta`` hold no numbers: whatever reads one, or copies one to the CPU, fails. And
in Triton's interpreter no operation may run that reads a number off a tensor, or finds out how many there are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import attemper
from attemper import InputError
from attemper.backends import table
from attemper.call import operator as _ops
from attemper.call.attention import measurement, run
from attemper.call.call_sums import accumulate
from attemper.call.packing import Packing
from attemper.call.request import Options

pytest.importorskip("triton")
pytestmark = [pytest.mark.each, pytest.mark.usefixtures("interpreted")]

READS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal")
"""Operations whose result the host waits for."""


OURS: dict[str, Callable[..., Any]] = {"attemper::attention": _ops._attention, "attemper::accumulate": _ops._accumulate}
"""Operators, and what runs in them."""


class Unread(TorchDispatchMode):
    """Fails when a number is read; looks into our operators, too."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        self.seen.append(name)
        assert not any(name.startswith(f"aten::{read}") for read in READS), name
        if name not in OURS:
            return func(*args, **(kwargs or {}))
        with self:
            return OURS[name](*args, **(kwargs or {}))


@pytest.fixture
def behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every device works behind the host."""
    monkeypatch.setattr(table, "asynchronous", lambda device: True)


def tensors(device: str = "cpu", heads: int = 2) -> tuple[Tensor, Tensor]:
    return torch.randn(2, heads, 20, 8, device=device), torch.randn(2, heads, 24, 8, device=device)


def packed(device: str = "cpu") -> dict[str, Any]:
    query, key, value = (torch.randn(tokens, 2, 8, device=device) for tokens in (20, 24, 24))
    return {
        "query": query, "key": key, "value": value, "cu_seqlens_q": torch.tensor([0, 7, 7, 20], device=device),
        "cu_seqlens_k": torch.tensor([0, 9, 10, 24], device=device),
    }  # fmt: skip


def options_of(device: str) -> dict[str, dict[str, Any]]:
    return {
        "plain": {},
        "causal": {"is_causal": True, "causal_alignment": "bottom-right"},
        "mask": {"attn_mask": torch.ones(2, 1, 20, 24, dtype=torch.bool, device=device)},
        "bias": {"attn_mask": torch.zeros(20, 24, device=device)},
        "temperature, sink": {
            "temperature": torch.ones(1, 2, 20, device=device), "sink_logits": torch.zeros(2, device=device),
        },
    }  # fmt: skip


def measured_of(tensors: dict[str, Tensor]) -> Tensor:
    query, key = (tensors[name].transpose(0, 1)[None] for name in ("query", "key"))
    packing = Packing(tensors["cu_seqlens_q"], tensors["cu_seqlens_k"])
    options = Options(stats="all", is_causal=True, backend="triton")
    stats = run(measurement(query, key, None, options, packing=packing, rows=5)).stats
    assert stats is not None
    return stats.entropy


CALLS: dict[str, Callable[[str], Any]] = {
    **{
        f"attention_statistics, {name}{', sampled' if rows else ''}": lambda device, name=name, rows=rows: (
            attemper.attention_statistics(
                *tensors(device), rows=rows, backend="triton", **options_of(device)[name]
            ).entropy
        )
        for name in options_of("meta")
        for rows in (None, 5)
    },
    "sampled, with a generator of the CPU": lambda device: attemper.attention_statistics(
        *tensors(device), rows=5, backend="triton", generator=torch.Generator().manual_seed(1)
    ).entropy,
    "sampled, with a gradient": lambda device: attemper.attention_statistics(
        tensors(device)[0].requires_grad_(), tensors(device)[1], rows=5, backend="triton"
    ).entropy,
    "varlen_attention": lambda device: attemper.varlen_attention(
        **packed(device), is_causal=True, stats="all", backend="triton"
    ).output,
    "measured, packed, sampled": lambda device: measured_of(packed(device)),
    "accumulated": lambda device: accumulate(
        measurement(tensors(device)[0], tensors(device)[1], None, Options(stats="all", backend="triton"), rows=5),
        torch.ones(2, 5, dtype=torch.bool, device=device),
    ).sums,
}  # fmt: skip


@pytest.mark.usefixtures("behind")
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.turns(2)
def test_a_call_on_tensors_without_numbers_goes_through(name: str) -> None:
    assert CALLS[name]("meta").device.type == "meta"


@pytest.mark.usefixtures("behind")
@pytest.mark.parametrize(
    "name", [name for name in CALLS if "sampled" in name or name in ("varlen_attention", "accumulated")]
)
@pytest.mark.turns(2)
def test_a_call_reads_no_number_down_to_its_kernels(name: str) -> None:
    with Unread() as mode:
        found = CALLS[name]("cpu")
    assert torch.isfinite(found).all()
    assert any(operator.startswith("attemper::") for operator in mode.seen)


def test_elsewhere_offsets_are_read_as_ever() -> None:
    with pytest.raises(AssertionError, match="_local_scalar_dense"), Unread():
        torch.ones(1).item()
    with pytest.raises(RuntimeError, match="meta"):
        attemper.varlen_attention(**packed("meta"), backend="triton")


@pytest.mark.usefixtures("behind")
def test_other_backends_still_read_their_offsets() -> None:
    wrong: dict[str, Any] = packed() | {"cu_seqlens_k": torch.tensor([0, 9, 8, 24])}
    with pytest.raises(InputError, match=r"cu_seqlens_k=...\) must rise from 0 to 24, got \[0, 9, 8, 24\]"):
        attemper.varlen_attention(**wrong, backend="blocked")


@pytest.mark.usefixtures("behind")
@pytest.mark.parametrize(
    ("name", "offsets", "total"),
    [("cu_seqlens_q", [1, 7, 7, 20], 20), ("cu_seqlens_q", [0, 7, 7, 19], 20), ("cu_seqlens_k", [0, 9, 8, 24], 24)],
)
def test_wrong_offsets_are_told_by_the_device(name: str, offsets: list[int], total: int) -> None:
    wrong: dict[str, Any] = packed() | {name: torch.tensor(offsets)}
    with pytest.raises(RuntimeError, match=rf"varlen_attention\({name}=...\) must rise from 0 to {total}"):
        attemper.varlen_attention(**wrong, backend="triton")


def test_errors_on_the_cpu_come_before_those_of_options() -> None:
    wrong: dict[str, Any] = packed() | {"cu_seqlens_q": torch.tensor([0, 7, 6, 20])}
    with pytest.raises(InputError, match="must rise from 0 to 20"):
        attemper.varlen_attention(**wrong, normalizer="none", backend="triton")


@pytest.mark.usefixtures("behind")
def test_rows_chosen_on_the_device_are_those_of_the_same_draw() -> None:
    query, key = tensors()
    torch.manual_seed(5)
    there = attemper.attention_statistics(query, key, rows=7, backend="triton")
    torch.manual_seed(5)
    here = attemper.attention_statistics(query, key, rows=7, backend="blocked")
    assert there.rows is not None
    assert here.rows is not None
    assert torch.equal(there.rows, here.rows)
    torch.testing.assert_close(there.entropy, here.entropy, rtol=5e-6, atol=5e-6)


def test_the_kernel_picks_the_rows_unless_a_gradient_is_wanted() -> None:
    query, key = tensors()
    with Unread() as mode:
        attemper.attention_statistics(query, key, rows=7, backend="triton")
    assert "aten::index_select" not in mode.seen
    query.requires_grad_()
    found = attemper.attention_statistics(query, key, rows=7, backend="triton")
    found.entropy.sum().backward()
    assert found.rows is not None
    assert query.grad is not None
    assert query.grad.abs().sum((0, 1, 3)).nonzero().flatten().tolist() == found.rows.tolist()


@pytest.mark.usefixtures("behind")
@pytest.mark.parametrize("generator", [None, torch.Generator().manual_seed(1)])
def test_rows_are_chosen_where_the_query_is(generator: torch.Generator | None) -> None:
    query, key = tensors("meta")
    for rows in (
        attemper.attention_statistics(query, key, rows=5, backend="triton", generator=generator).rows,
        measurement(query, key, None, Options(stats="all", backend="triton"), rows=5, generator=generator).rows,
    ):
        assert rows is not None
        assert rows.device.type == "meta"
