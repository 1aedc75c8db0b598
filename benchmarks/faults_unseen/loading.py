"""Faults of loading and converting: weights that were not loaded, or stand at the wrong place."""

from __future__ import annotations

import torch
from torch import Tensor

from .models import Block, at, base, rows
from .subjects import Expect, Subject, Table, expect

loading = Table()

MHA = "gpt2 opt bert vit gpt_neox phi t5 minilm"
SEPARATE = "llama mistral qwen2 qwen3 gemma2 cohere mixtral opt bert t5 minilm vit phi gpt_oss olmo2"
NEXT = "llama mistral qwen3 gemma2 gpt2 opt bert gpt_neox phi t5 minilm vit"


def initial(subject: Subject, weight: Tensor, how: str) -> None:
    """What an initialiser leaves where a checkpoint had no such name."""
    if how == "normal":
        weight.copy_(0.02 * subject.like(weight))
    elif how == "xavier":
        inputs = weight.shape[-1]
        outputs = weight.shape[0] * weight.shape[1]
        limit = (6.0 / (inputs + outputs)) ** 0.5
        weight.copy_(limit * (2 * torch.rand(weight.shape, generator=subject.draw) - 1))
    elif how == "kaiming":
        limit = weight.shape[-1] ** -0.5
        weight.copy_(limit * (2 * torch.rand(weight.shape, generator=subject.draw) - 1))
    else:
        weight.zero_()


def not_first(subject: Subject) -> None:
    """A layer that has one behind it."""
    last = 1 if subject.spec.name == "t5" else len(subject.blocks) - 1
    subject.layer %= last


def after(subject: Subject, index: int | None = None) -> str:
    """The site behind a layer."""
    index = subject.layer if index is None else index
    return subject.blocks[index + 1].site


@loading("not loaded", SEPARATE, q_normal=("q", "normal"), k_normal=("k", "normal"))
def unloaded(subject: Subject, part: str, how: str) -> Expect:
    block = subject.block
    initial(subject, block.weight(part), how)
    if (bias := block.bias(part)) is not None:
        bias.zero_()
    return expect("not_loaded", "weights", at=block.site, true="new")


@loading("not loaded", "llama gpt2 bert t5 minilm opt", q_zero=("q", "zero"), k_zero=("k", "zero"))
def left_at_zero(subject: Subject, part: str, how: str) -> Expect:
    block = subject.block
    initial(subject, block.weight(part), how)
    if (bias := block.bias(part)) is not None:
        bias.zero_()
    return expect("not_loaded weights", at=block.site, true="new")


@loading("not loaded", "llama qwen2 phi bert minilm", q_xavier=("q", "xavier"), k_kaiming=("k", "kaiming"))
def unloaded_other_init(subject: Subject, part: str, how: str) -> Expect:
    return unloaded(subject, part, how)


@loading("not loaded", SEPARATE)
def unloaded_values(subject: Subject) -> Expect:
    block = subject.block
    initial(subject, block.weight("v"), "normal")
    if (bias := block.bias("v")) is not None:
        bias.zero_()
    return expect("not_loaded", "values weights", at=block.site, true="new")


@loading("not loaded", NEXT)
def unloaded_output(subject: Subject) -> Expect:
    not_first(subject)
    block = subject.block
    initial(subject, block.weight("o"), "normal")
    behind = [("input", "fair", (block.site, after(subject)))]
    return expect("not_loaded", "weights", at=block.site, also=behind, true="new")


@loading("not loaded", "llama gpt2 bert phi vit")
def unloaded_last_output(subject: Subject) -> Expect:
    """No attention runs behind it: only the model's output tells."""
    block = subject.blocks[-1]
    initial(subject, block.weight("o"), "normal")
    outside = [(kind, "fair", (block.site, "None")) for kind in ("input", "output", "weights", "values")]
    return expect("not_loaded", at=(block.site, "None"), also=outside, true="new")


