"""The Keras layer on each backend, in a process of its own: the same numbers everywhere, and those of attemper's own.

``scripts/test.sh --long`` installs Keras and jax into build/keras; tensorflow is tested where it is installed.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import attemper
from attemper.functional.losses import entropy_target
from tests.integrations import keras_numbers as case

ROOT = Path(__file__).parents[2]
PACKAGES = ROOT / "build" / "keras"
pytestmark = [
    pytest.mark.long("needs what scripts/test.sh installs with --long"),
    pytest.mark.skipif(
        not (PACKAGES / "keras").is_dir() and find_spec("keras") is None,
        reason="Keras is not in build/keras: `bash scripts/test.sh --long` installs it there",
    ),
]
BACKENDS = ["torch", "jax", *(["tensorflow"] if find_spec("tensorflow") else [])]
_found: dict[str, dict[str, Any]] = {}


def ran(backend: str, *arguments: str) -> str:
    """What a Python process prints in which Keras has this backend."""
    paths = [str(ROOT), str(ROOT / "src"), str(PACKAGES)]
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=900,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "KERAS_BACKEND": backend, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(params=BACKENDS)
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The document of tests/integrations/keras_numbers.py on each backend."""
    backend = request.param
    if backend not in _found:
        _found[backend] = json.loads(ran(backend, "-m", "tests.integrations.keras_numbers").splitlines()[-1])
    assert _found[backend]["backend"] == backend
    return _found[backend]


