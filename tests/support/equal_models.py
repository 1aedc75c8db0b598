"""Small models of many architectures, and the same function in other weights: scaled, rotated, folded, permuted,
repeated, shifted, rounded. Nothing here is known to the code that tells them from faults.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.engine_models import SHARED, TOKENS, VOCABULARY, WINDOW, as_if_trained
from tests.support.engine_patches import grid, noise

SIZES = {**SHARED, "hidden_size": 128, "head_dim": 32, "tie_word_embeddings": False}
_MHA = {**{k: v for k, v in SIZES.items() if k != "head_dim"}, "num_key_value_heads": 4}
_SMALL = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", SIZES),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", SIZES),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", SIZES),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**SIZES, "sliding_window": WINDOW}),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**SIZES, "sliding_window": WINDOW, "query_pre_attn_scalar": 32, "attn_implementation": "eager"},
    ),
    "phi": (
        "PhiForCausalLM",
        "PhiConfig",
        {**_MHA, "rope_parameters": {**SHARED["rope_parameters"], "partial_rotary_factor": 0.5}},
    ),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {**_SMALL, "n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 256}),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {
            **_SMALL, "hidden_size": 128, "ffn_dim": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
            "word_embed_proj_dim": 128, "max_position_embeddings": 256, "tie_word_embeddings": False,
        },
    ),
    "gpt_neox": (
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        {**{k: v for k, v in _MHA.items() if k not in ("num_key_value_heads", "rope_parameters")}},
    ),
    "bert": ("BertForMaskedLM", "BertConfig", _MHA),
    "vit": (
        "ViTModel",
        "ViTConfig",
        {
            "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128,
            "image_size": 64, "patch_size": 8,
        },
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            **_SMALL, "d_model": 128, "d_kv": 32, "d_ff": 128, "num_layers": 3, "num_heads": 4,
            "decoder_start_token_id": 0, "tie_word_embeddings": False,
        },
    ),
}  # fmt: skip
"""Name -> class of the model, of its configuration, and sizes."""


@dataclass
class Linear:
    """A projection as a view that can be written: outputs first, inputs last."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass
class Layer:
    """Views of one attention and, where there is one, the MLP behind it. Heads are the first axis of q, k and v."""

    module: Any
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    norm: Any = None
    """Before attention; None where its output is the residual stream as well."""
    also: list[Linear] = field(default_factory=list)
    """What else reads this norm."""
    mlp_norm: Any = None
    mlp_in: list[Linear] = field(default_factory=list)
    mlp_out: list[Linear] = field(default_factory=list)
    up: Linear | None = None
    """An input of the MLP in which it is linear."""
    source: str = "own"
    """Where keys and values come from: "own", or "encoder"."""

    @property
    def groups(self) -> int:
        """Heads of queries that read one of keys."""
        return len(self.q.weight) // len(self.k.weight)


@dataclass
class Whole:
    """A model, its layers and what stands around them."""

    name: str
    model: Any
    batch: dict[str, Tensor]
    layers: list[Layer]
    embeddings: list[Tensor]
    """What begins the residual stream, width last."""
    ends: list[tuple[Any, Linear | None]]
    """Norms at the end of a stream, and the projection behind each."""
    gemma: bool = False
    relative: list[Tensor] = field(default_factory=list)
    """Numbers that are added to scores by distance, heads last."""

    @property
    def rotary(self) -> int:
        """Rotated features of a head."""
        return {"phi": 16, "gpt_neox": 8}.get(self.name, 0 if self.name in ("gpt2", "opt", "bert", "vit", "t5") else 32)

    @property
    def layer_norm(self) -> bool:
        return self.name in ("phi", "gpt2", "opt", "gpt_neox", "bert", "vit")


def _linear(module: Any) -> Linear:
    conv = type(module).__name__ == "Conv1D"
    return Linear(
        module.weight.data.T if conv else module.weight.data, None if module.bias is None else module.bias.data
    )


def _heads(linear: Linear, size: int) -> Linear:
    bias = None if linear.bias is None else linear.bias.unflatten(0, (-1, size))
    return Linear(linear.weight.unflatten(0, (-1, size)), bias)


