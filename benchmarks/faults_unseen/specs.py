"""Which architectures there are, and where each keeps what faults act on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

WIDTH, HEADS, SIZE, INNER, LAYERS, VOCABULARY, TOKENS = 64, 4, 16, 96, 3, 101, 36


@dataclass(frozen=True)
class Spec:
    """Where an architecture keeps what faults act on. Paths are of a layer, or of the model."""

    name: str
    model: str
    config: str
    options: dict[str, Any]
    layers: str = "model.layers"
    attention: str = "self_attn"
    parts: tuple[str, str, str, str] = ("q_proj", "k_proj", "v_proj", "o_proj")
    fused: str | None = None
    out: str | None = None
    norm: str | None = "input_layernorm"
    mlp_norm: str | None = "post_attention_layernorm"
    readers: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    writer: str = "mlp.down_proj"
    final: str | None = "model.norm"
    embeddings: tuple[str, ...] = ("model.embed_tokens.weight",)
    head: str | None = "lm_head"
    style: str = "rms"
    rope: str | None = "half"
    causal: bool = True
    decoder: bool = True


COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = {**COMMON, "num_key_value_heads": 2}
SIZED = {**GROUPED, "head_dim": SIZE}
ENCODER = {name: value for name, value in COMMON.items() if name not in ("tie_word_embeddings", "bos_token_id")}
IMAGE = {name: COMMON[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")}
HALF_TURNED = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}

BERT: dict[str, Any] = {
    "layers": "encoder.layer",
    "attention": "attention.self",
    "parts": ("query", "key", "value", "dense"),
    "out": "attention.output.dense",
    "norm": None,
    "mlp_norm": None,
    "readers": ("intermediate.dense",),
    "writer": "output.dense",
    "final": None,
    "embeddings": ("embeddings.word_embeddings.weight", "embeddings.position_embeddings.weight"),
    "head": None,
    "style": "layer",
    "rope": None,
    "causal": False,
    "decoder": False,
}

SPECS = {
    spec.name: spec
    for spec in (
        Spec("llama", "LlamaForCausalLM", "LlamaConfig", GROUPED),
        Spec("mistral", "MistralForCausalLM", "MistralConfig", {**GROUPED, "sliding_window": 12}),
        Spec("qwen2", "Qwen2ForCausalLM", "Qwen2Config", GROUPED),
        Spec("qwen3", "Qwen3ForCausalLM", "Qwen3Config", SIZED),
        Spec(
            "gemma2",
            "Gemma2ForCausalLM",
            "Gemma2Config",
            {
                **SIZED,
                "sliding_window": 10,
                "query_pre_attn_scalar": SIZE,
                "attn_logit_softcapping": 4.0,
                "final_logit_softcapping": None,
            },
            mlp_norm="pre_feedforward_layernorm",
            style="rms+1",
        ),
        Spec(
            "gpt_oss",
            "GptOssForCausalLM",
            "GptOssConfig",
            {
                **SIZED,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "sliding_window": 12,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 150000.0,
                    "factor": 8.0,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "truncate": False,
                    "original_max_position_embeddings": 32,
                },
            },
            readers=("mlp.router", "mlp.experts.gate_up_proj"),
            writer="mlp.experts.down_proj",
        ),
        Spec(
            "mixtral",
            "MixtralForCausalLM",
            "MixtralConfig",
            {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
            readers=("mlp.gate", "mlp.experts.gate_up_proj"),
            writer="mlp.experts.down_proj",
        ),
        Spec("cohere", "CohereForCausalLM", "CohereConfig", GROUPED, mlp_norm=None, style="layer", rope="interleaved"),
        Spec(
            "phi3",
            "Phi3ForCausalLM",
            "Phi3Config",
            GROUPED,
            parts=("qkv_proj", "qkv_proj", "qkv_proj", "o_proj"),
            fused="rows",
            readers=("mlp.gate_up_proj",),
        ),
        Spec("olmo2", "Olmo2ForCausalLM", "Olmo2Config", GROUPED, norm=None, mlp_norm=None),
        Spec(
            "phi",
            "PhiForCausalLM",
            "PhiConfig",
            COMMON,
            parts=("q_proj", "k_proj", "v_proj", "dense"),
            mlp_norm=None,
            readers=("mlp.fc1",),
            writer="mlp.fc2",
            final="model.final_layernorm",
            style="layer",
        ),
        Spec(
            "gpt_neox",
            "GPTNeoXForCausalLM",
            "GPTNeoXConfig",
            {**COMMON, "rope_parameters": HALF_TURNED},
            layers="gpt_neox.layers",
            attention="attention",
            parts=("query_key_value", "query_key_value", "query_key_value", "dense"),
            fused="heads",
            readers=("mlp.dense_h_to_4h",),
            writer="mlp.dense_4h_to_h",
            final="gpt_neox.final_layer_norm",
            embeddings=("gpt_neox.embed_in.weight",),
            style="layer",
        ),
        Spec(
            "gpt2",
            "GPT2LMHeadModel",
            "GPT2Config",
            {
                "vocab_size": VOCABULARY,
                "n_embd": WIDTH,
                "n_layer": LAYERS,
                "n_head": HEADS,
                "n_positions": 128,
                "tie_word_embeddings": False,
                "bos_token_id": 1,
                "eos_token_id": 2,
            },
            layers="transformer.h",
            attention="attn",
            parts=("c_attn", "c_attn", "c_attn", "c_proj"),
            fused="rows",
            norm="ln_1",
            mlp_norm="ln_2",
            readers=("mlp.c_fc",),
            writer="mlp.c_proj",
            final="transformer.ln_f",
            embeddings=("transformer.wte.weight", "transformer.wpe.weight"),
            style="layer",
            rope=None,
        ),
        Spec(
            "opt",
            "OPTForCausalLM",
            "OPTConfig",
            {
                **{name: value for name, value in COMMON.items() if name != "intermediate_size"},
                "ffn_dim": INNER,
                "word_embed_proj_dim": WIDTH,
                "dropout": 0.0,
            },
            layers="model.decoder.layers",
            parts=("q_proj", "k_proj", "v_proj", "out_proj"),
            norm="self_attn_layer_norm",
            mlp_norm="final_layer_norm",
            readers=("fc1",),
            writer="fc2",
            final="model.decoder.final_layer_norm",
            embeddings=("model.decoder.embed_tokens.weight", "model.decoder.embed_positions.weight"),
            style="layer",
            rope=None,
        ),
        Spec("bert", "BertModel", "BertConfig", ENCODER, **BERT),
        Spec("minilm", "AutoModel", "", {}, **BERT),
        Spec(
            "vit",
            "ViTModel",
            "ViTConfig",
            {**IMAGE, "num_attention_heads": HEADS, "image_size": 20, "patch_size": 4},
            layers="layers",
            attention="attention",
            norm="layernorm_before",
            mlp_norm="layernorm_after",
            readers=("mlp.fc1",),
            writer="mlp.fc2",
            final="layernorm",
            embeddings=("embeddings.cls_token", "embeddings.position_embeddings"),
            head=None,
            style="layer",
            rope=None,
            causal=False,
            decoder=False,
        ),
        Spec(
            "t5",
            "T5ForConditionalGeneration",
            "T5Config",
            {
                "vocab_size": VOCABULARY,
                "d_model": WIDTH,
                "d_kv": SIZE,
                "d_ff": INNER,
                "num_layers": 2,
                "num_decoder_layers": 2,
                "num_heads": HEADS,
                "tie_word_embeddings": False,
                "decoder_start_token_id": 0,
            },
            layers="encoder.block",
            attention="layer.0.SelfAttention",
            parts=("q", "k", "v", "o"),
            norm="layer.0.layer_norm",
            mlp_norm="layer.1.layer_norm",
            readers=("layer.1.DenseReluDense.wi",),
            writer="layer.1.DenseReluDense.wo",
            final="encoder.final_layer_norm",
            embeddings=("shared.weight",),
            rope=None,
            causal=False,
        ),
        Spec(
            "granite",
            "GraniteForCausalLM",
            "GraniteConfig",
            {
                **GROUPED,
                "embedding_multiplier": 3.0,
                "residual_multiplier": 0.5,
                "attention_multiplier": 0.3,
                "logits_scaling": 2.0,
            },
        ),
        Spec("smollm3", "SmolLM3ForCausalLM", "SmolLM3Config", {**GROUPED, "no_rope_layers": [1, 0, 1]}),
        Spec(
            "glm",
            "GlmForCausalLM",
            "GlmConfig",
            {**SIZED, "attention_bias": True, "rope_parameters": HALF_TURNED},
            readers=("mlp.gate_up_proj",),
            rope="interleaved",
        ),
        Spec(
            "nemotron",
            "NemotronForCausalLM",
            "NemotronConfig",
            {**SIZED, "rope_parameters": HALF_TURNED},
            readers=("mlp.up_proj",),
            style="rms+1",
        ),
        Spec(
            "starcoder2",
            "Starcoder2ForCausalLM",
            "Starcoder2Config",
            GROUPED,
            readers=("mlp.c_fc",),
            writer="mlp.c_proj",
            style="layer",
        ),
        Spec(
            "distilbert",
            "DistilBertModel",
            "DistilBertConfig",
            {
                "vocab_size": VOCABULARY,
                "dim": WIDTH,
                "hidden_dim": INNER,
                "n_layers": LAYERS,
                "n_heads": HEADS,
                "max_position_embeddings": 256,
                "pad_token_id": 0,
            },
            **{
                **BERT,
                "layers": "transformer.layer",
                "attention": "attention",
                "parts": ("q_lin", "k_lin", "v_lin", "out_lin"),
                "out": None,
                "readers": ("ffn.lin1",),
                "writer": "ffn.lin2",
            },
        ),
    )
}

HELD_OUT = {
    "granite": "llama",
    "smollm3": "llama",
    "glm": "qwen2",
    "nemotron": "llama",
    "starcoder2": "qwen2",
    "distilbert": "bert",
}
"""Architectures on which nothing in attemper was tuned, and the one whose cases each has, those of ``UNFIT`` apart.

All cases of the other one: none was chosen by what attemper says of it.
"""

_CENTRES = "its LayerNorm takes out the mean, and has biases"
_BENDS = "its MLP has no projection in which it is linear but the last"
_FUSED = "its MLP has gate and up in one matrix"
UNFIT: dict[str, dict[str, str]] = {
    "granite": {},
    "smollm3": {"not_turned-one": "the layer that it draws has no rotary embedding"},
    "glm": {"mlp_channels_scaled": _FUSED, "mlp_neurons_permuted": _FUSED},
    "nemotron": dict.fromkeys(
        (
            "gains_folded",
            "stream_rotated",
            "a_pipeline_of_changes",
            "folded_scale",
            "folded_keys_noisy",
            "rotated_scale",
            "rotated_queries_unloaded",
            "rotated_values_unloaded",
            "rotated_mlp_unloaded",
            "rotated_window",
        ),
        _CENTRES,
    )
    | {"mlp_channels_scaled": _BENDS},
    "distilbert": {"other_token_type": "it has no token types"},
}
UNFIT["starcoder2"] = UNFIT["nemotron"]
"""Cases that are not what they say on an architecture, and why."""
