"""Faults of what enters attention, and weights that something has touched."""

from __future__ import annotations

from torch import nn

from .loading import after, not_first
from .models import at
from .subjects import Expect, Subject, Table, expect

replaced = Table()


@replaced("inputs", "llama gpt2 bert minilm")
def vocabulary_shifted(subject: Subject) -> Expect:
    weight = at(subject.model, subject.spec.embeddings[0]).data
    weight.copy_(weight.roll(1, 0))
    return expect("input", at=subject.site(0))


@replaced("inputs", "llama bert qwen2")
def one_token_not_learned(subject: Subject) -> Expect:
    """An added token whose row was never filled."""
    common = subject.b["input_ids"].flatten().mode().values
    at(subject.model, subject.spec.embeddings[0]).data[common] = 0
    return expect("input", "few_tokens", at=subject.site(0))


@replaced("inputs", "vit")
def colours_in_another_order(subject: Subject) -> Expect:
    weight = subject.model.embeddings.patch_embeddings.projection.weight.data
    weight.copy_(weight.flip(1))
    return expect("input", at=subject.site(0))


@replaced("inputs", "opt bert gpt2 minilm")
def positions_begin_at_two(subject: Subject) -> Expect:
    """Offsets of 2, as RoBERTa and OPT have, forgotten or added."""
    weight = at(subject.model, subject.spec.embeddings[1]).data
    weight.copy_(weight.roll(2, 0))
    return expect("input", at=subject.site(0))


@replaced("inputs", "bert minilm")
def other_token_type(subject: Subject) -> Expect:
    weight = subject.model.embeddings.token_type_embeddings.weight.data
    weight.copy_(weight.flip(0) + 0.1 * subject.like(weight))
    return expect("input", at=subject.site(0))


@replaced("inputs", "gemma2")
def one_not_added_to_gains(subject: Subject) -> Expect:
    for block in subject.blocks:
        for module in block.layer.modules():
            if "RMSNorm" in type(module).__name__:
                module.weight.data -= 1
    return expect("input", at=subject.site(0))


@replaced("inputs", "llama gpt2 opt bert t5 phi vit")
def other_activation(subject: Subject) -> Expect:
    not_first(subject)
    replaced = 0
    for module in subject.block.layer.modules():
        for name in ("act_fn", "act", "activation_fn", "intermediate_act_fn", "activation"):
            if hasattr(module, name):
                setattr(module, name, nn.Tanh())
                replaced += 1
    assert replaced
    here = [("weights", "fair", subject.site())]
    return expect("input", at=(subject.site(), after(subject)), also=here)


@replaced("inputs", "gpt2 gpt_neox")
def gelu_of_another_formula(subject: Subject) -> Expect:
    """The tanh approximation for the error function, or the other way: a thousandth."""
    for block in subject.blocks:
        for module in block.layer.modules():
            if hasattr(module, "act"):
                exact = "tanh" in str(module.act).lower() or "new" in type(module.act).__name__.lower()
                module.act = nn.GELU() if exact else nn.GELU(approximate="tanh")
    sites = [block.site for block in subject.blocks]
    return expect("input", "too_small", at=sites[:2], also=[("too_small", "fair", ("None", *sites))])


@replaced("inputs", "mixtral")
def experts_in_another_order(subject: Subject) -> Expect:
    not_first(subject)
    for reader in subject.block.mlp_readers()[1:] + [subject.block.writer()]:
        reader.copy_(reader.roll(1, 0))
    here = [("weights", "fair", subject.site())]
    return expect("input", at=(subject.site(), after(subject)), also=here)


@replaced("inputs", "mixtral gpt_oss")
def one_expert_for_two(subject: Subject) -> Expect:
    not_first(subject)
    for module in subject.block.layer.modules():
        if hasattr(module, "top_k"):
            module.top_k = 1
    here = [("weights", "fair", subject.site())]
    return expect("input", at=(subject.site(), after(subject)), also=here)


