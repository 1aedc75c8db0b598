"""Small random models of timm and diffusers, and what ``watch`` finds in them, as JSON on stdout.

Runs in a process of its own (``python -m tests.vision.zoo examine|train NAME...``), in which build/vision is
importable, and torchvision too, without its compiled operators: tests/vision/test_vision.py starts it.
"""

from __future__ import annotations

import copy
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attemper
from tests.support.identical_training import assert_identical_training

NOT_TOKENS = ("XCA", "FactorAttnConvRelPosEnc")
"""Classes whose softmax is no attention over tokens."""

_ASKING = {"qkv", "q", "k", "kv", "to_q", "to_k", "add_q_proj", "add_k_proj"}
"""Names of projections to queries and keys: enlarged, they give rows of every sharpness."""


@dataclass(frozen=True)
class Entry:
    """A model, its inputs by keyword, and how to make it compute weights by hand."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Tensor]]
    by_hand: Callable[[nn.Module], None] = lambda model: None
    sharper: float = 4.0
    """What its projections to queries and keys are multiplied with. A deep float32 model amplifies its own rounding."""


def without_operators() -> None:
    """torchvision's operators come compiled for another torch: their schemas are enough to import it."""
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    globals()["_library"] = library


def _timm(name: str, size: int, fused: bool = True, **options: Any) -> Entry:
    def build() -> nn.Module:
        model = import_module("timm").create_model(name, num_classes=7, **options)
        if not fused:
            _unfused(model)
        return model

    return Entry(build, lambda: {"x": torch.randn(2, 3, size, size)}, _unfused, sharper=12.0)


def _unfused(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False  # type: ignore[assignment]


_VIT: dict[str, Any] = {
    "img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4, "attn_drop_rate": 0.1,
    "proj_drop_rate": 0.1,
}  # fmt: skip
_SWIN: dict[str, Any] = {
    "img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4),
    "attn_drop_rate": 0.1, "drop_path_rate": 0.1,
}  # fmt: skip
_COAT: dict[str, Any] = {
    "img_size": 32, "embed_dims": (32, 32, 32, 32), "serial_depths": (1, 1, 1, 1), "parallel_depth": 0, "num_heads": 8,
    "mlp_ratios": (2, 2, 2, 2),
}  # fmt: skip


def _unet(processor: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = import_module("diffusers").UNet2DConditionModel(
            sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(16, 32),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            cross_attention_dim=12, attention_head_dim=2, norm_num_groups=4, dropout=0.1,
        )  # fmt: skip
        _set_processor(model, processor)
        return model

    return build


def _set_processor(model: Any, name: str) -> None:
    for module in model.modules():
        if hasattr(module, "set_processor"):
            module.set_processor(getattr(import_module("diffusers.models.attention_processor"), name)())


def _dit() -> nn.Module:
    return import_module("diffusers").DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=8, in_channels=4, num_layers=2, sample_size=8, patch_size=2,
        num_embeds_ada_norm=10, dropout=0.1, norm_num_groups=4,
    )  # fmt: skip


def _sd3() -> nn.Module:
    return import_module("diffusers").SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4,
        joint_attention_dim=12, caption_projection_dim=32, pooled_projection_dim=10, out_channels=4,
        pos_embed_max_size=8,
    )  # fmt: skip


def _flux() -> nn.Module:
    return import_module("diffusers").FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=12, pooled_projection_dim=10, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip


STEPS = torch.tensor([3, 7])

