"""Names of modules as the user knows them, whatever is wrapped around or between."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import attemper
from attemper.sites.names import Wrapper, class_name, names_of, unwrap
from tests.sites.own_models import OWN, Own


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize(
    "wrap", [Wrapper, nn.DataParallel, compiled, checkpoint_wrapper, lambda model: compiled(Wrapper(model))]
)
def test_a_wrapper_around_the_model_or_inside_adds_nothing_to_a_name(wrap: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    plain = {module: name for name, module in model.named_modules()}
    wrapped = wrap(model)
    assert plain.items() <= names_of(wrapped).items()
    assert names_of(wrapped)[wrapped] == ""
    assert unwrap(wrapped) is model
    if wrap in (compiled, checkpoint_wrapper):
        model[1] = wrap(model[1])
        assert plain.items() <= names_of(model).items()
        assert unwrap(model) is model


def test_a_users_own_attribute_called_module_stays_in_the_name() -> None:
    class Holder(nn.Module):
        pass

    holder = Holder()
    holder.module = nn.Linear(2, 2)
    assert list(names_of(holder).values()) == ["", "module"]
    assert class_name(unwrap(holder)) == "Holder"


def test_a_module_in_two_places_has_its_first_name_as_in_named_modules() -> None:
    shared = nn.Linear(2, 2)
    assert list(names_of(nn.Sequential(shared, shared)).values()) == ["", "0"]


def test_a_site_in_a_checkpoint_wrapper_keeps_its_name() -> None:
    model = nn.Sequential(checkpoint_wrapper(Own()))
    with attemper.watch(model, sites=["0"]) as watch:
        model(torch.randn(2, 20, 32)).sum().backward()
    assert [site.name for site in watch.table().sites] == ["0"]
    assert watch.table().model == "Sequential"


def test_a_copy_that_shares_hooks_and_runs_in_another_thread_is_left_alone() -> None:
    model, batch = OWN["sdpa"]()
    expected = model(*batch)
    outputs: list[torch.Tensor] = []
    with attemper.watch(model) as watch:
        replica: nn.Module = model._replicate_for_data_parallel()
        vars(replica).update(_modules=model._modules)
        thread = threading.Thread(target=lambda: outputs.append(replica(*batch)))
        thread.start()
        thread.join()
        assert (watch.passes, watch.sampled) == (0, 0)
        model(*batch)
        assert (watch.passes, watch.sampled) == (1, 1)
    assert torch.equal(outputs[0], expected)


def test_a_name_that_no_encoding_holds_is_written_as_its_escape(tmp_path: Path) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("a\ud800", nn.MultiheadAttention(8, 2, batch_first=True))

        def forward(self, x: Tensor) -> Tensor:
            return self.get_submodule("a\ud800")(x, x, x)[0]

    model, x = Named(), torch.randn(2, 5, 8)
    scan = attemper.scan(model, [x])
    assert [site.name for site in scan.sites] == ["a\\ud800"]
    scan.save(tmp_path / "scan.safetensors")
    scan.to_html(tmp_path / "scan.html")
    attemper.fingerprint(model, [x]).save(tmp_path / "one.safetensors")
    with attemper.watch(model, store=tmp_path / "run", sites="a\ud800") as watch:
        model(x)
        watch.step(np.int64(7))
    with attemper.open(tmp_path / "run") as run:
        assert [site.name for site in run.sites] == ["a\\ud800"]
        assert run.steps.tolist() == [7]
