"""Public models of published packages, trained for two steps with one watch: are all their attention layers seen?

Run: ``pip install --no-deps --target FOLDER PACKAGES`` and ``PYTHONPATH=FOLDER python benchmarks/public_models.py``.
A package that is not there is left out, with the reason. Losses must be those of the same training without a watch.
"""

from __future__ import annotations

import copy
import importlib
import random
import sys
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import attemper


class Case(NamedTuple):
    """A model, and how many attention layers of it have weights to read."""

    package: str
    title: str
    build: Any
    """Gives the model and its arguments."""
    sites: int
    named: int = 0
    """Modules that mix tokens otherwise, which the first step names."""


TOKENS, VOCABULARY = 32, 50
SIZES: dict[str, Any] = {"dim": 32, "depth": 2, "heads": 4, "dim_head": 8}
LANGUAGE: dict[str, Any] = {"num_tokens": VOCABULARY, "max_seq_len": TOKENS, **SIZES}


def tokens() -> Tensor:
    return torch.randint(4, 24, (2, TOKENS))


def model_of(module: str, name: str, inputs: Any = tokens, **options: Any) -> Any:
    def build() -> tuple[nn.Module, tuple[Any, ...]]:
        model = getattr(importlib.import_module(module), name)(**options)
        given = inputs()
        return model, given if isinstance(given, tuple) else (given,)

    return build


def decoder(**options: Any) -> Any:
    def build() -> tuple[nn.Module, tuple[Any, ...]]:
        x = importlib.import_module("x_transformers")
        layers = x.Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, verbose=False, **options)
        return x.TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=TOKENS, attn_layers=layers), (tokens(),)

    return build


def litgpt(name: str) -> Any:
    def build() -> tuple[nn.Module, tuple[Any, ...]]:
        model = importlib.import_module("litgpt")
        sizes: dict[str, Any] = {"n_layer": 2, "n_embd": 32, "n_head": 4, "head_size": 8, "n_query_groups": 2}
        config = model.Config.from_name(name, **sizes, intermediate_size=48, padded_vocab_size=64, block_size=TOKENS)
        return model.GPT(config), (tokens(),)

    return build


SEEN = (
    *("attn_flash", "alibi_pos_bias", "rel_pos_bias", "rotary_pos_emb", "attn_qk_norm", "attn_one_kv_head"),
    *("attn_add_zero_kv", "attn_softclamp_logits", "attn_l2_distance", "attn_selective", "attn_pre_talking_heads"),
    *("attn_laser", "attn_use_cope", "residual_attn", "macaron", "weight_tie_layers"),
)
NAMED = ("attn_head_learned_sink", "attn_post_talking_heads", "attn_hard", "attn_sigmoid", "attn_gumbel_softmax")