ZOO: dict[str, Entry] = {
    "ViT": _timm("vit_tiny_patch16_224", 32, **_VIT),
    "ViT by hand": _timm("vit_tiny_patch16_224", 32, fused=False, **_VIT),
    "Swin": _timm("swin_tiny_patch4_window7_224", 32, **_SWIN),
    "XCiT": _timm("xcit_nano_12_p8_224", 32, img_size=32, embed_dim=32, depth=2, num_heads=4),
    "CoaT": _timm("coat_lite_tiny", 32, **_COAT),
    "LeViT": _timm("levit_128s", 128, img_size=128),
    "Twins": _timm("twins_svt_small", 32, img_size=32, embed_dims=(16, 32, 32, 32), depths=(2, 2, 2, 2),
                   num_heads=(2, 4, 4, 4), wss=(4, 2, 2, 2), attn_drop_rate=0.1),
    "Twins by hand": _timm("twins_svt_small", 32, fused=False, img_size=32, embed_dims=(16, 32, 32, 32),
                           depths=(2, 2, 2, 2), num_heads=(2, 4, 4, 4), wss=(4, 2, 2, 2), attn_drop_rate=0.1),
    "UNet2DConditionModel": Entry(
        _unet("AttnProcessor2_0"),
        lambda: {"sample": torch.randn(2, 4, 8, 8), "timestep": STEPS, "encoder_hidden_states": torch.randn(2, 5, 12)},
        lambda model: _set_processor(model, "AttnProcessor"),
    ),
    "UNet2DConditionModel by hand": Entry(
        _unet("AttnProcessor"),
        lambda: {"sample": torch.randn(2, 4, 8, 8), "timestep": STEPS, "encoder_hidden_states": torch.randn(2, 5, 12)},
    ),
    "DiT": Entry(
        _dit,
        lambda: {"hidden_states": torch.randn(2, 4, 8, 8), "timestep": STEPS, "class_labels": torch.tensor([1, 4])},
        lambda model: _set_processor(model, "AttnProcessor"),
    ),
    "SD3": Entry(
        _sd3,
        lambda: {
            "hidden_states": torch.randn(2, 4, 8, 8), "encoder_hidden_states": torch.randn(2, 5, 12),
            "pooled_projections": torch.randn(2, 10), "timestep": STEPS,
        },
    ),
    "Flux": Entry(
        _flux,
        lambda: {
            "hidden_states": torch.randn(2, 16, 4), "encoder_hidden_states": torch.randn(2, 5, 12),
            "pooled_projections": torch.randn(2, 10), "timestep": torch.tensor([0.3, 0.7]),
            "img_ids": torch.randint(4, (16, 3)).float(), "txt_ids": torch.zeros(5, 3),
        },
    ),
}  # fmt: skip


