"""regularize: the gradient is that of the same penalty from dense float64 weights, whatever training brings."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import attemper
from attemper import EntropyBonus, EntropyDiversity, EntropyTarget, InputError, ZLoss
from attemper.lab.model import ByteConfig, ByteModel
from tests.control.models import built, checkpointed

Rows = tuple[Tensor, Tensor, Tensor]
"""Entropies [B, H, Q], visible keys, valid rows."""
Terms = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From rows to a site's penalty."""


def _as_any(value: Any) -> Any:
    """What a caller without a type checker passes."""
    return value


def _target(entropy: Tensor, visible: Tensor, valid: Tensor) -> Tensor:
    return ((entropy - 1.0).abs() - 0.05).clamp(min=0).square()[valid].mean()


def _normalized(entropy: Tensor, visible: Tensor, valid: Tensor) -> Tensor:
    valid = valid & (visible > 1)
    return (entropy / visible.clamp(min=2).log() - 0.5).square()[valid].mean()


def _bonus(entropy: Tensor, visible: Tensor, valid: Tensor) -> Tensor:
    return -entropy[valid].mean()


def _diversity(entropy: Tensor, visible: Tensor, valid: Tensor) -> Tensor:
    means = torch.where(valid, entropy, 0.0).sum((0, 2)) / valid.sum((0, 2))
    return -means.var(unbiased=False)


PENALTIES: dict[str, tuple[Any, float, Terms]] = {
    "target": (EntropyTarget(1.0, 0.3, tolerance=0.05), 0.3, _target),
    "normalized": (EntropyTarget(0.5, 0.3, unit="normalized"), 0.3, _normalized),
    "bonus": (EntropyBonus(0.3), 0.3, _bonus),
    "diversity": (EntropyDiversity(2.0), 2.0, _diversity),
}


def small() -> ByteModel:
    return ByteModel(ByteConfig(layers=1, width=8, heads=2))