@replaced("inputs", "gpt_neox")
def sequential_for_parallel(subject: Subject) -> Expect:
    not_first(subject)
    subject.block.layer.use_parallel_residual = False
    here = [("weights", "fair", subject.site())]
    return expect("input", at=(subject.site(), after(subject)), also=here)


@replaced("inputs", "llama mistral gpt2 opt t5")
def epsilon_of_another_size(subject: Subject) -> Expect:
    """1e-6 read as 0.1."""
    norm = subject.block.norm
    name = "variance_epsilon" if hasattr(norm, "variance_epsilon") else "eps"
    setattr(norm, name, 0.1)
    return expect("input", at=subject.site())


@replaced("replaced", "llama qwen2 gpt2 bert t5 phi minilm gemma2", q=("q", 0.05), k=("k", 0.05), one_head=("k", 0.1))
def noise_on_a_projection(subject: Subject, part: str, share: float) -> Expect:
    """Something has touched the weights: a broken file, a wrong merge, other fine-tuning."""
    weight = subject.block.weight(part)
    weight = weight[1:2] if share == 0.1 else weight
    weight += share * weight.std() * subject.like(weight)
    return expect("weights", at=subject.site())


@replaced("replaced", "llama gpt2 bert mistral minilm qwen3", deep=())
def noise_on_keys_of_deep_layers(subject: Subject) -> Expect:
    for block in subject.blocks[-2:]:
        weight = block.weight("k")
        weight += 0.03 * weight.std() * subject.like(weight)
    return expect("weights", at=subject.site(len(subject.blocks) - 2))


@replaced("replaced", "llama gpt2 bert phi t5 minilm qwen2", q=("q",), v=("v",))
def adapter_merged(subject: Subject, part: str) -> Expect:
    """A low-rank update that one run has and the other has not."""
    weight = subject.block.weight(part)
    heads, size, inputs = weight.shape
    update = subject.noise(heads * size, 2) @ subject.noise(2, inputs)
    weight += 0.25 * weight.std() * update.view(weight.shape)
    return expect("weights" if part == "q" else "values weights", at=subject.site())


@replaced("replaced", "llama bert gpt2 opt minilm")
def values_of_another_training(subject: Subject) -> Expect:
    weight = subject.block.weight("v")
    weight.copy_(weight.std() * subject.like(weight))
    return expect("values", "weights not_loaded", at=subject.site(), true="new")


@replaced("replaced", "llama gpt2 bert phi qwen3 minilm t5")
def another_checkpoint(subject: Subject) -> Expect:
    """Every matrix has moved by 3%, as between two steps of a training."""
    for parameter in subject.model.parameters():
        if parameter.ndim > 1:
            parameter.data += 0.03 * parameter.data.std() * subject.like(parameter)
    return expect("input weights", at=subject.site(0))


@replaced("replaced", "llama gpt2 bert qwen2 minilm")
def scales_of_quantisation_misplaced(subject: Subject) -> Expect:
    """8-bit rows multiplied by their neighbours' scales."""
    weight = subject.block.weight("k")
    scale = weight.abs().amax(-1, keepdim=True)
    weight.mul_(scale.roll(1, 1) / scale)
    return expect("weights", at=subject.site())


@replaced("replaced", "llama phi bert minilm")
def zero_point_off_by_one(subject: Subject) -> Expect:
    """Of an asymmetric 4-bit grid: a constant on every row."""
    weight = subject.block.weight("q")
    weight += (weight.amax(-1, keepdim=True) - weight.amin(-1, keepdim=True)) / 15
    return expect("weights", at=subject.site())


@replaced("replaced", "llama bert gpt2")
def not_a_number_in_a_row(subject: Subject) -> Expect:
    block = subject.block
    block.weight("k")[0, 3, 5] = float("nan")
    return expect("weights", "scores input values", at=block.site)
