"""The code of docs/normalizers.md runs as it stands, and gives what its page says; so does the picture's script."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from attemper import nn
from attemper.call.normalizer import names
from tests.docs.pages import ROOT, run_code

PAGE = ROOT / "docs" / "normalizers.md"


def test_the_code_of_the_page():
    names = run_code("docs/normalizers.md")
    assert names["weights"][3] == 0
    assert names["weights"].sum() == pytest.approx(1)
    assert (names["sparser"] > 0).sum() < 3
    assert (names["kept"] < 1).all()
    names["attended"].sum().backward()
    assert names["layer"].normalizer.log_excess.grad.abs().min() > 0
    before, after = ({s.name: s.heads[0].effective_tokens for s in names[scan].sites} for scan in ("plain", "scan"))
    assert max(after["blocks.0.attention"], after["blocks.1.attention"]) <= 16
    assert before["blocks.0.attention"] != after["blocks.0.attention"]


def test_the_page_names_every_normalizer():
    text = PAGE.read_text("utf-8")
    found = {name: one for name, one in vars(nn).items() if isinstance(one, type) and issubclass(one, nn.Normalizer)}
    shown = {*re.findall(r"nn\.(\w+)\(", text), *re.findall(r'`"(\w+)"`', text)}
    spelled = {"SoftmaxPlusOne": "softmax_plus_one", "Sparsemax": "sparsemax", "Entmax15": "entmax15"}
    for name in found.keys() - {"Normalizer", "Softmax"}:
        assert spelled.get(name, name) in shown
    assert set(names()) - {"softmax"} <= shown


@pytest.mark.slow("takes many seconds")
def test_the_picture_is_drawn_of_weights_that_are_there(tmp_path: Path):
    pytest.importorskip("matplotlib")
    path = ROOT / "scripts" / "normalizer_picture.py"
    spec = importlib.util.spec_from_file_location("normalizer_picture", path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.draw(tmp_path / "normalizers.png")
    assert (tmp_path / "normalizers.png").stat().st_size > 20_000
    weights = {name: module(script.SCORES[None, None])[0, 0] for name, module in script.NORMALIZERS.items()}
    assert [int((weights[name] > 0).sum()) for name in ("softmax", "entmax15", "sparsemax", "top 3")] == [10, 4, 3, 3]
    assert weights["top 3"].sum() == pytest.approx(1)
