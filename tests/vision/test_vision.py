"""Image models of timm and diffusers, which know nothing of transformers' registry: seen exactly, or skipped by name.

They run in a process of their own (tests/vision/zoo.py): timm needs torchvision, whose build for another torch breaks
whoever imports it beside a CPU torch. ``scripts/test.sh --all`` installs what they need into build/vision.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.identical_training import STEPS

ROOT = Path(__file__).parents[2]
PACKAGES = ROOT / "build" / "vision"
pytestmark = [
    pytest.mark.slow("needs what scripts/test.sh installs with --all"),
    pytest.mark.skipif(
        not (PACKAGES / "timm").is_dir() or not (PACKAGES / "diffusers").is_dir(),
        reason="timm and diffusers are not in build/vision: `bash scripts/test.sh --all` installs them there",
    ),
]
HAND, SDPA = "softmax by hand", "F.scaled_dot_product_attention"
ROWS = {
    "timm": {
        "ViT": ("ViT", SDPA), "ViT by hand": ("ViT", HAND), "Swin": ("Swin", HAND), "LeViT": ("LeViT", HAND),
        "Twins": ("Twins", SDPA), "Twins by hand": ("Twins", HAND), "XCiT": ("XCiT, class attention", SDPA),
    },
    "diffusers": {
        "UNet2DConditionModel": ("UNet2DConditionModel", SDPA),
        "UNet2DConditionModel by hand": ("UNet2DConditionModel", HAND),
        "DiT": ("DiTTransformer2DModel", SDPA), "SD3": ("SD3Transformer2DModel, joint attention", SDPA),
        "Flux": ("FluxTransformer2DModel, joint attention", SDPA),
    },
}  # fmt: skip
"""Library -> name in the zoo -> (model, way) on the page of seen models."""
NOT_TOKENS = {
    "XCiT": ("XCiT, cross-covariance attention", "its softmax runs over channels, not over tokens"),
    "CoaT": ("CoaT", "its softmax runs over tokens once for each output of a linear layer, without queries"),
}
"""Name in the zoo -> (model, beginning of the reason) where softmax is no attention over tokens."""


def ran(what: str, names: list[str]) -> dict[str, Any]:
    """What the zoo prints about these models."""
    paths = [str(ROOT), str(ROOT / "src"), str(PACKAGES)]
    process = subprocess.run(
        [sys.executable, "-m", "tests.vision.zoo", what, *names],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout.splitlines()[-1])
    for name, result in found.items():
        assert not (isinstance(result, dict) and "error" in result), f"{name}: {result['error']}"
    return found


@pytest.mark.parametrize("library", ROWS)
def test_every_site_is_read_exactly(library: str, seen: Callable[..., None]) -> None:
    rows = ROWS[library]
    found = ran("examine", list(rows))
    for name, (model, way) in rows.items():
        result = found[name]
        print(f"{name}: {result['sites']} sites, worst error {result['error_nats']:.1e} nats")
        assert (result["missing"], result["unexpected"], result["failures"]) == ([], [], 0), name
        assert sorted(result["skipped"]) == result["not_tokens"], name
        assert result["identical_outputs"], name
        assert result["spread_nats"] > 0.01, name
        assert result["error_nats"] < 2e-5, name
        seen(library, model, way, error_nats=result["error_nats"])


def test_a_softmax_over_channels_or_without_queries_is_skipped_by_name(seen: Callable[..., None]) -> None:
    found = ran("examine", list(NOT_TOKENS))
    for name, (model, reason) in NOT_TOKENS.items():
        result = found[name]
        assert result["not_tokens"], name
        assert sorted(result["skipped"]) == result["not_tokens"], name
        assert all(given.startswith(reason) for given in result["skipped"].values()), name
        seen("timm", model, HAND, skipped=reason)


@pytest.mark.parametrize("library", ROWS)
def test_training_is_bit_identical_over_fifty_steps(library: str, seen: Callable[..., None]) -> None:
    rows = ROWS[library]
    found = ran("train", list(rows))
    for name, (model, way) in rows.items():
        assert found[name] is True, name
        seen(library, model, way, identical_steps=STEPS)