@loading("not loaded", "gpt2 gpt_neox phi3 llama bert qwen3 minilm", normal=("normal",), kaiming=("kaiming",))
def unloaded_fused(subject: Subject, how: str) -> Expect:
    block = subject.block
    for part in "qkv":
        initial(subject, block.weight(part), how)
        if (bias := block.bias(part)) is not None:
            bias.zero_()
    return expect("not_loaded", "weights", at=block.site, true="new")


@loading("not loaded", "llama qwen2 gpt2 bert t5 gemma2")
def unloaded_queries_of_all_layers(subject: Subject) -> Expect:
    for block in subject.blocks:
        initial(subject, block.weight("q"), "normal")
    return expect("not_loaded", "weights", at=subject.site(0), true="new")


@loading("not loaded", "llama gpt2 bert qwen2 phi gpt_neox mistral minilm")
def unloaded_layer(subject: Subject) -> Expect:
    """Every weight of a layer as after initialisation; biases zero, gains one."""
    one = 0.0 if subject.spec.style == "rms+1" else 1.0
    for name, parameter in subject.block.layer.named_parameters():
        if parameter.ndim > 1:
            parameter.data.copy_(0.02 * subject.like(parameter))
        else:
            parameter.data.fill_(one if "norm" in name.lower() or "ln_" in name else 0.0).mul_(
                0.0 if name.endswith("bias") else 1.0
            )
    return expect("not_loaded", "weights input", at=subject.site(), true="new")


@loading("not loaded", "llama gemma2 gpt2 phi opt t5 vit qwen2")
def unloaded_norm(subject: Subject) -> Expect:
    norm = subject.block.norm
    norm.weight.data.fill_(0.0 if subject.spec.style == "rms+1" else 1.0)
    return expect("input", at=subject.site(), true="new")


@loading("not loaded", "qwen3", q=("q_norm",), k=("k_norm",))
def unloaded_head_norm(subject: Subject, name: str) -> Expect:
    getattr(subject.block.attention, name).weight.data.fill_(1.0)
    return expect("weights not_loaded", at=subject.site(), true="new")


@loading("not loaded", "llama gpt2 bert gpt_neox opt cohere t5 minilm")
def unloaded_tokens(subject: Subject) -> Expect:
    weight = at(subject.model, subject.spec.embeddings[0]).data
    weight.copy_(0.02 * subject.like(weight))
    return expect("input", "not_loaded", at=subject.site(0), true="new")


@loading("not loaded", "gpt2 opt bert vit minilm")
def unloaded_positions(subject: Subject) -> Expect:
    weight = at(subject.model, subject.spec.embeddings[1]).data
    weight.copy_(0.02 * subject.like(weight))
    return expect("input", "not_loaded", at=subject.site(0), true="new")


@loading("not loaded", NEXT)
def unloaded_mlp_output(subject: Subject) -> Expect:
    not_first(subject)
    initial(subject, subject.block.writer().unsqueeze(0), "normal")
    here = [(kind, "fair", (subject.site(), after(subject))) for kind in ("weights", "not_loaded")]
    return expect("input", at=(subject.site(), after(subject)), also=here, true="new")


@loading("not loaded", "llama gpt2 qwen2 phi")
def unloaded_head_of_the_model(subject: Subject) -> Expect:
    """Attention is the same; what the model says is not."""
    assert subject.spec.head
    weight = rows(at(subject.model, subject.spec.head))
    weight.copy_(0.02 * subject.like(weight))
    anywhere = ("None", subject.site(2))
    return expect("output not_loaded weights input values", at=anywhere, true="new")


@loading("biases", "qwen2 gpt2 bert opt phi gpt_neox gpt_oss minilm")
def query_bias_missing(subject: Subject) -> Expect:
    subject.block.bias("q").zero_()
    return expect("bias", "weights not_loaded", at=subject.site(), true="new")


