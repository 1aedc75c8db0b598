"""One of two processes: training that is watched while it is spread over them. Run by ``test_training.py``."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import attemper
from attemper.distributed import data_parallel
from attemper.sites.observation import current
from tests.distributed.models import Attention, Parallel
from tests.support.ranks import run_cases
from tests.support.shadow_models import compilations, fresh_compiler

WORLD, STEPS = 2, 6
HEADS, SIZE, TOKENS = 4, 8, 20
SEEN = {"layers.0": HEADS, "layers.1": HEADS}
MANY = 100
"""Steps of a compiled training."""


class Model(nn.Module):
    """Two layers; ``attention_mask`` [B, n] marks real tokens."""

    def __init__(self, *, tapped: bool = False, checkpointed: bool = False) -> None:
        super().__init__()
        taps = ("tap.0", "tap.1") if tapped else ("", "")
        self.layers = nn.ModuleList(Attention(32, HEADS, HEADS, tapped=name) for name in taps)
        self.dropout, self.checkpointed = nn.Dropout(0.1), checkpointed

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            mixed = checkpoint(layer, x, attention_mask, use_reentrant=False) if self.checkpointed else layer(
                x, attention_mask
            )  # fmt: skip
            x = x + self.dropout(mixed)
        return x


def model(**options: bool) -> Model:
    torch.manual_seed(0)
    return Model(**options)


def shard(step: int = 0) -> Tensor:
    """This process's part of a batch [2, TOKENS, 32]."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(2, TOKENS, 32, generator=generator)


def ddp(module: nn.Module) -> nn.Module:
    return DistributedDataParallel(module)


def fsdp(module: Any, **options: Any) -> nn.Module:
    mesh = DeviceMesh("cpu", list(range(WORLD)))
    for layer in module.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(module, mesh=mesh, **options)


def reading(watch: attemper.types.Watch) -> dict[str, Any]:
    assert watch.failures == 0
    found = watch.table().to_dict()
    return {name: found[name] for name in ("model", "tokens", "sites", "skipped")}


def read(wrapped: nn.Module, watched: nn.Module, *batch: Any) -> dict[str, Any]:
    """What a watch of ``watched`` reads while ``wrapped`` runs one batch."""
    with attemper.watch(watched) as watch:
        wrapped(*batch)
    return reading(watch)


def compared(found: dict[str, Any], *batch: Any) -> dict[str, Any]:
    """A reading beside that of the same model in one process on the same shard."""
    alone = model()
    return {"found": found, "expected": read(alone, alone, *batch)}


def hooks(module: nn.Module) -> int:
    return sum(len(part._forward_pre_hooks) + len(part._forward_hooks) for part in module.modules())