def llama() -> tuple[Any, dict[str, Any]]:
    model, batch = built("llama")
    ids = batch["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    return model.train(), {"input_ids": ids, "attention_mask": mask, "labels": ids, "use_cache": False}


def expected(model: Any, name: str, *batches: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients in float64 from dense weights, the rows of all batches taken together."""
    _, coef, terms = PENALTIES[name]
    twin = copy.deepcopy(model).double()
    twin.set_attn_implementation("eager")
    found = [twin(**batch, output_attentions=True) for batch in batches]
    sites = [
        [_rows(*pair) for pair in zip(of_site, batches, strict=True)]
        for of_site in zip(*(one.attentions for one in found), strict=True)
    ]
    penalties = [terms(*(torch.cat(parts) for parts in zip(*rows, strict=True))) for rows in sites]
    loss = sum(one.loss for one in found) + coef * torch.stack(penalties).mean()
    loss.backward()
    return loss.item(), {key: p.grad for key, p in twin.named_parameters()}


def _rows(p: Tensor, batch: dict[str, Any]) -> Rows:
    entropy = -torch.where(p > 0, p * p.clamp(min=1e-300).log(), 0.0).sum(-1)
    tokens = batch["attention_mask"].bool()
    visible = (tokens[:, None, None] & torch.ones(p.shape[-2:]).tril().bool()).sum(-1).expand(entropy.shape)
    return entropy, visible, tokens[:, None].expand(entropy.shape)


def error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    return max(((found[name].double() - grad).norm() / grad.norm()).item() for name, grad in wanted.items())


def gradients(model: nn.Module, run: Callable[[], Tensor]) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    loss = run()
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("observe", ["replace", "beside"])
@pytest.mark.parametrize("name", PENALTIES)
@pytest.mark.turns(2)
def test_gradients_are_those_of_dense_weights_with_and_without_checkpointing(name: str, observe: str):
    model, batch = llama()
    loss, wanted = expected(model, name, batch)
    _, plain = gradients(model, lambda: model(**batch).loss)
    assert error(plain, wanted) > 0.01
    penalty = attemper.regularize(model, PENALTIES[name][0], observe=observe)
    for reentrant in (None, True, False):
        checkpointed(model, reentrant)
        value, found = gradients(model, lambda: penalty.attach(model(**batch).loss))
        assert abs(value - loss) < 1e-5
        assert error(found, wanted) < 1e-5
    penalty.remove()
    checkpointed(model, None)
    _, after = gradients(model, lambda: model(**batch).loss)
    assert all(torch.equal(after[key], grad) for key, grad in plain.items())


# torch.compile itself makes an instance of a torch.autograd.Function while it traces one.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("reentrant", [None, False])
@pytest.mark.parametrize("observe", ["replace", "beside"])
@pytest.mark.slow("takes many seconds")
def test_compiled_it_is_the_same(observe: str, reentrant: bool | None):
    model, batch = llama()
    _, wanted = expected(model, "target", batch)
    checkpointed(model, reentrant)
    penalty = attemper.regularize(model, PENALTIES["target"][0], observe=observe)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    compilations = []
    for _ in range(3):
        _, found = gradients(model, lambda: penalty.attach(compiled(**batch).loss))
        assert error(found, wanted) < 1e-5
        compilations.append(counter.frame_count)
    assert len(set(compilations)) == 1
    ties = [sum("penalised" in str(node.target) for node in graph.graph.nodes) for graph in counter.graphs]
    # The whole forward pass is one graph; what tells padding before it is another.
    if reentrant is None:
        assert [number for number in ties if number] == [2]


def test_factors_on_the_loss_and_accumulation_scale_the_penalty_too():
    model, batch = llama()
    _, wanted = expected(model, "target", batch)
    with attemper.regularize(model, PENALTIES["target"][0]) as penalty:
        model.zero_grad()
        for _ in range(3):
            (penalty.attach(model(**batch).loss) * 1024 / 3).backward()
        found = {name: p.grad / 1024 for name, p in model.named_parameters() if p.grad is not None}
    assert error(found, wanted) < 1e-5


def test_several_forward_passes_of_one_loss_are_one_mean():
    model, batch = llama()
    halves = [
        {key: value[i : i + 1] if isinstance(value, Tensor) else value for key, value in batch.items()} for i in (0, 1)
    ]
    _, wanted = expected(model, "target", *halves)
    with attemper.regularize(model, PENALTIES["target"][0]) as penalty:
        _, found = gradients(model, lambda: penalty.attach(model(**halves[0]).loss + model(**halves[1]).loss))
    assert error(found, wanted) < 1e-5


def test_two_penalties_add():
    model, batch = llama()
    single = {}
    for name in ("target", "bonus"):
        with attemper.regularize(model, PENALTIES[name][0]) as penalty:
            single[name] = gradients(model, lambda penalty=penalty: penalty.attach(model(**batch).loss))[1]
    plain = gradients(model, lambda: model(**batch).loss)[1]
    one = attemper.regularize(model, PENALTIES["target"][0])
    two = attemper.regularize(model, PENALTIES["bonus"][0])
    both = gradients(model, lambda: two.attach(one.attach(model(**batch).loss)))[1]
    wanted = {key: (single["target"][key] + single["bonus"][key] - plain[key]).double() for key in plain}
    assert error(both, wanted) < 1e-5


def test_the_z_loss_is_on_the_log_of_the_sum():
    torch.manual_seed(0)
    layer = attemper.nn.MultiheadAttention(16, 2, batch_first=True, stats="lse").train()
    x = torch.randn(2, 5, 16)
    with attemper.regularize(layer, ZLoss(0.5)) as penalty:
        found = gradients(layer, lambda: penalty.attach(layer(x, x, x)[0].sum()))[1]
        value = penalty.value
    output, stats = layer(x, x, x)
    term = 0.5 * attemper.functional.z_loss(stats)
    assert abs(value - term.item()) < 1e-6
    wanted = gradients(layer, lambda: output.sum() + term)[1]
    assert error(found, {name: grad.double() for name, grad in wanted.items()}) < 1e-5


@pytest.mark.parametrize("name", ["gemma2", "gpt-oss", "bert", "vit", "nn.MultiheadAttention", "deepseek_v3"])
@pytest.mark.turns(2)
def test_one_pass_and_beside_agree_in_models_of_every_kind(name: str):
    model, batch = built(name)
    model.train()
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0

    def run() -> Tensor:
        result = model(**batch)
        return (result if isinstance(result, Tensor) else result[0]).square().mean()

    found = {}
    for observe in ("replace", "beside"):
        with attemper.regularize(model, EntropyTarget(0.5, 1.0, unit="normalized"), observe=observe) as penalty:
            found[observe] = gradients(model, lambda penalty=penalty: penalty.attach(run()))[1]
    plain = gradients(model, run)[1]
    wanted = {key: grad.double() for key, grad in found["beside"].items() if grad.norm() > 1e-6}
    assert error(found["replace"], wanted) < 1e-3
    assert max((found["beside"][key] - plain[key]).abs().max() for key in plain) > 1e-6


def test_a_temperature_that_is_learned_gets_the_penaltys_gradient():
    model, batch = llama()
    handle = attemper.temper(model, temperature=attemper.nn.LearnedTemperature(4))
    penalty = attemper.regularize(model, EntropyTarget(0.0, 1e3))
    penalty.attach(model(**batch).loss).backward()
    for parameter in handle.parameters():
        assert parameter.grad is not None
        assert (parameter.grad > 0).all()  # it must fall


def test_eval_mode_and_removal_leave_the_model_alone():
    model, batch = llama()
    model.eval()
    before = model(**batch).logits
    penalty = attemper.regularize(model, EntropyBonus())
    assert torch.equal(model(**batch).logits, before)
    with pytest.raises(InputError, match=r"model\.train\(\)"):
        penalty.attach(model(**batch).loss)
    penalty.remove()
    penalty.remove()
    assert torch.equal(model(**batch).logits, before)
    assert "forward" not in vars(model.model.layers[0].self_attn)
    penalty = attemper.regularize(model.train(), EntropyBonus())
    loss = penalty.attach(model(**batch).loss)
    penalty.remove()
    loss.backward()  # without a word: it was taken off on purpose


def test_the_penalty_is_never_lost_in_silence():
    model, batch = llama()
    penalty = attemper.regularize(model, EntropyBonus())
    with pytest.raises(InputError, match="without the penalty"):
        model(**batch).loss.backward()
    penalty.reset()
    losses = [penalty.attach(model(**batch).loss) for _ in range(2)]
    with pytest.raises(InputError, match="two attached losses"):
        (losses[0] + losses[1]).backward()
    penalty.reset()
    model(**batch)  # thrown away
    with pytest.raises(InputError, match="flowed back 1 times"):
        penalty.attach(model(**batch).loss).backward()
    penalty.reset()
    early = model(**batch).loss
    attached = penalty.attach(early)
    late = model(**batch).loss
    del late
    attached.backward()  # what came after is for the next attach
    penalty.reset()
    penalty.attach(model(**batch).loss).backward()


def test_frozen_parts_count_and_need_no_gradient():
    model, batch = llama()
    model.requires_grad_(False)
    model.model.layers[1].requires_grad_(True)
    with attemper.regularize(model, EntropyBonus()) as penalty:
        penalty.attach(model(**batch).loss).backward()
    assert model.model.layers[1].self_attn.q_proj.weight.grad is not None


def test_a_scheduled_target_is_that_of_the_steps_that_are_over_and_is_resumed():
    goals = [0.4, 1.3, 2.2]
    model, batch = llama()

    def penalised(penalty: attemper.EntropyTarget, steps: int) -> list[float]:
        with attemper.regularize(model, penalty) as handle:
            values = []
            for _ in range(steps):
                handle.attach(model(**batch).loss)
                values.append(handle.value)
                handle.step()
            return values

    scheduled = EntropyTarget(lambda step, _: goals[min(step, 2)], 1.0, total_steps=3)
    wanted = [penalised(EntropyTarget(goal, 1.0), 1)[0] for goal in goals]
    assert penalised(scheduled, 3) == pytest.approx(wanted, rel=1e-6)
    again = attemper.regularize(model, scheduled)
    again.load_state_dict({"steps": 1})
    again.attach(model(**batch).loss)
    assert (again.steps, again.value) == (1, pytest.approx(wanted[1], rel=1e-6))
    assert again.state_dict() == {"steps": 1}
    with pytest.raises(InputError, match="must have steps"):
        again.load_state_dict({})


def test_a_copy_leaves_the_penalty_behind_and_memory_does_not_grow():
    model, batch = llama()
    penalty = attemper.regularize(model, EntropyBonus())
    copy.deepcopy(model)(**batch).loss.backward()
    for _ in range(3):
        penalty.attach(model(**batch).loss).backward()
    assert penalty._ledger.pending.sites == {}
    assert penalty._ledger.running is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EntropyTarget(-1.0), "at least 0"),
        (lambda: EntropyTarget(float("inf")), "finite"),
        (lambda: EntropyTarget(1.0, float("nan")), "coef"),
        (lambda: EntropyTarget(1.0, tolerance=-1.0), "tolerance"),
        (lambda: EntropyTarget(1.0, unit="bits"), "unit"),
        (lambda: EntropyTarget(lambda step, total: 1.0), "total_steps"),
        (lambda: attemper.regularize(nn.Linear(2, 2), EntropyBonus()), "no attention"),
        (lambda: attemper.regularize(small(), _as_any("entropy")), "EntropyTarget"),
        (lambda: attemper.regularize(small(), EntropyBonus(), observe="above"), "observe"),
    ],
)
def test_mistakes_are_told(make: Callable[[], Any], message: str):
    with pytest.raises(InputError, match=message):
        make()


def test_what_is_attached_must_be_a_loss():
    model, batch = llama()
    penalty = attemper.regularize(model, EntropyBonus())
    loss = model(**batch).loss
    for wrong in (1.0, loss.detach(), torch.ones(2, requires_grad=True)):
        with pytest.raises(InputError, match="one number with a gradient"):
            penalty.attach(_as_any(wrong))
    with pytest.raises(InputError, match=r"after the first penalty\.attach"):
        _ = penalty.value


@pytest.mark.parametrize("accumulation", [1, 2])
def test_trainer_takes_it_as_its_loss(accumulation: int, tmp_path: Any):
    """One optimizer step of plain gradient descent moves weights by the gradient of loss and penalty, once."""
    tf = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    model, batch = llama()
    model.config.use_cache = False
    # Nothing predicts the first token. Some releases of Trainer divide by its label, too, unless it says so.
    rows = [{"input_ids": ids, "labels": torch.cat([ids.new_tensor([-100]), ids[1:]])} for ids in batch["input_ids"]]
    whole = {key: value for key, value in batch.items() if key != "attention_mask"}
    twin = copy.deepcopy(model)
    with attemper.regularize(twin, EntropyBonus(0.3)) as penalty:
        wanted = gradients(twin, lambda: penalty.attach(twin(**whole).loss))[1]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    penalty = attemper.regularize(model, EntropyBonus(0.3))
    trainer = tf.Trainer(
        model, tf.TrainingArguments(
            str(tmp_path), per_device_train_batch_size=len(rows) // accumulation, max_steps=1, learning_rate=1.0,
            gradient_accumulation_steps=accumulation, optim="sgd", max_grad_norm=0.0, lr_scheduler_type="constant",
            report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True, weight_decay=0.0,
        ),
        train_dataset=rows, compute_loss_func=penalty.compute_loss,
    )  # fmt: skip
    trainer.train()
    moved = {name: before[name] - p.detach() for name, p in model.named_parameters()}
    assert error(moved, {name: grad.double() for name, grad in wanted.items()}) < 2e-3
    said = trainer.evaluate(rows)["eval_loss"]
    penalty.remove()
    with torch.no_grad():
        assert said == pytest.approx(float(model(**whole).loss), rel=1e-5), "an evaluation has no penalty"


def test_without_a_loss_to_be_had_it_says_so():
    model = small().train()
    penalty = attemper.regularize(model, EntropyBonus())
    with pytest.raises(InputError, match="found no loss"):
        penalty.compute_loss({"logits": model(torch.zeros(1, 4, dtype=torch.int64))}, None)


def test_padding_is_read_however_the_mask_is_passed():
    model, batch = llama()
    penalty = attemper.regularize(model, EntropyBonus())
    counts = []
    for call in (
        lambda: model(batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False),
        lambda: model(batch["input_ids"], batch["attention_mask"], use_cache=False),
        lambda: model(batch["input_ids"], use_cache=False),
    ):
        call()
        first = next(iter(penalty._ledger.pending.sites.values()))
        assert first.counts is not None
        counts.append(int(first.counts[0]))
        penalty.reset()
    padded = int((batch["attention_mask"] == 0).sum())
    assert counts == [batch["input_ids"].numel() - padded] * 2 + [batch["input_ids"].numel()]


def test_an_encoder_decoder_has_a_mask_of_its_own_for_each_side():
    tf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = tf.BartConfig(
        vocab_size=50, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=32, dropout=0.0,
    )  # fmt: skip
    model = tf.BartModel(config).train()
    penalty = attemper.regularize(model, EntropyBonus())
    ids, mask = torch.randint(3, 50, (2, 8)), torch.ones(2, 8, dtype=torch.long)
    mask[0, 5:] = 0
    other = torch.ones(2, 8, dtype=torch.long)
    other[1, 7:] = 0
    model(ids, attention_mask=mask, decoder_input_ids=ids, decoder_attention_mask=other)
    sites = penalty._ledger.pending.sites
    counted = {name: int(found.counts[0]) for name, found in sites.items() if found.counts is not None}
    assert counted == {
        "encoder.layers.0.self_attn": 13, "decoder.layers.0.self_attn": 15, "decoder.layers.0.encoder_attn": 15,
    }  # fmt: skip


def test_one_key_head_for_all_without_a_word_is_computed_as_torch_does():
    class Shared(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(x, x[:, :1], x[:, :1])

    x = torch.randn(2, 4, 5, 4, requires_grad=True)
    shared = Shared().train()
    with attemper.regularize(shared, EntropyBonus()) as penalty:
        penalty.attach(shared(x).sum()).backward()
    assert x.grad is not None


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # PyTorch's own
@pytest.mark.parametrize("transform", ["grad", "gradients per sample", "forward mode"])
def test_a_penalty_inside_a_transform_of_functions_is_refused(transform: str):
    model, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 5, 8)
    penalty = attemper.regularize(model, EntropyTarget(1.0, 0.1))

    def loss(x: Tensor) -> Tensor:
        return model(x[None], x[None], x[None])[0].square().sum()

    calls: dict[str, Callable[[], Any]] = {
        "grad": lambda: torch.func.grad(loss)(x[0]),
        "gradients per sample": lambda: torch.func.vmap(torch.func.grad(loss))(x),
        "forward mode": lambda: torch.func.jvp(loss, (x[0],), (x[1],)),
    }
    with pytest.raises(InputError, match=r"torch\.func and forward mode do not call.*eval mode.*entropy_target"):
        calls[transform]()
    penalty.reset()
    model.eval()
    calls[transform]()
    penalty.remove()
