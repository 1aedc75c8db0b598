"""The text of training experiments: the same bytes every time, and none of them on both sides."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attemper.errors import InputError
from attemper.lab.corpus import drawn_windows, standard_library


def test_training_and_held_out_bytes_are_those_of_this_library_and_differ():
    corpus = standard_library()
    assert corpus is standard_library()
    assert corpus.training.dtype == torch.uint8
    assert len(corpus.training) > 5 * len(corpus.held_out) > 250_000
    assert len(corpus.digest) == 16
    held = bytes(corpus.held_out.tolist()).split(b"\0")
    assert bytes(corpus.training.tolist()).find(max(held, key=len)) == -1


def test_a_python_without_its_sources_is_told(tmp_path: Path):
    (tmp_path / "a.py").write_text("x = 1\n")
    with pytest.raises(InputError, match=r"too few to train on\. This Python came without the sources of its library"):
        standard_library(tmp_path)


def test_windows_are_drawn_by_their_seed_to_the_very_end():
    ids = torch.arange(10, dtype=torch.uint8)
    drawn = drawn_windows(ids, 500, 4, seed=3)
    assert drawn.dtype == torch.int64
    assert torch.equal(drawn, drawn_windows(ids, 500, 4, seed=3))
    assert not torch.equal(drawn, drawn_windows(ids, 500, 4, seed=4))
    assert set(drawn[:, 0].tolist()) == set(range(7))
    assert bool((drawn.diff(dim=1) == 1).all())
