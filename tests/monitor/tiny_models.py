"""Tiny random transformers models, built from config without download, and the entropies of their eager weights."""

from __future__ import annotations

import copy
import inspect
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

import attemper
from tests.support.scans import of_heads

CACHE = next(
    name for name in ("cache", "past_key_values") if name in inspect.signature(tf.LlamaModel.forward).parameters
)
"""What this version of transformers calls keys of earlier calls."""

TEXT: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
GROUPED: dict[str, Any] = TEXT | {
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
T5: dict[str, Any] = {
    "vocab_size": 101,
    "d_model": 48,
    "d_kv": 12,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
SMALL: dict[str, Any] = TEXT | {"image_size": 32, "patch_size": 4}


_DROPOUTS = (
    "attention_dropout", "dropout", "activation_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob",
    "attn_pdrop", "resid_pdrop", "embd_pdrop", "dropout_rate", "hidden_dropout", "attention_probs_dropout",
)  # fmt: skip
"""Under which names configs hold probabilities of dropout."""


def require_registry(model: Any) -> None:
    """Skips where this transformers attends in that class of models without asking its registry for the function."""
    if ".get_interface(" not in inspect.getsource(sys.modules[model.__module__]):
        pytest.skip(f"{model.__name__} of this transformers does not ask the attention registry")


def from_config(model: Any, config: Any, **options: Any) -> Any:
    """A model of that class. Not typed: for what ``_from_config`` returns pyright would read all of transformers."""
    return model._from_config(config, **options)


@dataclass(frozen=True)
class Tiny:
    """A model, how to feed it, and how its documentation calls it."""

    title: str
    model: Any
    """A class with ``_from_config``."""
    config: Any
    kind: str = "decoder"
    """"decoder", "encoder", "encoder-decoder", "vision", "two towers" or "speech"."""
    tokens: int = 40
    sdpa: bool = True
    """Whether transformers has an sdpa attention for it."""

    def build(self, dropout: float | None = None) -> Any:
        """The model, eager. ``dropout``: every probability of dropout that its config knows."""
        config = copy.deepcopy(self.config)
        if dropout is not None:
            for name in _DROPOUTS:
                if isinstance(getattr(config, name, None), (int, float)):
                    setattr(config, name, dropout)
        return from_config(self.model, config, attn_implementation="eager")

    @property
    def implementations(self) -> tuple[str, ...]:
        return ("eager", "sdpa") if self.sdpa else ("eager",)


TINY: dict[str, Tiny] = {
    "llama": Tiny("Llama", tf.LlamaForCausalLM, tf.LlamaConfig(**GROUPED)),
    "qwen3": Tiny("Qwen3", tf.Qwen3ForCausalLM, tf.Qwen3Config(**GROUPED)),
    "mistral": Tiny("Mistral", tf.MistralForCausalLM, tf.MistralConfig(**GROUPED, sliding_window=7)),
    "gpt2": Tiny(
        "GPT-2",
        tf.GPT2LMHeadModel,
        tf.GPT2Config(vocab_size=101, n_embd=48, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2),
    ),
    "gemma2": Tiny(
        "Gemma 2",
        tf.Gemma2ForCausalLM,
        tf.Gemma2Config(**GROUPED, sliding_window=7, attn_logit_softcapping=2.0, query_pre_attn_scalar=12),
        sdpa=False,
    ),
    "gpt-oss": Tiny(
        "gpt-oss",
        tf.GptOssForCausalLM,
        tf.GptOssConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2, sliding_window=7),
        sdpa=False,
    ),
    "bert": Tiny("BERT", tf.BertModel, tf.BertConfig(**TEXT, max_position_embeddings=128), kind="encoder"),
    "t5": Tiny("T5", tf.T5ForConditionalGeneration, tf.T5Config(**T5), kind="encoder-decoder"),
    "vit": Tiny(
        "ViT",
        tf.ViTModel,
        tf.ViTConfig(**{name: value for name, value in SMALL.items() if name != "vocab_size"}),
        kind="vision",
    ),
    "whisper": Tiny(
        "Whisper",
        tf.WhisperModel,
        tf.WhisperConfig(
            vocab_size=101, d_model=48, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_source_positions=50,
            max_target_positions=64, num_mel_bins=8, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            decoder_start_token_id=1,
        ),
        kind="speech",
    ),
}  # fmt: skip


def sharpened(model: tf.PreTrainedModel, factor: float = 6.0) -> tf.PreTrainedModel:
    """Random weights give near-uniform attention; larger ones give rows of every sharpness."""
    for name, parameter in model.named_parameters():
        # q, k, sinks and relative positions, under the names these models use.
        if any(
            part in name for part in ("q_proj", "k_proj", "c_attn", "query", "key", ".q.", ".k.", "sinks", "relative")
        ):
            parameter.data.mul_(factor)
    return model.eval()


def inputs(kind: str, padding: str | None, tokens: int = 40, batch: int = 3) -> dict[str, Tensor]:
    """A batch for a kind of model, padded left, right or not at all, with lengths tokens, tokens - 9 and 5."""
    if kind == "vision":
        return {"pixel_values": torch.randn(batch, 3, 32, 32)}
    if kind == "two towers":
        return inputs("decoder", padding, tokens, batch) | inputs("vision", None, tokens, batch)
    ids = torch.randint(3, 101, (batch, tokens))
    mask = _padding(padding, batch, tokens)
    if kind == "speech":
        return {
            "input_features": torch.randn(batch, 8, 100),
            "decoder_input_ids": ids,
            "decoder_attention_mask": mask,
        }
    batch_inputs = {"input_ids": ids, "attention_mask": mask}
    if kind == "encoder-decoder":
        short = tokens // 2
        batch_inputs |= {
            "decoder_input_ids": torch.randint(3, 101, (batch, short)),
            "decoder_attention_mask": _padding(padding, batch, short),
        }
    return batch_inputs


def _padding(side: str | None, batch: int, tokens: int) -> Tensor:
    mask = torch.ones(batch, tokens, dtype=torch.int64)
    lengths = [tokens, tokens - 9, 5]
    for row, length in enumerate(lengths[:batch]):
        if side == "right":
            mask[row, length:] = 0
        elif side == "left":
            mask[row, : tokens - length] = 0
    return mask


def eager_entropies(model: tf.PreTrainedModel, batch: dict[str, Tensor]) -> dict[str, list[Tensor]]:
    """Mean entropy per head [H] of each layer from eager weights in float64, real queries only, by group of sites."""
    with torch.no_grad():
        outputs = model(**batch, output_attentions=True)
    own = batch.get("attention_mask")
    decoder = batch.get("decoder_attention_mask", own)
    groups = {
        "attentions": own,
        "encoder_attentions": own,
        "decoder_attentions": decoder,
        "cross_attentions": decoder,
    }
    found = {}
    for name, mask in groups.items():
        weights = getattr(outputs, name, None)
        if weights:
            found[name] = [head_entropies(layer, mask) for layer in weights]
    return found


def head_entropies(weights: Tensor, mask: Tensor | None) -> Tensor:
    """Mean over real queries of the entropy of rows [B, H, Q, K], renormalised (a learned sink is left out), [H]."""
    p = weights.double()
    p = p / p.sum(-1, keepdim=True)
    entropy = -torch.where(p > 0, p * torch.where(p > 0, p, 1.0).log(), 0.0).sum(-1)
    rows = torch.ones(entropy.shape[0], entropy.shape[2], dtype=torch.bool) if mask is None else mask.bool()
    return torch.stack([entropy[:, head][rows].mean() for head in range(entropy.shape[1])])


def watched_scan(model: Any, batch: dict[str, Any]) -> attemper.Scan:
    """What a watch reads of a pass, whose output is that of the unwatched model to the bit."""
    with torch.no_grad():
        before = model(**batch)[0]
        with attemper.watch(model) as watch:
            during = model(**batch)[0]
    assert torch.equal(before, during)
    assert watch.failures == 0
    return watch.table()


def largest_error(scan: Any, kind: str, expected: dict[str, list[Tensor]]) -> float:
    """Largest difference, in nats, of a site's entropies from those of its layer; every layer must be there."""
    found: dict[str, list[Any]] = {name: [] for name in expected}
    for site in scan.sites:
        found[_group(site, kind)].append(site)
    worst = 0.0
    for group, layers in expected.items():
        assert len(found[group]) == len(layers), (group, [site.name for site in scan.sites])
        for site, entropies in zip(found[group], layers, strict=True):
            worst = max(worst, float((of_heads(site) - entropies).abs().max()))
    return worst


def _group(site: Any, kind: str) -> str:
    """The output that holds the weights of a site."""
    if kind in ("decoder", "encoder", "vision"):
        return "attentions"
    if site.kind == "cross":
        return "cross_attentions"
    return "encoder_attentions" if "encoder" in site.name.split(".")[:2] else "decoder_attentions"
