"""A tap beside an attention that is seen otherwise: one site, under the tap's name, in eager and in compiled code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attemper
from attemper.sites import observation
from tests.sites.own_models import Checkpointed
from tests.support.scans import entropies, names, of_heads

HEADS, SIZE, TOKENS = 4, 8, 12
HIDDEN = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def copied(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q.contiguous(), k.contiguous(), v.contiguous())


def own(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attemper.attention(q, k, v, is_causal=True).output


def hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1) / SIZE**0.5
    return scores.masked_fill(HIDDEN, -torch.inf).softmax(-1) @ v


def scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.matmul(q * SIZE**-0.25, (SIZE**-0.25 * k).transpose(-2, -1))
    return torch.where(HIDDEN, -torch.inf, scores).softmax(-1) @ v


def doubled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhid,bhjd->bhij", q.double(), k.double()) * SIZE**-0.5
    weights = torch.softmax(scores + torch.zeros(TOKENS, TOKENS).masked_fill(HIDDEN, -torch.inf), -1)
    return torch.einsum("bhij,bhjd->bhid", weights.to(v.dtype), v)


def folded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (part.reshape(-1, TOKENS, SIZE) for part in (q, k, v))
    scores = torch.baddbmm(torch.zeros(()), q, k.transpose(1, 2), beta=0, alpha=SIZE**-0.5)
    return torch.bmm(scores.masked_fill(HIDDEN, -torch.inf).softmax(-1), v).unflatten(0, (-1, HEADS))


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "sdpa": sdpa, "copied": copied, "own": own, "hand": hand, "scaled": scaled, "doubled": doubled, "folded": folded,
}  # fmt: skip


class Attention(nn.Module):
    """One attention with a tap before it, or after it."""

    def __init__(self, name: str, way: Callable[[Tensor, Tensor, Tensor], Tensor], *, late: bool = False) -> None:
        super().__init__()
        self.num_heads, self.name, self.way, self.late = HEADS, name, way, late
        self.qkv = nn.Linear(32, 96)
        self.qkv.weight.data *= 4

    def split(self, x: Tensor) -> list[Tensor]:
        return [part.unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        if not self.late:
            attemper.tap(q, k, is_causal=True, name=self.name)
        mixed = self.way(q, k, v)
        if self.late:
            attemper.tap(q, k, is_causal=True, name=self.name)
        return mixed.transpose(1, 2).flatten(2)


class Projecting(nn.Module):
    """nn.MultiheadAttention, which projects for itself, with a tap on what it will project."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.inner = name, nn.MultiheadAttention(32, HEADS, batch_first=True)
        self.inner.in_proj_weight.data *= 3

    def forward(self, x: Tensor) -> Tensor:
        q, k, _ = F.linear(x, self.inner.in_proj_weight, self.inner.in_proj_bias).chunk(3, -1)
        q, k = (part.unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for part in (q, k))
        attemper.tap(q, k, is_causal=True, name=self.name)
        return self.inner(x, x, x, attn_mask=HIDDEN, need_weights=False)[0]


class Model(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x) for layer in self.layers]).sum(0)


def batch() -> Tensor:
    return torch.randn(2, TOKENS, 32)


def watched(model: nn.Module, *batches: Tensor, **options: Any) -> attemper.Scan:
    with attemper.watch(model, **options) as watch:
        watch.step()
        for x in batches:
            model(x)
            watch.end_pass()
    assert watch.failures == 0
    return watch.table()


class Two(Attention):
    """Two attentions, and a tap for the second one only."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        other = self.way(v, q, k)
        attemper.tap(q, k, is_causal=True, name=self.name)
        return (self.way(q, k, v) + other).transpose(1, 2).flatten(2)


class Windows(Attention):
    """Two attentions over the same queries and keys, each with its tap."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        attemper.tap(q, k, is_causal=True, name="far")
        far = attemper.attention(q, k, v, is_causal=True).output
        attemper.tap(q, k, is_causal=True, window_size=(2, 0), name="near")
        near = attemper.attention(q, k, v, is_causal=True, window_size=(2, 0)).output
        return (far + near).transpose(1, 2).flatten(2)


class Masked(Attention):
    """A tap whose mask means what its attention's flag means."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        attemper.tap(q, k, ~HIDDEN, name=self.name)
        return sdpa(q, k, v).transpose(1, 2).flatten(2)


def unseen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention in a way that nobody sees."""
    weights = (q @ k.transpose(-2, -1) / SIZE**0.5).masked_fill(HIDDEN, -torch.inf).exp()
    return (weights / weights.sum(-1, keepdim=True)) @ v


