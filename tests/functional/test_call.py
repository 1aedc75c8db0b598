"""What attention refuses, message by message: each says what was expected, what came and what to do."""

import inspect
import math
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import attemper
from attemper import InputError, functional
from attemper.call.request import Keywords, ScoreKeywords
from attemper.statistics import ONE_PASS
from tests.support.calls import attended

pytestmark = pytest.mark.each

Q, KV = torch.zeros(2, 4, 3, 8), torch.zeros(2, 4, 5, 8)


def attend(**changes: Any) -> attemper.types.AttentionOutput:
    arguments: dict[str, Any] = {"query": Q, "key": KV, "value": KV} | changes
    return attemper.attention(**arguments)


TENSORS = {
    "query is a list": ({"query": [1.0]}, r"attention\(query=\.\.\.\) must be a tensor, got list"),
    "key is None": ({"key": None}, r"attention\(key=\.\.\.\) must be a tensor, got NoneType"),
    "query has 3 dimensions": (
        {"query": Q[0]},
        r"attention\(query=\.\.\.\) must have 4 dimensions \[batch, heads, tokens, size\], got \[4, 3, 8\]"
        r".*query\[None, None\]",
    ),
    "value has 2 dimensions": (
        {"value": KV[0, 0]},
        r"attention\(value=\.\.\.\) must have 4 dimensions .* got \[5, 8\]",
    ),
    "query is int": (
        {"query": Q.long()},
        r"attention\(query=\.\.\.\) must be float16, bfloat16, float32 or float64, got torch\.int64",
    ),
    "query is complex": (
        {"query": Q.to(torch.complex64)},
        r"must be float16, bfloat16, float32 or float64, got torch\.complex64",
    ),
    "types differ": (
        {"key": KV.half()},
        r"query is torch\.float32 on cpu but key is torch\.float16 on cpu\. Bring them to one type and device",
    ),
    "devices differ": ({"value": KV.to("meta")}, r"query is torch\.float32 on cpu but value is torch\.float32 on meta"),
    "batches differ": (
        {"key": KV[:1], "value": KV[:1]},
        r"key must be \[2, heads, keys, 8\] to match query \[2, 4, 3, 8\], got \[1, 4, 5, 8\]",
    ),
    "head sizes differ": (
        {"key": KV[..., :4]},
        r"key must be \[2, heads, keys, 8\] to match query .* got \[2, 4, 5, 4\]",
    ),
    "value has other keys": (
        {"value": KV[:, :, :4]},
        r"value must be \[2, 4, 5, size\] to match key, got \[2, 4, 4, 8\]",
    ),
    "value has other heads": (
        {"value": KV[:, :2]},
        r"value must be \[2, 4, 5, size\] to match key, got \[2, 2, 5, 8\]",
    ),
    "heads do not divide": (
        {"key": KV[:, :3], "value": KV[:, :3], "enable_gqa": True},
        r"query heads \(4\) cannot share key heads \(3\): they must be a multiple of these",
    ),
    "no key heads": (
        {"key": KV[:, :0], "value": KV[:, :0], "enable_gqa": True},
        r"query heads \(4\) cannot share key heads \(0\)",
    ),
    "grouped heads not meant": (
        {"key": KV[:, :2], "value": KV[:, :2]},
        r"query has 4 heads and key 2\. If 2 query heads share each key head "
        r"\(grouped-query attention\), pass enable_gqa=True",
    ),
}

