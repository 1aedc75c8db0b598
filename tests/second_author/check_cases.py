"""Faults put into small random models, and correct models, that judge ``attemper.check``.

Written from the docs page alone. A fault changes one module of one layer (or of all), or the mask that is given to it.
Every fault first proves itself in plain torch: the sound model does not do it, the faulty one does, and the first
layer that shows it is the wanted one.

    python -m tests.second_author.check_cases --json FILE
"""

from __future__ import annotations

import argparse
import inspect
import json
import platform
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import attemper

LAYERS, WIDTH, HEADS, BATCH, TOKENS, WINDOW, VOCABULARY = 2, 32, 4, 2, 24, 8, 64
HIDDEN, IMAGE = -1e9, 1
Batch = dict[str, Any]

COMMON = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
COMMON |= {
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = COMMON | {"num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


@dataclass(frozen=True)
class Family:
    """An architecture: how it is built, and what it can be asked."""

    model: str
    config: str
    options: dict[str, Any]
    causal: bool = True
    windows: tuple[int | None, ...] = (None,) * LAYERS
    padded: tuple[str, ...] = ("right", "left")
    packed: bool = True
    cached: bool = True
    parts: bool = False  # encoder and decoder
    part: str = ""  # where the layers are
    faults_of_windows: tuple[str, ...] = ("a key more", "a key less", "no window")


SLIDING = ["sliding_attention", "full_attention"]
MIXED = (WINDOW, None)
FAMILIES = {
    "llama": Family("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "mistral": Family(
        "MistralForCausalLM", "MistralConfig", GROUPED | {"sliding_window": WINDOW}, windows=(WINDOW,) * 2
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        GROUPED
        | {"sliding_window": WINDOW, "layer_types": SLIDING, "attn_logit_softcapping": 1.0, "query_pre_attn_scalar": 8},
        windows=MIXED,
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        GROUPED | {"sliding_window": WINDOW, "layer_types": SLIDING, "query_pre_attn_scalar": 8},
        windows=MIXED,
    ),
    "qwen2": Family("Qwen2ForCausalLM", "Qwen2Config", GROUPED),
    "qwen3": Family("Qwen3ForCausalLM", "Qwen3Config", GROUPED),
    "phi3": Family("Phi3ForCausalLM", "Phi3Config", COMMON | {"num_key_value_heads": 2}),
    "olmo2": Family("Olmo2ForCausalLM", "Olmo2Config", COMMON | {"num_key_value_heads": 2}),
    "gpt_neox": Family("GPTNeoXForCausalLM", "GPTNeoXConfig", COMMON),
    "mixtral": Family("MixtralForCausalLM", "MixtralConfig", GROUPED | EXPERTS),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        "GptOssConfig",
        GROUPED | EXPERTS | {"sliding_window": WINDOW, "layer_types": SLIDING},
        windows=MIXED,
        packed=False,
    ),
    "falcon": Family("FalconForCausalLM", "FalconConfig", COMMON | {"multi_query": True, "alibi": False}, packed=False),
    "gpt2": Family("GPT2LMHeadModel", "GPT2Config", COMMON | {"n_inner": 48, "n_positions": 64}, padded=("right",)),
    "opt": Family(
        "OPTForCausalLM",
        "OPTConfig",
        COMMON | {"ffn_dim": 48, "word_embed_proj_dim": WIDTH},
        padded=("right",),
        packed=False,
    ),
    "gpt_neo": Family(
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {key: COMMON[key] for key in ("vocab_size", "hidden_size", "max_position_embeddings")}
        | {
            "num_layers": LAYERS,
            "num_heads": HEADS,
            "attention_types": [[["local", "global"], 1]],
            "window_size": WINDOW,
        },
        windows=MIXED,
        padded=("right",),
        packed=False,
    ),
    "starcoder2": Family(
        "Starcoder2ForCausalLM",
        "Starcoder2Config",
        COMMON | {"num_key_value_heads": 2, "sliding_window": WINDOW},
        windows=(WINDOW,) * LAYERS,
    ),
    "cohere2": Family(
        "Cohere2ForCausalLM",
        "Cohere2Config",
        COMMON | {"num_key_value_heads": 2, "sliding_window": WINDOW, "layer_types": SLIDING},
        windows=MIXED,
    ),
    "qwen2_windows": Family(
        "Qwen2ForCausalLM",
        "Qwen2Config",
        GROUPED
        | {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1}
        | {"layer_types": ["full_attention", "sliding_attention"]},
        windows=(None, WINDOW),
    ),
    "granite": Family("GraniteForCausalLM", "GraniteConfig", COMMON | {"num_key_value_heads": 2}),
    "stablelm": Family("StableLmForCausalLM", "StableLmConfig", COMMON | {"num_key_value_heads": 2}),
    "llama4": Family(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        GROUPED
        | {"attention_chunk_size": WINDOW, "layer_types": ["chunked_attention", "full_attention"]}
        | {"num_local_experts": 4, "intermediate_size_mlp": 48, "interleave_moe_layer_step": 2},
        windows=MIXED,
        faults_of_windows=("no window",),
    ),
    "modernbert": Family(
        "ModernBertModel",
        "ModernBertConfig",
        COMMON | {"local_attention": 8, "cls_token_id": 1, "sep_token_id": 2},
        causal=False,
        windows=(None, 5),
        padded=("right",),
        packed=False,
        cached=False,
        faults_of_windows=("no window",),
    ),
    "llava": Family(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {
            "text_config": GROUPED | {"model_type": "llama"},
            "vision_config": {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48}
            | {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "image_size": 8, "patch_size": 4}
            | {"projection_dim": 32},
            "image_token_index": IMAGE,
            "vision_feature_layer": -1,
        },
        packed=False,
        cached=False,
        part="language_model",
    ),
    "lfm2": Family(
        "Lfm2ForCausalLM",
        "Lfm2Config",
        COMMON | {"num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]},
        packed=False,
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        GROUPED
        | {"layer_types": ["linear_attention", "full_attention"], "num_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "linear_num_value_heads": 4}
        | {"linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
        packed=False,
    ),
    "jamba": Family(
        "JambaForCausalLM",
        "JambaConfig",
        COMMON
        | {"num_key_value_heads": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2}
        | {
            "expert_layer_offset": 1,
            "num_experts": 4,
            "use_mamba_kernels": False,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
        },
        packed=False,
        cached=False,
    ),
    "mamba": Family(
        "MambaForCausalLM",
        "MambaConfig",
        {k: COMMON[k] for k in ("vocab_size", "hidden_size", "num_hidden_layers", "pad_token_id")}
        | {"state_size": 8, "time_step_rank": 4},
        padded=("right",),
        packed=False,
        cached=False,
    ),
    "bert": Family("BertModel", "BertConfig", COMMON, causal=False, padded=("right",), cached=False),
    "roberta": Family("RobertaModel", "RobertaConfig", COMMON, causal=False, padded=("right",), cached=False),
    "distilbert": Family(
        "DistilBertModel",
        "DistilBertConfig",
        {
            "vocab_size": VOCABULARY,
            "dim": WIDTH,
            "n_layers": LAYERS,
            "n_heads": HEADS,
            "hidden_dim": 48,
            "max_position_embeddings": 64,
        },
        causal=False,
        padded=("right",),
        cached=False,
    ),
    "clip_text": Family(
        "CLIPTextModel",
        "CLIPTextConfig",
        COMMON | {"projection_dim": 32},
        padded=("right",),
        packed=False,
        cached=False,
    ),
    "t5": Family(
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": VOCABULARY,
            "d_model": WIDTH,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": LAYERS,
            "num_heads": HEADS,
            "decoder_start_token_id": 0,
        },
        padded=("right",),
        packed=False,
        cached=False,
        parts=True,
    ),
    "bart": Family(
        "BartForConditionalGeneration",
        "BartConfig",
        {"vocab_size": VOCABULARY, "d_model": WIDTH, "encoder_layers": LAYERS, "decoder_layers": LAYERS}
        | {
            "encoder_attention_heads": HEADS,
            "decoder_attention_heads": HEADS,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
        }
        | {"max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        padded=("right",),
        packed=False,
        cached=False,
        parts=True,
    ),
}


def randomize(model: nn.Module) -> nn.Module:
    """Weights of a size at which tokens see one another clearly."""
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            nn.init.normal_(parameter, std=0.25)
    return model.eval()


def compile_eagerly(model: nn.Module) -> nn.Module:
    compiled = torch.compile(model, backend="eager")
    assert isinstance(compiled, nn.Module)
    return compiled


def build(family: str, *, attention: str = "eager", dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    kind = FAMILIES[family]
    config = getattr(transformers, kind.config)(**kind.options)
    config._attn_implementation = attention
    return randomize(getattr(transformers, kind.model)(config)).to(dtype)


def ids(rows: int = BATCH, tokens: int = TOKENS) -> Tensor:
    return torch.randint(3, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(1))


def batch_of(family: str, kind: str, rows: int = BATCH) -> Batch:
    """``kind``: plain, right, left (padding), or packed."""
    batch: Batch = {"input_ids": ids(rows)}
    if kind in ("right", "left"):
        mask = torch.ones(rows, TOKENS, dtype=torch.int64)
        for row in range(rows):
            hidden = 6 - 2 * row
            mask[row, (slice(-hidden, None) if kind == "right" else slice(hidden))] = 0
        batch["input_ids"] = torch.where(mask == 1, batch["input_ids"], 0)
        batch["attention_mask"] = mask
    if kind == "packed":
        batch["position_ids"] = torch.cat([torch.arange(10), torch.arange(14)])[None].repeat(rows, 1)
        batch["use_cache"] = False
    if family == "llava":
        batch["input_ids"][:, 8:12] = IMAGE
        batch["pixel_values"] = torch.randn(rows, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    if FAMILIES[family].parts:
        batch["decoder_input_ids"] = ids(rows, 16)
    return batch


EAGER = ("gpt_oss", "gemma2", "mamba", "gpt_neo", "llama4")  # have no sdpa
DOCUMENTS = torch.tensor([[0] * 10 + [1] * 14])


# What a model does, in plain torch


def tensor_of(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, tuple):
        return output[0]
    logits = getattr(output, "logits", None)
    return output.last_hidden_state if logits is None else logits


def layers_of(model: nn.Module, part: str = "") -> dict[str, nn.Module]:
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == LAYERS and part in name and "expert" not in name:
            return {f"{name}.{index}": layer for index, layer in enumerate(module)}
    raise AssertionError("no layers")


@torch.no_grad()
def run(model: nn.Module, batch: Any, part: str = "") -> list[Tensor]:
    """What every layer gives, then the output."""
    seen: list[Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda _module, _args, output: seen.append(tensor_of(output).float().clone()))
        for layer in layers_of(model, part).values()
    ]
    torch.manual_seed(7)
    try:
        output = model(**batch) if isinstance(batch, dict) else model(batch)
    finally:
        for hook in hooks:
            hook.remove()
    return [*seen, tensor_of(output).float()]


def difference(one: Tensor, other: Tensor, kept: Tensor) -> float:
    """The largest change of the rows of ``kept`` [B, T], as a part of the size of a row."""
    rows = (one - other).norm(dim=-1) / one.norm(dim=-1).clamp_min(1e-6)
    if rows.shape != kept.shape:  # a decoder's rows, beside the tokens of the encoder
        kept = kept.any(1, keepdim=True).expand_as(rows)
    return float(rows[kept].max()) if kept.any() else 0.0


def exchange(batch: Any, places: Tensor, key: str) -> Any:
    """Other tokens at ``places`` [B, T]."""
    values = batch[key]
    other = (values - 3 + 17) % (VOCABULARY - 3) + 3
    return {**batch, key: torch.where(places & (values != IMAGE), other, values)}


def moves(
    model: nn.Module, batch: Batch, rule: str, part: str = "", key: str = "input_ids", padding: Tensor | None = None
) -> list[float]:
    """How far each layer, and the output, moves where ``rule`` allows none. For rules that exchange tokens."""
    before = run(model, batch, part)
    rows, tokens = batch[key].shape
    index = torch.arange(tokens)[None].expand(rows, -1)
    if rule == "causal":
        token = batch.get("attention_mask", torch.ones(1)).dim() != 2 or batch["attention_mask"] == 1
        pairs = [(index >= cut, (index < cut) & token) for cut in (4, 11, 18) if cut < tokens]
    elif rule == "documents":
        documents = DOCUMENTS.expand(rows, -1)
        pairs = [(documents == number, documents != number) for number in (0, 1)]
    elif rule == "padding":
        hidden = batch["attention_mask"] == 0 if padding is None else padding == 0
        pairs = [(hidden, ~hidden)]
    else:
        sequence = torch.arange(rows)[:, None].expand(-1, tokens)
        pairs = [(sequence == number, sequence != number) for number in range(rows)]
    largest = [0.0] * len(before)
    for changed, kept in pairs:
        after = run(model, exchange(batch, changed, key), part)
        found = [difference(one, two, kept) for one, two in zip(before, after, strict=True)]
        largest = [max(pair) for pair in zip(largest, found, strict=True)]
    return largest


@torch.no_grad()
def cache_moves(model: nn.Module, batch: Batch, step: int) -> list[float]:
    """The same of reading ``step`` tokens at a time with a cache, beside one pass."""
    whole = run(model, {**batch, "use_cache": False})
    cache, pieces = None, []
    for start in range(0, TOKENS, step):
        seen: list[Tensor] = []
        hooks = [
            layer.register_forward_hook(
                lambda _module, _args, output, seen=seen: seen.append(tensor_of(output).clone())
            )
            for layer in layers_of(model).values()
        ]
        output = model(input_ids=batch["input_ids"][:, start : start + step], past_key_values=cache, use_cache=True)
        for hook in hooks:
            hook.remove()
        cache = output.past_key_values
        pieces.append([*seen, output.logits])
    parts = [torch.cat(rows, dim=1) for rows in zip(*pieces, strict=True)]
    kept = torch.ones_like(batch["input_ids"], dtype=torch.bool)
    return [difference(one, two, kept) for one, two in zip(whole, parts, strict=True)]


def beside(sound: nn.Module, faulty: nn.Module, batch: Batch, part: str = "") -> list[float]:
    """How far each layer of the faulty model is from that of the sound one."""
    pairs = list(zip(run(sound, batch, part), run(faulty, batch, part), strict=True))
    return [difference(one, two, torch.ones(one.shape[:2], dtype=torch.bool)) for one, two in pairs]


# Faults: each changes one layer


def attention_of(layer: nn.Module) -> nn.Module:
    """The innermost self attention of a layer."""
    for name, module in layer.named_modules():
        nested = any("Attention" in type(child).__name__ for child in module.modules() if child is not module)
        known = {"attention_mask", "mask"} & set(inspect.signature(module.forward).parameters)
        foreign = any(word in name for word in ("encoder_attn", "EncDec", "cross"))
        if "Attention" in type(module).__name__ and not nested and known and not foreign:
            return module
    raise LookupError("no attention")


def mask_of(queries: int, keys: int, causal: bool, window: int | None, ahead: int = 0) -> Tensor:
    """An additive mask [1, 1, queries, keys]."""
    row = torch.arange(keys - queries, keys)[:, None]
    column = torch.arange(keys)[None]
    visible = torch.ones(queries, keys, dtype=torch.bool)
    if causal:
        visible &= column <= row + ahead
    if window is not None:
        visible &= (row - column).abs() < window
    return torch.where(visible, 0.0, HIDDEN)[None, None]


def give_mask(module: nn.Module, mask: Callable[[int, Tensor | None], Tensor | None]) -> None:
    """The attention gets another mask: ``mask(queries, given)``."""

    def swap(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        bound = inspect.signature(module.forward).bind_partial(*args, **kwargs)
        name = "attention_mask" if "attention_mask" in inspect.signature(module.forward).parameters else "mask"
        hidden = next(iter(bound.arguments.values()))
        changed = mask(hidden.shape[1], bound.arguments.get(name))
        bound.arguments[name] = None if changed is None else changed.to(hidden.dtype)
        return bound.args, bound.kwargs

    module.register_forward_pre_hook(swap, with_kwargs=True)


def change_output(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    def swap(_module: nn.Module, _args: Any, output: Any) -> Any:
        return change(output) if isinstance(output, Tensor) else (change(output[0]), *output[1:])

    module.register_forward_hook(swap)


def length_of(queries: int, given: Tensor | None) -> int:
    return queries if given is None else given.shape[-1]


def open_mask(fault: str, causal: bool, window: int | None) -> Callable[[int, Tensor | None], Tensor | None]:
    def mask(queries: int, given: Tensor | None) -> Tensor | None:
        keys = length_of(queries, given)
        if fault == "all later tokens":
            return mask_of(queries, keys, False, window)
        if fault == "the next token":
            return mask_of(queries, keys, True, window, ahead=1)
        if fault == "the next token, in one head":
            whole = mask_of(queries, keys, True, window).repeat(1, HEADS, 1, 1)
            whole[:, 1] = mask_of(queries, keys, True, window, ahead=1)[:, 0]
            return whole
        if fault == "the next token, in one row":
            whole = mask_of(queries, keys, True, window)
            if queries == keys and queries > 12:
                whole[:, :, 10, 11] = 0.0
            return whole
        if fault == "a key forgotten":
            result = mask_of(queries, keys, causal, window)
            return (
                result.index_fill(-1, torch.tensor([max(keys - queries - 2, 0)]), HIDDEN) if keys > queries else given
            )
        width = {"a key more": WINDOW + 1, "a key less": WINDOW - 1, "no window": None}.get(fault, window)
        return mask_of(queries, keys, causal, width)

    return mask


@dataclass(frozen=True)
class Case:
    """``make`` gives model, batch and arguments of ``check``; of a fault, ``rule`` and ``block`` are wanted."""

    name: str
    make: Callable[[], tuple[nn.Module, Any, dict[str, Any]]]
    rule: str = ""
    block: Callable[[nn.Module], str] | None = None


OUTPUTS: dict[str, dict[str, Callable[[Tensor], Tensor]]] = {
    "causal": {"a filter that looks ahead": lambda x: x + 0.5 * functional.pad(x, (0, 0, 0, 1))[:, 1:]},
    "documents": {"a filter over the boundary": lambda x: x + 0.5 * functional.pad(x, (0, 0, 1, 0))[:, :-1]},
    "padding": {"a mean over padding": lambda x: x + 0.5 * x.mean(1, keepdim=True)},
    "batch": {
        "a mean over the batch": lambda x: x + 0.5 * x.mean(0, keepdim=True),
        "statistics of the batch": lambda x: functional.batch_norm(
            x.transpose(1, 2), None, None, training=True
        ).transpose(1, 2),
    },
    "repeat": {"dropout": lambda x: functional.dropout(x, 0.3, training=True)},
}
WHERE = {"first": (0,), "last": (LAYERS - 1,), "all": tuple(range(LAYERS))}


def sound_and_faulty(
    family: str, rule: str, fault: str, where: str, part: str, attention: str
) -> tuple[nn.Module, nn.Module, int]:
    """Both models, and the first layer that is faulty."""
    sound, faulty = build(family, attention=attention), build(family, attention=attention)
    kind = FAMILIES[family]
    causal = kind.causal and part != "encoder"
    layers = list(layers_of(faulty, part).values())
    chosen = [index for index in WHERE[where] if rule != "window" or kind.windows[index]]
    if fault in OUTPUTS.get(rule, {}):
        for index in chosen:
            change_output(layers[index], OUTPUTS[rule][fault])
        return sound, faulty, chosen[0]
    reached = []
    for index in chosen:
        try:
            module, mask = attention_of(layers[index]), open_mask(fault, causal, kind.windows[index])
            if family == "gpt_neo" and rule in ("causal", "window"):  # keeps its mask itself
                mended = mask(64, None)
                assert mended is not None
                module.bias = mended == 0
            give_mask(module, mask)
        except LookupError:
            continue
        reached.append(index)
    return sound, faulty, reached[0]


def prove(rule: str, sound: nn.Module, faulty: nn.Module, batch: Batch, part: str, key: str, first: int) -> None:
    """That the fault is one: asserts in plain torch what the case claims."""
    if rule in ("window", "scores"):
        found, clean = beside(sound, faulty, batch, part), [0.0]
    elif rule == "cache":
        found, clean = cache_moves(faulty, batch, 1), cache_moves(sound, batch, 1)
    elif rule == "repeat":
        torch.manual_seed(3)
        with torch.no_grad():
            one, two = tensor_of(faulty(**batch)), tensor_of(faulty(**batch))
        assert not torch.equal(one, two)
        return
    else:
        found, clean = moves(faulty, batch, rule, part, key), moves(sound, batch, rule, part, key)
    assert max(clean) < 2e-5, f"the sound model does it too: {clean}"
    assert found[-1] > 1e-3, f"the output does not show it: {found}"
    assert [value > 2e-4 for value in found].index(True) == first, f"another layer is first: {found}"


def fault_case(family: str, rule: str, fault: str, where: str, part: str = "", attention: str = "eager") -> Case:
    kind = FAMILIES[family]
    part = part or kind.part
    key = "decoder_input_ids" if part == "decoder" else "input_ids"
    side = "right" if not kind.causal or part == "encoder" else "left"
    batch = batch_of(family, {"documents": "packed", "padding": side}.get(rule, "plain"))
    options = {"documents": DOCUMENTS.expand(BATCH, -1)} if rule == "documents" and not kind.causal else {}
    if options:
        separate = DOCUMENTS[:, :, None] == DOCUMENTS[:, None]
        batch = {
            "input_ids": batch["input_ids"],
            "attention_mask": torch.where(separate, 0.0, HIDDEN)[:, None].expand(BATCH, 1, -1, -1),
        }

    def make() -> tuple[nn.Module, Any, dict[str, Any]]:
        sound, faulty, first = sound_and_faulty(family, rule, fault, where, part, attention)
        prove(rule, sound, faulty, batch, part, key, first)
        return faulty, batch, options | ({"causal": True} if family == "clip_text" else {})

    def block(model: nn.Module) -> str:
        return list(layers_of(model, part))[sound_and_faulty(family, rule, fault, where, part, attention)[2]]

    named = " ".join(word for word in (family, part, rule, attention if attention != "eager" else "") if word)
    return Case(f"{named}: {fault}, {where}", make, rule, block)


def transformers_faults() -> Iterator[Case]:
    for family, kind in FAMILIES.items():
        recurrent = family in ("mamba", "jamba", "lfm2", "qwen3_next")
        if kind.parts:
            for where in ("first", "last"):
                if family != "t5":
                    yield fault_case(family, "causal", "the next token", where, "decoder")
                    yield fault_case(family, "padding", "padding not in the mask", where, "encoder")
                yield fault_case(family, "causal", "a filter that looks ahead", where, "decoder")
                yield fault_case(family, "padding", "a mean over padding", where, "encoder")
                yield fault_case(family, "batch", "a mean over the batch", where, "encoder")
                yield fault_case(family, "repeat", "dropout", where, "encoder")
            continue
        if kind.causal:
            if family != "mamba":
                yield fault_case(family, "causal", "all later tokens", "all")
                yield fault_case(family, "causal", "the next token", "last")
            if not recurrent:
                yield fault_case(family, "causal", "the next token", "first")
                if family not in EAGER:
                    yield fault_case(family, "causal", "the next token", "last", attention="sdpa")
            yield fault_case(family, "causal", "a filter that looks ahead", "first")
            if family in ("llama", "qwen2", "phi3", "gemma2", "opt", "gpt2", "gpt_oss", "mixtral", "falcon", "cohere2"):
                yield fault_case(family, "causal", "the next token, in one head", "last")
                yield fault_case(family, "causal", "the next token, in one row", "last")
        if kind.packed:
            yield fault_case(family, "documents", "documents not in the mask", "first")
            yield fault_case(family, "documents", "documents not in the mask", "last")
            yield fault_case(family, "documents", "a filter over the boundary", "last")
        if not kind.causal:
            yield fault_case(family, "padding", "a mean over padding", "last")
        if not kind.causal or ("left" in kind.padded and not recurrent):
            yield fault_case(family, "padding", "padding not in the mask", "first")
            yield fault_case(family, "padding", "padding not in the mask", "last")
        if any(kind.windows):
            for fault in kind.faults_of_windows:
                yield fault_case(family, "window", fault, "all")
            if all(kind.windows) and kind.causal:
                yield fault_case(family, "window", "a key more", "last")
                yield fault_case(family, "window", "a key less", "last")
        if kind.cached and not recurrent:
            yield fault_case(family, "cache", "a key forgotten", "last")
        yield fault_case(family, "batch", "a mean over the batch", "first")
        yield fault_case(family, "batch", "statistics of the batch", "last")
        yield fault_case(family, "repeat", "dropout", "last")


def attention_without_sinks(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: Any,
    attention_mask: Any,
    past_key_values: Any = None,
    **_: Any,
) -> Any:
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    q, k, v = (part(hidden_states).view(shape).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj))
    cosine, sine = position_embeddings

    def turn(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        c, s = cosine.unsqueeze(1), sine.unsqueeze(1)
        return torch.cat([first * c - second * s, second * c + first * s], dim=-1)

    q, k = turn(q), turn(k)
    if past_key_values is not None:
        k, v = past_key_values.update(k, v, self.layer_idx)
    groups = self.num_key_value_groups
    mixed = functional.scaled_dot_product_attention(
        q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), attention_mask, scale=self.scaling
    )
    return self.o_proj(mixed.transpose(1, 2).flatten(2)), None


def scores_faults() -> Iterator[Case]:
    """The softcap that a layer of Gemma 2 leaves out, the sinks that one of gpt-oss leaves out."""
    for where, chosen in WHERE.items():

        def leave_out(chosen: tuple[int, ...] = chosen) -> tuple[nn.Module, Any, dict[str, Any]]:
            sound, faulty = build("gpt_oss"), build("gpt_oss")
            for index in chosen:
                attention = attention_of(list(layers_of(faulty).values())[index])
                attention.forward = MethodType(attention_without_sinks, attention)
            batch = batch_of("gpt_oss", "plain")
            prove("scores", sound, faulty, batch, "", "input_ids", chosen[0])
            return faulty, batch, {}

        yield Case(
            f"gpt_oss scores: no sinks, {where}",
            leave_out,
            "scores",
            lambda model, first=chosen[0]: list(layers_of(model))[first],
        )
    for where, chosen in WHERE.items():

        def make(chosen: tuple[int, ...] = chosen) -> tuple[nn.Module, Any, dict[str, Any]]:
            sound, faulty = build("gemma2"), build("gemma2")
            for index in chosen:
                setattr(attention_of(list(layers_of(faulty).values())[index]), "attn_logit_softcapping", None)  # noqa: B010
            batch = batch_of("gemma2", "plain")
            prove("scores", sound, faulty, batch, "", "input_ids", chosen[0])
            return faulty, batch, {}

        yield Case(
            f"gemma2 scores: no softcap, {where}",
            make,
            "scores",
            lambda model, first=chosen[0]: list(layers_of(model))[first],
        )


def native_faults() -> Iterator[Case]:
    """What stock models do with packed documents."""
    for family in ("lfm2", "qwen3_next", "jamba", "mamba", "opt", "falcon", "gpt_oss"):
        for fault in ("as they are", "as they are, documents as an argument"):

            def make(family: str = family, fault: str = fault) -> tuple[nn.Module, Any, dict[str, Any]]:
                model, batch = build(family), batch_of(family, "packed")
                options = {"documents": DOCUMENTS.expand(BATCH, -1)} if "argument" in fault else {}
                if family == "mamba":
                    options = {"documents": DOCUMENTS.expand(BATCH, -1)}
                    del batch["position_ids"]
                assert moves(model, batch, "documents")[0] > 1e-3
                return model, batch, options

            yield Case(f"{family} documents: {fault}", make, "documents", lambda model: next(iter(layers_of(model))))
    for family in ("llama", "qwen2", "gpt_neox", "phi3", "qwen3", "mixtral", "olmo2"):
        for fault in ("the default cache", "a mask of ones"):

            def make(family: str = family, fault: str = fault) -> tuple[nn.Module, Any, dict[str, Any]]:
                model, batch = build(family, attention="sdpa"), batch_of(family, "packed", 1)
                if fault == "the default cache":
                    del batch["use_cache"]
                else:
                    batch["attention_mask"] = torch.ones(1, TOKENS, dtype=torch.int64)
                assert moves(model, batch, "documents")[0] > 1e-3
                return model, batch, {}

            yield Case(f"{family} documents: {fault}", make, "documents", lambda model: next(iter(layers_of(model))))


# Hand-written models


class Block(nn.Module):
    """Attention in one of three writings, or a recurrence; ``fault`` is what this layer does wrong."""

    def __init__(self, writing: str, fault: str = ""):
        super().__init__()
        self.writing, self.fault = writing, fault
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH))

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1))
        if self.writing == "sdpa":
            mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        elif self.writing == "softmax":
            mixed = (q @ k.mT / 8**0.5).masked_fill(~visible, -1e9).softmax(-1) @ v
        else:
            weights = torch.einsum("bhid,bhjd->bhij", q.sigmoid(), k.sigmoid()) * visible
            mixed = weights @ v / weights.sum(-1, keepdim=True).clamp_min(1e-6)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        x = x + self.mlp(x)
        if self.fault == "batch":
            x = x + 0.5 * x.mean(0, keepdim=True)
        if self.fault == "repeat":
            x = functional.dropout(x, 0.3, training=True)
        return x


class Written(nn.Module):
    """Rows see what is before them, of their document, in their window, and no padding, as far as each is given."""

    def __init__(
        self, writing: str, rule: str = "", where: str = "all", causal: bool = True, window: int | None = None
    ):
        super().__init__()
        self.causal, self.window, self.rule = causal, window, rule
        self.embedding, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(
            Block(writing, rule if rule and index in WHERE[where] else "") for index in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def visible(self, ids: Tensor, documents: Tensor | None, attention_mask: Tensor | None, fault: str) -> Tensor:
        index = torch.arange(ids.shape[1])
        seen = torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool)
        if self.causal and fault != "causal":
            seen = seen & (index[None] <= index[:, None])
        if self.window is not None:
            more = 1 if self.causal else 2  # to both sides, the page leaves open whether a window counts its edges
            width = self.window + more if fault == "window" else self.window
            seen = seen & ((index[:, None] - index[None]).abs() < width)
        if documents is not None and fault != "documents":
            seen = seen & (documents[:, None, :, None] == documents[:, None, None])
        if attention_mask is not None and fault != "padding":
            seen = seen & (attention_mask[:, None, None] == 1) | torch.eye(ids.shape[1], dtype=torch.bool)
        return seen

    def forward(
        self, input_ids: Tensor, documents: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        x = self.embedding(input_ids) + self.positions(torch.arange(input_ids.shape[1]))
        for layer in self.layers:
            x = layer(x, self.visible(input_ids, documents, attention_mask, str(layer.fault)))
        return self.head(x)


class Encoder(nn.Module):
    """``nn.TransformerEncoder`` with a padding mask, or causal. A fault takes the mask from one layer."""

    def __init__(self, rule: str = "", where: str = "all", causal: bool = False):
        super().__init__()
        self.causal = causal
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        for index in WHERE[where]:
            chosen = self.encoder.layers[index]
            if rule in OUTPUTS and rule in ("batch", "repeat"):
                change_output(chosen, next(iter(OUTPUTS[rule].values())))
            elif rule:
                chosen.register_forward_pre_hook(self.drop(rule), with_kwargs=True)

    @staticmethod
    def drop(rule: str) -> Callable[..., Any]:
        name = {"padding": "src_key_padding_mask", "causal": "src_mask"}[rule]
        return lambda _module, args, kwargs: (
            args,
            {**kwargs, name: None, **({"is_causal": False} if rule == "causal" else {})},
        )

    def forward(self, input_ids: Tensor, src_key_padding_mask: Tensor | None = None) -> Tensor:
        tokens = input_ids.shape[1]
        mask = torch.ones(tokens, tokens, dtype=torch.bool).triu(1) if self.causal else None
        return self.encoder(self.embedding(input_ids), mask=mask, src_key_padding_mask=src_key_padding_mask)


def seed(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return randomize(make())


def written_batch(
    rule: str, causal: bool, rows: int = BATCH, names: str = "attention_mask"
) -> tuple[Batch, dict[str, Any]]:
    batch: Batch = {"input_ids": ids(rows)}
    options: dict[str, Any] = {"causal": causal}
    if rule == "documents":
        batch["documents"] = options["documents"] = DOCUMENTS.expand(rows, -1)
    mask = torch.ones(rows, TOKENS)
    if rule == "padding":
        mask = batch_of("llama", "left" if causal else "right", rows)["attention_mask"]
        batch["attention_mask"] = options["padding"] = mask
    if rule == "window":
        options["window"] = WINDOW
    if names != "attention_mask" and rule == "padding":
        batch = {"input_ids": batch["input_ids"], names: mask == 0}
        options = {"causal": causal} if causal else {}
    return batch, options


def prove_written(
    rule: str, sound: nn.Module, faulty: nn.Module, batch: Batch, options: dict[str, Any], first: int
) -> None:
    if rule != "padding":
        prove(rule, sound, faulty, batch, "", "input_ids", first)
        return
    padding = options["padding"] if "padding" in options else (~batch["src_key_padding_mask"]).long()
    found = moves(faulty, batch, rule, padding=padding)
    assert max(moves(sound, batch, rule, padding=padding)) < 2e-5
    assert found[-1] > 1e-3
    assert [value > 2e-4 for value in found].index(True) == first


def written_case(writing: str, rule: str, where: str, causal: bool, wrap: str = "") -> Case:
    window = WINDOW if rule == "window" else None
    first = WHERE[where][0]

    def make() -> tuple[nn.Module, Any, dict[str, Any]]:
        if writing == "encoder":
            sound, faulty = seed(lambda: Encoder(causal=causal)), seed(lambda: Encoder(rule, where, causal))
            batch, options = written_batch(rule, causal, names="src_key_padding_mask")
        else:
            sound = seed(lambda: Written(writing, causal=causal, window=window))
            faulty = seed(lambda: Written(writing, rule, where, causal, window))
            batch, options = written_batch(rule, causal)
        prove_written(rule, sound, faulty, batch, options, first)
        return compile_eagerly(faulty) if wrap else faulty, batch, options

    block = "encoder.layers" if writing == "encoder" else "layers"
    style = " ".join(word for word in ("written", writing, wrap, "causal" if causal else "both ways", rule) if word)
    return Case(f"{style}, {where}", make, rule, lambda _model: f"{block}.{first}")


def written_faults() -> Iterator[Case]:
    for writing in ("sdpa", "softmax", "linear"):
        for rule in ("causal", "documents", "padding", "window", "batch", "repeat"):
            for where in ("first", "last"):
                yield written_case(writing, rule, where, True)
            if rule != "causal":
                yield written_case(writing, rule, "last", False)
    for rule in ("padding", "batch", "repeat"):
        for where in WHERE:
            yield written_case("encoder", rule, where, False)
    for where in WHERE:
        yield written_case("encoder", "causal", where, True)
    for rule in ("causal", "documents", "padding", "window", "batch", "repeat"):
        yield written_case("sdpa", rule, "last", True, "compiled")
        yield written_case("softmax", rule, "first", True, "compiled")


class Step(nn.Module):
    """What is no attention: a recurrence, a filter, a router. Without ``fault`` it keeps documents and times apart."""

    def __init__(self, kind: str, fault: str):
        super().__init__()
        self.kind, self.fault = kind, fault
        both = kind == "recurrence" and fault == "causal"
        self.state = nn.GRU(WIDTH, WIDTH // 2 if both else WIDTH, batch_first=True, bidirectional=both)
        self.filter = nn.Conv1d(WIDTH, WIDTH, 4, groups=WIDTH)
        self.router, self.experts = nn.Linear(WIDTH, 2), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        if self.kind == "router":
            return x + self.route(x)
        if self.fault == "documents":
            return x + self.mix(x)
        pieces = [x[:, documents == number] for number in documents.unique()]
        return x + torch.cat([self.mix(piece) for piece in pieces], dim=1)

    def mix(self, x: Tensor) -> Tensor:
        if self.kind == "recurrence":
            return self.state(x)[0]
        ahead = 1 if self.fault == "causal" else 0
        return self.filter(functional.pad(x.mT, (3 - ahead, ahead))).mT

    def route(self, x: Tensor) -> Tensor:
        """Each expert takes a part of all tokens of the batch if faulty, else every token that chose it."""
        tokens = x.flatten(0, 1)
        chosen = self.router(tokens).argmax(-1)
        result = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            places = (chosen == number).nonzero()[:, 0]
            places = places[: len(tokens) // 4] if self.fault == "batch" else places
            result[places] = expert(tokens[places])
        return result.view_as(x)


class Steps(nn.Module):
    def __init__(self, kind: str, fault: str = "", where: str = "all"):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Step(kind, fault if index in WHERE[where] else "") for index in range(LAYERS))

    def forward(self, input_ids: Tensor, documents: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x, documents[0])
        return x


def step_case(kind: str, fault: str, where: str = "all") -> Case:
    first = WHERE[where][0]

    def make() -> tuple[nn.Module, Any, dict[str, Any]]:
        sound, faulty = seed(lambda: Steps(kind)), seed(lambda: Steps(kind, fault, where))
        documents = DOCUMENTS.expand(BATCH, -1)
        batch: Batch = {"input_ids": ids(), "documents": documents}
        if fault:
            prove(fault, sound, faulty, batch, "", "input_ids", first)
        return faulty, batch, {"causal": kind != "router" or None, "documents": documents if kind != "router" else None}

    if not fault:
        return Case(f"pair written {kind}", make)
    return Case(f"written {kind} {fault}, {where}", make, fault, lambda _model: f"layers.{first}")


def step_faults() -> Iterator[Case]:
    for where in WHERE:
        for kind in ("recurrence", "filter"):
            yield step_case(kind, "causal", where)
            yield step_case(kind, "documents", where)
        yield step_case("router", "batch", where)


# Correct models


def prefix_batch(rows: int) -> Batch:
    """A prefix of 8 tokens that all see one another, causal behind it: a mask, and declared as not causal."""
    index = torch.arange(TOKENS)
    visible = (index[None] <= index[:, None]) | (index[None] < 8)
    return {
        "input_ids": ids(rows),
        "attention_mask": torch.where(visible, 0.0, HIDDEN)[None, None].expand(rows, 1, -1, -1),
    }


def pair_case(
    family: str,
    kind: str,
    rows: int = BATCH,
    attention: str = "eager",
    dtype: torch.dtype = torch.float32,
    wrap: bool = False,
) -> Case:
    def make() -> tuple[nn.Module, Any, dict[str, Any]]:
        model = build(family, attention=attention, dtype=dtype)
        if kind == "prefix":
            return model, prefix_batch(rows), {"causal": False}
        batch = batch_of(family, kind, rows)
        rule = {"packed": "documents", "right": "padding", "left": "padding"}.get(kind, "batch")
        limit = 0.05 if dtype is torch.bfloat16 else 2e-5
        part = "encoder" if FAMILIES[family].parts else FAMILIES[family].part
        assert max(moves(model, batch, rule, part)) < limit
        if FAMILIES[family].causal and not FAMILIES[family].parts:
            assert max(moves(model, batch, "causal", part)) < limit
        if family in ("mamba", "jamba"):  # the docs page: it does not resume its convolution
            batch["use_cache"] = False
        return compile_eagerly(model) if wrap else model, batch, {}

    words = [family, kind, f"batch of {rows}", attention, str(dtype).removeprefix("torch."), "compiled" if wrap else ""]
    return Case("pair " + ", ".join(word for word in words if word), make)


def pairs() -> Iterator[Case]:
    for family, kind in FAMILIES.items():
        stock = "eager" if family in EAGER else "sdpa"
        yield pair_case(family, "plain")
        yield pair_case(family, "plain", attention=stock, rows=1)
        yield pair_case(family, "plain", attention=stock, dtype=torch.bfloat16)
        for side in kind.padded:
            if family not in ("jamba", "lfm2", "qwen3_next") or side == "right":
                yield pair_case(family, side)
                yield pair_case(family, side, attention=stock, rows=3)
        if kind.packed and kind.causal:
            yield pair_case(family, "packed", attention=stock, rows=1)
            yield pair_case(family, "packed")
    for family in ("llama", "qwen2", "gemma2", "mixtral", "bert", "gpt2"):
        yield pair_case(family, "plain", wrap=True)
    for family in ("llama", "qwen2", "qwen3", "gpt_neox", "phi3"):
        yield pair_case(family, "prefix")
    for writing in ("sdpa", "softmax", "linear"):
        for causal in (True, False):
            for rule in ("causal", "documents", "padding", "window"):
                for wrap in ("", "compiled") if writing == "sdpa" else ("",):
                    yield written_pair(writing, rule, causal, wrap)
    for kind in ("recurrence", "filter", "router"):
        yield step_case(kind, "")
    for rule in ("padding", "batch"):
        yield written_pair("encoder", rule, False, "")
        yield written_pair("encoder", rule, True, "")


def written_pair(writing: str, rule: str, causal: bool, wrap: str) -> Case:
    def make() -> tuple[nn.Module, Any, dict[str, Any]]:
        names = "src_key_padding_mask" if writing == "encoder" else "attention_mask"
        batch, options = written_batch(rule, causal, names=names)
        if writing == "encoder" and rule == "padding":
            batch["src_key_padding_mask"] = batch_of("llama", "right")["attention_mask"] == 0
        window = WINDOW if rule == "window" else None
        model = seed(
            lambda: Encoder(causal=causal) if writing == "encoder" else Written(writing, causal=causal, window=window)
        )
        return compile_eagerly(model) if wrap else model, batch, options

    return Case(f"pair written {writing} {rule} {'causal' if causal else 'both ways'} {wrap}".strip(), make)


FAULTS = [*transformers_faults(), *scores_faults(), *native_faults(), *written_faults(), *step_faults()]
PAIRS = list(pairs())


def judge(case: Case) -> dict[str, Any]:
    """What ``check`` says of a case: ``right``, and the rules it blames with their sites."""
    start = time.perf_counter()
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, batch, options = case.make()
        report = attemper.check(model, batch, **options)
    blamed = {rule.name: rule.site for rule in report.broken}
    result = {"case": case.name, "right": not blamed, "blamed": blamed}
    if case.block is not None:
        wanted = case.block(getattr(model, "_orig_mod", model))
        site = str(blamed.get(case.rule, "")).removeprefix("_orig_mod.")
        result |= {"wanted": f"{case.rule} at {wanted}", "right": site == wanted or site.startswith(wanted + ".")}
        result["verdict"] = report[case.rule].verdict
    return result | {"seconds": round(time.perf_counter() - start, 2)}


def count(results: list[dict[str, Any]], pairs: list[dict[str, Any]]) -> dict[str, Any]:
    wrong = [row for row in results if not row["right"]]
    return {
        "faults": len(results),
        "named": len(results) - len(wrong),
        "wrong": wrong,
        "pairs": len(pairs),
        "blamed": [row for row in pairs if not row["right"]],
        "environment": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": version("transformers"),
            "machine": platform.machine(),
        },
    }


def judge_by_index(kind: int, index: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    return judge((FAULTS, PAIRS)[kind][index])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    results: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        futures = {
            pool.submit(judge_by_index, kind, index): kind
            for kind, cases in enumerate((FAULTS, PAIRS))
            for index, case in enumerate(cases)
            if options.only in case.name
        }
        for future in as_completed(futures):
            results[futures[future]].append(future.result())
            row = future.result()
            print("right" if row["right"] else "WRONG", json.dumps(row), flush=True)
    text = json.dumps(count(*results), indent=2) + "\n"
    if options.json:
        options.json.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
