"""``attemper.pattern`` without a head: all heads of a layer or a model, as one by one, with their roles."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attemper
from attemper import InputError
from attemper.monitor import exact_weights
from attemper.results.pattern import Pattern, Patterns
from tests.monitor.test_heat_map import Parsed
from tests.monitor.test_pattern import HalfRead, Shared


def tiny(name: str, kind: str, padding: str | None, tokens: int) -> tuple[nn.Module, dict[str, Tensor]]:
    pytest.importorskip("transformers")
    from tests.monitor.tiny_models import TINY, inputs, sharpened

    return sharpened(TINY[name].build()), inputs(kind, padding, tokens)


CASES = {
    "grouped heads": ("llama", "decoder", "left"),
    "encoder and decoder": ("t5", "encoder-decoder", "right"),
}


@pytest.mark.parametrize("at_once", [1, 1 << 22])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.quick("grouped heads-1", "encoder and decoder-4194304")
def test_all_heads_are_those_that_come_one_by_one(monkeypatch: pytest.MonkeyPatch, case: str, at_once: int) -> None:
    name, kind, padding = CASES[case]
    model, batch = tiny(name, kind, padding, 20)
    monkeypatch.setattr(exact_weights, "MOST_WEIGHTS", at_once)
    found = attemper.pattern(model, batch, sequence=1)
    sites = list(dict.fromkeys(one.site for one in found))
    scan = attemper.scan(model, [batch])
    assert sites == [site.name for site in scan.sites]
    assert len(found) == sum(len(site.heads) for site in scan.sites)
    for one in found[::3]:
        alone = attemper.pattern(model, batch, site=one.site, head=one.head, sequence=1)
        torch.testing.assert_close(one.weights, alone.weights, atol=1e-6, rtol=0)
        for of in ("tokens", "key_tokens", "kind", "padding", "layer", "role"):
            assert getattr(one, of) == getattr(alone, of), of


@pytest.mark.parametrize("sequence", [0, 1])
def test_roles_are_those_of_a_scan_of_this_text(sequence: int) -> None:
    model, batch = tiny("bert", "encoder", "right", 40)
    found = attemper.pattern(model, batch, sequence=sequence, tokenizer=lambda ids: ["." for _ in ids])
    own = {name: part[sequence : sequence + 1] for name, part in batch.items()}
    scan = attemper.scan(model, [own], tokenizer=lambda ids: ["." for _ in ids])
    assert [one.role for one in found] == [head.role for site in scan.sites for head in site.heads]
    assert "separator" in {one.role for one in found}


def test_one_layer_or_one_site_has_its_heads_alone() -> None:
    model, batch = tiny("t5", "encoder-decoder", None, 8)
    found = attemper.pattern(model, batch, layer=1, sequence=0)
    assert {one.layer for one in found} == {1}
    assert len({one.site for one in found}) == 3
    site = "decoder.block.1.layer.1.EncDecAttention"
    cross = attemper.pattern(model, batch, site=site, sequence=0)
    assert {(one.site, one.kind) for one in cross} == {(site, "cross")}
    assert [one.head for one in cross] == list(range(len(cross)))


def test_each_call_of_a_module_is_a_site_and_one_can_be_chosen() -> None:
    model, x = Shared().eval(), torch.randn(1, 6, 32)
    found = attemper.pattern(model, x)
    assert list(dict.fromkeys(one.site for one in found)) == ["attention", "attention#2"]
    second = attemper.pattern(model, x, call=1)
    assert {one.site for one in second} == {"attention#2"}
    for call in (0, 1):
        one = attemper.pattern(model, x, head=3, call=call)
        assert torch.equal(found[4 * call + 3].weights, one.weights)
    assert torch.equal(second[3].weights, one.weights)
    torch.testing.assert_close(found[3].weights, attemper.pattern(model.attention, x, head=3).weights)
    assert not torch.equal(found[3].weights, one.weights)


def test_a_text_that_is_too_long_says_how_long_it_may_be() -> None:
    model, batch = tiny("llama", "decoder", None, 16)
    with pytest.raises(
        InputError,
        match=r"8 heads of up to 16 queries x 16 keys have 2,048 weights, and max_weights is 2,047. Take a text of at "
        r"most 15 tokens, one layer= or head=, or pass max_weights=2048",
    ):
        attemper.pattern(model, batch, sequence=0, max_weights=2047)
    with pytest.raises(InputError, match="max_weights is 100"):  # no more than this is kept on the way
        attemper.pattern(model, batch, sequence=0, max_weights=100)
    assert len(attemper.pattern(model, batch, sequence=0, max_weights=2048)) == 8
    assert len(attemper.pattern(model, batch, layer=1, sequence=0, max_weights=1024)) == 4


def test_what_could_not_be_read_is_told_beside_the_others() -> None:
    found = attemper.pattern(HalfRead(), torch.randn(4, 1, 8))
    assert {one.site for one in found} == {"seen"}
    assert [(one.name, "extra keys" in one.reason) for one in found.skipped] == [("lost", True)]


def made(*sites: tuple[str, int, tuple[int, int]], **changes: Any) -> Patterns:
    """Patterns of sites, each with so many heads of so many queries and keys."""
    found = [
        Pattern(torch.rand(shape), ("q",) * shape[0], site, head, ("k",) * shape[1], role="induction" if head else None)
        for site, heads, shape in sites
        for head in range(heads)
    ]
    return Patterns(found, name="mine <i>", **changes)


def test_they_are_a_sequence_that_says_what_it_is() -> None:
    found = made(("layers.0.a", 3, (4, 4)), ("layers.1.a", 2, (5, 7)))
    assert repr(found) == "Patterns(mine <i>: 5 heads of 2 sites, 5 queries x 7 keys)"
    assert found[-1].head == 1
    assert isinstance(found[1:3], Patterns)
    assert [one.head for one in found[1:3]] == [1, 2]
    assert repr(made()) == "Patterns(mine <i>: 0 heads of 0 sites, 0 queries x 0 keys)"
    assert "mine &lt;i&gt;: 0 heads" in made()._repr_html_()


def test_a_notebook_shows_one_picture_that_runs_and_loads_nothing() -> None:
    html = made(("layers.0.a", 3, (4, 4)), ("layers.1.a", 2, (5, 7)))._repr_html_()
    parsed = Parsed(html)
    assert {tag for tag, _ in parsed.tags} == {"div", "img"}
    assert "mine <i>: 5 heads of 2 sites" in parsed.text
    assert len(re.findall("src=", html)) == html.count('src="data:image/png;base64,') == 1


def test_a_picture_of_all_heads_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    grid = made(("layers.0.a", 3, (40, 40)), ("x$", 2, (5, 7)))
    written = grid.to_png(tmp_path / "grid.png")
    assert written.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InputError, match="there is nothing to draw: mine <i>: 0 heads"):
        made().to_png(tmp_path / "none.png")
    with pytest.raises(InputError, match="there is nothing to draw"):
        made(("a", 1, (0, 0))).to_png(tmp_path / "none.png")