def _columns(linear: Linear, size: int) -> Linear:
    """[E, heads, size]"""
    return Linear(linear.weight.unflatten(1, (-1, size)), linear.bias)


def whole(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Whole:
    """A model of random weights, and its views."""
    import transformers

    kind, config, sizes = ARCHITECTURES[name]
    given = getattr(transformers, config)(**{k: v for k, v in sizes.items() if k != "attn_implementation"})
    given._attn_implementation = sizes.get("attn_implementation", "sdpa")
    torch.manual_seed(seed)
    model = getattr(transformers, kind)(given).eval()
    if name in ("gpt2", "t5"):
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    as_if_trained(model, torch.Generator().manual_seed(seed + 1))
    generator = torch.Generator().manual_seed(100 + seed)
    if name == "vit":
        batch = {"pixel_values": torch.randn(2, 3, 64, 64, generator=generator)}
    else:
        ids = torch.randint(3, VOCABULARY, (2, TOKENS), generator=generator)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if name == "t5":
            batch["decoder_input_ids"] = torch.randint(3, VOCABULARY, (2, TOKENS - 16), generator=generator)
    return views(name, model.to(dtype), batch)


def views(name: str, model: Any, batch: dict[str, Tensor]) -> Whole:
    """Views of a model's weights."""
    made = {"gpt2": _gpt2, "opt": _opt, "gpt_neox": _neox, "bert": _bert, "vit": _vit, "t5": _t5}.get(name, _llama)
    return made(name, model, {k: v.to(model.dtype) if v.is_floating_point() else v for k, v in batch.items()})


def _llama(name: str, model: Any, batch: dict[str, Tensor]) -> Whole:
    layers = []
    for block in model.model.layers:
        own, size = block.self_attn, block.self_attn.head_dim
        q, k, v = (_heads(_linear(getattr(own, f"{part}_proj")), size) for part in "qkv")
        o = _columns(_linear(own.dense if name == "phi" else own.o_proj), size)
        layer = Layer(own, q, k, v, o, block.input_layernorm)
        if name == "phi":
            layer.also, layer.mlp_out = [_linear(block.mlp.fc1)], [_linear(block.mlp.fc2)]
        else:
            layer.mlp_norm = block.pre_feedforward_layernorm if name == "gemma2" else block.post_attention_layernorm
            layer.up = _linear(block.mlp.up_proj)
            layer.mlp_in, layer.mlp_out = [_linear(block.mlp.gate_proj), layer.up], [_linear(block.mlp.down_proj)]
        layers.append(layer)
    end = model.model.final_layernorm if name == "phi" else model.model.norm
    embedding = model.model.embed_tokens.weight.data
    return Whole(name, model, batch, layers, [embedding], [(end, _linear(model.lm_head))], name == "gemma2")


def _gpt2(name: str, model: Any, batch: dict[str, Tensor]) -> Whole:
    layers, body = [], model.transformer
    for block in body.h:
        packed = _linear(block.attn.c_attn)
        q, k, v = (
            _heads(Linear(w, b), 32)
            for w, b in zip(packed.weight.chunk(3), packed.bias.chunk(3), strict=True)  # type: ignore[union-attr]
        )
        layer = Layer(block.attn, q, k, v, _columns(_linear(block.attn.c_proj), 32), block.ln_1)
        layer.mlp_norm, layer.mlp_in, layer.mlp_out = block.ln_2, [_linear(block.mlp.c_fc)], [_linear(block.mlp.c_proj)]
        layers.append(layer)
    starts = [body.wte.weight.data, body.wpe.weight.data]
    return Whole(name, model, batch, layers, starts, [(body.ln_f, _linear(model.lm_head))])


def _opt(name: str, model: Any, batch: dict[str, Tensor]) -> Whole:
    layers, body = [], model.model.decoder
    for block in body.layers:
        own = block.self_attn
        q, k, v = (_heads(_linear(getattr(own, f"{part}_proj")), 32) for part in "qkv")
        layer = Layer(own, q, k, v, _columns(_linear(own.out_proj), 32), block.self_attn_layer_norm)
        layer.mlp_norm, layer.mlp_in, layer.mlp_out = block.final_layer_norm, [_linear(block.fc1)], [_linear(block.fc2)]
        layers.append(layer)
    starts = [body.embed_tokens.weight.data, body.embed_positions.weight.data]
    return Whole(name, model, batch, layers, starts, [(body.final_layer_norm, _linear(model.lm_head))])


def _neox(name: str, model: Any, batch: dict[str, Tensor]) -> Whole:
    layers, body = [], model.gpt_neox
    for block in body.layers:
        packed = block.attention.query_key_value
        weight, bias = packed.weight.data.view(4, 3, 32, 128), packed.bias.data.view(4, 3, 32)
        q, k, v = (Linear(weight[:, n], bias[:, n]) for n in range(3))
        layer = Layer(block.attention, q, k, v, _columns(_linear(block.attention.dense), 32), block.input_layernorm)
        layer.mlp_norm = block.post_attention_layernorm
        layer.mlp_in, layer.mlp_out = [_linear(block.mlp.dense_h_to_4h)], [_linear(block.mlp.dense_4h_to_h)]
        layers.append(layer)
    end = body.final_layer_norm, _linear(model.lm_head if hasattr(model, "lm_head") else model.embed_out)
    return Whole(name, model, batch, layers, [body.embed_in.weight.data], [end])


def _bert(name: str, model: Any, batch: dict[str, Tensor]) -> Whole:
    layers = []
    for block in model.bert.encoder.layer:
        own = block.attention.self
        q, k, v = (_heads(_linear(getattr(own, part)), 32) for part in ("query", "key", "value"))
        layer = Layer(own, q, k, v, _columns(_linear(block.attention.output.dense), 32))
        layer.mlp_in, layer.mlp_out = [_linear(block.intermediate.dense)], [_linear(block.output.dense)]
        layers.append(layer)
    return Whole(name, model, batch, layers, [], [])


def _vit(name: str, model: Any, batch: dict[str, Tensor]) -> Whole:
    layers = []
    for block in model.layers:
        own = block.attention
        q, k, v = (_heads(_linear(getattr(own, f"{part}_proj")), 32) for part in "qkv")
        layer = Layer(own, q, k, v, _columns(_linear(own.o_proj), 32), block.layernorm_before)
        layer.mlp_norm = block.layernorm_after
        layer.mlp_in, layer.mlp_out = [_linear(block.mlp.fc1)], [_linear(block.mlp.fc2)]
        layers.append(layer)
    return Whole(name, model, batch, layers, [], [])


def _t5(name: str, model: Any, batch: dict[str, Tensor]) -> Whole:
    layers, relative = [], []
    for stack in (model.encoder, model.decoder):
        for block in stack.block:
            for part in block.layer[:-1]:
                own = part.SelfAttention if hasattr(part, "SelfAttention") else part.EncDecAttention
                q, k, v = (_heads(_linear(getattr(own, letter)), 32) for letter in "qkv")
                layer = Layer(own, q, k, v, _columns(_linear(own.o), 32), part.layer_norm)
                layer.source = "own" if hasattr(part, "SelfAttention") else "encoder"
                if own.has_relative_attention_bias:
                    relative.append(own.relative_attention_bias.weight.data)
                layers.append(layer)
            mlp = block.layer[-1]
            layers[-1].mlp_norm = mlp.layer_norm
            layers[-1].mlp_in = [_linear(mlp.DenseReluDense.wi)]
            layers[-1].mlp_out = [_linear(mlp.DenseReluDense.wo)]
    ends = [(model.encoder.final_layer_norm, None), (model.decoder.final_layer_norm, _linear(model.lm_head))]
    return Whole(name, model, batch, layers, [model.shared.weight.data], ends, relative=relative)


Change = Callable[[Whole, torch.Generator], bool | None]
"""Changes the weights of a model in place; False where it does not fit."""


def _drawn(generator: torch.Generator, *shape: int, spread: float = 0.5) -> Tensor:
    return torch.exp(torch.randn(*shape, generator=generator, dtype=torch.float64) * spread)


def orthogonal(generator: torch.Generator, size: int) -> Tensor:
    return torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]