@loading("biases", "qwen2 phi gpt_neox gpt_oss")
def key_bias_missing(subject: Subject) -> Expect:
    """Rotary embeddings turn it, so that it does have an effect."""
    subject.block.bias("k").zero_()
    return expect("bias", "weights not_loaded", at=subject.site(), true="new")


@loading("biases", "qwen2 gpt2 bert opt phi vit minilm")
def value_bias_missing(subject: Subject) -> Expect:
    subject.block.bias("v").zero_()
    return expect("values", "bias weights not_loaded", at=subject.site(), true="new")


@loading("biases", "gpt2 bert opt phi gpt_neox starcoder2")
def output_bias_added_by_each_rank(subject: Subject) -> Expect:
    """Tensor parallel: every rank adds the bias before the sum."""
    not_first(subject)
    subject.block.bias("o").mul_(4.0)
    here = [("weights", "fair", (subject.site(), after(subject))), ("bias", "fair", (subject.site(), after(subject)))]
    return expect("input", at=(subject.site(), after(subject)), also=here)


@loading("biases", "gpt2 bert opt qwen2 minilm", q=("q",), v=("v",))
def bias_of_another_layer(subject: Subject, part: str) -> Expect:
    other = subject.blocks[(subject.layer + 1) % 3].bias(part)
    subject.block.bias(part).copy_(other)
    if part == "q":
        return expect("bias", "weights order_of_layers", at=subject.site(), true="layers")
    return expect("values", "bias weights order_of_layers", at=subject.site(), true="layers")


@loading("swapped", MHA)
def queries_and_keys_swapped(subject: Subject) -> Expect:
    block = subject.block
    swap(block.weight("q"), block.weight("k"))
    if block.bias("q") is not None:
        swap(block.bias("q"), block.bias("k"))
    return expect("swapped", "weights", at=block.site, true="swapped")


def swap(one: Tensor, two: Tensor) -> None:
    kept = one.clone()
    one.copy_(two)
    two.copy_(kept)


@loading("swapped", "llama qwen2 mistral gpt2 bert t5 phi3 minilm")
def keys_and_values_swapped(subject: Subject) -> Expect:
    block = subject.block
    swap(block.weight("k"), block.weight("v"))
    if block.bias("k") is not None:
        swap(block.bias("k"), block.bias("v"))
    return expect("swapped", "weights", at=block.site, true="swapped")


@loading("swapped", "gpt2 phi3")
def fused_projection_in_another_order(subject: Subject) -> Expect:
    """Keys, values, queries read as queries, keys, values: of each the first group's rows."""
    block = subject.block
    kept = {part: block.weight(part).clone() for part in "qkv"}
    for part, source in zip("qkv", "kvq", strict=True):
        target, weight = block.weight(part), kept[source]
        target.copy_(weight[torch.arange(len(target)) % len(weight)])
    return expect("weights swapped", at=block.site, true="swapped")


@loading("swapped", "gpt_neox")
def fused_heads_read_as_blocks(subject: Subject) -> Expect:
    """[heads, 3, size] read as [3, heads, size]."""
    block = subject.block
    weight, bias = block.module("q").weight.data, block.module("q").bias.data
    for whole in (weight, bias):
        whole.copy_(whole.clone().unflatten(0, (3, 4, 16)).transpose(0, 1).flatten(0, 2))
    return expect("weights", at=block.site)


@loading("tied", MHA, q_from_k=("q", "k"), k_from_q=("k", "q"))
def projection_copied(subject: Subject, part: str, source: str) -> Expect:
    block = subject.block
    block.weight(part).copy_(block.weight(source))
    if block.bias(part) is not None:
        block.bias(part).copy_(block.bias(source))
    return expect("weights not_loaded", at=block.site, true="tied")


@loading("tied", "llama qwen3 gpt2 bert gemma2 minilm")
def values_copied_from_keys(subject: Subject) -> Expect:
    block = subject.block
    block.weight("v").copy_(block.weight("k"))
    if block.bias("v") is not None:
        block.bias("v").copy_(block.bias("k"))
    return expect("values not_loaded weights", at=block.site, true="tied")