def trained(build: Callable[[], nn.Module], watching: bool, steps: int = STEPS) -> tuple[list[Tensor], int]:
    """Losses, parameters and the state of the random numbers after some steps; passes that were sampled."""
    wrapped = build()
    torch.manual_seed(7)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
    before = hooks(wrapped)
    watch = attemper.watch(wrapped, every=2, rows=5) if watching else None
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = wrapped(shard(step)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if watch is not None:
            watch.step()
    if watch is not None:
        assert {site.name: len(site.heads) for site in watch.table().sites} == SEEN
        assert watch.failures == 0
        watch.close()
    assert hooks(wrapped) == before, "hooks are left"
    assert current() == ()
    full = [getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for p in wrapped.parameters()]
    return [*losses, *full, torch.get_rng_state()], watch.sampled if watch is not None else 0


def identical(build: Callable[[], nn.Module], *, watching: bool = True) -> dict[str, Any]:
    (plain, _), (watched, sampled) = trained(build, False), trained(build, watching)
    equal = [torch.equal(one, two) for one, two in zip(plain, watched, strict=True)]
    return {"compared": len(equal), "equal": sum(equal), "sampled": sampled}


def ddp_wrapper() -> Any:
    wrapped = ddp(model())
    return compared(read(wrapped, wrapped, shard()), shard())


def ddp_inner() -> Any:
    wrapped = ddp(model())
    return compared(read(wrapped, wrapped.module, shard()), shard())  # type: ignore[arg-type]


def ddp_mask_by_place() -> Any:
    mask = torch.ones(2, TOKENS, dtype=torch.bool)
    mask[1, 12:] = False
    wrapped = ddp(model())
    return compared(read(wrapped, wrapped, shard(), mask), shard(), mask)


def ddp_tapped() -> Any:
    """A tap beside an attention that is seen anyway; rows of two micro-batches."""
    wrapped = ddp(model(tapped=True))
    with attemper.watch(wrapped) as watch:
        watch.step()
        for _ in range(2):
            wrapped(shard()).square().mean().backward()
    sites = reading(watch)["sites"]
    return {"names": [site["name"] for site in sites], "rows": [site["heads"][0]["rows"] for site in sites]}


def fsdp_wrapper() -> Any:
    wrapped = fsdp(model())
    return compared(read(wrapped, wrapped, shard()), shard())


def ddp_checkpointed() -> Any:
    wrapped = ddp(model(checkpointed=True))
    with attemper.watch(wrapped) as watch:
        wrapped(shard().requires_grad_()).sum().backward()
        watch.step()
    return compared(reading(watch), shard())


def only_rank_zero() -> Any:
    return [identical(build, watching=dist.get_rank() == 0) for build in (lambda: ddp(model()), lambda: fsdp(model()))]


def compiled_ddp(inner: bool) -> Any:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    wrapped = ddp(model(tapped=True))
    compiled = torch.compile(wrapped, backend="aot_eager")
    with attemper.watch(wrapped.module if inner else compiled, every=2) as watch:  # type: ignore[arg-type]
        for step in range(4):
            for _ in range(2):
                compiled(shard(step)).square().mean().backward()
                watch.end_pass()
            watch.step()
    sites = reading(watch)["sites"]
    stats = torch._dynamo.utils.counters["stats"]
    return {
        "graphs": stats["unique_graphs"], "sampled": watch.sampled, "names": [site["name"] for site in sites],
        "rows": [site["heads"][0]["rows"] for site in sites],
    }  # fmt: skip


def with_blocks_compiled(module: Any) -> Any:
    for layer in module.layers:
        layer.compile(backend="aot_eager")
    return module


def as_torchtitan_does(module: Any) -> Any:
    """Each layer in a wrapper that runs it again for its gradients; the wrapper is compiled, then sharded."""
    for name, layer in list(module.layers.named_children()):
        module.layers.register_module(name, checkpoint_wrapper(layer, preserve_rng_state=True))
    for layer in module.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    return fsdp(module)


def wholly_compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="aot_eager")


COMPILED: dict[str, Callable[[], Any]] = {
    "compiled inside ddp": lambda: ddp(wholly_compiled(model())),
    "compiled around ddp": lambda: wholly_compiled(ddp(model())),
    "compiled blocks in ddp": lambda: ddp(with_blocks_compiled(model())),
    "compiled blocks in ddp with checkpointing": lambda: ddp(with_blocks_compiled(model(checkpointed=True))),
    "compiled blocks in fsdp2": lambda: fsdp(with_blocks_compiled(model())),
    "blocks in fsdp2 as torchtitan compiles": lambda: as_torchtitan_does(model()),
}


def shadowed(build: Callable[[], Any], steps: int = MANY) -> Any:
    """A row of benchmarks/compiled.py."""
    left, counted, sampled = [], [], 0
    trained(build, False, 2)  # the first training of a process looks at more frames of torch's own
    for watching in (False, True):
        fresh_compiler()
        tensors, sampled = trained(build, watching, steps)
        left.append(tensors)
        counted.append(compilations())
    equal = list(map(torch.equal, *left))
    found = {
        "losses equal": all(equal[:steps]), "weights equal": all(equal[steps:]),
        "compilations equal": counted[0] == counted[1],
    }  # fmt: skip
    right = all(found.values()) and sampled == steps // 2
    graphs = counted[0]["stats"]["unique_graphs"]
    return {"right": right, "steps": steps, **found, "graphs": graphs, "sampled": sampled, "heads": SEEN}


