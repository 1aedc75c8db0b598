"""Exporting: ``torch.export`` takes every operator of ours, and what ONNX has no form of is told in one sentence."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import attemper
from attemper import BackendError
from attemper.nn import Entmax, LearnedTemperature, Sparsemax, Threshold, TopK


class Attending(nn.Module):
    """Attention of x to itself."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.normalizer = options.get("normalizer")  # a parameter of it is one of this module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return attemper.attention(x, x, x, **self.options).output


class Heads(nn.Module):
    """Attention of x to itself by torch, for ``temper``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x)


def tempered(**options: Any) -> nn.Module:
    model = Heads()
    attemper.temper(model, **options)
    return model


def onnx_of(model: nn.Module, x: torch.Tensor, file: Path) -> bytes:
    """By the exporter that needs no other package; the newer one asks the same question."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this exporter is the older one, and says so
        torch.onnx.export(model, (x,), file, dynamo=False)
    return file.read_bytes()


X = torch.randn(1, 2, 5, 4, generator=torch.Generator().manual_seed(0))
PLAIN = r'.*backend="reference"\) is plain'
WITHOUT_A_FORM: dict[str, tuple[Any, str]] = {
    "learned entmax": (lambda: Entmax(1.5, learned=True), r"^entmax cannot be exported.*use softmax"),
    "sparsemax": (Sparsemax, "^sparsemax cannot be exported"),
    "top-k": (lambda: TopK(2), "^topk_softmax cannot be exported"),
    "threshold": (lambda: Threshold(0.1), "^threshold_softmax cannot be exported"),
    "attention": (Attending, rf"^attention\(normalizer='softmax', {PLAIN}"),
    "attention by entmax": (lambda: Attending(normalizer=Entmax(1.5, learned=True)), rf"normalizer='entmax', {PLAIN}"),
    "temper": (lambda: tempered(normalizer=Entmax(1.5, learned=True)), r"torch\.export.*handle\.remove\(\)"),
}
WITH_ONE: dict[str, Any] = {
    "attention by reference": lambda: Attending(backend="reference", is_causal=True),
    "learned entmax by reference": lambda: Attending(backend="reference", normalizer=Entmax(1.5, learned=True)),
    "a tempered model": lambda: tempered(temperature=2.0),
    "a learned temperature": lambda: tempered(temperature=LearnedTemperature(2, initial=1.5)),
}


@pytest.mark.parametrize("name", WITHOUT_A_FORM)
def test_what_onnx_has_no_form_of_is_told_in_one_sentence(name: str, tmp_path: Path):
    make, message = WITHOUT_A_FORM[name]
    with pytest.raises(BackendError, match=message):
        onnx_of(make(), X, tmp_path / "model.onnx")


@pytest.mark.parametrize("name", WITH_ONE)
@pytest.mark.quick("attention by reference", "a learned temperature")
def test_what_has_a_form_is_exported(name: str, tmp_path: Path):
    if find_spec("onnx"):
        assert len(onnx_of(WITH_ONE[name](), X, tmp_path / "model.onnx")) > 100
        return
    # Every operator has been translated when torch looks for the package that writes the file.
    with pytest.raises(torch.onnx.OnnxExporterError, match="onnx is not installed"):
        onnx_of(WITH_ONE[name](), X, tmp_path / "model.onnx")


def test_the_bounds_of_a_learned_temperature_are_exported_with_it(monkeypatch: pytest.MonkeyPatch):
    module = LearnedTemperature(3)
    with torch.no_grad():
        module.log_temperature.copy_(torch.tensor([-100.0, 0.3, 100.0]))
    expected = module.value()
    monkeypatch.setattr("attemper.nn.bounds.exports_to_onnx", lambda: True)
    assert torch.equal(module.value(), expected)


SLOW = {"learned entmax by reference": pytest.mark.slow("takes many seconds")}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=SLOW.get(name, [])) for name in [*WITHOUT_A_FORM, *WITH_ONE]]
)
@pytest.mark.quick("sparsemax", "attention by reference", "temper]")
def test_torch_export_takes_it_and_gives_the_same(name: str):
    model = WITHOUT_A_FORM[name][0]() if name in WITHOUT_A_FORM else WITH_ONE[name]()
    exported = torch.export.export(model, (X,)).module()
    torch.testing.assert_close(exported(X), model(X))