def gated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention that is seen and cannot be read."""
    weights = (q @ k.transpose(-2, -1) / SIZE**0.5).masked_fill(HIDDEN, -torch.inf).softmax(-1)
    return (weights * torch.linspace(0, 1, TOKENS)) @ v


def every_layer() -> dict[str, nn.Module]:
    """Layer by the name of its tap; all taps of ``far`` are ``far`` and ``near``."""
    ways = {f"{way}, before": Attention(f"{way}, before", WAYS[way]) for way in WAYS}
    late = {f"{way}, after": Attention(f"{way}, after", WAYS[way], late=True) for way in WAYS}
    return {
        **ways, **late, "projecting": Projecting("projecting"), "far": Windows("", sdpa), "mask": Masked("mask", sdpa),
        "unseen": Attention("unseen", unseen), "gated": Attention("gated", gated),
    }  # fmt: skip


@pytest.mark.parametrize("name", every_layer())
@pytest.mark.turns(2)
def test_a_tap_and_the_attention_beside_it_are_one_site_under_the_taps_name(name: str) -> None:
    model = Model(every_layer()[name])
    scan = watched(model, batch(), batch())
    assert names(scan) == names(attemper.scan(model, [batch()])) == (["far", "near"] if name == "far" else [name])
    assert [len(site.heads) for site in scan.sites] == [HEADS] * len(scan.sites)
    assert {head.rows for site in scan.sites for head in site.heads} == {4 * TOKENS}
    assert scan.skipped == ()


@pytest.mark.slow("takes many seconds")
def test_names_numbers_rows_and_modes_are_the_same_in_compiled_code(full_size: bool) -> None:
    shared = Attention("shared", sdpa)
    same = [Attention("same", sdpa) for _ in range(2)]
    chosen = ("sdpa, before", "hand, after", "projecting", "far", "mask", "gated")
    model = Model(
        *(every_layer()[name] for name in (chosen if full_size else chosen[::3])), *same, shared, shared
    ).eval()
    x = batch()
    with torch.no_grad():
        eager = watched(model, x, x)
        compiled = watched(torch.compile(model, backend="eager"), x, x)  # type: ignore[arg-type]
    assert names(eager) == names(compiled)
    assert names(eager)[-4:] == ["same", "same#2", "shared", "shared#2"]
    assert [site.heads[0].rows for site in eager.sites] == [site.heads[0].rows for site in compiled.sites]
    assert [(site.kind, site.mode) for site in eager.sites] == [("self", "eval")] * len(eager.sites)
    assert [(site.kind, site.mode) for site in compiled.sites] == [("self", "eval")] * len(eager.sites)
    assert float((entropies(eager) - entropies(compiled)).abs().max()) < 2e-6


@pytest.mark.slow("takes a second")
def test_a_tap_in_front_of_the_registry_is_one_site_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("attemper.integrations.transformers")
    from transformers.models.llama import modeling_llama

    from tests.monitor.tiny_models import TINY, inputs

    rotary = modeling_llama.apply_rotary_pos_emb
    counts = iter(range(100))

    def tapped(*args: Any, **kwargs: Any) -> Any:
        q, k = rotary(*args, **kwargs)
        attemper.tap(q, k, is_causal=True, enable_gqa=q.shape[1] != k.shape[1], name=f"tap.{next(counts)}")
        return q, k

    model, given = TINY["llama"].build(), inputs("decoder", "right")
    plain = attemper.scan(model, [given])
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", tapped)
    for implementation in ("eager", "sdpa", "attemper"):
        model.set_attn_implementation(implementation)
        counts = iter(range(100))
        found = attemper.scan(model, [given])
        assert names(found) == [f"tap.{place}" for place in range(len(plain.sites))]
        assert float((entropies(found) - entropies(plain)).abs().max()) < 1e-9
        counts = iter(range(100))
        with attemper.watch(model) as watch:
            model(**given)
        assert names(watch.table()) == names(found)
        assert [(s.kind, s.mode) for s in found.sites] == [(s.kind, s.mode) for s in plain.sites]


@pytest.mark.parametrize("way", ["sdpa", "hand"])
def test_of_two_attentions_in_one_module_the_tap_names_the_one_that_it_is_given(way: str) -> None:
    model, x = Model(Two("second", WAYS[way])), batch()
    scan = watched(model, x)
    assert names(scan) == ["layers.0", "second"]
    layer: Any = model.layers[0]
    q, k, v = layer.split(x)
    for site, pair in zip(scan.sites, ((v, q), (q, k)), strict=True):
        want = attemper.attention_statistics(*pair, is_causal=True).per_head()["entropy"].mean
        assert torch.allclose(of_heads(site), want, atol=2e-6), site.name


def test_a_tap_for_what_nobody_sees_does_not_take_the_place_of_a_seen_attention_beside_it() -> None:
    class Hybrid(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.split(x)
            attemper.tap(q, k, is_causal=True, name=self.name)
            return (unseen(q, k, v) + sdpa(v, q, k)).transpose(1, 2).flatten(2)

    scan = watched(Model(Hybrid("mine", sdpa)), batch())
    assert names(scan) == ["mine", "layers.0"]
    assert entropies(scan)[0].ne(entropies(scan)[1]).all()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, r"tap 'x' is given is_causal=False, not True as the attention beside it in 'layers\.0'"),
        ({"is_causal": True, "scale": 1.0}, r"given scale=1, not 0\.3536 as the attention"),
        ({"is_causal": True, "temperature": 2.0}, r"given scale=0\.1768, not 0\.3536 as"),
    ],
)
def test_a_tap_with_other_arguments_than_its_attention_is_told_and_the_attention_is_read(
    given: dict[str, Any], said: str
) -> None:
    class Mistaken(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.split(x)
            attemper.tap(q, k, name="x", **given)
            return sdpa(q, k, v).transpose(1, 2).flatten(2)

    model, x = Model(Mistaken("x", sdpa)), batch()
    with pytest.warns(UserWarning, match=said) as told:
        scan = watched(model, x, x)
    assert len(told) == 1
    q, k, _ = model.layers[0].split(x)  # type: ignore[operator]
    want = attemper.attention_statistics(q, k, is_causal=True).per_head()["entropy"].mean
    assert names(scan) == ["x"]
    assert torch.allclose(entropies(scan)[0], want, atol=2e-6)


@pytest.mark.parametrize("wanted", ["tap.1", "layers.1"])
def test_sites_are_chosen_by_the_taps_name_or_by_that_of_its_module(wanted: str) -> None:
    model = Model(*(Attention(f"tap.{place}", sdpa) for place in range(2)))
    assert names(watched(model, batch(), sites=[wanted])) == ["tap.1"]


def test_a_tempered_attention_is_read_as_it_attends_under_its_taps_name() -> None:
    class Plain(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.split(x)
            attemper.tap(q, k, is_causal=True, name=self.name)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    model, x = Model(Plain("tap", sdpa)), batch()
    with attemper.temper(model, temperature=2.0):
        scan = watched(model, x)
    assert names(scan) == ["tap"]
    q, k, _ = model.layers[0].split(x)  # type: ignore[operator]
    want = attemper.attention_statistics(q, k, is_causal=True, temperature=2.0).per_head()["entropy"].mean
    assert torch.allclose(entropies(scan)[0], want, atol=2e-6)


def test_rows_of_a_checkpointed_tap_count_once() -> None:
    model = Checkpointed()
    with attemper.watch(model) as watch:
        model(batch().requires_grad_()).sum().backward()
        watch.step()
    assert [(site.name, site.heads[0].rows) for site in watch.table().sites] == [("first", 2 * TOKENS)]


def test_a_clip_finds_the_module_in_which_a_tap_stands() -> None:
    class Apart(Attention):
        def __init__(self) -> None:
            super().__init__("tap", sdpa)
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(32, 32) for _ in range(3))
            del self.qkv
            self.q_proj.weight.data *= 20

        def split(self, x: Tensor) -> list[Tensor]:
            parts = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
            return [part.unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for part in parts]

    model, x = Model(Apart()), batch()
    with attemper.QKClip(model, threshold=1.0) as clip:
        model(x)
        assert list(clip.step()) == ["layers.0"]
    compiled: Any = torch.compile(model, backend="eager")
    with attemper.QKClip(compiled, threshold=0.1) as clip:
        compiled(x)
        with pytest.raises(attemper.InputError, match="the tap 'tap' was seen in compiled code"):
            clip.step()


def test_nothing_of_a_pass_is_kept_alive() -> None:
    model = Model(Attention("a", sdpa))
    with attemper.watch(model, rows=2) as watch:
        model(batch())
        assert watch._collector.calls == []
        assert observation.current() == ()
