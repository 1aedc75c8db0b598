"""Temperature modules: what attention makes of them, learning, bounds, checkpoints, compilation, mistakes."""

import copy
import math
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

import attemper
from attemper import InputError, nn, schedules
from attemper.nn.bounds import bounded_exponential

pytestmark = pytest.mark.each

B, H, Q, K, D, WIDTH = 2, 3, 5, 7, 4, 6


def tensors(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(B, H, n, D, dtype=dtype) for n in (Q, K, K)]


def scheduled() -> nn.ScheduledTemperature:
    return nn.ScheduledTemperature(schedules.curriculum(2.0, 0.5), 10)


MODULES: dict[str, Any] = {
    "fixed": lambda: nn.FixedTemperature(0.7),
    "fixed per head": lambda: nn.FixedTemperature([0.5, 1.0, 2.0]),
    "learned": lambda: nn.LearnedTemperature(initial=0.7),
    "learned per head": lambda: nn.LearnedTemperature(H),
    "conditional": lambda: nn.ConditionalTemperature(WIDTH, H, initial=1.5),
    "conditional, one": lambda: nn.ConditionalTemperature(WIDTH),
    "conditional, pooled": lambda: nn.ConditionalTemperature(WIDTH, H, pool="mean"),
    "length": lambda: nn.LengthTemperature(64),
    "scheduled": scheduled,
    "product": lambda: nn.LearnedTemperature(H) * nn.LengthTemperature(64) * 0.5,
}


def called(module: Any, query: Tensor, hidden: Tensor) -> Tensor:
    return module(query, hidden=hidden, visible_keys=torch.arange(2, 2 + Q))


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.turns(2)
def test_attention_divides_the_scores_by_it(name: str, backend: str):
    query, key, value = tensors()
    hidden = torch.randn(B, Q, WIDTH)
    module = MODULES[name]()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    temperature = called(module, query, hidden)
    assert temperature.dtype == torch.float32
    each = temperature.expand(B, H, Q)
    assert (each > 0).all()
    weights = ((query @ key.mT / D**0.5) / each[..., None]).softmax(-1)
    output, stats = attemper.attention(query, key, value, temperature=temperature, stats="entropy", backend=backend)
    torch.testing.assert_close(output, weights @ value)
    assert stats is not None
    torch.testing.assert_close(stats.entropy, -(weights * weights.log()).sum(-1))


