"""Fingerprints from queries and keys that plain PyTorch saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import attemper
from attemper.errors import InputError
from attemper.monitor.fingerprint_folder import fingerprint_of_folder


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
    ],
)
def test_what_a_file_lacks_is_said(tmp_path: Path, tensors, facts, message):
    save_file({name: torch.zeros(shape) for name, shape in tensors.items()}, tmp_path / "a.safetensors", facts)
    with pytest.raises(InputError, match=message):
        fingerprint_of_folder(tmp_path)


def test_an_empty_folder_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match=r"there is no \.safetensors file"):
        fingerprint_of_folder(tmp_path)
