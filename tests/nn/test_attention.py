"""Attention layers: torch's module with every option, temperatures, statistics, mistakes."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import attemper
from attemper import InputError, nn
from attemper.call.visible_keys import visible_keys
from attemper.nn.attention import lengths

pytestmark = [pytest.mark.each, pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")]

B, Q, K, E, H = 2, 5, 7, 12, 3


def pair(**options: Any) -> tuple[torch.nn.MultiheadAttention, nn.MultiheadAttention]:
    """torch's module and ours with its checkpoint."""
    torch.manual_seed(0)
    theirs = torch.nn.MultiheadAttention(E, H, **options)
    for name, parameter in theirs.named_parameters():
        if "bias" in name:
            torch.nn.init.normal_(parameter)
    ours = nn.MultiheadAttention(E, H, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def inputs(batch_first: bool = False, kdim: int = E, vdim: int = E) -> list[Tensor]:
    tensors = [torch.randn(B, n, size) for n, size in ((Q, E), (K, kdim), (K, vdim))]
    return tensors if batch_first else [tensor.transpose(0, 1) for tensor in tensors]


MODULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False},
    "sizes": {"kdim": 6, "vdim": 10},
    "bias_kv": {"add_bias_kv": True},
    "zero_attn": {"add_zero_attn": True},
    "both": {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
}
PADDING = torch.zeros(B, K, dtype=torch.bool)
PADDING[1, 4:] = True
MASK = torch.arange(Q * K).view(Q, K) % 4 == 1
MASKS: dict[str, dict[str, Tensor]] = {
    "none": {},
    "padding": {"key_padding_mask": PADDING},
    "float padding": {"key_padding_mask": torch.zeros(B, K).masked_fill(PADDING, -torch.inf)},
    "mask": {"attn_mask": MASK},
    "bias": {"attn_mask": torch.linspace(-2, 2, Q * K).view(Q, K)},
    "bias per head": {"attn_mask": torch.linspace(-2, 2, B * H * Q * K).view(B * H, Q, K)},
    "mask and padding": {"attn_mask": MASK, "key_padding_mask": PADDING},
}


@pytest.mark.parametrize(("options", "masks"), list(itertools.product(MODULES, MASKS)))
def test_it_gives_what_torch_gives_with_the_same_checkpoint(options: str, masks: str):
    theirs, ours = pair(**MODULES[options])
    given = inputs(
        MODULES[options].get("batch_first", False), MODULES[options].get("kdim", E), MODULES[options].get("vdim", E)
    )
    for tensor in given:
        tensor.requires_grad_()
    for average in (True, False):
        want, want_weights = theirs(*given, **MASKS[masks], average_attn_weights=average)
        got, got_weights = ours(*given, **MASKS[masks], average_attn_weights=average)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(got_weights, want_weights)
    want = torch.autograd.grad(want.square().sum(), [*given, *theirs.parameters()])
    got = torch.autograd.grad(got.square().sum(), [*given, *ours.parameters()])
    for (name, _), one, other in zip([("", None)] * 3 + list(ours.named_parameters()), got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4, msg=lambda text, n=name: f"{n}: {text}")
    assert ours(*given, need_weights=False)[1] is None


def test_without_a_batch_and_under_causality_it_gives_what_torch_gives():
    theirs, ours = pair()
    single = [tensor[:, 0] for tensor in inputs()]
    for one, other in zip(ours(*single), theirs(*single), strict=True):
        torch.testing.assert_close(one, other)
    padded = {"key_padding_mask": PADDING[1]}
    torch.testing.assert_close(ours(*single, **padded)[0], theirs(*single, **padded)[0])
    for options in ({}, {"add_bias_kv": True, "add_zero_attn": True}):
        theirs, ours = pair(**options)
        query = torch.randn(K, B, E)
        causal = torch.nn.Transformer.generate_square_subsequent_mask(K)
        # Not with is_causal=True: torch then hides the keys that add_bias_kv appends from most queries.
        want = theirs(query, query, query, attn_mask=causal)[0]
        torch.testing.assert_close(ours(query, query, query, is_causal=True, need_weights=False)[0], want)
        torch.testing.assert_close(ours(query, query, query, attn_mask=causal, is_causal=True)[0], want)


def test_torchs_layers_take_it_as_their_attention():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(E, H, 16, dropout=0.0)
    source = torch.randn(Q, B, E)
    want = layer(source)
    ours = nn.MultiheadAttention(E, H)
    ours.load_state_dict(layer.self_attn.state_dict())
    layer.self_attn = ours
    torch.testing.assert_close(layer(source), want)