class Decaying(Model):
    """Its forward writes a parameter: where that is sharded, the copy of it that is gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        self.scale.data.mul_(0.9)
        return super().forward(x * self.scale, attention_mask)


def decaying(**options: bool) -> nn.Module:
    torch.manual_seed(0)
    return fsdp(with_blocks_compiled(Decaying()), **options)


def fsdp_watched_by_some(every: int, watching: bool, seconds: float) -> Any:
    """What is told where a model that gathers its weights is not watched alike by all ranks."""
    data_parallel.MEET_SECONDS = seconds
    wrapped = fsdp(with_blocks_compiled(model()))
    watch = attemper.watch(wrapped, every=every) if watching else None
    try:
        wrapped(shard()).square().mean().backward()
    except attemper.InputError as error:
        return str(error)
    said = ""
    if watch is not None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            watch.step()
        said = str(caught[0].message)
        watch.close()
    return said


def fsdp_watched_by_rank_zero_and_then_by_all() -> Any:
    """What each watch has sampled."""
    wrapped, found = fsdp(with_blocks_compiled(model())), []
    for watching, data_parallel.MEET_SECONDS in ((dist.get_rank() == 0, 3.0), (True, 60.0)):
        watch = attemper.watch(wrapped) if watching else None
        wrapped(shard()).square().mean().backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.append(watch.close() or watch.sampled if watch is not None else 0)
    return found


def tensor_parallel(placement: Any, *, tapped: bool = False) -> Any:
    mesh = DeviceMesh("cpu", list(range(WORLD)))
    torch.manual_seed(3)
    whole = [torch.randn(2, HEADS, TOKENS, SIZE) for _ in range(3)]
    parts = [distribute_tensor(tensor, mesh, [placement]) for tensor in whole]
    layer, alone = Parallel(tapped=tapped), Parallel(tapped=tapped)
    with attemper.watch(layer) as watch:
        try:
            layer(*parts)
            found = reading(watch)["sites"][0]["heads"]
        except attemper.InputError as error:
            return {"error": str(error)}
    with attemper.watch(alone) as expected:
        alone(*whole)
    heads = reading(expected)["sites"][0]["heads"]
    numbers = [[[head["head"], head["entropy_nats"]] for head in part] for part in (found, heads)]
    return dict(zip(("found", "whole"), numbers, strict=True))


def in_context_parallel() -> Any:
    """Tapped, since torch's own attention under context parallelism does not run on a CPU."""
    mesh = DeviceMesh("cpu", list(range(WORLD)))
    layer, parts = Parallel(tapped=True), [torch.randn(2, HEADS, TOKENS, SIZE) for _ in range(3)]
    with attemper.watch(layer) as watch:
        # It asks the first buffer for its device, and wants one.
        with context_parallel(mesh, buffers=[torch.zeros(TOKENS)], buffer_seq_dims=[0]):
            layer(*parts)
        skipped = [(entry.name, entry.reason) for entry in watch._collector.readings().skipped]
        layer(*parts)
    return {"skipped": skipped, "sites_afterwards": len(watch.table().sites)}


def trainer() -> Any:
    import transformers as tf

    from attemper.integrations.transformers import AttemperCallback

    def run(watched: bool) -> tuple[list[Tensor], Any]:
        torch.manual_seed(0)
        llama = tf.LlamaForCausalLM(
            tf.LlamaConfig(
                vocab_size=64,
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                intermediate_size=64,
            )
        )
        ids = torch.randint(0, 64, (32, TOKENS), generator=torch.Generator().manual_seed(1))
        data: Any = [{"input_ids": row, "labels": row} for row in ids]
        args = tf.TrainingArguments(
            tempfile.mkdtemp(), per_device_train_batch_size=2, max_steps=4, use_cpu=True, report_to="none",
            save_strategy="no", disable_tqdm=True, ddp_find_unused_parameters=False, logging_steps=2,
        )  # fmt: skip
        callback = AttemperCallback(every=2, rows=None)
        tf.Trainer(llama, args, train_dataset=data, callbacks=[callback] if watched else []).train()
        return [parameter.detach() for parameter in llama.parameters()], callback

    (plain, _), (watched, callback) = run(False), run(True)
    assert callback.watch is None or callback.watch.failures == 0
    return {
        "equal": all(map(torch.equal, plain, watched)),
        "names": None if callback.last is None else [site.name for site in callback.last.sites],
        "tokens": None if callback.last is None else callback.last.tokens,
    }