OPTIONS = {
    "unknown normalizer": (
        {"normalizer": "softmin"},
        r"attention\(normalizer=\.\.\.\) must be one of 'softmax', .*'sigmoid', or an object of .*got 'softmin'",
    ),
    "unknown alignment": (
        {"causal_alignment": "center"},
        r"attention\(causal_alignment=\.\.\.\) must be one of 'top-left', 'bottom-right'; got 'center'",
    ),
    "window is a number": ({"window_size": 3}, r"attention\(window_size=\.\.\.\) must be \(left, right\).*got 3"),
    "window of three": (
        {"window_size": (1, 2, 3)},
        r"window_size=\.\.\.\) must be \(left, right\): two ints.*got \(1, 2, 3\)",
    ),
    "window below -1": ({"window_size": (-2, 0)}, r"-1 for no limit; got \(-2, 0\)"),
    "window of floats": ({"window_size": (1.0, 0)}, r"two ints of keys on each side.*got \(1\.0, 0\)"),
    "unknown statistic": (
        {"stats": ("entropy", "enthropy")},
        r"attention\(stats=\.\.\.\) does not know 'enthropy'\. Valid: 'all' \(one pass\), or names of lse, entropy",
    ),
    "unknown name alone": ({"stats": "variance"}, r"attention\(stats=\.\.\.\) does not know 'variance'"),
    "mask of ints": (
        {"attn_mask": torch.ones(3, 5, dtype=torch.int64)},
        r"attention\(attn_mask=\.\.\.\) must be a bool tensor .* got torch\.int64\. "
        r"For a mask of 0 and 1 pass mask\.bool\(\)",
    ),
    "mask is a list": ({"attn_mask": [[True]]}, r"attention\(attn_mask=\.\.\.\) must be a bool tensor .* got list"),
    "mask does not fit": (
        {"attn_mask": torch.ones(2, 5, dtype=torch.bool)},
        r"attn_mask=\.\.\.\) must broadcast to \[batch, heads, queries, keys\] = \[2, 4, 3, 5\], got \[2, 5\]"
        r".*mask\[:, None, None, :\]",
    ),
    "mask of five dimensions": (
        {"attn_mask": torch.ones(1, 1, 1, 3, 5, dtype=torch.bool)},
        r"must broadcast to .* got \[1, 1, 1, 3, 5\]",
    ),
    "no first token": ({"first_tokens": 0}, r"attention\(first_tokens=\.\.\.\) must be an int of at least 1, got 0"),
    "half a first token": (
        {"first_tokens": 1.5},
        r"attention\(first_tokens=\.\.\.\) must be an int of at least 1, got 1\.5",
    ),
    "softcap 0": (
        {"softcap": 0.0},
        r"attention\(softcap=\.\.\.\) must be finite and above 0, got 0\.0\. softcap\(x\) = c tanh",
    ),
    "softcap inf": ({"softcap": math.inf}, r"attention\(softcap=\.\.\.\) must be finite and above 0, got inf"),
    "softcap is a tensor": ({"softcap": torch.ones(())}, r"attention\(softcap=\.\.\.\) must be a number, got Tensor"),
    "scale NaN": (
        {"scale": math.nan},
        r"attention\(scale=\.\.\.\) must be a finite number or None for 1/sqrt\(head size\), got nan",
    ),
    "scale inf": ({"scale": -math.inf}, r"attention\(scale=\.\.\.\) must be a finite number"),
    "scale is a tensor": ({"scale": torch.ones(())}, r"attention\(scale=\.\.\.\) must be a finite number or None"),
    "temperature is a name": ({"temperature": "hot"}, r"attention\(temperature=\.\.\.\) must be a number, got str"),
    "temperature is True": ({"temperature": True}, r"attention\(temperature=\.\.\.\) must be a number, got bool"),
    "temperature 0": (
        {"temperature": 0.0},
        r"temperature=\.\.\.\) must be above 0, got 0\.0\. Temperature divides the scores: below 1",
    ),
    "temperature overflows": (
        {"temperature": 1e-40},
        r"temperature=\.\.\.\) is 1e-40: scale / temperature overflows torch\.float32\. Use 1e-30 or more",
    ),
    "temperature of ints": (
        {"temperature": torch.ones(4, 1, dtype=torch.int64)},
        r"temperature=\.\.\.\) must be a floating tensor, got torch\.int64",
    ),
    "temperature [H]": (
        {"temperature": torch.ones(4)},
        r"has one dimension, \[4\]: it would act on queries, not on heads\. "
        r"For one temperature per head pass temperature\[:, None\]",
    ),
    "temperature does not fit": (
        {"temperature": torch.ones(2, 1)},
        r"temperature=\.\.\.\) must broadcast to \[batch, heads, queries\] = \[2, 4, 3\], got \[2, 1\]",
    ),
    "temperature of four dimensions": (
        {"temperature": torch.ones(2, 4, 3, 1)},
        r"must broadcast to .* got \[2, 4, 3, 1\]",
    ),
    "sink is a number": (
        {"sink_logits": 0.0},
        r"attention\(sink_logits=\.\.\.\) must be a floating tensor \[heads\] = \[4\], got float",
    ),
    "sink of other heads": (
        {"sink_logits": torch.zeros(3)},
        r"sink_logits=\.\.\.\) must be a floating tensor .* got \[3\]",
    ),
    "sink of ints": (
        {"sink_logits": torch.zeros(4, dtype=torch.int64)},
        r"sink_logits=\.\.\.\) must be a floating tensor",
    ),
    "dropout above 1": (
        {"dropout_p": 1.5},
        r"attention\(dropout_p=\.\.\.\) must be a probability from 0 to 1, got 1\.5",
    ),
    "dropout below 0": (
        {"dropout_p": -0.1},
        r"attention\(dropout_p=\.\.\.\) must be a probability from 0 to 1, got -0\.1",
    ),
    "dropout NaN": (
        {"dropout_p": math.nan},
        r"attention\(dropout_p=\.\.\.\) must be a probability from 0 to 1, got nan",
    ),
}