@pytest.mark.parametrize("given", [0.5, torch.tensor([0.5, 1.0, 2.0]), "learned", "conditional", "length"])
def test_a_temperature_divides_the_scores_of_each_head(given: Any):
    theirs, plain = pair(batch_first=True)
    modules = {
        "learned": nn.LearnedTemperature(H, initial=0.7), "conditional": nn.ConditionalTemperature(E, H),
        "length": nn.LengthTemperature(3),
    }  # fmt: skip
    temperature = modules[given] if isinstance(given, str) else given
    if given == "conditional":
        torch.nn.init.normal_(modules[given].projection.weight)
    ours = nn.MultiheadAttention(E, H, batch_first=True, temperature=temperature)
    ours.load_state_dict(theirs.state_dict(), strict=False)
    query, key, value = inputs(batch_first=True)
    q, k, v = plain._project(query, key, value)
    assert ours.temperature is not None
    counts = (~PADDING).sum(-1)[:, None, None].expand(B, 1, Q)
    each = ours.temperature(q, hidden=query, visible_keys=counts).expand(B, H, Q)
    scores = (q @ k.mT / 2.0 / each[..., None]).masked_fill(PADDING[:, None, None], -torch.inf)
    want = plain.out_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(ours(query, key, value, key_padding_mask=PADDING)[0], want)


def test_statistics_take_the_place_of_weights_and_have_gradients():
    ours = nn.MultiheadAttention(E, H, stats="all", temperature=nn.LearnedTemperature(H), batch_first=True)
    query, key, value = inputs(batch_first=True)
    output, stats = ours(query, key, value, key_padding_mask=PADDING)
    assert isinstance(stats, attemper.types.AttentionStats)
    assert output.shape == (B, Q, E)
    assert (stats.visible_keys == torch.tensor([K, 4])[:, None, None]).all()
    attemper.functional.entropy_target(stats, 0.5).backward()
    assert ours.temperature is not None
    grads = [parameter.grad for parameter in (*ours.temperature.parameters(), ours.in_proj_weight)]
    assert all(grad is not None and grad.abs().max() > 0 for grad in grads)


def test_dropout_acts_in_training_only():
    ours = nn.MultiheadAttention(E, H, dropout=0.5)
    given = inputs()
    assert not torch.equal(ours(*given)[0], ours(*given)[0])
    ours.eval()
    assert torch.equal(ours(*given)[0], ours(*given)[0])


@pytest.mark.parametrize("padding", ["none", "bool", "context size"])
def test_cross_attention_is_its_four_projections_around_attention(padding: str):
    layer = nn.CrossAttention(E, 10, H, head_dim=5, temperature=0.7, stats="entropy")
    query, context = torch.randn(B, Q, E), torch.randn(B, K, 10)
    mask = None if padding == "none" else ~PADDING
    output, stats = layer(query, context, mask)
    q, k, v = (
        projection(tensor).view(B, -1, H, 5).transpose(1, 2)
        for projection, tensor in ((layer.q_proj, query), (layer.k_proj, context), (layer.v_proj, context))
    )
    scores = q @ k.mT / 5**0.5 / 0.7
    scores = scores if mask is None else scores.masked_fill(PADDING[:, None, None], -torch.inf)
    weights = scores.softmax(-1)
    torch.testing.assert_close(output, layer.out_proj((weights @ v).transpose(1, 2).flatten(2)))
    assert stats is not None
    torch.testing.assert_close(stats.entropy, torch.special.entr(weights).sum(-1))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [None, (K,), (Q, K), (B, 1, 1, K), (B, 1, Q, K), (1, H, Q, K)])
