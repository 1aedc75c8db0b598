"""Tiny random models of the architectures that people run in 2026, from transformers' configurations, no download."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

from tests.monitor.tiny_models import inputs

DECODER: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 96, "max_position_embeddings": 128, "sliding_window": 7, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
    # mixtures of experts
    "n_routed_experts": 4, "num_local_experts": 4, "num_experts": 4, "n_group": 2, "topk_group": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "shared_expert_intermediate_size": 32,
}  # fmt: skip
"""Fields of language models; each configuration takes those that it knows."""
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 12, "head_dim": 8,
}  # fmt: skip
INDEXER: dict[str, Any] = {"index_topk": 9, "index_head_dim": 16, "index_n_heads": 2}
TWO_KINDS = ["linear_attention", "full_attention"]
LOCAL = ["sliding_attention", "full_attention"]
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": TWO_KINDS,
}  # fmt: skip
STATES: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16,
    "mamba_d_ssm": 128,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
SPEECH: dict[str, Any] = {
    "vocab_size": 101, "d_model": 48, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_source_positions": 50,
    "max_target_positions": 64, "num_mel_bins": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Architecture:
    """An architecture by the name that people know, and how to build and to feed a tiny model of it."""

    title: str
    model: str
    """Name of its class in transformers: a file of transformers is loaded when its model is built."""
    config: Callable[[], Any]
    kind: str = "decoder"
    """"decoder", "vision", "speech", "two towers" or "vision and text"."""
    images: Callable[[], dict[str, Tensor]] | None = None
    """Of "vision and text": a batch of text in which images stand."""

    def build(self) -> Any:
        """The model, eager, with weights that make its attention neither uniform nor one-hot."""
        if not hasattr(tf, self.model):
            pytest.skip(f"this transformers has no {self.model}")
        model = getattr(tf, self.model)._from_config(self.config(), attn_implementation="eager")
        return _sharpened(model)

    def batch(self, padding: str | None) -> dict[str, Tensor]:
        if self.images is not None:
            return self.images()
        if self.kind == "two towers":
            return inputs("decoder", padding) | inputs("vision", None)
        return inputs(self.kind, padding)


def _config(name: str, changes: dict[str, Any]) -> Any:
    kind = getattr(tf, f"{name}Config")
    known = set(inspect.signature(kind).parameters)
    return kind(**{key: value for key, value in DECODER.items() if key in known} | changes)


def _decoder(title: str, name: str, model: str | None = None, **changes: Any) -> Architecture:
    return Architecture(title, model or f"{name}ForCausalLM", lambda: _config(name, changes))


def _images_in_text() -> dict[str, Tensor]:
    """One row of text with two images in it, of 16 and 32 patches."""
    ids = torch.randint(3, 90, (1, 30))
    ids[0, [2, 11]], ids[0, 3:7], ids[0, 12:20] = 97, 99, 99
    return {
        "input_ids": ids,
        "pixel_values": torch.randn(48, 96),
        "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 8]]),
        "mm_token_type_ids": (ids == 99).int(),
    }


def _patches_in_text() -> dict[str, Tensor]:
    """The same, of patches that a convolution reads."""
    batch = _images_in_text()
    return {name: batch[name] for name in ("input_ids", "image_grid_thw")} | {"pixel_values": torch.randn(48, 3, 4, 4)}


def _crops_in_text() -> dict[str, Tensor]:
    """One row of text with an image in it, whole and as its one crop, of 16 patches each."""
    ids = torch.randint(3, 90, (1, 30))
    ids[0, 4:17] = 99
    # Some patches are padding: without any, sdpa attention reads this vision tower causally, and eager does not.
    mask = torch.ones(1, 2, 4, 4)
    mask[..., 3] = 0
    return {
        "input_ids": ids,
        "image_pixel_values": torch.randn(1, 2, 3, 16, 16),
        "image_sizes": torch.tensor([[16, 16]]),
        "image_attention_mask": mask,
    }


def _vision_and_text(title: str, name: str, text: dict[str, Any], **vision: Any) -> Architecture:
    """A model of Qwen's kind: a packed vision tower, and text in which images stand."""
    rope = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}}
    fields = {key: DECODER[key] for key in list(DECODER)[:8]} | {"pad_token_id": 0} | rope | text
    tower = {
        "depth": 2, "hidden_size": 32, "num_heads": 4, "patch_size": 4, "in_channels": 3, "spatial_merge_size": 2,
        "temporal_patch_size": 2, "intermediate_size": 48, "out_hidden_size": 64,
    }  # fmt: skip
    tokens = {
        "image_token_id": 99, "video_token_id": 98, "vision_start_token_id": 97, "vision_end_token_id": 96
    }  # fmt: skip

    def config() -> Any:
        return getattr(tf, f"{name}Config")(text_config=fields, vision_config=tower | vision, **tokens)

    return Architecture(title, f"{name}ForConditionalGeneration", config, "vision and text", _images_in_text)


