"""QK-Clip: the largest logit of each head comes to the threshold in every layout, the rest stays; mistakes."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import attemper
from attemper import InputError
from attemper.control.qk_clip import QKClip
from attemper.control.query_key_weights import projections_of
from tests.control.models import BUILD, built
from tests.monitor.tiny_models import TINY

EXACT = [name for name in BUILD if name not in ("gemma2", "bloom")]
"""A softcap and ALiBi stand between weights and logits of the other two."""


def largest(model: nn.Module, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    scan = attemper.scan(model, [batch])
    return {site.name: torch.tensor([head.max_logit or 0.0 for head in site.heads]) for site in scan.sites}


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.turns(3)
def test_logits_above_the_threshold_come_down_to_it_and_others_stay(name: str):
    model, batch = built(name)
    first = next(iter(largest(model, batch)))
    before = largest(model, batch)[first]
    threshold = float(before.sort().values[1:3].mean())
    clip = QKClip(model, threshold)
    model(**batch)
    clipped = clip.step()
    clip.remove()
    after = largest(model, batch)[first]
    torch.testing.assert_close(after, before.clamp(max=threshold), rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(clipped[first], (threshold / before).clamp(max=1))


@pytest.mark.parametrize("name", ["gemma2", "bloom"])
def test_with_a_softcap_or_alibi_they_come_nearer(name: str):
    model, batch = built(name)
    first = next(iter(largest(model, batch)))
    before = largest(model, batch)[first]
    threshold = float(before.median()) * 0.9
    with QKClip(model, threshold) as clip:
        model(**batch)
        clip.step()
    after = largest(model, batch)[first]
    assert (after <= before + 1e-5).all()
    assert (after[before > threshold] < before[before > threshold]).all()


def test_below_the_threshold_no_weight_moves_to_the_bit():
    model, batch = built("llama")
    weights = copy.deepcopy(model.state_dict())
    with QKClip(model, 1e6) as clip:
        for _ in range(3):
            model(**batch)
            assert clip.step() == {}
    assert (clip.steps, clip.clipped) == (3, 0)
    assert all(torch.equal(weights[name], now) for name, now in model.state_dict().items())


def test_a_step_without_a_pass_clips_nothing_again():
    model, batch = built("llama")
    site, before = next(iter(largest(model, batch).items()))
    with QKClip(model, float(before.min())) as clip:
        with pytest.raises(InputError, match=r"QKClip has no logits to clip by: watch has .*needs attemper\.tap"):
            clip.step()
        model(**batch)
        assert clip.step()
        weights = copy.deepcopy(model.state_dict())
        assert clip.step() == {}
        assert all(torch.equal(weights[name], now) for name, now in model.state_dict().items())
        model(**batch)
        after = clip._watch.table().sites[0]
    assert after.name == site
    assert max(head.max_logit or 0.0 for head in after.heads) <= float(before.min()) * (1 + 2e-4)


def test_all_passes_of_a_step_count():
    model, batch = built("gpt2")
    small = {"input_ids": batch["input_ids"][:, :2]}
    site = next(iter(largest(model, batch)))
    peaks = [largest(model, given)[site] for given in (batch, small)]
    assert (peaks[0] > peaks[1]).any()
    threshold = float(peaks[0].median())
    with QKClip(model, threshold) as clip:
        model(**batch)
        model(**small)  # the last pass of the step alone would not tell
        factors = clip.step()[site]
    torch.testing.assert_close(factors, (threshold / torch.maximum(*peaks)).clamp(max=1))


def test_hooks_come_off_and_the_state_goes_on():
    model, batch = built("gpt2")
    hooks = len(model._forward_hooks), len(model._forward_pre_hooks)
    clip = QKClip(model, 0.1)
    for _ in range(2):
        model(**batch)
        clip.step()
    clip.remove()
    clip.remove()
    assert (len(model._forward_hooks), len(model._forward_pre_hooks)) == hooks
    other = QKClip(model, 3.0)
    other.load_state_dict(clip.state_dict())
    assert (other.threshold, other.steps, other.clipped) == (0.1, 2, clip.clipped)
    other.remove()


def test_mistakes_are_told_and_nothing_is_changed():
    model = TINY["qwen3"].build()
    with pytest.raises(InputError, match=r"model.layers.0.self_attn normalises its queries or keys"):
        QKClip(model)
    with pytest.raises(
        InputError, match=r"QKClip\(threshold=...\) must be finite and above 0, got -1. MuonClip uses 100"
    ):
        QKClip(model, -1)

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(8, 24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.mix(x).chunk(3, -1)
            return torch.nn.functional.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])

    own = Own()
    weights = copy.deepcopy(own.state_dict())
    with QKClip(own, 1e-6) as clip:
        own(torch.randn(2, 5, 8) * 10)
        with pytest.raises(InputError, match="Own: the layout of its query and key projections is not known"):
            clip.step()
    assert all(torch.equal(weights[name], now) for name, now in own.state_dict().items())
    with pytest.raises(InputError, match="must have threshold, steps and clipped, got \\['gamma'\\]"):
        clip.load_state_dict({"gamma": 1})


def test_projections_that_are_not_known_are_refused_with_what_is():
    with pytest.raises(
        InputError, match=r"Linear: the layout of its query and key projections is not known. Known are"
    ):
        projections_of(nn.Linear(3, 3))
    module = nn.Module()
    module.q_proj, module.k_proj = nn.Linear(4, 4), nn.Linear(4, 4)
    with pytest.raises(InputError, match="the number of heads is not to be found under num_heads"):
        projections_of(module)
    with pytest.raises(InputError, match="keeps weights apart and biases together"):
        projections_of(nn.MultiheadAttention(8, 2, kdim=6))


class Plain(nn.Module):
    """Attention written by hand, with grouped queries; nothing in it says how many heads it has.

    Args:
        packed: queries, keys and values in one projection, without groups.
        folded: whether heads are folded into the batch, so that a watch sees one head of many examples.
        tap: the name of a tap inside.
    """

    def __init__(self, *, packed: bool = False, folded: bool = False, tap: str | None = None) -> None:
        super().__init__()
        self.packed, self.folded, self.tap = packed, folded, tap
        if packed:
            self.qkv = nn.Linear(32, 96)
        else:
            self.q_proj, self.k_proj, self.v_proj = nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(x).chunk(3, -1) if self.packed else (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (part.unflatten(-1, (-1, 8)).transpose(1, 2) for part in parts)
        if self.tap is not None:
            attemper.tap(q, k, enable_gqa=True, name=self.tap)
        if self.folded:
            q, k, v = (part.repeat_interleave(4 // part.shape[1], 1).flatten(0, 1) for part in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=not self.folded)


class Holder(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> list[Any]:
        return [part(x) if isinstance(part, Plain) else part(x, x, x) for part in self.layers]


def tokens() -> torch.Tensor:
    return torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0)) * 4


@pytest.mark.parametrize("options", [{}, {"packed": True}, {"tap": "layers.0"}], ids=["apart", "packed", "compiled"])
@pytest.mark.parametrize("heads", [None, 4, {"layers": 4}, {"layers": 2, "layers.0": 4}])
@pytest.mark.turns(3)
def test_heads_that_no_attribute_tells_are_those_that_are_given_or_seen(options: Any, heads: Any):
    model = Holder(Plain(**options))
    runs: Any = torch.compile(model, backend="eager") if "tap" in options else model
    before = largest(model, {"x": tokens()})["layers.0"]
    threshold = float(before.sort().values[1:3].mean())
    with QKClip(runs, threshold, heads=heads) as clip:
        runs(tokens())
        assert list(clip.step()) == ["layers.0"]
    after = largest(model, {"x": tokens()})["layers.0"]
    torch.testing.assert_close(after, before.clamp(max=threshold), rtol=2e-4, atol=2e-4)


def test_heads_that_are_given_or_seen_must_be_those_of_the_projection():
    model = Holder(Plain(), nn.MultiheadAttention(32, 2))
    for heads, message in {
        3: r"QKClip\(heads=...\): layers.0: Plain: its queries of 32 are no multiple of its heads, 3",
        16: r"layers.1: MultiheadAttention has 2 heads, not 16. For single modules: heads=\{'NAME': 16\}",
        0: r"QKClip\(heads=...\) must be an int of at least 1, or a mapping from names to such, got 0",
        True: "must be an int of at least 1, or a mapping from names to such, got True",
        "4": "must be an int of at least 1, or a mapping from names to such, got '4'",
    }.items():
        with pytest.raises(InputError, match=message):
            QKClip(model, heads=heads)
    for heads, message in {
        ("layers.0", 5): "layers.0: Plain: its queries of 32 are no multiple of its heads, 5",
        ("layers.0", 1): "layers.0: Plain: its keys of 16 are no multiple of the size of a head, 32",
        ("layers.0", -1): r"QKClip\(heads=...\)\['layers.0'\] must be an int of at least 1, got -1",
        (
            "layer",
            4,
        ): "names 'layer', which holds no attention whose projections are known. They are: layers.0, layers.1",
        ("layers.0.q_proj", 4): "names 'layers.0.q_proj', which holds no attention",
        (0, 4): "names 0, which holds no attention",
    }.items():
        with pytest.raises(InputError, match=message):
            QKClip(model, heads=dict([heads]))
    with pytest.raises(InputError, match=r"names 'layers.0', which holds no attention .* They are: layers.1"):
        QKClip(model, heads={"layers.0": 4}, sites="layers.1")
    with pytest.raises(InputError, match="heads=4 has no effect: no attention here has known projections"):
        QKClip(nn.Linear(2, 2), heads=4)
    with pytest.raises(
        InputError, match="Plain: its queries, keys and values of 96 are no multiple of the heads of all three, 33"
    ):
        QKClip(Plain(packed=True), heads=11)


@pytest.mark.parametrize("heads", [None, 4, 8])
def test_heads_that_are_not_those_of_the_attention_are_told_and_nothing_is_changed(heads: Any):
    model = Holder(Plain(folded=heads != 8))
    weights = copy.deepcopy(model.state_dict())
    message = {
        None: r"the number of heads is not to be found under .* Say it: QKClip\(model, heads=\{'layers.0': ...\}\)",
        4: "the heads of layers.0 are 1, and 4 in its query projection",
        8: "the heads of layers.0 are 4, and 8 in its query projection",
    }
    with QKClip(model, 1e-6, heads=heads) as clip:
        model(tokens())
        with pytest.raises(InputError, match=message[heads]):
            clip.step()
    assert all(torch.equal(weights[name], now) for name, now in model.state_dict().items())


def test_a_norm_of_queries_is_refused_also_where_nothing_tells_the_heads():
    model = Plain()
    model.q_norm = nn.LayerNorm(8)
    with pytest.raises(InputError, match="Plain normalises its queries or keys"):
        QKClip(model)
