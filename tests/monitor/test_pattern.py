"""``attemper.pattern``: the exact weights of one head for one text, whatever computes the attention."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attemper
from attemper import InputError
from attemper.monitor.pattern import Pattern
from tests.sites import own_models
from tests.sites.flash_stand_in import flash_attn_func

# --- against eager weights of transformers, in float64 ---


def eager_weights(monkeypatch: pytest.MonkeyPatch, model: nn.Module, batch: dict[str, Tensor]) -> Any:
    """The output of a model in float64 throughout: eager code rounds weights to float32, even in a double model."""
    plain = F.softmax

    def softmax(scores: Tensor, dim: int = -1, **_: Any) -> Tensor:
        return plain(scores.double(), dim=dim)

    with torch.no_grad(), monkeypatch.context() as patched:
        patched.setattr(torch.nn.functional, "softmax", softmax)
        return model(**batch, output_attentions=True)


DECODERS = ("llama", "mistral", "gpt2", "gemma2")


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("name", [*DECODERS, "bert", "qwen3"])
@pytest.mark.quick("mistral-left", "gemma2-right", "bert-left")
def test_the_weights_are_those_of_the_eager_model(monkeypatch: pytest.MonkeyPatch, name: str, padding: str) -> None:
    """Causality, sliding windows, softcaps and grouped heads, with padded tokens left out of rows and columns."""
    pytest.importorskip("transformers")
    from tests.monitor.tiny_models import TINY, inputs, sharpened

    tiny = TINY[name]
    model, batch = sharpened(tiny.build()).double(), inputs(tiny.kind, padding, 24)
    expected = eager_weights(monkeypatch, model, batch).attentions
    real = batch["attention_mask"][1].bool()
    for layer, within in ((0, 1e-12), (1, 2e-5)):  # layers between normalise in float32
        found = attemper.pattern(model, batch, layer=layer, head=3, sequence=1)
        assert found.weights.dtype == torch.float64
        assert found.padding == (9, 9)
        assert found.tokens == found.key_tokens == tuple(map(str, batch["input_ids"][1][real].tolist()))
        torch.testing.assert_close(found.weights, expected[layer][1, 3][real][:, real], atol=within, rtol=0)


def test_learned_sinks_take_their_share_as_in_the_eager_model() -> None:
    pytest.importorskip("transformers")
    from tests.monitor.tiny_models import TINY, inputs, sharpened

    model, batch = sharpened(TINY["gpt-oss"].build()), inputs("decoder", None, 16)
    with torch.no_grad():
        expected = model(**batch, output_attentions=True).attentions[0][0, 2]
    found = attemper.pattern(model, batch, layer=0, head=2, sequence=0)
    assert found.weights.dtype == torch.float32
    assert found.weights.sum(-1).max() < 0.999
    torch.testing.assert_close(found.weights, expected, atol=2e-5, rtol=0)


def test_encoder_decoder_sites_are_labelled_by_their_own_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from tests.monitor.tiny_models import TINY, inputs, sharpened

    model = sharpened(TINY["t5"].build()).double()
    batch = {name: part[:1] for name, part in inputs("encoder-decoder", "right", 14).items()}
    eager = eager_weights(monkeypatch, model, batch)
    ids, own = (tuple(map(str, batch[name][0].tolist())) for name in ("input_ids", "decoder_input_ids"))
    sites = {
        "encoder.block.1.layer.0.SelfAttention": (eager.encoder_attentions, ids, ids),
        "decoder.block.1.layer.0.SelfAttention": (eager.decoder_attentions, own, own),
        "decoder.block.1.layer.1.EncDecAttention": (eager.cross_attentions, own, ids),
    }
    for site, (expected, rows, columns) in sites.items():
        found = attemper.pattern(model, batch, site=site, head=1)
        assert (found.tokens, found.key_tokens) == (rows, columns)
        assert found.kind == ("cross" if "EncDec" in site else "self")
        # Some transformers softmax T5 in float32, others in the model's float64.
        torch.testing.assert_close(found.weights, expected[1][0, 1].to(found.weights), atol=2e-5, rtol=0)


def test_keys_of_a_cache_are_labelled_by_their_places() -> None:
    transformers = pytest.importorskip("transformers")
    from tests.monitor.tiny_models import CACHE, TINY

    model = TINY["llama"].build().eval()
    ids = torch.randint(3, 101, (1, 9))
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(**{"input_ids": ids[:, :6], CACHE: cache, "use_cache": True})
    found = attemper.pattern(model, {"input_ids": ids[:, 6:], CACHE: cache, "use_cache": True}, layer=1, head=0)
    last = tuple(map(str, ids[0, 6:].tolist()))
    assert found.tokens == last
    assert found.key_tokens == ("#0", "#1", "#2", "#3", "#4", "#5", *last)
    torch.testing.assert_close(found.weights.sum(-1), torch.ones(3))


# --- every way into a model ---


class Flash(own_models.Own):
    """flash_attn's function, whose causality is aligned to the bottom right."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.transpose(1, 2) for part in self.split(x))
        return flash_attn_func(query, key, value, causal=True)


