"""More tiny random transformers models, and the entropies of their eager weights by the module that returns them."""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn

from tests.monitor.tiny_models import GROUPED, SMALL, TEXT, Tiny, head_entropies

LIMIT: dict[str, Any] = {"max_position_embeddings": 128, "pad_token_id": 0}
PAIRS: dict[str, Any] = LIMIT | {"num_key_value_heads": 2}
VISION: dict[str, Any] = {name: value for name, value in SMALL.items() if name != "vocab_size"}
HALF: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
SPECIAL: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2}


OTHERS: dict[str, Tiny] = {
    one.title: one
    for one in (
        Tiny("GPT-NeoX", tf.GPTNeoXForCausalLM, tf.GPTNeoXConfig(**TEXT, **LIMIT, **SPECIAL)),
        Tiny(
            "OPT",
            tf.OPTForCausalLM,
            tf.OPTConfig(
                vocab_size=101, hidden_size=48, num_hidden_layers=2, ffn_dim=64, num_attention_heads=4,
                word_embed_proj_dim=48, max_position_embeddings=128, pad_token_id=0, **SPECIAL,
            ),
        ),
        Tiny(
            "DistilBERT",
            tf.DistilBertModel,
            tf.DistilBertConfig(vocab_size=101, dim=48, n_layers=2, n_heads=4, hidden_dim=64),
            kind="encoder",
        ),
        Tiny("RoBERTa", tf.RobertaModel, tf.RobertaConfig(**TEXT, **LIMIT, **SPECIAL), kind="encoder"),
        Tiny("ELECTRA", tf.ElectraModel, tf.ElectraConfig(**TEXT, **LIMIT, embedding_size=48), kind="encoder"),
        Tiny("ALBERT", tf.AlbertModel, tf.AlbertConfig(**TEXT, **LIMIT, embedding_size=48), kind="encoder"),
        Tiny(
            "ModernBERT",
            tf.ModernBertModel,
            tf.ModernBertConfig(
                **TEXT, **LIMIT, local_attention=8, layer_types=["full_attention", "sliding_attention"],
                cls_token_id=1, sep_token_id=2,
                **SPECIAL,
            ),
            kind="encoder",
        ),
        Tiny("Phi", tf.PhiForCausalLM, tf.PhiConfig(**TEXT, **LIMIT, **SPECIAL)),
        Tiny("Phi-3", tf.Phi3ForCausalLM, tf.Phi3Config(**TEXT, **PAIRS, **SPECIAL)),
        Tiny("Qwen2", tf.Qwen2ForCausalLM, tf.Qwen2Config(**TEXT, **PAIRS)),
        Tiny("Gemma", tf.GemmaForCausalLM, tf.GemmaConfig(**GROUPED)),
        Tiny(
            "Gemma 3",
            tf.Gemma3ForCausalLM,
            tf.Gemma3TextConfig(**GROUPED, sliding_window=7, query_pre_attn_scalar=12),
        ),
        Tiny("OLMo 2", tf.Olmo2ForCausalLM, tf.Olmo2Config(**TEXT, **PAIRS)),
        Tiny("Granite", tf.GraniteForCausalLM, tf.GraniteConfig(**TEXT, **PAIRS)),
        Tiny("Cohere", tf.CohereForCausalLM, tf.CohereConfig(**TEXT, **PAIRS, **SPECIAL)),
        Tiny("StarCoder 2", tf.Starcoder2ForCausalLM, tf.Starcoder2Config(**TEXT, **PAIRS, **SPECIAL)),
        Tiny(
            "StableLM", tf.StableLmForCausalLM, tf.StableLmConfig(**TEXT, **PAIRS, rope_parameters=HALF, **SPECIAL)
        ),
        Tiny(
            "Mixtral",
            tf.MixtralForCausalLM,
            tf.MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2, sliding_window=7),
        ),
        Tiny(
            "Qwen3 MoE",
            tf.Qwen3MoeForCausalLM,
            tf.Qwen3MoeConfig(**GROUPED, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
        ),
        Tiny(
            "DeepSeek V3",
            tf.DeepseekV3ForCausalLM,
            tf.DeepseekV3Config(
                **TEXT, **LIMIT, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
                qk_nope_head_dim=8, v_head_dim=12, n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2,
                moe_intermediate_size=32, first_k_dense_replace=1, n_shared_experts=1, **SPECIAL,
            ),
        ),
        Tiny(
            "Llama 4",
            tf.Llama4ForCausalLM,
            tf.Llama4TextConfig(
                **GROUPED, intermediate_size_mlp=64, num_local_experts=2, num_experts_per_tok=1,
                attention_chunk_size=16, no_rope_layers=[1, 0], **SPECIAL,
            ),
        ),
        Tiny(
            "BART",
            tf.BartModel,
            tf.BartConfig(
                vocab_size=101, d_model=48, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
                decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=128,
                pad_token_id=0, decoder_start_token_id=2, forced_eos_token_id=2, **SPECIAL,
            ),
            kind="encoder-decoder",
        ),
        Tiny(
            "CLIP",
            tf.CLIPModel,
            tf.CLIPConfig(text_config=TEXT | LIMIT | SPECIAL, vision_config=VISION, projection_dim=16),
            kind="two towers",
        ),
        Tiny("SigLIP", tf.SiglipVisionModel, tf.SiglipVisionConfig(**VISION, vision_use_head=False), kind="vision"),
        Tiny("DeiT", tf.DeiTModel, tf.DeiTConfig(**VISION), kind="vision"),
        Tiny("DINOv2", tf.Dinov2Model, tf.Dinov2Config(**VISION), kind="vision"),
    )
}  # fmt: skip


def weights_by_module(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, list[Tensor]]:
    """What each call of each module returns as its attention weights, [B, H, Q, K], under eager attention."""
    found: dict[str, list[Tensor]] = {}

    def hook(name: str) -> Any:
        def keep(_m: nn.Module, _i: Any, output: Any) -> None:
            if isinstance(output, tuple) and len(output) > 1 and isinstance(output[1], Tensor) and output[1].dim() == 4:
                found.setdefault(name, []).append(output[1])

        return keep

    with ExitStack() as hooks, torch.no_grad():
        for name, module in model.named_modules():
            if "ttention" in type(module).__name__:
                hooks.callback(module.register_forward_hook(hook(name)).remove)
        # Some releases give a module's weights back only where they are asked for.
        parameters = inspect.signature(model.forward).parameters
        model(**batch, **dict.fromkeys({"output_attentions"} & set(parameters), True))
    # What a module passes on from one inside it is not its own.
    return {name: layers for name, layers in found.items() if not any(other.startswith(f"{name}.") for other in found)}


def expected(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Mean entropy per head [H] of every call of a module that returns weights, by site, real queries only."""

    def mask(name: str) -> Tensor | None:
        if "vision" in name:
            return None
        return batch.get("decoder_attention_mask" if name.startswith("decoder") else "attention_mask")

    return {
        f"{name}#{call}" if call > 1 else name: head_entropies(layer, mask(name))
        for name, layers in weights_by_module(model, batch).items()
        for call, layer in enumerate(layers, 1)
    }