def cases() -> Iterator[Case]:
    for option in SEEN:
        yield Case("x-transformers", option, decoder(**{option: True}), 2)
    for option in NAMED:
        yield Case("x-transformers", option, decoder(**{option: True}), 0, 2)
    for name in ("Llama-3.2-1B", "Gemma-2-2b", "Gemma-3-1b-it", "Qwen3-0.6B", "OLMo-2-1124-7B", "phi-4"):
        yield Case("litgpt", name, litgpt(name), 2)
    local = {**LANGUAGE, "local_attn_window_size": 8}
    yield Case("local-attention", "LocalTransformer", model_of("local_attention", "LocalTransformer", **local), 2)
    yield Case("performer-pytorch", "PerformerLM", model_of("performer_pytorch", "PerformerLM", **LANGUAGE), 0, 2)
    mixed = {**LANGUAGE, "local_attn_heads": 2, "local_window_size": 8}
    yield Case("performer-pytorch", "local heads", model_of("performer_pytorch", "PerformerLM", **mixed), 2, 2)
    lsh = {**LANGUAGE, "bucket_size": 4, "n_hashes": 2, "causal": True, "ff_chunks": 1}
    yield Case("reformer-pytorch", "ReformerLM", model_of("reformer_pytorch", "ReformerLM", **lsh), 0, 2)
    image = {"num_freq_bands": 4, "depth": 2, "max_freq": 10.0, "num_latents": 8, "latent_dim": 32, "latent_heads": 4}
    pixels = lambda: torch.randn(2, 8, 8, 3)  # noqa: E731
    yield Case("perceiver-pytorch", "Perceiver", model_of("perceiver_pytorch", "Perceiver", pixels, **image), 4)
    twice = model_of("perceiver_pytorch", "Perceiver", pixels, self_per_cross_attn=2, **image)
    yield Case("perceiver-pytorch", "two self-attentions", twice, 6)
    frames = lambda: torch.randn(2, 16, 32)  # noqa: E731
    landmarks = model_of("nystrom_attention", "Nystromformer", frames, num_landmarks=4, **SIZES)
    yield Case("nystrom-attention", "Nystromformer", landmarks, 0, 2)
    yield Case("conformer", "Conformer", model_of("conformer", "Conformer", frames, **SIZES), 2, 2)
    short = {"num_tokens": VOCABULARY, "dim": 32, "depth": 2, "heads": 4}
    projected = model_of("linformer", "LinformerLM", seq_len=TOKENS, k=8, **short)
    yield Case("linformer", "LinformerLM", projected, 0, 2)
    blocks = {**LANGUAGE, "block_size": 8, "max_seq_len": TOKENS}
    yield Case("h-transformer-1d", "HTransformer1D", model_of("h_transformer_1d", "HTransformer1D", **blocks), 0, 2)
    protein = {"num_layers": 2, "embed_dim": 32, "attention_heads": 4}
    yield Case("fair-esm", "ESM2", model_of("esm.model.esm2", "ESM2", **protein), 2)
    planes = model_of(
        "axial_attention", "AxialAttention", lambda: torch.randn(1, 32, 6, 5), dim=32, dim_index=1, heads=4
    )
    yield Case("axial-attention", "AxialAttention", planes, 2)


def loss_of(model: nn.Module, inputs: tuple[Any, ...]) -> Tensor:
    out = model(*inputs)
    out = out["logits"] if isinstance(out, dict) else out[0] if isinstance(out, tuple) else out
    return out.float().square().mean()


def train(model: nn.Module, inputs: tuple[Any, ...], watch: attemper.types.Watch | None) -> list[float]:
    torch.manual_seed(1)
    random.seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = loss_of(model, inputs)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if watch is not None:
            watch.step()
    return losses


def show(case: Case) -> bool:
    """Trains one model and prints its row; whether all is as expected."""
    torch.manual_seed(0)
    model, inputs = case.build()
    model.train()
    start = copy.deepcopy(model.state_dict())
    plain = train(model, inputs, None)
    model.load_state_dict(start)
    with warnings.catch_warnings(record=True) as said, attemper.watch(model) as watch:
        warnings.simplefilter("always")
        watched = train(model, inputs, watch)
        sites = len(watch.current) or len(watch.table().sites) if case.sites else 0
    told = [line for w in said if "attemper" in str(w.message) for line in str(w.message).splitlines()[1:]]
    right = sites == case.sites and plain == watched and bool(told) == bool(case.named) and not watch.failures
    reason = told[0].partition(": ")[2][:90] if told else ""
    cells = (f"{case.package} {version(case.package)}", case.title, case.sites, sites, reason)
    print("|", " | ".join(map(str, cells)), "|" if right else "| WRONG", flush=True)
    return right


def main() -> None:
    warnings.filterwarnings("ignore")
    print("| package | model or option | weights to read | seen | named at the first step |\n|---|---|---|---|---|")
    right = True
    for case in cases():
        try:
            right &= show(case)
        except ImportError as error:
            print(f"left out: {case.package}, {case.title}: {error}", file=sys.stderr)
    sys.exit(not right)


if __name__ == "__main__":
    main()
