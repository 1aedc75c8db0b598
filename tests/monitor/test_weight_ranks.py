"""Which ranks a control is over: what ``reduce`` may be, and what it is without other ranks."""

from typing import Any

import pytest
from torch import nn

import attemper
from attemper import InputError
from attemper.distributed.data_parallel import weight_ranks


@pytest.mark.parametrize("given", ["model", 0, True, ["data"]])
@pytest.mark.parametrize(
    "control", [attemper.QKClip, lambda model, **options: attemper.Thermostat(model, 1.0, **options)]
)
def test_reduce_is_data_none_a_group_or_a_mesh(control: Any, given: Any):
    with pytest.raises(InputError, match=r'\(reduce=...\) must be "data", a process group .* got'):
        control(nn.TransformerEncoderLayer(16, 2), reduce=given)


def test_one_process_has_no_other_ranks():
    layer = nn.TransformerEncoderLayer(16, 2)
    assert weight_ranks(layer, [layer.self_attn], "data") == []