@pytest.mark.parametrize("raw", [-100.0, 100.0, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("make", [lambda: nn.LearnedTemperature(H), lambda: nn.ConditionalTemperature(WIDTH, H)])
def test_from_any_parameter_it_is_finite_above_0_and_finds_back(make: Any, raw: float):
    module = make()
    parameter = module.log_temperature if isinstance(module, nn.LearnedTemperature) else module.projection.bias
    with torch.no_grad():
        parameter.fill_(raw)
    query, hidden = tensors()[0], torch.zeros(B, Q, WIDTH)
    temperature = called(module, query, hidden)
    assert temperature.isfinite().all()
    assert (temperature >= 0.01).all()
    # A loss that wants T = 1 finds a gradient towards it, from either side.
    (grad,) = torch.autograd.grad((temperature.log()).square().sum(), parameter)
    if not math.isnan(raw):
        assert (grad * (1 if raw > 0 else -1) > 0).all()
    # One that wants to go further out finds none.
    outward = (called(module, query, hidden).log() * (-1 if raw > 0 else 1)).sum()
    if not math.isnan(raw):
        assert (torch.autograd.grad(outward, parameter)[0] == 0).all()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_gradient_that_is_not_finite_does_not_move_it(bad: float):
    module = nn.LearnedTemperature(H)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    (module(tensors()[0]) * torch.tensor([bad, 1.0, 1.0])[:, None]).sum().backward()
    optimizer.step()
    value = module.value()
    assert value[0] == 1.0
    assert (value[1:] < 1.0).all()


def test_the_gradient_of_the_bounded_exponential_is_right_inside():
    raw = torch.linspace(-2, 2, 9, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: bounded_exponential(x, 0.01, 100.0), raw)
    assert torch.autograd.gradgradcheck(lambda x: bounded_exponential(x, 0.01, 100.0), raw)
    torch.library.opcheck(torch.ops.attemper.bounded_exponential.default, (raw, -4.0, 4.0))


def test_pooling_sees_the_whole_sequence_and_the_default_only_the_query():
    query, hidden = tensors()[0], torch.randn(B, Q, WIDTH)
    changed = hidden.clone()
    changed[:, -1] += 1
    for pool, moved in ((None, False), ("mean", True)):
        module = nn.ConditionalTemperature(WIDTH, H, pool=pool)
        torch.nn.init.normal_(module.projection.weight)
        before, after = (module(query, hidden=given).expand(B, H, Q) for given in (hidden, changed))
        assert (before[:, :, 0] != after[:, :, 0]).any().item() is moved


def test_a_schedule_goes_on_after_a_checkpoint_with_the_same_bits():
    schedule = schedules.warmup_anneal(2.0, 0.1)
    one, two = nn.ScheduledTemperature(schedule, 20), nn.ScheduledTemperature(schedule, 20)
    for _ in range(7):
        one.step()
    assert one.value.item() == pytest.approx(schedule(7, 20))
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    assert torch.equal(two.value, one.value)
    one.step()
    two.step()
    assert torch.equal(two(tensors()[0]), one(tensors()[0]))
    two.step(20)
    assert two.value.item() == pytest.approx(0.1)


def test_a_schedule_is_asked_for_the_steps_that_are_over():
    asked = []

    def schedule(step: int, total: int) -> float:
        asked.append((step, total))
        return 1.0 + step

    module = nn.ScheduledTemperature(schedule, 9)
    query = tensors()[0]
    values = [module(query).item()]
    for _ in range(2):
        module.step()
        values.append(module(query).item())
    module.step(7)
    assert asked == [(0, 9), (1, 9), (2, 9), (7, 9)]
    assert [*values, module(query).item()] == [1.0, 2.0, 3.0, 8.0]


def test_a_compiled_model_is_not_compiled_again_when_its_schedule_moves():
    module, (query, key, value) = scheduled(), tensors()
    counter = torch._dynamo.testing.CompileCounter()

    @torch.compile(backend=counter, fullgraph=True)
    def run(query: Tensor) -> Tensor:
        return attemper.attention(query, key, value, temperature=module(query)).output

    before = run(query)
    module.step(10)
    assert not torch.equal(run(query), before)
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.quick("conditional, pooled")
def test_it_is_saved_and_loaded_and_compiles(name: str):
    one, two = MODULES[name](), MODULES[name]()
    for parameter in one.parameters():
        torch.nn.init.normal_(parameter)
    two.load_state_dict(one.state_dict())
    query, hidden = tensors()[0], torch.randn(B, Q, WIDTH)
    assert torch.equal(called(one, query, hidden), called(two, query, hidden))
    torch._dynamo.reset()
    compiled = torch.compile(two, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(called(compiled, query, hidden), called(one, query, hidden))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.FixedTemperature(0.0), r"FixedTemperature\(value\) must be above 0, got 0.0"),
        (lambda: nn.FixedTemperature(torch.tensor([1.0, -1.0])), r"must be a number above 0 or a tensor \[heads\]"),
        (lambda: nn.FixedTemperature(torch.ones(2, 3)), r"must be a number above 0 or a tensor \[heads\]"),
        (lambda: nn.LearnedTemperature(0), r"LearnedTemperature\(num_heads\) must be an int of at least 1, got 0"),
        (lambda: nn.LearnedTemperature(initial=1e-3), "needs floor <= initial <= ceiling, got 0.01, 0.001 and 100.0"),
        (lambda: nn.ConditionalTemperature(4, pool="max"), "must be one of 'mean'; got 'max'"),
        (lambda: nn.LengthTemperature(1), "must be a number above 1, got 1"),
        (lambda: nn.LengthTemperature(64, "sqrt"), "must be one of 'log', 'yarn', 'llama4'; got 'sqrt'"),
        (
            lambda: nn.ScheduledTemperature(lambda step, total: 0.0, 5),
            "temperature at step 0 must be finite and above 0",
        ),
        (lambda: nn.ScheduledTemperature(schedules.constant(), 0), "must be an int of at least 1, got 0"),
        (lambda: nn.ProductTemperature([]), "must hold at least one temperature"),
        (lambda: nn.LearnedTemperature(4)(tensors()[0]), "has 4 temperatures; the query's heads are 3"),
        (lambda: nn.LearnedTemperature()(torch.zeros(2, 3)), r"called with a query \[B, H, Q, D\], got \[2, 3\]"),
        (lambda: nn.ConditionalTemperature(6)(tensors()[0]), r"needs the layer's input: call it with hidden="),
        (
            lambda: nn.ConditionalTemperature(6)(tensors()[0], hidden=torch.zeros(B, K, 6)),
            r"\(hidden=...\) must be \[2, 5, 6\], got \[2, 7, 6\]",
        ),
        (lambda: nn.LengthTemperature(64)(tensors()[0]), "needs visible_keys="),
    ],
)
def test_mistakes_are_told(make: Any, message: str):
    with pytest.raises(InputError, match=message):
        make()


def test_a_checkpoint_with_other_heads_or_none_is_refused_by_name():
    with pytest.raises(RuntimeError, match=r"size mismatch for log_temperature: .*\[3\].*\[4\]"):
        nn.LearnedTemperature(4).load_state_dict(nn.LearnedTemperature(3).state_dict())
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: .log_temperature."):
        nn.LearnedTemperature(4).load_state_dict({})


def test_an_infinite_factor_gives_no_nan_to_a_learned_one():
    learned = nn.LearnedTemperature(1, initial=2.0)
    query = torch.randn(1, 1, 3, 4)
    value = (nn.FixedTemperature(float("inf")) * learned)(query)
    assert torch.isinf(value).all()
    (1 / value).sum().backward()
    assert learned.log_temperature.grad is not None
    assert (learned.log_temperature.grad == 0).all()