def _kimi() -> Any:
    text = {key: value for key, value in (DECODER | LATENT).items() if key != "sliding_window"}
    tower = {
        "patch_size": 4, "pos_emb_height": 8, "pos_emb_width": 8, "num_attention_heads": 4, "num_hidden_layers": 2,
        "hidden_size": 32, "intermediate_size": 48,
    }  # fmt: skip
    return tf.Kimi_K25Config(
        text_config={"model_type": "deepseek_v3", **text}, vision_config=tower, projection_hidden_size=32,
        image_token_id=99, video_token_id=98, vision_start_token_id=97, vision_end_token_id=96,
    )  # fmt: skip


def _phi4() -> Any:
    text = {key: value for key, value in list(DECODER.items())[:8] if key != "head_dim"}
    vision = {**VISION, "image_size": 16, "patch_size": 4, "crop_size": 16, "image_token_id": 99}
    audio = {
        "hidden_size": 32, "intermediate_size": 48, "num_blocks": 1, "num_attention_heads": 4, "input_size": 16,
        "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "nemo_conv_channels": 16, "audio_token_id": 98,
    }  # fmt: skip
    return tf.Phi4MultimodalConfig(**text, pad_token_id=0, vision_config=vision, audio_config=audio)


def _siglip() -> Any:
    text = {
        "vocab_size": 101, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2, "projection_size": 48,
    }  # fmt: skip
    return tf.SiglipConfig(text_config=text, vision_config=VISION)


MINIMAX_M3: dict[str, Any] = {
    "layer_types": ["full_attention", "minimax_m3_sparse"], "dense_intermediate_size": 48,
    "shared_intermediate_size": 32, "rotary_dim": 8, "index_n_heads": 2, "index_head_dim": 8, "index_block_size": 4,
    "index_topk_blocks": 2,
}  # fmt: skip