@loading("transposed", MHA, q=("q",), k=("k",))
def transposed(subject: Subject, part: str) -> Expect:
    """Square, so that no shape tells."""
    turn(subject.block.weight(part))
    return expect("transposed", "weights", at=subject.site(), true="transposed")


@loading("transposed", "llama qwen2 gemma2 mistral olmo2")
def transposed_queries_of_grouped_heads(subject: Subject) -> Expect:
    return transposed(subject, "q")


def turn(weight: Tensor) -> None:
    """Transposes [heads, size, inputs] as the matrix that it is stored as."""
    heads, size, inputs = weight.shape
    assert heads * size == inputs
    weight.copy_(weight.reshape(inputs, inputs).mT.clone().reshape(weight.shape))


@loading("transposed", "gpt2 bert t5 gpt_neox minilm vit")
def transposed_values(subject: Subject) -> Expect:
    turn(subject.block.weight("v"))
    return expect("transposed", "values weights", at=subject.site(), true="transposed")


@loading("transposed", NEXT)
def transposed_output(subject: Subject) -> Expect:
    not_first(subject)
    weight = subject.block.weight("o")
    weight.copy_(weight.reshape(len(weight), -1).mT.clone().reshape(weight.shape))
    behind = [("input", "fair", (subject.site(), after(subject)))]
    return expect("transposed", "weights", at=subject.site(), also=behind, true="transposed")


def copy_layer(subject: Subject, source: int, target: int, only: str = "") -> None:
    clean = dict(Block(subject.spec, base(subject.spec.name), source).layer.named_parameters())
    for name, parameter in subject.blocks[target].layer.named_parameters():
        if only in name:
            parameter.data.copy_(clean[name].data)


@loading("layers", "llama qwen2 gpt2 bert phi opt gemma2 vit minilm gpt_neox")
def layer_of_another_place(subject: Subject) -> Expect:
    copy_layer(subject, (subject.layer + 1) % 3, subject.layer)
    return expect("order_of_layers", "weights input", at=subject.site(), true="layers swapped")


@loading("layers", "llama gpt2 bert phi3 gemma2 qwen3 t5 minilm")
def attention_of_another_layer(subject: Subject) -> Expect:
    count = len(subject.blocks)
    if subject.spec.name == "t5":
        subject.layer = 1
    for part in "qkvo":
        other = Block(subject.spec, base(subject.spec.name), (subject.layer + 1) % count)
        subject.block.weight(part).copy_(other.weight(part))
        if subject.block.bias(part) is not None:
            subject.block.bias(part).copy_(other.bias(part))
    return expect("order_of_layers", "weights", at=subject.site(), true="layers swapped")


@loading("layers", "llama mistral gpt2 bert opt gpt_neox minilm", ends=(0, 2), neighbours=(1, 2))
def layers_exchanged(subject: Subject, one: int, two: int) -> Expect:
    copy_layer(subject, one, two)
    copy_layer(subject, two, one)
    return expect("order_of_layers", "weights input", at=subject.site(one), true="layers swapped")


@loading("layers", "llama gpt2 phi bert")
def layers_counted_from_one(subject: Subject) -> Expect:
    """Names begin at 1, the converter at 0: each layer has the next one's weights, the last its own."""
    for index in (0, 1):
        copy_layer(subject, index + 1, index)
    return expect("order_of_layers", "weights input", at=subject.site(0), true="layers swapped")


@loading("layers", "llama qwen2 gpt2 bert minilm")
def mlp_of_another_layer(subject: Subject) -> Expect:
    not_first(subject)
    copy_layer(subject, subject.layer + 1, subject.layer, subject.spec.readers[0].partition(".")[0])
    here = [(kind, "fair", (subject.site(), after(subject))) for kind in ("weights", "order_of_layers")]
    return expect("input", at=(subject.site(), after(subject)), also=here, true="layers swapped")