def _gain(whole: Whole, norm: Any) -> Tensor:
    return norm.weight.data + 1.0 if whole.gemma else norm.weight.data


def _set_gain(whole: Whole, norm: Any, gain: Tensor) -> None:
    norm.weight.data.copy_(gain - 1.0 if whole.gemma else gain)


def _readers(whole: Whole, layer: Layer) -> list[Linear]:
    """What reads the norm before attention. Keys and values of a decoder may read an encoder."""
    return [layer.q, *([layer.k, layer.v] if layer.source == "own" else []), *layer.also]


def _rescale_norm(whole: Whole, norm: Any, readers: Sequence[Linear], scale: Tensor) -> None:
    """What the norm gives is divided by ``scale``, and what reads it multiplied."""
    _set_gain(whole, norm, _gain(whole, norm) / scale)
    if getattr(norm, "bias", None) is not None:
        norm.bias.data.div_(scale)
    for reader in readers:
        reader.weight.mul_(scale)


def smoothed(whole: Whole, generator: torch.Generator, layers: Sequence[Layer] | None = None) -> bool | None:
    """Per-channel scales moved from norms into projections (SmoothQuant)."""
    for layer in whole.layers if layers is None else layers:
        if layer.norm is None:
            return False
        width = layer.q.weight.shape[-1]
        _rescale_norm(whole, layer.norm, _readers(whole, layer), _drawn(generator, width))
        if layer.mlp_norm is not None:
            _rescale_norm(whole, layer.mlp_norm, layer.mlp_in, _drawn(generator, width))
    return None


