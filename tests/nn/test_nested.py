"""``nn.TransformerEncoder`` makes nested tensors of padded batches for its fast path: our layers take them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import attemper
from attemper import InputError, nn
from attemper.nn.attention import lengths

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
LENGTHS = (5, 3, 1)
PADDING = torch.arange(5) >= torch.tensor(LENGTHS)[:, None]


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
        found = encoder(x, src_key_padding_mask=PADDING)
    dense = encoder(x, src_key_padding_mask=PADDING)  # with gradients torch nests nothing
    torch.testing.assert_close(found[~PADDING], dense[~PADDING])
    assert bool((found[PADDING] == 0).all())  # as torch's own encoder
    if temperature == 1.0:
        with torch.no_grad():
            torch.testing.assert_close(found, stock()(x, src_key_padding_mask=PADDING))


def test_a_stock_encoder_that_is_tempered_takes_one_too():
    encoder, x = stock(), batch()
    with torch.no_grad():
        before = encoder(x, src_key_padding_mask=PADDING)
        with attemper.temper(encoder, temperature=2.0):
            found = encoder(x, src_key_padding_mask=PADDING)
        torch.testing.assert_close(found, ours(2.0)(x, src_key_padding_mask=PADDING))
        assert torch.equal(encoder(x, src_key_padding_mask=PADDING), before)


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