def output(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Models of timm return a tensor, those of diffusers an object with one."""
    found = model(*inputs.values()) if "x" in inputs else model(**inputs)
    return found if isinstance(found, Tensor) else found[0]


@contextmanager
def recorded(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """The weights [..., H, Q, K] of every softmax that runs inside, by the name of the module that runs it."""
    names = {module: name for name, module in model.named_modules()}
    running: list[nn.Module] = []
    found: dict[str, Tensor] = {}
    plain = (F.softmax, Tensor.softmax, F.scaled_dot_product_attention)

    def keep(weights: Tensor) -> Tensor:
        heads = next((getattr(running[-1], name) for name in ("num_heads", "heads") if hasattr(running[-1], name)), 1)
        found[names[running[-1]]] = weights.unflatten(0, (-1, heads)) if weights.dim() == 3 else weights
        return weights

    def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, *_: Any, **given: Any) -> Tensor:
        scale = given.get("scale") or query.shape[-1] ** -0.5
        bias = given.get("attn_mask", attn_mask)
        scores = query @ key.transpose(-2, -1) * scale
        return keep(torch.exp(F.log_softmax(scores if bias is None else scores + bias, -1))) @ value

    holders = [module for module in names if not isinstance(module, nn.Softmax)]
    hooks = [module.register_forward_pre_hook(lambda module, _: running.append(module)) for module in holders]
    hooks += [module.register_forward_hook(lambda *_: running.pop() and None) for module in holders]
    F.softmax = lambda *args, **given: keep(plain[0](*args, **given))
    Tensor.softmax = lambda *args, **given: keep(plain[1](*args, **given))  # type: ignore[method-assign]
    F.scaled_dot_product_attention = attention  # type: ignore[assignment]
    try:
        yield found
    finally:
        F.softmax, Tensor.softmax, F.scaled_dot_product_attention = plain
        for hook in hooks:
            hook.remove()


def _settle(model: nn.Module, inputs: dict[str, Tensor]) -> None:
    """Batch norms take the statistics of one pass: with those they start with, activations would all but vanish."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.momentum = None
    model.train()
    with torch.no_grad():
        output(model, inputs)
    model.eval()


def examined(name: str) -> dict[str, Any]:
    """Errors of all sites of a model against its own weights in float64, what is skipped, and what is missing."""
    torch.manual_seed(0)
    entry = ZOO[name]
    model = entry.build().eval()
    for path, parameter in model.named_parameters():
        if parameter.dim() > 1 and _ASKING.intersection(path.split(".")):
            parameter.data *= entry.sharper
    inputs = entry.inputs()
    _settle(model, inputs)
    twin = copy.deepcopy(model).double()
    entry.by_hand(twin)
    with torch.no_grad():
        with recorded(twin) as weights:
            output(twin, {key: part.double() if part.is_floating_point() else part for key, part in inputs.items()})
        before = output(model, inputs)
        with attemper.watch(model) as watch:
            during = output(model, inputs)
    modules = dict(model.named_modules())
    return {"identical_outputs": torch.equal(before, during), "failures": watch.failures} | _compared(
        watch, {site: part for site, part in weights.items() if type(modules[site]).__name__ not in NOT_TOKENS},
        sorted(site for site, module in modules.items() if type(module).__name__ in NOT_TOKENS),
    )  # fmt: skip


def entropies(weights: Tensor) -> Tensor:
    """Mean entropy per head [H] of weights [..., H, Q, K], in nats."""
    logs = torch.where(weights > 0, weights, 1.0).log()
    return -(weights * logs).sum(-1).movedim(-2, 0).flatten(1).mean(1)


def _told_reasons(watch: attemper.types.Watch) -> dict[str, str]:
    """Where no site is seen, the table is an error that names what was skipped, one line for each."""
    try:
        watch.table()
    except attemper.InputError as error:
        lines = [line.strip().partition(": ") for line in str(error).splitlines()[1:]]
        return {name: reason for name, _, reason in lines}
    raise AssertionError("a table without a site of the model's")


def _compared(watch: attemper.types.Watch, weights: dict[str, Tensor], others: list[str]) -> dict[str, Any]:
    sites: dict[str, Any] = {}
    if weights:
        table = watch.table()
        sites = {site.name: torch.tensor([head.entropy_nats for head in site.heads]).double() for site in table.sites}
        skipped = {entry.name: entry.reason for entry in table.skipped}
    else:
        skipped = _told_reasons(watch)
    errors = {
        site: float((sites[site] - entropies(part)).abs().max())
        for site, part in weights.items() if site in sites
    }  # fmt: skip
    spread = [float(entropies(part).std()) for part in weights.values()]
    return {
        "sites": len(errors),
        "error_nats": max(errors.values(), default=None),
        "spread_nats": max(spread, default=None),
        "skipped": skipped,
        "not_tokens": others,
        "missing": sorted(set(weights) - set(sites)),
        "unexpected": sorted(set(sites) - set(weights)),
    }


def trains_identically(name: str) -> bool:
    """Whether 50 steps of training are bit-identical with and without a watch."""
    entry = ZOO[name]

    def made() -> tuple[nn.Module, Callable[[Any], Tensor]]:
        model, inputs = entry.build(), entry.inputs()
        return model, lambda root: output(root, inputs).square().mean()

    assert_identical_training(made)
    return True


def main(what: str, names: list[str]) -> None:
    without_operators()
    torch.set_num_threads(1)
    found = {}
    for name in names:
        try:
            found[name] = examined(name) if what == "examine" else trains_identically(name)
        except Exception:
            found[name] = {"error": traceback.format_exc()}  # told to the test that started this
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