def folded(whole: Whole, _: torch.Generator) -> bool | None:
    """Gains of norms folded into projections, biases of theirs into biases."""
    for layer in whole.layers:
        if layer.norm is None:
            return False
        _fold(whole, layer.norm, _readers(whole, layer))
        if layer.mlp_norm is not None:
            _fold(whole, layer.mlp_norm, layer.mlp_in)
    return None


def _fold(whole: Whole, norm: Any, readers: Sequence[Linear]) -> None:
    bias = getattr(norm, "bias", None)
    for reader in readers:
        if bias is not None and reader.bias is not None:
            reader.bias.add_(reader.weight @ bias.data)
        reader.weight.mul_(_gain(whole, norm))
    _set_gain(whole, norm, torch.ones_like(norm.weight.data))
    if bias is not None:
        bias.data.zero_()


def values_scaled(whole: Whole, generator: torch.Generator) -> None:
    """Values multiplied by channel, output projections divided (AWQ)."""
    for layer in whole.layers:
        scale = _drawn(generator, *layer.v.weight.shape[:2])
        layer.v.weight.mul_(scale[..., None])
        if layer.v.bias is not None:
            layer.v.bias.mul_(scale)
        layer.o.weight.div_(scale.repeat_interleave(layer.groups, 0))


def values_rotated(whole: Whole, generator: torch.Generator) -> None:
    """Values rotated within heads, output projections back (SpinQuant's R2)."""
    for layer in whole.layers:
        for head in range(len(layer.v.weight)):
            turn = orthogonal(generator, layer.v.weight.shape[1])
            layer.v.weight[head] = turn @ layer.v.weight[head]
            if layer.v.bias is not None:
                layer.v.bias[head] = turn @ layer.v.bias[head]
            for reader in range(head * layer.groups, (head + 1) * layer.groups):
                layer.o.weight[:, reader] = layer.o.weight[:, reader] @ turn.T


def keys_scaled(whole: Whole, generator: torch.Generator) -> bool | None:
    """Queries multiplied by channel, keys divided; both features of a rotated pair alike."""
    if whole.name == "qwen3":
        return False
    for layer in whole.layers:
        scale = _drawn(generator, *layer.k.weight.shape[:2])
        half = whole.rotary // 2
        scale[:, half : 2 * half] = scale[:, :half]
        for part, factor in ((layer.q, scale.repeat_interleave(layer.groups, 0)), (layer.k, 1 / scale)):
            part.weight.mul_(factor[..., None])
            if part.bias is not None:
                part.bias.mul_(factor)
    return None