@pytest.mark.parametrize("what", TENSORS)
def test_tensors_that_do_not_fit_are_refused(what: str):
    changes, message = TENSORS[what]
    with pytest.raises(InputError, match=message):
        attend(**changes)


@pytest.mark.parametrize("what", OPTIONS)
def test_options_without_a_meaning_are_refused(what: str):
    changes, message = OPTIONS[what]
    with pytest.raises(InputError, match=message):
        attend(**changes)


@pytest.mark.parametrize("function", ["attention_statistics", "dense_weights"])
def test_messages_name_the_function_that_was_called(function: str):
    with pytest.raises(InputError, match=rf"{function}\(query=\.\.\.\) must have 4 dimensions"):
        getattr(attemper.functional, function)(Q[0], KV)
    with pytest.raises(InputError, match=rf"{function}\(temperature=\.\.\.\) must be above 0"):
        getattr(attemper.functional, function)(Q, KV, temperature=-1)
    with pytest.raises(InputError, match=r"attention_statistics\(stats=\(\)\) asks for nothing: pass 'all' or names"):
        attemper.attention_statistics(Q, KV, stats=())


OFFSETS = torch.tensor([0, 2, 5])
PACKED: dict[str, tuple[dict[str, Any], str]] = {
    "query of four dimensions": (
        {"query": Q},
        r"varlen_attention\(query=\.\.\.\) must be \[total tokens, heads, size\], got \[2, 4, 3, 8\]",
    ),
    "key is a list": ({"key": [1]}, r"varlen_attention\(key=\.\.\.\) must be \[total tokens, heads, size\], got list"),
    "offsets are a list": (
        {"cu_seqlens_q": [0, 5]},
        r"cu_seqlens_q=\.\.\.\) must be a one-dimensional int32 or int64 tensor of offsets, got list",
    ),
    "offsets are floats": (
        {"cu_seqlens_k": OFFSETS.float()},
        r"cu_seqlens_k=\.\.\.\) must be .* got \[3\] torch\.float32",
    ),
    "offsets of two dimensions": (
        {"cu_seqlens_q": OFFSETS[None]},
        r"cu_seqlens_q=\.\.\.\) must be .* got \[1, 3\] torch\.int64",
    ),
    "numbers of documents differ": (
        {"cu_seqlens_k": OFFSETS[[0, 2]]},
        r"cu_seqlens_q and cu_seqlens_k must both be \[documents \+ 1\], got \[3\] and \[2\]",
    ),
    "no offsets": (
        {"cu_seqlens_q": OFFSETS[:0], "cu_seqlens_k": OFFSETS[:0]},
        r"must both be \[documents \+ 1\], got \[0\] and \[0\]",
    ),
    "offsets do not start at 0": (
        {"cu_seqlens_q": torch.tensor([1, 2, 5])},
        r"cu_seqlens_q=\.\.\.\) must rise from 0 to 5, got \[1, 2, 5\]",
    ),
    "offsets do not end at the end": (
        {"cu_seqlens_k": torch.tensor([0, 2, 4])},
        r"cu_seqlens_k=\.\.\.\) must rise from 0 to 5, got \[0, 2, 4\]",
    ),
    "offsets fall": ({"cu_seqlens_q": torch.tensor([0, 7, 5])}, r"must rise from 0 to 5, got \[0, 7, 5\]"),
}