def lightning() -> Any:
    import lightning.pytorch as L

    from attemper.integrations.lightning import AttemperCallback

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def training_step(self, batch: Tensor, _: int) -> Tensor:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    logged: list[int] = []
    callback = AttemperCallback(every=2, rows=None, trackers=[lambda values, step: logged.append(step)], store=None)
    data = torch.utils.data.DataLoader(torch.randn(16, TOKENS, 32), batch_size=2)  # type: ignore[arg-type]
    trainer = L.Trainer(
        accelerator="cpu", devices=WORLD, strategy="ddp", max_steps=4, callbacks=[callback], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = Module()
    trainer.fit(module, data)
    return {
        "steps": logged, "names": None if callback.last is None else [site.name for site in callback.last.sites],
        "hooks": hooks(module),
    }  # fmt: skip


def tempered() -> tuple[Model, Any]:
    """A model with learned temperatures and a penalty on its entropies; without dropout."""
    plain = model()
    plain.dropout.p = 0.0
    attemper.temper(plain, temperature=attemper.nn.LearnedTemperature(HEADS, initial=0.7))
    return plain, attemper.regularize(plain, attemper.EntropyTarget(0.5, 2.0, unit="normalized"))


def ddp_tempered() -> dict[str, Any]:
    """Gradients under DistributedDataParallel, each process with its part of the batch, beside those of one process."""
    plain, penalty = tempered()
    wrapped = ddp(plain)
    for _ in range(2):
        wrapped.zero_grad()
        penalty.attach(wrapped(shard()).square().mean()).backward()
    found = {name: parameter.grad.tolist() for name, parameter in plain.named_parameters()}  # pyright: ignore[reportOptionalMemberAccess]
    alone, penalty = tempered()
    for rank in range(WORLD):
        generator = torch.Generator().manual_seed(rank)
        batch = torch.randn(2, TOKENS, 32, generator=generator)
        (penalty.attach(alone(batch).square().mean()) / WORLD).backward()
    expected = {name: parameter.grad.tolist() for name, parameter in alone.named_parameters()}  # pyright: ignore[reportOptionalMemberAccess]
    try:
        attemper.temper(wrapped, temperature=attemper.nn.LearnedTemperature(HEADS))
    except attemper.InputError as error:
        return {"found": found, "expected": expected, "refused": str(error)}
    return {"found": found, "expected": expected, "refused": ""}


CASES: dict[str, Callable[[], Any]] = {
    "ddp": ddp_wrapper,
    "module of ddp": ddp_inner,
    "ddp with a mask by place": ddp_mask_by_place,
    "fsdp2": fsdp_wrapper,
    "ddp with checkpointing": ddp_checkpointed,
    "ddp tapped": ddp_tapped,
    "ddp tempered": ddp_tempered,
    "training ddp": lambda: identical(lambda: ddp(model())),
    "training fsdp2": lambda: identical(lambda: fsdp(model())),
    "training ddp with checkpointing": lambda: identical(lambda: ddp(model(checkpointed=True))),
    "only rank 0": only_rank_zero,
    "compiled ddp": lambda: compiled_ddp(False),
    "module of compiled ddp": lambda: compiled_ddp(True),
    "heads split": lambda: tensor_parallel(Shard(1)),
    "heads split, tapped": lambda: tensor_parallel(Shard(1), tapped=True),
    "nothing split": lambda: tensor_parallel(Replicate()),
    "tokens split": lambda: tensor_parallel(Shard(2)),
    "tokens split, tapped": lambda: tensor_parallel(Shard(2), tapped=True),
    "context parallel": in_context_parallel,
    **{f"training {name}": partial(shadowed, build) for name, build in COMPILED.items()},
    "training fsdp2 that writes a parameter": lambda: shadowed(decaying, 6),
    "training fsdp2 that shards its root again": lambda: shadowed(partial(decaying, reshard_after_forward=True), 6),
    "fsdp2 watched by rank 0": lambda: fsdp_watched_by_some(1, dist.get_rank() == 0, 3.0),
    "fsdp2 watched unlike": lambda: fsdp_watched_by_some(1 + dist.get_rank(), True, 60.0),
    "fsdp2 watched by rank 0, then by all": fsdp_watched_by_rank_zero_and_then_by_all,
    "trainer": trainer,
    "lightning": lightning,
}


if __name__ == "__main__":
    run_cases(CASES)