class Tapped(own_models.Own):
    """Arithmetic that nothing sees, and a tap beside it."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.split(x)
        attemper.tap(query, key, name="beside", is_causal=True)
        weights = (query @ key.transpose(-2, -1) / 8**0.5).exp().tril()
        return (weights / weights.sum(-1, keepdim=True)) @ value


class Ours(own_models.Own):
    """Our own function, in a normalizer that is not softmax."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.split(x)
        return attemper.attention(query, key, value, is_causal=True, normalizer="sparsemax", temperature=0.5).output

    def weights(self, x: Tensor) -> Tensor:
        query, key, _ = self.split(x)
        scores = query @ key.transpose(-2, -1) / (0.5 * 8**0.5)
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return attemper.functional.sparsemax(scores.masked_fill(hidden, -torch.inf))


class Packed(own_models.Own):
    """Two documents of 7 and 5 tokens in one row."""

    def forward(self, x: Tensor) -> Tensor:
        starts = torch.tensor([0, 7, 12], dtype=torch.int32)
        query, key, value = (part[0].transpose(0, 1) for part in self.split(x))
        return attemper.varlen_attention(query, key, value, starts, starts, 7, 7, is_causal=True).output

    def weights(self, x: Tensor) -> Tensor:
        parts = [super(Packed, self).weights(document)[0] for document in (x[:, :7], x[:, 7:])]
        return torch.stack([torch.block_diag(*heads) for heads in zip(*parts, strict=True)])[None]


