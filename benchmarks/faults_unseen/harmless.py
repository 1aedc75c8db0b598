"""The same function in other weights, other layouts, other orders of work; and weights rounded.

Every change is checked by the benchmark itself: outputs agree with the clean model's to rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .models import at, rows
from .subjects import Subject, Table

harmless = Table()

PRENORM = "llama mistral qwen2 qwen3 gemma2 mixtral phi3 gpt_oss gpt2 opt phi gpt_neox vit t5 cohere"
RMS = "llama mistral qwen2 qwen3 mixtral phi3 gpt_oss t5"
CENTRED = "gpt2 opt phi gpt_neox starcoder2"
GROUPED = "llama mistral qwen2 qwen3 gemma2 mixtral cohere gpt_oss"
SETTLED = "llama qwen2 gpt2 opt bert phi gpt_neox t5 vit minilm mistral gemma2"


def gain(subject: Subject, norm: Any) -> Tensor:
    return norm.weight.data + (1.0 if subject.spec.style == "rms+1" else 0.0)


def set_gain(subject: Subject, norm: Any, value: Tensor) -> None:
    norm.weight.data = value - (1.0 if subject.spec.style == "rms+1" else 0.0)


def norms_and_readers(subject: Subject) -> list[tuple[Any, list[Tensor]]]:
    """Every norm and the weights that read it, channels on the last axis."""
    found: list[tuple[Any, list[Tensor]]] = []
    for block in subject.all_blocks():
        cross = "EncDec" in block.site
        heads = [block.weight("q")] if cross else [block.weight(part) for part in "qkv"]
        if block.mlp_norm is None:
            heads += block.mlp_readers()
        found.append((block.norm, heads))
        if block.mlp_norm is not None and not cross:
            found.append((block.mlp_norm, block.mlp_readers()))
    return found


def last_norm(subject: Subject) -> list[tuple[Any, list[Tensor]]]:
    """The model's last norm with its head, and T5's between encoder and decoder."""
    model, spec = subject.model, subject.spec
    if spec.name == "t5":
        cross = [block for block in subject.all_blocks() if "EncDec" in block.site]
        read = [block.weight(part) for block in cross for part in "kv"]
        return [(model.encoder.final_layer_norm, read), (model.decoder.final_layer_norm, [rows(model.lm_head)])]
    return [(at(model, spec.final), [rows(at(model, spec.head))])] if spec.final and spec.head else []


def share_turned(subject: Subject) -> float:
    """Of a head's features, those that the rotary embedding turns."""
    return getattr(subject.model.config, "rope_parameters", {}).get("partial_rotary_factor", 1.0)


def positive(subject: Subject, count: int, spread: float = 0.5) -> Tensor:
    return torch.exp(spread * subject.noise(count))


@harmless("rescaled", PRENORM, strong=(1.0,), mild=(0.3,))
def smoothed(subject: Subject, spread: float) -> None:
    """SmoothQuant: channels' scales move from norms into the projections behind."""
    for norm, readers in norms_and_readers(subject):
        scales = positive(subject, norm.weight.numel(), spread)
        set_gain(subject, norm, gain(subject, norm) / scales)
        if getattr(norm, "bias", None) is not None:
            norm.bias.data /= scales
        for reader in readers:
            reader.mul_(scales)