def keys_rotated(whole: Whole, generator: torch.Generator) -> bool | None:
    """Queries and keys of a head rotated alike; where there are rotated pairs, within each pair."""
    if whole.name == "qwen3":
        return False
    size, half = whole.layers[0].k.weight.shape[1], whole.rotary // 2
    for layer in whole.layers:
        for head in range(len(layer.k.weight)):
            turn = torch.zeros(size, size, dtype=torch.float64)
            turn[2 * half :, 2 * half :] = orthogonal(generator, size - 2 * half) if size > 2 * half else 0.0
            angles = torch.rand(half, generator=generator, dtype=torch.float64) * 6
            for pair, angle in enumerate(angles):
                both = [pair, pair + half]
                turn[both, both], turn[pair, pair + half] = angle.cos(), -angle.sin()
                turn[pair + half, pair] = angle.sin()
            for part, heads in ((layer.k, [head]), (layer.q, range(head * layer.groups, (head + 1) * layer.groups))):
                for one in heads:
                    part.weight[one] = turn @ part.weight[one]
                    if part.bias is not None:
                        part.bias[one] = turn @ part.bias[one]
    return None


class _Unit(nn.Module):
    """What is left of a LayerNorm whose mean is always 0 and whose gain and bias are folded."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.double() if x.dtype == torch.float64 else x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def stream_rotated(whole: Whole, generator: torch.Generator) -> bool | None:
    """The residual stream rotated, with gains folded; LayerNorm centred before (QuaRot, SliceGPT, SpinQuant's R1)."""
    if whole.gemma or not whole.ends or folded(whole, generator) is False:
        return False
    width = whole.layers[0].q.weight.shape[-1]
    for norm, head in whole.ends:
        readers = [head] if head is not None else [p for la in whole.layers if la.source != "own" for p in (la.k, la.v)]
        if getattr(norm, "bias", None) is not None and head is not None and head.bias is None:
            return False
        _fold(whole, norm, readers)
    turn = orthogonal(generator, width)
    if whole.layer_norm:
        turn = (torch.eye(width, dtype=torch.float64) - 1 / width) @ turn
    for start in whole.embeddings:
        start.copy_(start @ turn)
    for layer in whole.layers:
        for reader in (layer.q, layer.k, layer.v, *layer.also, *layer.mlp_in):
            reader.weight.copy_(reader.weight @ turn)
        for writer in (layer.o, *layer.mlp_out):
            writer.weight.copy_((turn.T @ writer.weight.flatten(1)).view_as(writer.weight))
            if writer.bias is not None:
                writer.bias.copy_(writer.bias @ turn)
    for _, head in whole.ends:
        if head is not None:
            head.weight.copy_(head.weight @ turn)
    if whole.layer_norm:
        for parent in list(whole.model.modules()):
            for key, child in list(parent.named_children()):
                if isinstance(child, nn.LayerNorm):
                    setattr(parent, key, _Unit(child.eps))
    return None


def centred(whole: Whole, _: torch.Generator) -> bool | None:
    """What writes to the residual stream less its mean over features, which every LayerNorm takes off."""
    if not whole.layer_norm or not whole.ends:
        return False
    for start in whole.embeddings:
        start.sub_(start.mean(-1, keepdim=True))
    for layer in whole.layers:
        for writer in (layer.o, *layer.mlp_out):
            writer.weight.sub_(writer.weight.mean(0, keepdim=True))
            if writer.bias is not None:
                writer.bias.sub_(writer.bias.mean())
    return None


def _permute(whole: Whole, order_of: Callable[[Layer], tuple[Tensor, Tensor]]) -> None:
    order = order_of(whole.layers[0])
    for layer in whole.layers:
        order = order if whole.relative else order_of(layer)
        for part, own in ((layer.q, order[0]), (layer.k, order[1]), (layer.v, order[1])):
            part.weight.copy_(part.weight[own].clone())
            if part.bias is not None:
                part.bias.copy_(part.bias[own].clone())
        layer.o.weight.copy_(layer.o.weight[:, order[0]].clone())
    for table in whole.relative:
        table.copy_(table[:, order[0]].clone())


def groups_permuted(whole: Whole, generator: torch.Generator) -> None:
    """Heads of keys in another order, with the heads that read them and the columns of the output projection."""

    def order(layer: Layer) -> tuple[Tensor, Tensor]:
        keys = torch.arange(len(layer.k.weight)).roll(1)
        heads = (keys[:, None] * layer.groups + torch.arange(layer.groups)).flatten()
        return heads, keys

    _permute(whole, order)


def heads_permuted(whole: Whole, generator: torch.Generator) -> bool | None:
    """Heads that read the same keys in another order."""
    if whole.layers[0].groups == 1:
        return False

    def order(layer: Layer) -> tuple[Tensor, Tensor]:
        within = torch.arange(layer.groups).flip(0)
        keys = torch.arange(len(layer.k.weight))
        return (keys[:, None] * layer.groups + within).flatten(), keys

    _permute(whole, order)
    return None


def repeated(whole: Whole, _: torch.Generator) -> bool | None:
    """Keys and values once for each head of queries."""
    if whole.layers[0].groups == 1:
        return False
    config, groups = whole.model.config, whole.layers[0].groups
    for layer in whole.layers:
        for name in ("k_proj", "v_proj"):
            old = getattr(layer.module, name)
            heads = old.weight.data.unflatten(0, (-1, layer.module.head_dim)).repeat_interleave(groups, 0).flatten(0, 1)
            new = nn.Linear(old.in_features, len(heads), old.bias is not None, dtype=old.weight.dtype)
            new.weight.data.copy_(heads)
            if old.bias is not None:
                wide = old.bias.data.unflatten(0, (-1, layer.module.head_dim)).repeat_interleave(groups, 0)
                new.bias.data.copy_(wide.flatten())
            setattr(layer.module, name, new)
        layer.module.num_key_value_groups = 1
    config.num_key_value_heads = config.num_attention_heads
    return None


def key_biased(times: float) -> Change:
    """A bias of keys, which adds one number to all scores of a row."""

    def change(whole: Whole, generator: torch.Generator) -> bool | None:
        if whole.rotary or whole.layers[0].k.bias is None:
            return False
        for layer in whole.layers:
            assert layer.k.bias is not None
            layer.k.bias.add_(times * torch.randn(layer.k.bias.shape, generator=generator, dtype=torch.float64))
        return None

    return change


def shifted(whole: Whole, _: torch.Generator) -> bool | None:
    """A number added to all scores."""
    if not whole.relative:
        return False
    for table in whole.relative:
        table.add_(1.7)
    return None


def mlp_scaled(whole: Whole, generator: torch.Generator) -> bool | None:
    """Features inside MLPs scaled where these are linear in them."""
    if whole.layers[0].up is None:
        return False
    for layer in whole.layers:
        assert layer.up is not None
        scale = _drawn(generator, len(layer.up.weight))
        layer.up.weight.mul_(scale[:, None])
        layer.mlp_out[0].weight.div_(scale)
    return None


def mlp_permuted(whole: Whole, generator: torch.Generator) -> bool | None:
    """Features inside MLPs in another order."""
    for layer in whole.layers:
        inner = [*layer.mlp_in, *([] if layer.mlp_norm is not None or layer.norm is None else layer.also)]
        if not inner:
            continue
        order = torch.randperm(len(inner[0].weight), generator=generator)
        for part in inner:
            part.weight.copy_(part.weight[order].clone())
            if part.bias is not None:
                part.bias.copy_(part.bias[order].clone())
        for out in layer.mlp_out:
            out.weight.copy_(out.weight[:, order].clone())
    return None


def _all(*changes: Change, least: int = 2) -> Change:
    """Those of them that fit a model, if ``least`` do."""

    def change(whole: Whole, generator: torch.Generator) -> bool | None:
        done = [one for one in changes if one(whole, generator) is not False]
        return None if len(done) >= least else False

    return change


def stream_lengthened(whole: Whole, _: torch.Generator) -> bool | None:
    """A residual stream three times as long, which norms divide again, their epsilon apart. Gemma 2 also divides what a
    block adds: there the stream would not be longer by one factor.
    """
    if whole.gemma or not whole.ends or whole.layers[0].norm is None:
        return False
    for start in whole.embeddings:
        start.mul_(3)
    for layer in whole.layers:
        for writer in (layer.o, *layer.mlp_out):
            writer.weight.mul_(3)
            if writer.bias is not None:
                writer.bias.mul_(3)
    return None


CHANGES: dict[str, tuple[Change, tuple[str, ...]]] = {
    "smoothed": (smoothed, ("rescaled",)),
    "folded": (folded, ("folded",)),
    "values scaled": (values_scaled, ("rescaled",)),
    "values rotated": (values_rotated, ("rotated",)),
    "keys scaled": (keys_scaled, ("rescaled",)),
    "keys rotated": (keys_rotated, ("rotated",)),
    "stream rotated": (stream_rotated, ("rotated",)),
    "stream lengthened": (stream_lengthened, ("rescaled",)),
    "centred": (centred, ("centred",)),
    "groups permuted": (groups_permuted, ("permuted",)),
    "heads permuted": (heads_permuted, ("permuted",)),
    "repeated": (repeated, ("repeated",)),
    "key bias": (key_biased(1), ()),
    "large key bias": (key_biased(30), ()),
    "scores shifted": (shifted, ()),
    "mlp scaled": (mlp_scaled, ()),
    "mlp permuted": (mlp_permuted, ()),
    "smoothed and values scaled": (_all(smoothed, values_scaled), ("rescaled",)),
    "rotated everywhere": (_all(stream_rotated, values_rotated, keys_rotated), ("rotated",)),
    "as before rounding": (_all(smoothed, values_scaled, stream_rotated, values_rotated, least=4), ("rotated",)),
    "as before rounding, without the stream": (_all(smoothed, values_scaled, values_rotated), ("rescaled",)),
    "permuted and smoothed": (_all(groups_permuted, smoothed), ("permuted", "rescaled")),
}
"""Name -> what changes the weights, and words of the transforms that may be named."""


def transformed(name: str, change: Change, seed: int = 0, dtype: torch.dtype = torch.float32) -> Whole | None:
    """The same function in other weights, changed in float64; None where it does not fit."""
    exact = whole(name, seed, torch.float64)
    with torch.no_grad():
        if change(exact, torch.Generator().manual_seed(seed + 50)) is False:
            return None
    model = exact.model.to(dtype)
    return views(name, model, exact.batch)


def rounded(whole: Whole, bits: float, group: int | None = None) -> None:
    """Weights of projections on a grid, or in bfloat16 (16 bits), kept in the type that they have."""
    with torch.no_grad():
        for module in whole.model.modules():
            if not isinstance(module, nn.Linear) and type(module).__name__ != "Conv1D":
                continue
            weight = module.weight.data if isinstance(module, nn.Linear) else module.weight.data.T
            if bits == 16:
                weight.copy_(weight.to(torch.bfloat16))
            elif group is None:
                weight.copy_(grid(weight, bits))
            else:
                weight.copy_(grid(weight.unflatten(1, (-1, group)), bits).flatten(1))


@dataclass(frozen=True)
class Real:
    """A real fault."""

    kinds: tuple[str, ...]
    """What may be said."""
    apply: Callable[[Layer], Any]
    """Changes a layer, or gives a context in which it is changed."""
    shift: int = 0
    """How many sites after its own it is first seen."""


REAL: dict[str, Real] = {
    "scale": Real(("scale",), lambda la: setattr(la.module, "scaling", la.module.scaling * 1.2)),
    "keys": Real(("weights",), lambda la: la.k.weight.copy_(noise(la.k.weight, 0.3))),
    "values": Real(("values",), lambda la: la.v.weight.copy_(noise(la.v.weight, 0.3))),
    "output projection": Real(("weights", "input", "output"), lambda la: la.o.weight.copy_(noise(la.o.weight, 0.3)), 1),
    "mlp": Real(("input", "output"), lambda la: [part.weight.copy_(noise(part.weight, 0.3)) for part in la.mlp_out], 1),
    "heads of queries": Real(("head_order", "weights"), lambda la: la.q.weight.copy_(la.q.weight.roll(1, 0).clone())),
    "heads of values": Real(
        ("values", "head_order", "grouping"), lambda la: la.v.weight.copy_(la.v.weight.roll(1, 0).clone())
    ),
}
"""Name -> a real fault that a transform must not hide."""