WAYS: dict[str, type[own_models.Own]] = {
    "F.scaled_dot_product_attention": own_models.Own,
    "softmax by hand": own_models.Hand,
    "heads folded into the batch": own_models.Folded,
    "FlexAttention": own_models.Flex,
    "flash_attn": Flash,
    "tap": Tapped,
    "attemper.attention": Ours,
    "packed documents": Packed,
}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.turns(2)
def test_every_way_into_a_model_gives_the_weights_of_its_formula(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    model = WAYS[way]().double().eval()
    package: Any = ModuleType("flash_attn.flash_attn_interface")
    package.flash_attn_func = flash_attn_func
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", package)
    x = torch.randn(1, 12, 32, dtype=torch.float64)
    expected = model.weights(x).detach()
    found = attemper.pattern(model, x)
    assert [one.head for one in found] == list(range(4))
    assert {one.site for one in found} == {"beside" if way == "tap" else type(model).__name__}
    torch.testing.assert_close(torch.stack([one.weights for one in found]), expected[0], atol=1e-12, rtol=0)
    one = attemper.pattern(model, x, head=3)
    assert one.tokens == tuple(f"#{place}" for place in range(12)), "no ids were given"
    assert torch.equal(one.weights, found[3].weights)


def test_multi_head_attention_gives_the_weights_that_it_would_return() -> None:
    model, (x, _, padding) = own_models.OWN["encoder"]()
    model = model.double()
    batch = (x.double(), None, padding)
    layer = model.layers[0].self_attn
    expected = layer(x.double(), x.double(), x.double(), padding, average_attn_weights=False)[1].detach()
    found = attemper.pattern(model, batch, layer=0, head=2, sequence=1)
    assert found.padding == (5, 5)
    torch.testing.assert_close(found.weights, expected[1, 2, :15, :15], atol=1e-12, rtol=0)


@pytest.mark.parametrize("normalizer", ["softmax", "sigmoid", "entmax15", "softmax_plus_one", "scalable_softmax"])
def test_our_layers_give_the_weights_that_they_return(normalizer: str) -> None:
    layer = attemper.nn.MultiheadAttention(16, 2, batch_first=True, normalizer=normalizer, temperature=0.7).double()
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    expected = layer(x, x, x, need_weights=True, average_attn_weights=False)[1].detach()
    found = attemper.pattern(layer.eval(), (x, x, x), head=1, sequence=1)
    torch.testing.assert_close(found.weights, expected[1, 1], atol=1e-12, rtol=0)


def test_a_tempered_model_shows_the_weights_that_it_applies() -> None:
    model = own_models.Own().double().eval()
    x = torch.randn(1, 9, 32, dtype=torch.float64)
    before = attemper.pattern(model, x, head=1).weights
    with attemper.temper(model, temperature=2.0):
        after = attemper.pattern(model, x, head=1).weights
    expected = torch.where(before > 0, before.log() / 2, -torch.inf).softmax(-1)
    torch.testing.assert_close(after, expected, atol=1e-12, rtol=0)


def test_the_model_is_as_it_was() -> None:
    transformers = pytest.importorskip("transformers")
    from tests.monitor.tiny_models import TINY, inputs

    model, batch = TINY["llama"].build().eval(), inputs("decoder", None, 8)
    assert isinstance(model, transformers.PreTrainedModel)
    before = model(**batch).logits
    attemper.pattern(model, batch, layer=0, head=0, sequence=0)
    assert model.config._attn_implementation == "eager"
    assert torch.equal(model(**batch).logits, before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


# --- tokens ---


class Text(own_models.Own):
    """Ids in, by an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 32)

    def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(self.embedding(ids))


class Converts:
    def convert_ids_to_tokens(self, ids: list[int]) -> list[str | None]:
        return [None if number == 10 else f"<{number}>" for number in ids]


class Decodes:
    def decode(self, ids: list[int]) -> str:
        return "".join(chr(97 + number) for number in ids)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ("3", "1", "10")),
        ({"tokenizer": Converts()}, ("<3>", "<1>", "10")),
        ({"tokenizer": Decodes()}, ("d", "b", "k")),
        ({"tokenizer": lambda ids: [f"{number:03}" for number in ids]}, ("003", "001", "010")),
        ({"tokens": ["a", "b", "c"]}, ("a", "b", "c")),
    ],
)
def test_tokens_are_named_by_a_tokenizer_by_the_caller_or_by_their_ids(options: Any, expected: tuple) -> None:
    found = attemper.pattern(Text().eval(), torch.tensor([[3, 1, 10]]), head=0, **options)
    assert found.tokens == found.key_tokens == expected


def test_tokens_may_be_given_without_those_of_padding() -> None:
    model, (x, _, padding) = own_models.OWN["encoder"]()
    for given in (list("abcdefghijklmno"), list("abcdefghijklmno-----")):
        found = attemper.pattern(model, (x, None, padding), layer=1, head=0, sequence=1, tokens=given)
        assert found.tokens == tuple("abcdefghijklmno")


def test_two_sequences_of_ids_that_could_both_be_meant_label_nothing() -> None:
    class Two(Text):
        def forward(self, ids: Tensor, others: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(ids + others)

    ids = torch.tensor([[1, 2, 3]])
    assert attemper.pattern(Two().eval(), (ids, ids + 1), head=0).tokens == ("#0", "#1", "#2")


# --- errors ---


class Shared(nn.Module):
    """One module that attends twice under its own name."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = own_models.Own()

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(self.attention(x).transpose(1, 2).flatten(2))


class HalfRead(nn.Module):
    """A module that is read, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.lost = nn.MultiheadAttention(8, 2), nn.MultiheadAttention(8, 2, add_bias_kv=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.seen(x, x, x)[0] + self.lost(x, x, x)[0]


def _llama() -> tuple[nn.Module, Any]:
    pytest.importorskip("transformers")
    from tests.monitor.tiny_models import TINY, inputs

    return TINY["llama"].build().eval(), inputs("decoder", None, 8)


def _t5() -> tuple[nn.Module, Any]:
    pytest.importorskip("transformers")
    from tests.monitor.tiny_models import TINY, inputs

    return TINY["t5"].build().eval(), inputs("encoder-decoder", None, 8)


def _own() -> tuple[nn.Module, Any]:
    return own_models.Own().eval(), torch.randn(1, 6, 32)


def _shared() -> tuple[Shared, Any]:
    return Shared().eval(), torch.randn(1, 6, 32)


SITE = "model.layers.1.self_attn"
WRONG: dict[str, tuple[Callable[[], tuple[Any, Any]], dict[str, Any], str]] = {
    "site": (
        _llama, {"site": "model.layers.1.self_atn", "head": 0, "sequence": 0},
        r"no such site. Did you mean 'model.layers.1.self_attn'.* Sites: model.layers.0.self_attn, model.layers.1.self",
    ),
    "layer": (_llama, {"layer": 7, "head": 0, "sequence": 0}, "there is no such layer. Layers: 0, 1"),
    "head": (_llama, {"site": SITE, "head": 4, "sequence": 0}, rf"pattern\(head=4\): {SITE} has heads 0 to 3"),
    "which site": (_llama, {"head": 0, "sequence": 0}, "several sites, name one by site=: model.layers.0"),
    "which of a layer": (_t5, {"layer": 0, "head": 0, "sequence": 0}, "layer 0 has several sites, name one"),
    "sequence": (_llama, {"layer": 0, "head": 0}, "the batch has sequences 0 to 2, and none was chosen"),
    "which sequence": (_llama, {"layer": 0, "head": 0, "sequence": 3}, "sequence=3 is not among them"),
    "size": (
        _llama, {"layer": 0, "head": 0, "sequence": 0, "max_weights": 63},
        r"8 queries x 8 keys = 64 weights a head, and max_weights is 63. Take a shorter text, or pass max_weights=64",
    ),
    "which call": (_shared, {"head": 0}, "attention attends 2 times in this pass: say which, call=0 to 1"),
    "call": (_shared, {"head": 0, "call": 2}, r"pattern\(call=2\): attention attends 2 times in this pass, 0 to 1"),
    "no layers": (_own, {"layer": 0, "head": 0}, "there is no such layer. No site has a number: Own"),
    "both": (_own, {"site": "a", "layer": 0, "head": 0}, "give one of the two"),
    "head type": (_own, {"head": True}, r"pattern\(head=...\) must be an int of at least 0, or None, got True"),
    "head below": (_own, {"head": -1}, r"pattern\(head=...\) must be an int of at least 0, or None, got -1"),
    "layer type": (_own, {"head": 0, "layer": "1"}, r"layer=...\) must be an int of at least 0, or None, got '1'"),
    "site type": (_own, {"head": 0, "site": 3}, r"pattern\(site=...\) must be the name of a site, got 3"),
    "tokens": (_own, {"head": 0, "tokens": ["a"]}, r"pattern\(tokens=...\) must have a string for each key, 6; got 1"),
    "tokens type": (_own, {"head": 0, "tokens": "abcdef"}, r"tokens=...\) must be a sequence of strings.* got str"),
    "tokenizer type": (_own, {"head": 0, "tokenizer": 3}, "must have convert_ids_to_tokens or decode.* got int"),
    "tokens and tokenizer": (_own, {"head": 0, "tokens": ["a"], "tokenizer": Decodes()}, "give one of the two"),
    "tokens lost": (
        lambda: (Text().eval(), torch.tensor([[3, 1]])), {"head": 0, "tokenizer": lambda ids: ["one"]},
        "must give a string for each of 2 ids, gave 1",
    ),
    "skipped": (
        lambda: (HalfRead(), torch.randn(4, 1, 8)), {"head": 0, "site": "lost"},
        r"site='lost'\): it was not measured: it adds extra keys",
    ),
    "layer, all heads": (_llama, {"layer": 9, "sequence": 0}, r"\(layer=9\): there is no such layer. Layers: 0, 1"),
    "call, all heads": (_shared, {"call": 2}, r"pattern\(call=2\): attention attends 2 times in this pass, 0 to 1"),
    "nothing seen, all heads": (lambda: (nn.Linear(2, 2), torch.zeros(1, 2)), {}, "pattern saw no attention in Linear"),
    "nothing seen": (lambda: (nn.Linear(2, 2), torch.zeros(1, 2)), {"head": 0}, "pattern saw no attention in Linear"),
    "model": (lambda: (3, torch.zeros(1)), {"head": 0}, r"pattern\(model\) must be a torch.nn.Module, got int"),
    "name": (lambda: ("gpt2", torch.zeros(1)), {"head": 0}, r"got str\. Load it first, with AutoModel"),
    "batch": (lambda: (nn.Linear(2, 2), "text"), {"head": 0}, r"pattern\(batch\) must be a dict .* got str"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_not_there_is_refused_with_what_there_is(case: str) -> None:
    build, options, message = WRONG[case]
    model, batch = build()
    with pytest.raises(InputError, match=message):
        attemper.pattern(model, batch, **options)


def test_a_scan_that_is_given_such_a_tokenizer_names_itself() -> None:
    for tokenizer, told in (
        (3, "must have convert_ids_to_tokens or decode.* got int"),
        (lambda ids: ["one"], "gave 1"),
    ):
        with pytest.raises(InputError, match=rf"^scan\(tokenizer=\.\.\.\) .*{told}"):
            attemper.scan(Text().eval(), [torch.randint(0, 9, (1, 12))], tokenizer=tokenizer)


def test_a_pattern_says_what_it_is_and_not_its_numbers() -> None:
    found = attemper.pattern(own_models.Own().eval(), torch.randn(1, 6, 32), head=2)
    assert repr(found) == "Pattern(Own head 2: 6 queries x 6 keys)"
    assert found.layer is None
    padded = Pattern(torch.eye(2), ("a", "b"), "h.3.attn", 0, ("a", "b"), padding=(1, 2))
    assert "padding left out (of queries 1, of keys 2)" in repr(padded)
    assert padded.layer == 3