def close(found: list[float], wanted: torch.Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(
        torch.tensor(found, dtype=torch.float64), wanted.detach().double().flatten(), rtol=0, atol=atol
    )


def ours() -> tuple[attemper.nn.CrossAttention, dict[str, torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor]:
    """attemper's own layer with the same weights: (layer, inputs, mask, output, loss)."""
    given = {name: torch.from_numpy(value) for name, value in case.drawn().items()}
    layer = attemper.nn.CrossAttention(
        case.SIZE, case.CONTEXT, case.HEADS, head_dim=case.HEAD, temperature=case.TEMPERATURE, stats=("entropy",)
    )
    with torch.no_grad():
        for name, own in zip(case.PROJECTIONS, ("q_proj", "k_proj", "v_proj", "out_proj"), strict=True):
            getattr(layer, own).weight.copy_(given[f"{name}.kernel"].t())
            getattr(layer, own).bias.copy_(given[f"{name}.bias"])
    mask = given["attention_mask"][:, None] & given["context_mask"][:, None, None]
    output, stats = layer(given["x"], given["context"], mask)
    assert stats is not None
    valid = given["query_mask"][:, None]
    loss = case.COEF * entropy_target(stats, case.ALPHA, tolerance=case.TOLERANCE, valid=valid)
    return layer, given, mask, output, loss


def test_outputs_losses_and_gradients_are_those_of_our_own_layer(found: dict[str, Any]):
    layer, given, mask, output, loss = ours()
    close(found["output"], output)
    close(found["losses"], loss)
    assert loss > 0.01
    total = (output * given["up"]).sum() + loss
    total.backward()
    close(found["gradients"]["total"], total)
    for name, own in zip(case.PROJECTIONS, ("q_proj", "k_proj", "v_proj", "out_proj"), strict=True):
        projection = getattr(layer, own)
        assert projection.weight.grad.abs().max() > 0.1
        close(found["gradients"][f"{name}.kernel"], projection.weight.grad.t().contiguous())
        close(found["gradients"][f"{name}.bias"], projection.bias.grad)
    q, k = (
        each.unflatten(-1, (case.HEADS, -1)).transpose(1, 2)
        for each in (layer.q_proj(given["x"]), layer.k_proj(given["context"]))
    )
    close(found["weights"], attemper.functional.dense_weights(q, k, attn_mask=mask, temperature=case.TEMPERATURE))


def test_hostile_rows_are_finite_and_right(found: dict[str, Any]):
    entropies = [0.0, math.log(2), math.log(3), math.log(4), 0.0]
    assert found["hostile"]["entropy"] == pytest.approx(entropies, abs=1e-6)
    assert found["hostile"]["valid"] == [1, 1, 1, 1, 0]
    third = 1 / 3
    weights = [[1, 0, 0, 0], [0, 0, 0.5, 0.5], [third, third, third, 0], [0.25] * 4, [0] * 4]
    assert found["hostile"]["weights"] == pytest.approx(np.array(weights).flatten().tolist(), abs=1e-6)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_under_mixed_precision_weights_and_entropies_are_float32(found: dict[str, Any], policy: str):
    low = found["low"][policy]
    assert low["dtype"] == "float32"
    sums = np.array(low["weights"]).reshape(-1, case.KEYS).sum(-1)
    assert np.all((np.abs(sums - 1) < 1e-6) | (sums == 0))
    assert low["losses"] == pytest.approx(found["losses"], rel=0.05)
    # q and k were rounded to half precision, the product was not.
    assert np.abs(np.array(low["weights"]) - found["weights"]).max() < 0.03


def test_a_model_with_a_schedule_and_padding_is_saved_and_comes_back(found: dict[str, Any]):
    saved = found["saved"]
    assert saved["steps"] == 3
    assert saved["alpha"] == pytest.approx([0.75])
    assert saved["same"]
    assert saved["losses"] == saved["before"]
    assert saved["losses"][0] > 0
    assert saved["padded"] == pytest.approx(saved["plain"], abs=1e-6)
    assert saved["config"]["entropy_regularizer"]["config"]["alpha"]["config"]["values"] == [1.5, 1.25, 1.0, 0.75, 0.5]


def test_mistakes_are_told(found: dict[str, Any]):
    assert found["mistakes"] == [
        "InputError EntropyTarget(alpha=...) must be a number of nats, at least 0, or a function of the step; got -1.",
        "InputError EntropyTarget(tolerance=...) must be at least 0 nats, got -1.",
        "InputError CrossAttention(num_heads=...) must be an int of at least 1, got 0.",
        "InputError CrossAttention(temperature=...) must be finite and above 0, got 0. Below 1 sharpens.",
        "InputError TabulatedSchedule(values) must have at least one number, got none.",
        "InputError CrossAttention(num_heads=...) must be an int of at least 1, got 1.5.",
        "InputError CrossAttention(key_dim=...) must be an int of at least 1, got True.",
    ]


def test_fit_and_evaluate_log_the_entropy_and_the_term(found: dict[str, Any]):
    fitted = found["fitted"]
    assert fitted["logs"]["cross_entropy_nats"] == pytest.approx([fitted["entropy"]] * 2, rel=1e-5)
    assert fitted["logs"]["cross_entropy_term"] == pytest.approx([fitted["term"]] * 2, rel=1e-5)
    assert fitted["logs"]["val_cross_entropy_nats"] == pytest.approx([fitted["first_two"]] * 2, rel=1e-5)
    assert fitted["evaluated"]["cross_entropy_nats"] == pytest.approx(fitted["first_two"], rel=1e-5)
    # Four projections with a bias each: what the metrics sum is state, no weight, and is not saved.
    assert fitted["weights"] == [8, 8]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_saved_model_loads_in_a_fresh_process_that_imports_the_integration(backend: str, tmp_path: Path):
    build = (
        "import keras, numpy as np\n"
        "from attemper.integrations.keras import CrossAttention\n"
        "q, c = keras.Input((3, 4)), keras.Input((5, 4))\n"
        "keras.Model([q, c], CrossAttention(2, 4, entropy_regularizer=0.2)(q, c)).save({path!r})\n"
    )
    load = (
        "import keras, numpy as np\n{line}\n"
        "model = keras.models.load_model({path!r})\n"
        "print(model([np.ones((1, 3, 4), 'float32'), np.ones((1, 5, 4), 'float32')]).shape)\n"
    )
    path = str(tmp_path / "model.keras")
    ran(backend, "-c", build.format(path=path))
    out = ran(backend, "-c", load.format(path=path, line="import attemper.integrations.keras"))
    assert "1, 3, 4" in out