@pytest.mark.parametrize("floating", [False, True])
def test_visible_keys_are_counted_as_attention_counts_them(causal: bool, shape: Any, floating: bool):
    mask = None if shape is None else torch.rand(shape) < 0.6
    if mask is not None and floating:
        mask = torch.where(mask, torch.randn(mask.shape), torch.finfo(torch.float32).min)
    query, key = torch.randn(B, H, Q, 4), torch.randn(B, H, K, 4)
    want = attemper.attention_statistics(query, key, mask, causal, stats="visible_keys").visible_keys
    assert torch.equal(visible_keys(query, K, mask, causal).expand(B, H, Q), want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_float_mask_of_a_half_precision_layer_hides_nothing_that_it_only_makes_small(dtype: torch.dtype):
    layer = nn.MultiheadAttention(16, 2, batch_first=True, stats="visible_keys").to(dtype)
    x = torch.randn(1, 4, 16, dtype=dtype)
    mask = torch.zeros(4, 4)
    mask[:, 1] = -1e9
    padding = torch.zeros(1, 4, dtype=torch.bool)
    padding[:, 3] = True
    _, stats = layer(x, x, x, attn_mask=mask, key_padding_mask=padding)
    assert isinstance(stats, attemper.types.AttentionStats)
    assert (stats.visible_keys == 3).all()


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("kind", [nn.MultiheadAttention, torch.nn.MultiheadAttention])
@pytest.mark.parametrize("masks", ["padding", "mask", "padding of numbers, mask of marks"])
def test_the_lowest_number_of_a_float16_mask_hides_a_key(masks: str, kind: type[torch.nn.MultiheadAttention]):
    layer, x = kind(16, 2, batch_first=True).eval().half(), torch.randn(1, 4, 16).half()
    low = torch.tensor([0, 0, 0, torch.finfo(torch.float16).min], dtype=torch.float16)
    given = {"key_padding_mask": low[None]} if "padding" in masks else {"attn_mask": low.expand(4, 4)}
    given |= {"attn_mask": torch.zeros(4, 4, dtype=torch.bool)} if "marks" in masks else {}
    with attemper.watch(layer, stats="all") as watch:
        layer(x, x, x, **given)
    assert {head.visible_keys for head in watch.table().sites[0].heads} == {3.0}


TRIANGLES = {"top-left": causal_upper_left, "bottom-right": causal_lower_right}


@pytest.mark.parametrize("alignment", TRIANGLES)
@pytest.mark.parametrize("module", ["plain", "bias_kv"])
def test_a_causal_bias_is_the_mask_of_its_triangle(module: str, alignment: str):
    _, ours = pair(batch_first=True, **MODULES[module])
    x = inputs(batch_first=True)
    seen = torch.ones(Q, K, dtype=torch.bool).tril(K - Q if alignment == "bottom-right" else 0)
    found = ours(*x, attn_mask=TRIANGLES[alignment](Q, K))
    for one, two in zip(found, ours(*x, attn_mask=~seen), strict=True):
        torch.testing.assert_close(one, two)
    cross = nn.CrossAttention(E, num_heads=H, stats="visible_keys")
    stats = cross(x[0], x[1], TRIANGLES[alignment](Q, K)).stats
    assert stats is not None
    assert torch.equal(stats.visible_keys, seen.sum(-1).expand(B, H, Q))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: nn.MultiheadAttention(E, H, temperature=0.0), r"FixedTemperature\(value\) must be above 0, got 0.0"),
        (
            lambda x: nn.MultiheadAttention(E, H, stats="entrop"),
            r"MultiheadAttention\(stats=...\) does not know 'entrop'",
        ),
        (
            lambda x: nn.MultiheadAttention(E, H, stats="all")(*inputs(), need_weights=True),
            "returns statistics where torch's returns weights",
        ),
        (
            lambda x: nn.MultiheadAttention(E, H)(*inputs(), key_padding_mask=PADDING.T),
            r"\(key_padding_mask=...\) must be \[2, 7\], got \[7, 2\]",
        ),
        (
            lambda x: nn.MultiheadAttention(E, H)(*inputs(), attn_mask=MASK.T),
            r"\(attn_mask=...\) must be \[5, 7\] or \[6, 5, 7\], got \[7, 5\]",
        ),
        (
            lambda x: nn.MultiheadAttention(E, H)(*inputs(kdim=6)),
            r"MultiheadAttention\(key\) must be 12 long in its last",
        ),
        (
            lambda x: nn.MultiheadAttention(E, H, normalizer="top-k"),
            r"MultiheadAttention\(normalizer=\.\.\.\) must be one of",
        ),
        (
            lambda x: nn.CrossAttention(E, num_heads=H, normalizer=torch.nn.Softmax(-1)),  # pyright: ignore[reportArgumentType]
            r"CrossAttention\(normalizer=\.\.\.\) must be one of",
        ),
        (
            lambda x: nn.CrossAttention(E, num_heads=5),
            r"CrossAttention\(dim=12, num_heads=5\): the heads must divide dim",
        ),
        (
            lambda x: nn.CrossAttention(E, 10, H)(torch.zeros(B, Q, E), torch.zeros(B, K, E)),
            r"CrossAttention\(context\) must be \[batch, tokens, 10\], got \[2, 7, 12\]",
        ),
        (
            lambda x: nn.MultiheadAttention(E, H, batch_first=True)(*x, attn_mask=causal_upper_left(Q, Q)),
            r"MultiheadAttention\(attn_mask=...\) is a CausalBias of \(5, 5\) \(queries, keys\); the call has \(5, 7\)",
        ),
        (
            lambda x: nn.CrossAttention(E, num_heads=H)(*x[:2], causal_upper_left(Q, Q)),
            r"CrossAttention\(context_mask=...\) is a CausalBias of \(5, 5\) \(queries, keys\)",
        ),
        (
            lambda x: nn.MultiheadAttention(E, H, batch_first=True)(
                *x, key_padding_mask=torch.zeros(B, K).as_subclass(type("Odd", (Tensor,), {}))
            ),
            r"MultiheadAttention\(key_padding_mask=...\) is a Odd, a subclass of Tensor",
        ),
        (
            lambda x: nn.CrossAttention(E, num_heads=H)(torch.nested.as_nested_tensor(list(x[0])), x[1]),
            r"CrossAttention\(query=...\) is a nested tensor, whose sequences differ in length. Pad it",
        ),
    ],
)
def test_mistakes_are_told(call: Any, message: str):
    with pytest.raises(InputError, match=message):
        call(inputs(batch_first=True))


