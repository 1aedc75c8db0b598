"""Laws of temperature over length: their closed forms, and transformers' own numbers for the models that have them."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attemper import InputError
from attemper import functional as F

LENGTHS = (2, 17, 128, 512, 513, 4096, 100_000)


@pytest.mark.parametrize("n", [256, 4096, 65536])
def test_log_leaves_half_of_the_weight_on_a_key_that_stands_out_by_log_of_the_reference(n: int):
    scores = torch.zeros(n, dtype=torch.float64)
    scores[3] = math.log(256)
    temperature = F.length_temperature(n, 256)
    assert F.softmax(scores, temperature=temperature)[3].item() == pytest.approx(n / (2 * n - 1), rel=1e-9)
    assert temperature == pytest.approx(math.log(256) / math.log(n), rel=1e-12)
    if n > 256:
        assert F.softmax(scores)[3] < 0.1
    assert F.length_temperature(1, 512) == math.inf


def test_yarn_is_the_square_of_the_attention_factor_of_transformers():
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for factor in (1.0, 2.0, 8.0, 40.0):
        config = transformers.LlamaConfig(
            hidden_size=32, num_attention_heads=2, max_position_embeddings=int(512 * factor),
            rope_parameters={
                "rope_type": "yarn", "factor": factor, "rope_theta": 10_000.0, "original_max_position_embeddings": 512,
            },
        )  # fmt: skip
        _, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
        assert F.length_temperature(512 * factor, 512, "yarn") == pytest.approx(attention_factor**-2, rel=1e-12)
    assert F.length_temperature(100, 512, "yarn") == 1.0


def test_llama4_is_what_its_layers_without_positions_multiply_queries_by():
    pytest.importorskip("transformers")
    from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

    places = torch.arange(0, 40_000, 777)
    scale = get_llama_4_attn_scale(places[None], 0.1, 8192)[0, 0, :, 0]
    torch.testing.assert_close(1 / F.length_temperature(places, 8192, "llama4"), scale)
    own = SimpleNamespace(floor_scale=8192, attn_scale=0.1)
    # Llama4TextAttention.forward, with positions from 0.
    llama = torch.log1p(torch.floor((places.float() + 1.0) / own.floor_scale)) * own.attn_scale + 1.0
    torch.testing.assert_close(1 / F.length_temperature(places + 1, 8192, "llama4"), llama)


@pytest.mark.parametrize("law", ["log", "yarn", "llama4"])
def test_tensors_are_numbers_one_by_one(law: str):
    lengths = torch.tensor(LENGTHS)
    each = [F.length_temperature(int(n), 512, law) for n in lengths]
    got = F.length_temperature(lengths.view(1, -1), 512, law)
    assert isinstance(got, torch.Tensor)
    torch.testing.assert_close(got[0].double(), torch.tensor(each, dtype=torch.float64), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"law": "sqrt"}, "must be one of 'log', 'yarn', 'llama4'; got 'sqrt'"),
        ({"reference": 1}, r"length_temperature\(reference=...\) must be a number above 1, got 1"),
        ({"reference": 0, "law": "yarn"}, "must be a number above 0, got 0"),
        ({"n": 0}, r"length_temperature\(n\) must be a number of keys of at least 1, got 0"),
        ({"n": torch.ones(3, dtype=torch.bool)}, "must hold numbers of keys, got torch.bool"),
    ],
)
def test_mistakes_are_told(arguments: dict[str, Any], message: str):
    given: dict[str, Any] = {"n": 10, "reference": 10} | arguments
    with pytest.raises(InputError, match=message):
        F.length_temperature(**given)
