"""``AttemperCallback`` in Lightning's Trainer: what it reads and logs, and that fitting does not notice."""

from __future__ import annotations

import csv
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attemper
from attemper.lab.model import ByteConfig, ByteModel

L = pytest.importorskip("lightning.pytorch")

from lightning.pytorch.loggers import CSVLogger  # noqa: E402

from attemper.integrations.lightning import AttemperCallback  # noqa: E402

pytestmark = [
    # Lightning's own, about this machine and its use of torch.
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec"),
    pytest.mark.filterwarnings("ignore:Starting from v1.9.0, `tensorboardX` has been removed"),
]

CONTEXT, SITES = 32, ["net.blocks.0.attention", "net.blocks.1.attention"]


class Module(L.LightningModule):
    """Calls a part of itself, as most do: no forward of the module itself runs."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.fails_at = ByteModel(ByteConfig(layers=2, width=32, context=CONTEXT)), fails_at

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == self.fails_at:
            raise RuntimeError("no more")
        loss = self.net.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("validation", self.net.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Forward(Module):
    """Calls itself twice."""

    def forward(self, batch: Tensor) -> Tensor:
        return self.net.loss(batch)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch) + self(batch)


def loader(count: int = 40) -> Any:
    ids = torch.randint(0, 255, (count, CONTEXT + 1), generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(ids, batch_size=2)  # type: ignore[arg-type]


def fit(folder: Path, module: Any, *callbacks: Any, **options: Any) -> Any:
    """Eight steps of two batches; validation at the start and after every four batches."""
    arguments: dict[str, Any] = {
        "accelerator": "cpu", "max_steps": 8, "accumulate_grad_batches": 2, "val_check_interval": 4,
        "logger": CSVLogger(folder), "log_every_n_steps": 1, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    trainer = L.Trainer(callbacks=list(callbacks), **(arguments | options))
    trainer.fit(module, loader(), loader(4))
    return trainer


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "lightning_logs" / "version_0" / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def hooks(model: nn.Module) -> int:
    return sum(len(part._forward_pre_hooks) + len(part._forward_hooks) for part in model.modules())


def test_losses_and_parameters_are_bit_identical_with_and_without(tmp_path: Path) -> None:
    def run(name: str, *callbacks: Any) -> tuple[list[str], list[Tensor]]:
        module = Module()
        fit(tmp_path / name, module, *callbacks)
        losses = [row[key] for row in rows(tmp_path / name) for key in ("loss", "validation") if row[key]]
        return losses, [*(p.detach() for p in module.parameters()), torch.get_rng_state()]

    callback = AttemperCallback(every=3, rows=5)
    (plain, tensors), (watched, same) = run("plain"), run("watched", callback)
    assert len(plain) == 8 + 4
    assert plain == watched
    assert all(map(torch.equal, tensors, same))
    assert callback.watch is not None
    assert (callback.watch.sampled, callback.watch.failures) == (3, 0)


@pytest.mark.slow("takes a second")
def test_a_sample_holds_all_accumulated_batches_and_no_validation_alarms_are_told_and_nothing_is_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alarms: list[Any] = []
    callback = AttemperCallback(every=1, rows=None, on_alarm=alarms.append, limits={"logits": -1e9})
    module = Module()
    with caplog.at_level(logging.WARNING, "attemper"):
        fit(tmp_path, module, callback)
    assert callback.last is not None
    assert callback.watch is not None
    assert callback.watch.sampled == 8
    assert callback.last.tokens == 2 * 2 * CONTEXT
    assert [(site.name, site.mode) for site in callback.last.sites] == [(name, "train") for name in SITES]
    assert len(alarms) == 8
    assert "step 0: warning logits: net.blocks." in caplog.text
    assert hooks(module) == 0
    assert "training_step" not in vars(module)


@pytest.mark.slow("takes seconds")
def test_each_call_of_a_module_that_calls_itself_twice_is_a_site(tmp_path: Path) -> None:
    callback = AttemperCallback(every=1, rows=None)
    fit(tmp_path, Forward(), callback, accumulate_grad_batches=1)
    assert callback.last is not None
    assert {site.name for site in callback.last.sites} == {f"{name}{call}" for name in SITES for call in ("", "#2")}
    assert {site.heads[0].rows for site in callback.last.sites} == {2 * CONTEXT}


def test_scalars_stand_at_the_step_of_the_loss_of_the_same_batches(tmp_path: Path) -> None:
    losses: dict[int, float] = {}
    trackers = [lambda values, step: losses.update({step: len(values)})]
    callback = AttemperCallback(every=3, rows=None, trackers=trackers, max_keys=200)
    fit(tmp_path, Module(), callback)
    name = "attention/net.blocks.1.attention/head3/max_logit"
    found = {int(row["step"]): float(row[name]) for row in rows(tmp_path) if row[name]}
    assert list(found) == list(losses) == [0, 3, 6]
    assert {int(row["step"]) for row in rows(tmp_path) if row["loss"]} == set(range(8))
    module = Module()
    with attemper.watch(module.net) as watch:
        watch.step()  # from here on steps are counted, not passes: both batches are of one
        for batch in list(loader())[:2]:
            module.net.loss(batch)
    assert found[0] == watch.table().sites[1].heads[3].max_logit


def test_nothing_of_ours_is_left_after_fitting_that_raised(tmp_path: Path) -> None:
    callback = AttemperCallback(every=1)
    broken = Module(fails_at=3)
    with pytest.raises(RuntimeError, match="no more"):
        fit(tmp_path, broken, callback)
    assert hooks(broken) == 0
    assert "training_step" not in vars(broken)
    assert callback.last is not None


@pytest.mark.slow("takes many seconds")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_module_is_watched_through_its_taps_in_one_graph(tmp_path: Path) -> None:
    class Tapped(Module):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            query = self.net.embedding(batch[:, :-1]).unflatten(-1, (4, -1)).transpose(1, 2)
            attemper.tap(query, query, is_causal=True, name="tap")
            return nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True).square().mean()

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    callback = AttemperCallback(every=2, rows=None)
    fit(tmp_path, torch.compile(Tapped(), backend="aot_eager"), callback, limit_val_batches=0)
    assert callback.last is not None
    assert callback.watch is not None
    assert [(site.name, site.heads[0].rows) for site in callback.last.sites] == [("tap", 2 * 2 * CONTEXT)]
    assert (callback.watch.sampled, callback.watch.failures) == (4, 0)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow("compiles for seconds")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor")
def test_a_part_that_is_compiled_is_watched_without_a_word_and_the_step_runs_once(tmp_path: Path) -> None:
    class Counting(Module):
        steps = 0

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.steps += 1
            return super().training_step(batch, batch_idx)

    weights = []
    for callback in (None, AttemperCallback(every=2, rows=None)):
        torch._dynamo.reset()
        module = Counting()
        module.net.compile(backend="eager")
        fit(tmp_path, module, *([] if callback is None else [callback]), limit_val_batches=0)
        assert module.steps == 16
        weights.append([parameter.detach().clone() for parameter in module.parameters()])
    assert all(map(torch.equal, *weights))
    assert callback is not None
    assert callback.last is not None
    assert callback.watch is not None
    assert [site.name for site in callback.last.sites] == [f"net.blocks.{n}.attention" for n in range(2)]
    assert callback.last.sites[0].heads[0].rows == 2 * 2 * CONTEXT
    assert (callback.watch.sampled, callback.watch.failures) == (4, 0)


def test_a_training_step_that_was_put_there_before_is_put_back(tmp_path: Path) -> None:
    module = Module()
    own = module.training_step
    module.training_step = own  # type: ignore[method-assign]
    fit(tmp_path, module, AttemperCallback(), max_steps=1)
    assert vars(module)["training_step"] is own


@pytest.mark.slow("trains")
def test_the_loss_of_every_step_is_kept_as_lightning_has_it(tmp_path: Path) -> None:
    told: list[float] = []

    class Told(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            told.append(2 * float(outputs["loss"]))

    watched = AttemperCallback(every=4)
    module = Module()
    fit(tmp_path, module, Told(), watched)
    assert watched.watch is not None
    found = watched.watch.history("loss")
    assert found.steps.tolist() == [*range(8)]
    assert found.values.tolist() == pytest.approx(
        [(one + two) / 2 for one, two in zip(told[::2], told[1::2], strict=True)]
    )
    with torch.no_grad():
        batches = list(loader())
        assert found.values[0] == pytest.approx(sum(float(Module().net.loss(batch)) for batch in batches[:2]) / 2)