def _minimax_m3() -> Any:
    tower = {key: VISION[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    return tf.MiniMaxM3VLConfig(
        text_config=_config("MiniMaxM3VLText", MINIMAX_M3), projector_hidden_size=32, image_token_index=99,
        vision_config=tf.MiniMaxM3VLVisionConfig(**tower, num_attention_heads=4, image_size=32, patch_size=4),
    )  # fmt: skip


ARCHITECTURES = (
    _decoder("Qwen3", "Qwen3"),
    _decoder("Qwen3 MoE", "Qwen3Moe"),
    _decoder("Qwen3-Next", "Qwen3Next", **DELTA),
    _decoder("Qwen3.5", "Qwen3_5Text", "Qwen3_5ForCausalLM", **DELTA),
    _decoder("Qwen3.5 MoE", "Qwen3_5MoeText", "Qwen3_5MoeForCausalLM", **DELTA),
    _decoder("Gemma 3", "Gemma3Text", "Gemma3ForCausalLM", layer_types=LOCAL, query_pre_attn_scalar=16),
    _decoder(
        "Gemma 4", "Gemma4Text", "Gemma4ForCausalLM",
        num_hidden_layers=4, layer_types=LOCAL * 2, num_kv_shared_layers=2, hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=101,
    ),
    _decoder("gpt-oss", "GptOss", rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
    _decoder(
        "Llama 4", "Llama4Text", "Llama4ForCausalLM",
        intermediate_size_mlp=64, num_local_experts=2, num_experts_per_tok=1, attention_chunk_size=16,
        no_rope_layers=[1, 0],
    ),
    _decoder("DeepSeek V3", "DeepseekV3", **LATENT),
    _decoder("DeepSeek V3.2", "DeepseekV32", **LATENT, **INDEXER),
    _decoder(
        "DeepSeek V4", "DeepseekV4",
        num_hidden_layers=4, num_key_value_heads=1, q_lora_rank=24, o_groups=2, o_lora_rank=16, hc_mult=2,
        hc_sinkhorn_iters=2, **INDEXER,
    ),
    _decoder("GLM 4", "Glm4"),
    _decoder("GLM 4.5", "Glm4Moe"),
    _decoder("GLM 4.7 Flash", "Glm4MoeLite", **LATENT),
    _decoder("GLM 5", "GlmMoeDsa", **LATENT, **INDEXER),
    _decoder("HunYuan V4", "HYV4", **LATENT, **INDEXER),
    _decoder("Kimi Linear", "KimiLinear", **LATENT, linear_head_dim=8, linear_num_heads=4, layer_types=TWO_KINDS),
    _decoder("MiniMax", "MiniMax", layer_types=TWO_KINDS, block_size=16),
    _decoder("MiniMax M2", "MiniMaxM2"),
    _decoder(
        "MiniMax M3", "MiniMaxM3VLText", "MiniMaxM3VLForCausalLM", **MINIMAX_M3,
    ),
    _decoder("MiMo V2", "MiMoV2Flash"),
    _decoder("OLMo 3", "Olmo3", layer_types=LOCAL),
    _decoder("OLMo Hybrid", "OlmoHybrid", **DELTA),
    _decoder("SmolLM3", "SmolLM3", no_rope_layers=[1, 0]),
    _decoder("Phi-4", "Phi3", sliding_window=None),
    _decoder("Ministral 3", "Ministral3"),
    _decoder("Mistral 4", "Mistral4", **LATENT),
    _decoder(
        "Granite 4", "GraniteMoeHybrid",
        layer_types=["mamba", "attention"], shared_intermediate_size=64, **STATES,
    ),
    _decoder("Falcon H1", "FalconH1", **STATES),
    _decoder("Jamba", "Jamba", attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8, mamba_dt_rank=8),
    _decoder("Bamba", "Bamba", attn_layer_indices=[1], **STATES),
    _decoder(
        "Nemotron H", "NemotronH",
        layers_block_type=["mamba", "attention", "moe", "mlp"], ssm_state_size=8, mamba_num_heads=8, mamba_head_dim=16,
        n_groups=1, chunk_size=16, moe_shared_expert_intermediate_size=32,
    ),
    _decoder("LFM2", "Lfm2", layer_types=["conv", "full_attention"]),
    _decoder(
        "RecurrentGemma", "RecurrentGemma",
        block_types=("recurrent", "attention"), attention_window_size=16, lru_width=64,
    ),
    _decoder("EXAONE 4", "Exaone4", layer_types=LOCAL),
    _decoder("Seed-OSS", "SeedOss"),
    _decoder("NanoChat", "NanoChat"),
    _decoder("Mamba 2", "Mamba2", num_heads=8, head_dim=16, state_size=8, n_groups=1, chunk_size=16),
    Architecture("Whisper", "WhisperModel", lambda: tf.WhisperConfig(**SPEECH), "speech"),
    Architecture("SigLIP", "SiglipModel", _siglip, "two towers"),
    Architecture("DINOv3", "DINOv3ViTModel", lambda: tf.DINOv3ViTConfig(**VISION, num_register_tokens=4), "vision"),
    _vision_and_text("Qwen2.5-VL", "Qwen2_5_VL", {}, window_size=16, fullatt_block_indexes=(1,)),
    _vision_and_text("Qwen3-VL", "Qwen3VL", {}, deepstack_visual_indexes=(0, 1), num_position_embeddings=64),
    Architecture("Kimi K2.5", "Kimi_K25ForConditionalGeneration", _kimi, "vision and text", _patches_in_text),
    Architecture(
        "MiniMax M3, vision and text", "MiniMaxM3SparseForConditionalGeneration", _minimax_m3, "vision and text",
        _images_in_text,
    ),
    Architecture("Phi-4 multimodal", "Phi4MultimodalForCausalLM", _phi4, "vision and text", _crops_in_text),
    _vision_and_text("Qwen3.5, vision and text", "Qwen3_5", DELTA, num_position_embeddings=64),
)  # fmt: skip

BY_TITLE = {one.title: one for one in ARCHITECTURES}

_SCALED = ("q_proj", "k_proj", "qkv", "q_b_proj", "kv_b_proj", "sinks")


def _sharpened(model: nn.Module) -> nn.Module:
    """Queries and keys made larger, and the gains of their norms unlike, one and another head by head."""
    for name, parameter in model.named_parameters():
        inside = name.split(".")[-2:]
        if any(part in ("q_norm", "k_norm", "q_layernorm", "k_layernorm") for part in inside):
            parameter.data.copy_(1 + torch.rand_like(parameter))
        elif any(part in _SCALED for part in inside):
            # Phi-4's vision tower begins with weights of size 1, and scores of some hundreds.
            parameter.data.mul_(0.1 if "img_processor" in name else 4.0)
    return model.eval()