# --- nested tensors, which nn.TransformerEncoder makes of padded batches for its fast path ---

LENGTHS = (5, 3, 1)
UNEVEN = torch.arange(5) >= torch.tensor(LENGTHS)[:, None]


def stock() -> torch.nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 2).eval()


def ours(temperature: float = 1.0, *, later: bool = False) -> torch.nn.TransformerEncoder:
    """The same encoder with our layers: put in before torch looked at them, or after."""
    encoder = stock()
    state = encoder.state_dict()
    layer = encoder.layers[0]
    assert isinstance(layer, torch.nn.TransformerEncoderLayer)
    for part in encoder.layers if later else (layer,):
        part.self_attn = nn.MultiheadAttention(16, 4, batch_first=True, temperature=temperature)
    made = encoder if later else torch.nn.TransformerEncoder(layer, 2)
    made.load_state_dict(state, strict=False)
    return made.eval()


def batch() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(len(LENGTHS), max(LENGTHS), 16)


@pytest.mark.parametrize("later", [False, True], ids=["built with", "put in later"])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_an_encoder_in_eval_without_gradients_takes_a_padded_batch(temperature: float, later: bool):
    encoder, x = ours(temperature, later=later), batch()
    with torch.no_grad():
        found = encoder(x, src_key_padding_mask=UNEVEN)
    dense = encoder(x, src_key_padding_mask=UNEVEN)  # with gradients torch nests nothing
    torch.testing.assert_close(found[~UNEVEN], dense[~UNEVEN])
    assert bool((found[UNEVEN] == 0).all())  # as torch's own encoder
    if temperature == 1.0:
        with torch.no_grad():
            torch.testing.assert_close(found, stock()(x, src_key_padding_mask=UNEVEN))


def test_a_stock_encoder_that_is_tempered_takes_one_too():
    encoder, x = stock(), batch()
    with torch.no_grad():
        before = encoder(x, src_key_padding_mask=UNEVEN)
        with attemper.temper(encoder, temperature=2.0):
            found = encoder(x, src_key_padding_mask=UNEVEN)
        torch.testing.assert_close(found, ours(2.0)(x, src_key_padding_mask=UNEVEN))
        assert torch.equal(encoder(x, src_key_padding_mask=UNEVEN), before)


def nested(*sizes: int) -> Tensor:
    return torch.nested.as_nested_tensor([torch.randn(size, 16) for size in sizes])


def test_each_sequence_attends_as_if_it_was_alone():
    layer = nn.MultiheadAttention(16, 4, batch_first=True, stats="visible_keys")
    query, context = nested(2, 4), nested(6, 3)
    output, stats = layer(query, context, context)
    assert lengths(output) == [2, 4]
    for one, q, c in zip(output.unbind(), query.unbind(), context.unbind(), strict=True):
        torch.testing.assert_close(one, layer(q, c, c)[0])
    assert isinstance(stats, attemper.types.AttentionStats)
    assert stats.visible_keys[:, 0, 0].tolist() == [6, 3]


@pytest.mark.parametrize(
    "call",
    [
        lambda layer, x, mask: layer(x, x, x, key_padding_mask=mask),
        lambda layer, x, mask: layer(torch.randn(2, 5, 16), x, x),
        lambda layer, x, mask: nn.MultiheadAttention(16, 4)(x, x, x),
        lambda layer, x, mask: layer(*[torch.nested.as_nested_tensor(list(x.unbind()), layout=torch.jagged)] * 3),
    ],
    ids=["with padding, too", "not all of them", "batch second", "jagged"],
)
def test_nested_tensors_of_another_kind_are_refused(call):
    layer = nn.MultiheadAttention(16, 4, batch_first=True)
    with pytest.raises(InputError, match="takes nested tensors if query, key and value all are, batch first"):
        call(layer, nested(2, 4), torch.zeros(2, 4, dtype=torch.bool))