@harmless("rescaled", PRENORM + " bert minilm olmo2")
def values_scaled_and_outputs_divided(subject: Subject) -> None:
    """AWQ: each channel of the values, undone in the output projection."""
    for block in subject.all_blocks():
        value, output = block.weight("v"), block.weight("o")
        scales = positive(subject, value.shape[0] * value.shape[1], 0.7).view(value.shape[:2])
        value.mul_(scales[..., None])
        if (bias := block.bias("v")) is not None:
            bias.mul_(scales)
        output.div_(scales.repeat_interleave(output.shape[1] // len(scales), 0))


@harmless("rescaled", "llama mistral qwen2 qwen3 gemma2 olmo2 opt cohere")
def mlp_channels_scaled(subject: Subject) -> None:
    """AWQ inside the MLP: scales move from its last projection into the one before, which is linear in them."""
    for block in subject.blocks:
        reader, writer = block.mlp_readers()[-1], block.writer()
        scales = positive(subject, len(reader))
        reader.mul_(scales[:, None])
        bias = getattr(at(block.layer, subject.spec.readers[-1]), "bias", None)
        if bias is not None:
            bias.data.mul_(scales)
        writer.div_(scales)


@harmless("rescaled", "llama mistral qwen2 phi gpt_neox gpt2 opt bert t5 minilm vit phi3 gemma2")
def queries_scaled_and_keys_divided(subject: Subject) -> None:
    """Channels of queries and keys trade scale; both features of a rotary pair alike."""
    for block in subject.blocks:
        query, key = block.weight("q"), block.weight("k")
        size = query.shape[1]
        half = positive(subject, size // 2)
        turned = int(size * share_turned(subject))
        pairs = half[: turned // 2]
        scales = pairs.repeat_interleave(2) if subject.spec.rope == "interleaved" else torch.cat([pairs, pairs])
        if turned < size:
            scales = torch.cat([scales, positive(subject, size - turned)])
        for part, factor in (("q", scales), ("k", 1 / scales)):
            block.weight(part).mul_(factor[:, None])
            if (bias := block.bias(part)) is not None:
                bias.mul_(factor)
        assert query is not key


@harmless("rescaled", "qwen3")
def gains_of_queries_and_keys_traded(subject: Subject) -> None:
    for block in subject.blocks:
        attention: Any = block.attention
        half = positive(subject, attention.q_norm.weight.numel() // 2)
        attention.q_norm.weight.data *= torch.cat([half, half])
        attention.k_norm.weight.data /= torch.cat([half, half])


@harmless("rescaled", "llama mistral qwen2 phi gpt_neox gpt2 opt bert vit minilm phi3")
def scale_folded_into_queries(subject: Subject) -> None:
    """The engine multiplies by 1; weights of the queries have 1/sqrt(size)."""
    for block in subject.blocks:
        attention: Any = block.attention
        factor = attention.scaling
        attention.scaling = 1.0
        block.weight("q").mul_(factor)
        if (bias := block.bias("q")) is not None:
            bias.mul_(factor)


@harmless("rescaled", RMS)
def stream_scaled(subject: Subject) -> None:
    """The residual stream is twice as large; norms divide it again (epsilon apart)."""
    for writer in writers(subject):
        writer.mul_(2.0)


def writers(subject: Subject) -> list[Tensor]:
    """Everything that writes the residual stream, channels on the last axis."""
    found = [at(subject.model, path).data for path in subject.spec.embeddings]
    for block in subject.all_blocks():
        found.append(block.weight("o").movedim(0, -1))
        if (bias := block.bias("o")) is not None:
            found.append(bias)
        if "EncDec" not in block.site:
            found += [block.writer().mT, *block.mlp_biases()]
    return found


def fold_gains(subject: Subject) -> None:
    for norm, readers in norms_and_readers(subject) + last_norm(subject):
        scales = gain(subject, norm)
        for reader in readers:
            reader.mul_(scales)
        set_gain(subject, norm, torch.ones_like(scales))


@harmless("folded", RMS + " gemma2 cohere")
def gains_folded(subject: Subject) -> None:
    fold_gains(subject)


@harmless("folded", CENTRED)
def gains_and_biases_folded(subject: Subject) -> None:
    """LayerNorm's bias moves into the biases of the projections behind."""
    for block in subject.blocks:
        norm = block.norm
        for part in "qkv":
            block.bias(part).add_(block.weight(part) @ norm.bias.data)
        other = block.mlp_norm or norm
        module = at(block.layer, subject.spec.readers[0])
        module.bias.data.add_(rows(module) @ other.bias.data)
    for norm, readers in norms_and_readers(subject):
        for reader in readers:
            reader.mul_(norm.weight.data)
        norm.weight.data.fill_(1.0)
        norm.bias.data.zero_()


def orthogonal(subject: Subject, size: int) -> Tensor:
    return torch.linalg.qr(subject.noise(size, size).double()).Q.float()


def hadamard(subject: Subject, size: int) -> Tensor:
    """Signs at random, then Walsh and Hadamard's matrix, as QuaRot takes it."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix * subject.noise(size).sign()[:, None] * size**-0.5


def turn_stream(subject: Subject, turn: Tensor) -> None:
    for _, readers in norms_and_readers(subject) + last_norm(subject):
        for reader in readers:
            reader.copy_(reader @ turn)
    for writer in writers(subject):
        writer.copy_(writer @ turn)


@harmless("rotated", RMS, hadamard=("hadamard",), any=("orthogonal",))
def stream_rotated(subject: Subject, how: str) -> None:
    """QuaRot and SpinQuant: gains folded, the residual stream in another basis."""
    fold_gains(subject)
    size = subject.model.config.hidden_size
    turn_stream(subject, hadamard(subject, size) if how == "hadamard" else orthogonal(subject, size))


class Root(nn.Module):
    """RMSNorm without gains."""

    def __init__(self, like: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones_like(like.weight), requires_grad=False)
        self.eps = like.eps

    def forward(self, states: Tensor) -> Tensor:
        wide = states.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(states.dtype) * self.weight


@harmless("rotated", CENTRED)
def centred_and_rotated(subject: Subject) -> None:
    """SliceGPT: LayerNorm becomes RMSNorm of a stream whose mean is taken out of what writes it; then rotated."""
    gains_and_biases_folded(subject)
    model, spec = subject.model, subject.spec
    assert spec.final
    assert spec.head
    final, head = at(model, spec.final), at(model, spec.head)
    head.bias = nn.Parameter(
        (head.bias.data if head.bias is not None else 0.0) + rows(head) @ final.bias.data, requires_grad=False
    )
    rows(head).mul_(final.weight.data)
    for writer in writers(subject):
        writer.sub_(writer.mean(-1, keepdim=True))
    turn_stream(subject, orthogonal(subject, model.config.hidden_size))
    for block in subject.blocks:
        for path in (spec.norm, spec.mlp_norm):
            if path:
                setattr(block.layer, path, Root(at(block.layer, path)))
    owner, _, name = spec.final.rpartition(".")
    setattr(at(model, owner), name, Root(final))


@harmless("rotated", "gpt2 opt bert vit t5 minilm")
def queries_and_keys_rotated(subject: Subject) -> None:
    """Both by one orthogonal matrix for each head: products are the same."""
    for block in subject.blocks:
        for head in range(block.heads[0]):
            turn = orthogonal(subject, block.heads[2])
            for part in "qk":
                block.weight(part)[head] = turn @ block.weight(part)[head]
                if (bias := block.bias(part)) is not None:
                    bias[head] = turn @ bias[head]


@harmless("rotated", "llama mistral qwen2 phi3 gemma2 mixtral gpt_oss")
def values_rotated(subject: Subject) -> None:
    """SpinQuant's second rotation: values of a head, undone in the output projection."""
    for block in subject.blocks:
        heads, groups, size = block.heads
        for group in range(groups):
            turn = orthogonal(subject, size)
            block.weight("v")[group] = turn @ block.weight("v")[group]
            if (bias := block.bias("v")) is not None:
                bias[group] = turn @ bias[group]
            for head in range(group * heads // groups, (group + 1) * heads // groups):
                output = block.weight("o")[:, head]
                output.copy_(output @ turn.T)


@harmless("rotated", "llama qwen2 phi gpt_neox")
def rotary_pairs_turned(subject: Subject) -> None:
    """Each pair of features by an angle of its own, which rotary embeddings cannot tell."""
    from .evidence import turned

    for block in subject.blocks:
        size = block.heads[2]
        angles = 3.0 * subject.noise(1, int(size * share_turned(subject)) // 2)
        pairing = subject.spec.rope or "half"
        for part in "qk":
            weight = block.weight(part)
            weight.copy_(turned(weight.mT, angles, pairing).mT)
            if (bias := block.bias(part)) is not None:
                bias.copy_(turned(bias, angles, pairing))