@pytest.mark.parametrize("what", PACKED)
def test_packed_documents_that_do_not_fit_are_refused(what: str):
    changes, message = PACKED[what]
    packed = torch.zeros(5, 2, 4)
    arguments: dict[str, Any] = {
        "query": packed,
        "key": packed,
        "value": packed,
        "cu_seqlens_q": OFFSETS,
        "cu_seqlens_k": OFFSETS,
    }
    with pytest.raises(InputError, match=message):
        attemper.varlen_attention(**(arguments | changes))


def test_every_way_of_naming_statistics_is_understood():
    ways: list[tuple[Any, tuple[str, ...]]] = [
        ("gini", ("lse", "max_logit", "gini")),
        (["entropy"], ("lse", "entropy", "max_logit")),
        (("all", "gini"), (*ONE_PASS, "gini")),
        (iter(["key_mass", "entropy"]), ("lse", "entropy", "max_logit", "key_mass")),
    ]
    for stats, names in ways:
        measured = attend(stats=stats).stats
        assert measured is not None
        assert measured.names == names
        assert list(measured) == list(names)
    assert attend().stats is None


def test_a_call_reads_its_tensors_and_leaves_them_as_they_were(backend: str):
    tensors: dict[str, Any] = {
        "query": torch.randn(2, 4, 3, 8),
        "key": torch.randn(2, 4, 5, 8),
        "value": torch.randn(2, 4, 5, 8),
        "attn_mask": torch.randn(3, 5),
        "sink_logits": torch.randn(4),
        "temperature": torch.rand(4, 1) + 0.5,
    }
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    leaves = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
    output, stats = attended(backend, **leaves, softcap=5.0)
    (output.sum() + stats.entropy.sum()).backward()
    for name, tensor in tensors.items():
        assert torch.equal(tensor.detach(), copies[name]), name


NESTED = {
    "strided": lambda: torch.nested.as_nested_tensor([torch.randn(2, 3, 8), torch.randn(2, 5, 8)]),
    "jagged": lambda: torch.nested.as_nested_tensor(
        [torch.randn(3, 2, 8), torch.randn(5, 2, 8)], layout=torch.jagged
    ).transpose(1, 2),
}
TAKE_TENSORS = {
    "attention": lambda x: attemper.attention(x, x, x),
    "attention_statistics": lambda x: attemper.attention_statistics(x, x),
    "dense_weights": lambda x: attemper.functional.dense_weights(x, x),
    "varlen_attention": lambda x: attemper.varlen_attention(x, x, x, torch.tensor([0, 1]), torch.tensor([0, 1])),
    "tap": lambda x: attemper.tap(x, x, name="site"),
    "attention(attn_mask": lambda x: attemper.attention(Q, KV, KV, x),
    "attention(temperature": lambda x: attemper.attention(Q, KV, KV, temperature=x),
    "linear_attention": lambda x: functional.linear_attention(x, x, x),
    "entmax15": lambda x: functional.entmax15(x),
    "entropy": lambda x: functional.entropy(x),
}


@pytest.mark.parametrize("layout", NESTED)
@pytest.mark.parametrize("name", TAKE_TENSORS)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused_with_the_advice_to_pad_it(name: str, layout: str):
    with pytest.raises(
        InputError, match=f"^{re.escape(name)}.* is a nested tensor, .* Pad it with torch.nested.to_pad"
    ):
        TAKE_TENSORS[name](NESTED[layout]())


