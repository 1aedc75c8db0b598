"""Fingerprints from queries and keys that plain PyTorch saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import attemper
from attemper.errors import InputError
from attemper.fingerprints.taking.engine import fingerprint_of_folder


def layers(folder: Path, count: int = 3, factor: float = 1.0, **facts: str) -> Path:
    """A folder of an engine: q, k, v and what came out, computed by plain PyTorch."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    for number in range(count):
        q, k, v = (torch.randn(2, heads, 50, 16, generator=generator) for heads in (4, 2, 2))
        scale = 0.25 * (factor if number else 1.0)
        scores = q @ k.repeat_interleave(2, 1).transpose(2, 3) * scale
        scores = scores.masked_fill(~torch.ones(50, 50, dtype=torch.bool).tril(), -torch.inf)
        out = scores.softmax(-1) @ v.repeat_interleave(2, 1)
        ids = torch.arange(100).view(2, 50)
        tensors = {"q": q, "k": k, "v": v, "out": out.contiguous(), "token_ids": ids}
        save_file(tensors, folder / f"layer{number + 8}.safetensors", {"scale": str(scale), "causal": "true", **facts})
    return folder


def test_layers_are_read_in_the_order_of_their_numbers_and_a_factor_is_named(tmp_path: Path):
    a, b = (fingerprint_of_folder(layers(tmp_path / name, factor=c)) for name, c in (("a", 1.0), ("b", 1.003)))
    assert [site.name for site in a.sites] == ["layer8", "layer9", "layer10"]
    assert a.lengths == (50, 50)
    found = attemper.explain(a, b)
    assert (found.kind, found.site) == ("scale", "layer9")
    assert found.value == pytest.approx(1.003, rel=1e-5)


def test_an_output_that_is_not_of_its_own_mask_is_told(tmp_path: Path):
    a = fingerprint_of_folder(layers(tmp_path / "a"))
    b = fingerprint_of_folder(layers(tmp_path / "b", window="20"))
    found = attemper.explain(a, b)
    assert (found.kind, found.value) == ("window", 20)
    assert "scores" not in [one.kind for one in found.also]


def engine(folder: Path, scale: float, told: str, slope: float = 0.0) -> Path:
    """Two layers of an engine that says neither its scale nor its mask, and saves scores or outputs instead."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    distance = (torch.arange(50)[:, None] - torch.arange(50)).abs()
    for number in range(2):
        q, k, v = (torch.randn(2, heads, 50, 16, generator=generator) * 1.5 for heads in (4, 2, 2))
        scores = q @ k.repeat_interleave(2, 1).transpose(2, 3) * (scale if number else 0.25) - slope * distance
        scores = scores.masked_fill(~torch.ones(50, 50, dtype=torch.bool).tril(), -torch.inf)
        out = (scores.softmax(-1) @ v.repeat_interleave(2, 1)).contiguous()
        tensors = {"q": q, "k": k, "v": v, **({"scores": scores} if told == "scores" else {"out": out})}
        save_file(tensors, folder / f"{number}.safetensors", {} if told == "scores" else {"causal": "true"})
    return folder


@pytest.mark.parametrize(("told", "slope"), [("scores", 0.0), ("scores", 0.05), ("out", 0.0)])
def test_a_scale_that_was_not_told_is_fitted_to_scores_or_outputs(tmp_path: Path, told: str, slope: float):
    a, b = (fingerprint_of_folder(engine(tmp_path / f"{c}", c, told, slope)) for c in (0.25, 0.3))
    assert b.sites[1].scale == pytest.approx(0.3, rel=1e-6)
    found = attemper.explain(a, b)
    assert (found.kind, found.site) == ("scale", "1")
    assert found.value == pytest.approx(1.2, rel=1e-5)
    assert found.extent == "1 of 2 sites"
    assert found.also == ()


def test_scores_say_what_is_masked_and_what_is_added(tmp_path: Path):
    a, b = (fingerprint_of_folder(engine(tmp_path / f"{s}", 0.25, "scores", s)) for s in (0.0, 0.05))
    found = attemper.explain(a, b)
    assert (found.kind, found.value) == ("distance_bias", pytest.approx(-0.05, rel=1e-4))
    assert (a.sites[0].counts["visible_keys"][0] == a.sites[0].rows[:, 1] + 1).all()


def test_heads_of_a_folder_are_thinned(tmp_path: Path):
    found = fingerprint_of_folder(layers(tmp_path / "a"), heads=[3])
    assert [site.numbers for site in found.sites] == [(2, 3)] * 3
    with pytest.raises(InputError, match=r"layer8 has no head 4, its 4 are 0 to 3"):
        fingerprint_of_folder(tmp_path / "a", heads=[4])


@pytest.mark.parametrize(
    ("tensors", "facts", "message"),
    [
        ({"q": (2, 9, 4)}, {}, "must have the tensors q and k"),
        ({"q": (2, 9, 4), "k": (2, 9, 4)}, {}, "does not say what is masked"),
        ({"q": (2, 9, 4), "k": (2, 9, 4), "x": (1,)}, {}, "has 'x', which is not known"),
        ({"q": (9,), "k": (2, 9, 4)}, {"causal": "true"}, r"q is \[9\], expected 4 dimensions"),
        ({"q": (2, 9, 4), "k": (2, 9, 4)}, {"causal": "yes"}, "causal is 'yes', expected true or false"),
        ({"q": (2, 9, 4), "k": (2, 9, 4)}, {"causal": "true", "scale": "big"}, "scale is 'big', expected a number"),
        ({"q": (2, 9, 4), "k": (3, 9, 4)}, {"causal": "true"}, "a.safetensors: "),
        ({"q": (2, 9, 4), "k": (2, 9, 4), "scores": (2, 9, 9)}, {"causal": "true"}, "has scores and causal"),
        ({"q": (2, 9, 4), "k": (2, 9, 4), "scores": (2, 9, 8)}, {}, r"expected the final scores \[1, 2, 9, 9\]"),
    ],
)
def test_what_a_file_or_a_folder_lacks_is_said(tmp_path: Path, tensors, facts, message):
    with pytest.raises(InputError, match=r"there is no \.safetensors file"):
        fingerprint_of_folder(tmp_path)
    save_file({name: torch.zeros(shape) for name, shape in tensors.items()}, tmp_path / "a.safetensors", facts)
    with pytest.raises(InputError, match=message):
        fingerprint_of_folder(tmp_path)