ROUNDED = {
    "values": (torch.float32, torch.float32, torch.bfloat16),
    "keys and values": (torch.float32, torch.bfloat16, torch.bfloat16),
    "to another type": (torch.float32, torch.float16, torch.bfloat16),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_tensors_of_several_types_are_taken_under_autocast_as_sdpa_takes_them(name: str, backend: str):
    q, k, v = tensors = [torch.randn(2, 3, 5, 8).to(dtype).requires_grad_() for dtype in ROUNDED[name]]
    with torch.autocast("cpu", torch.bfloat16):
        found = attemper.attention(q, k, v, backend=backend).output
        wanted = F.scaled_dot_product_attention(q, k, v)
        stats = attemper.attention_statistics(q, k, backend=backend)
        weights = attemper.functional.dense_weights(q, k)
    assert found.dtype == wanted.dtype == torch.bfloat16
    q_inside, k_inside, v_inside = [part.detach().bfloat16() for part in tensors]
    same = attemper.attention(q_inside, k_inside, v_inside, backend=backend).output
    torch.testing.assert_close(found, same, rtol=0, atol=0)
    one_digit = 2.0**-7  # both round outputs below 2 to 8 bits
    torch.testing.assert_close(found.float(), wanted.float(), rtol=0, atol=one_digit)
    if q.dtype != k.dtype:
        assert torch.equal(stats.entropy, attemper.attention_statistics(q_inside, k_inside, backend=backend).entropy)
        assert weights.dtype == torch.bfloat16
    grads = torch.autograd.grad(found.float().square().sum(), tensors)
    assert [grad.dtype for grad in grads] == list(ROUNDED[name])


def test_tensors_of_one_type_are_not_rounded_by_autocast_and_float64_beside_another_is_refused():
    tensors = [torch.randn(2, 3, 5, 8) for _ in range(3)]
    query, key, value = tensors
    plain = attemper.attention(query, key, value).output
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(attemper.attention(query, key, value).output, plain)
        sdpa = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        rounded = attemper.attention(query.bfloat16(), key.bfloat16(), value.bfloat16()).output
    assert (plain.dtype, sdpa.dtype, rounded.dtype) == (torch.float32, torch.bfloat16, torch.bfloat16)
    torch.testing.assert_close(rounded, sdpa, rtol=2**-7, atol=2**-8)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(InputError, match=r"query is torch\.float64 on cpu"):
        attemper.attention(query.double(), key.bfloat16(), value.bfloat16())


def test_a_tap_under_autocast_takes_several_types_too():
    class Rotated(torch.nn.Module):
        def forward(self, query: Tensor, key: Tensor) -> Tensor:
            attemper.tap(query, key, name="site")
            return query

    query, key = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8).bfloat16()
    model = Rotated()
    with attemper.watch(model) as watch, torch.autocast("cpu", torch.bfloat16):
        model(query, key)
    wanted = attemper.attention_statistics(query.bfloat16(), key).entropy.mean((0, 2))
    assert [head.entropy_nats for head in watch.table().sites[0].heads] == pytest.approx(wanted.tolist(), rel=1e-6)


@pytest.mark.parametrize("name", ["varlen_attention", "attention_statistics", "dense_weights", "tap"])
def test_every_option_of_attention_is_in_the_signature_of_its_kin(name: str):
    def options(function: Any) -> dict[str, inspect.Parameter]:
        parameters = inspect.signature(function).parameters.values()
        return {one.name: one for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY}

    whole, some = options(attemper.attention), options(getattr(attemper.functional, name, None) or attemper.tap)
    if name == "tap":
        whole = {option: whole[option] for option in ScoreKeywords.__annotations__}
    else:
        assert whole.keys() == Keywords.__annotations__.keys()
    assert whole.keys() <= some.keys()
    stats = {"stats": whole["stats"].replace(default="all")} if name == "attention_statistics" else {}
    assert {option: some[option] for option in whole} == whole | stats


def test_a_keyword_that_is_no_option_is_refused_by_the_name_of_the_function():
    query = torch.zeros(1, 1, 2, 4)
    with pytest.raises(TypeError, match=r"attention_statistics\(\) got an unexpected keyword argument 'temprature'"):
        attemper.attention_statistics(query, query, temprature=2.0)  # pyright: ignore[reportCallIssue]
