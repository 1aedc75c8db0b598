"""What a shadow pass puts back, and the passes that cannot be taken back: those are left out, with the reason."""

from __future__ import annotations

import logging
import random
import threading
import weakref
from array import array
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from functools import partial
from io import StringIO
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

import attemper
from attemper.errors import InputError
from attemper.monitor.shadow import wrappers_of
from tests.support.shadow_models import torch_warns

pytestmark = pytest.mark.usefixtures("fresh_compiler")


X = torch.ones(2, 5, 16)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 16)

    def attend(self, x: Tensor) -> Tensor:
        rows = self.project(x).view(2, 5, 2, 8).transpose(1, 2)
        return F.scaled_dot_product_attention(rows, rows, rows).transpose(1, 2).reshape(x.shape)

    def forward(self, x: Any, *_: Any, **__: Any) -> Any:
        return self.attend(x)

    @property
    def gradients(self) -> list[Any]:
        return [None if one.grad is None else one.grad.tolist() for one in self.parameters()]


def forward(model: Any) -> None:
    model(X)


def check_as_unwatched(
    make: Callable[[], Any],
    state: Callable[[Any], Any],
    run: Callable[[Any], object] = forward,
    observe: str = "shadow",
) -> None:
    """Three steps leave the same state without a watch and beside one that reads each of them."""
    left = []
    for watched in (False, True):
        torch._dynamo.reset()
        counters.clear()
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        model = make()
        watch = attemper.watch(model, observe=observe) if watched else None
        for _ in range(3):
            run(model)
            if watch is not None:
                watch.step()
        if watch is not None:
            assert (watch.sampled, watch.failures, len(watch.table().sites)) == (3, 0, 1)
            watch.close()
        left.append((state(model), torch.rand(1).item(), random.random()))
    assert left[0] == left[1]


@dataclass
class Totals:
    loss: float = 0.0
    steps: int = 0


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Remembering(Base):
    """Changes whatever a forward can change."""

    routed: Tensor
    grown: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("routed", torch.zeros(2))
        self.register_buffer("grown", torch.zeros(1))
        self.hidden = torch.zeros(1)
        self.losses: list[Tensor] = []
        self.seen, self.recent, self.kinds = {"a": {"b": 0}}, deque([0], maxlen=3), {0}
        self.totals, self.slotted, self.array = Totals(), Slotted(), np.zeros(2)
        self.dice, self.generator = random.Random(3), torch.Generator().manual_seed(3)
        self.calls: list[int] = []
        self.project.register_forward_hook(lambda *_: self.calls.append(1))

    def forward(self, x: Tensor, given: dict[str, Any]) -> Tensor:  # type: ignore[override]
        out = self.attend(x)
        self.routed += 1
        self.grown.data = torch.cat([self.grown, self.grown.new_ones(1)])
        self.hidden.data.add_(1)
        self.losses.append(out.sum())
        self.seen["a"]["b"] += 1
        self.recent.append(len(self.kinds))
        self.kinds.add(len(self.kinds))
        self.totals.steps += 1
        self.totals = Totals(self.totals.loss + 0.5, self.totals.steps)
        self.slotted.count += 1
        self.array += 1
        self.new = getattr(self, "new", 0) + 1
        self.noise = random.random() + self.dice.random() + float(np.random.rand())
        self.drawn = torch.rand(1, generator=self.generator) + torch.rand(1)
        given["calls"] += 1
        given["x"].add_(1)
        return out

    @property
    def state(self) -> list[Any]:
        return [
            self.routed.tolist(), self.hidden.item(), len(self.losses), self.seen, list(self.recent), self.kinds,
            self.totals, self.slotted.count, self.array.tolist(), self.new, self.noise, self.drawn.item(), self.calls,
            self.grown.tolist(), self.gradients,
        ]  # fmt: skip


def test_everything_that_a_forward_changes_is_put_back() -> None:
    given: list[dict[str, Any]] = []

    def make() -> Remembering:
        given.append({"calls": 0, "x": torch.zeros(1)})
        return Remembering()

    check_as_unwatched(make, lambda model: model.state, lambda model: model(X, given[-1]).sum().backward())
    assert given[0] == given[1] == {"calls": 3, "x": torch.full((1,), 3.0)}


class Masked(Base):
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.rand(2, 5, 16))

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.attend(x) * self.mask


class Tied(Base):
    """Uses the weight of a compiled part once more."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Base()
        self.part.compile(backend="eager")
        del self.project

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(self.part(x), self.part.project.weight).float().square()


@torch_warns
@pytest.mark.parametrize(("kind", "observe"), [(Masked, "shadow"), (Tied, "auto")])
def test_graphs_that_wait_for_their_backward_pass_keep_buffers_and_weights_that_autocast_has_cast(
    kind: type[Base], observe: str
) -> None:
    """Two forwards, one backward: a write that autograd counts would make the first graph useless."""
    check_as_unwatched(
        kind, lambda model: model.gradients, lambda model: (model(X).sum() + model(X).sum()).backward(), observe
    )


class Held:
    """An object that holds another."""

    shared: list[int] = []  # noqa: RUF012
    number = 0

    def __init__(self, inner: Any = None) -> None:
        self.inner, self.count, self.sums = inner, 0, torch.zeros(2)

    @property
    def last(self) -> Any:
        one = self
        while one.inner is not None:
            one = one.inner
        return one


class Kept(MutableMapping[str, int]):
    """A mapping whose items are in an attribute; to look through it costs a change."""

    def __init__(self) -> None:
        self.items_of, self.looks = {"a": 0}, 0

    def __getitem__(self, key: str) -> int:
        return self.items_of[key]

    def __setitem__(self, key: str, value: int) -> None:
        self.items_of[key] = value

    def __delitem__(self, key: str) -> None:
        del self.items_of[key]

    def __iter__(self) -> Iterator[str]:
        self.looks += 1
        return iter(self.items_of)

    def __len__(self) -> int:
        return len(self.items_of)


class Ordered(OrderedDict[str, int]):
    """As transformers' outputs."""

    def update(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError


class Counting(dict[str, int]):
    count = 0


def nested(levels: int) -> Held:
    held = Held()
    for _ in range(levels - 1):
        held = Held(held)
    return held


def set_last(held: Held) -> None:
    held.last.count += 1
    held.last.sums += 1


def set_class(held: Held) -> None:
    Held.number += 1
    Held.shared.append(Held.number)
    Held.fresh = Held.number  # type: ignore[attr-defined]


def grow(held: dict[str, int]) -> None:
    held["b"] = held["a"] = held["a"] + 1
    held.pop("b", 0) if len(held) > 3 else None


def count(held: Any) -> None:
    held.count += 1
    held["c"] = held.count


def expanded() -> Tensor:
    return torch.zeros(2, 1).expand(2, 4)


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], object], Callable[[Any], Any]]] = {
    "UserDict": (lambda: UserDict(a=0), grow, dict),
    "UserList": (lambda: UserList([0]), lambda held: held.append(len(held)), list),
    "a mapping of one's own": (Kept, grow, lambda held: (held.items_of, held.looks)),
    "a dictionary that refuses to be updated": (lambda: Ordered(a=0), grow, list),
    "a dictionary with attributes": (lambda: Counting(a=0), count, lambda held: (held.count, dict(held))),
    "bytearray": (lambda: bytearray(b"ab"), lambda held: held.extend(b"cd"), bytes),
    "array": (lambda: array("d", [0]), lambda held: held.append(len(held)), list),
    "expanded, filled": (expanded, lambda held: held.data.fill_(held.data.sum().item() + 1), Tensor.tolist),
    "expanded, other memory": (expanded, lambda held: setattr(held, "data", held + 1), Tensor.tolist),
    "three levels": (lambda: nested(3), set_last, lambda held: (held.last.count, held.last.sums.tolist())),
    "a chain": (lambda: nested(2000), set_last, lambda held: (held.last.count, held.last.sums.tolist())),
    "class attributes": (
        Held,
        set_class,
        lambda held: (Held.number, list(Held.shared), vars(Held).get("fresh"), vars(held).keys()),
    ),
    "a slot": (Slotted, lambda held: setattr(held, "count", held.count + 1), lambda held: held.count),
    "a generator of numpy": (lambda: np.random.default_rng(0), lambda held: held.random(), lambda held: held.random()),
    "RandomState": (lambda: np.random.RandomState(0), lambda held: held.rand(), lambda held: held.rand()),
    "a logger with a stream": (
        lambda: (logging.StreamHandler(StringIO()), [0]),
        lambda held: held[1].append(1),
        lambda held: held[1],
    ),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.turns(2)
def test_whatever_holds_what_a_forward_changes_it_is_put_back(name: str) -> None:
    make, change, state = CHANGES[name]

    class Changing(Base):
        def __init__(self) -> None:
            super().__init__()
            self.held = make()

        def forward(self, x: Tensor) -> Tensor:
            change(self.held)
            return self.attend(x)

    def new() -> Changing:
        Held.number, Held.shared = 0, []
        if "fresh" in vars(Held):
            del Held.fresh  # type: ignore[attr-defined]
        return Changing()

    check_as_unwatched(new, lambda model: state(model.held))


def test_what_lies_far_from_the_model_is_not_copied_in_advance_and_locked_objects_are_left_alone() -> None:
    far: Any = nested(4)
    far.last.sums, far.last.turns = torch.zeros(1000), iter(range(3))
    locked: Any = Held()
    far.last.inner = locked
    locked.lock = threading.Lock()

    class Far(Base):
        def forward(self, x: Tensor) -> Tensor:
            locked.count += 1  # another thread's, perhaps
            return self.attend(x)

    model: Any = Far()
    model.far = far
    with attemper.watch(model, observe="shadow") as watch:
        model(X)
        assert len(watch.table().sites) == 1
    assert locked.count == 2


class Cache:
    def get_seq_length(self) -> int:
        return 0


class Iterating(Base):
    def __init__(self) -> None:
        super().__init__()
        self.turns = iter(range(100))

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        return self.attend(x) * next(self.turns)


class Lazy(Base):
    def __init__(self) -> None:
        super().__init__()
        self.lazy = nn.LazyLinear(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.lazy(self.attend(x))


OBSTACLES: dict[str, tuple[type[Base], dict[str, Any], str]] = {
    "cache": (Base, {"past": Cache()}, r"the argument past is a cache \(Cache\), to which the pass adds"),
    "generator": (
        Base,
        {"rng": torch.Generator()},
        r"the argument rng is a generator of random numbers",
    ),
    "iterator": (Iterating, {}, r"the model\.turns is an iterator \(range_iterator\)"),
    "lazy": (Lazy, {}, r"lazy is lazy: its first forward makes its parameters"),
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_a_pass_that_cannot_be_taken_back_is_left_out_with_the_reason(name: str) -> None:
    kind, arguments, said = OBSTACLES[name]
    model = kind()
    with attemper.watch(model, observe="shadow") as watch:
        model(X, **arguments)
        with pytest.warns(UserWarning, match=f"nothing was measured in the first step(.|\n)*{said}"):
            watch.step()
        with pytest.raises(InputError, match=said):
            watch.table()
    assert watch.failures == 0


def test_a_later_pass_that_cannot_be_taken_back_is_told_once() -> None:
    model = Base()
    with attemper.watch(model, observe="shadow") as watch:
        model(X)
        watch.step()
        with pytest.warns(UserWarning, match="Base was left out of a sample.*the argument past is a cache"):
            model(X, past=Cache())
        for _ in range(2):
            watch.step()
            model(X, past=Cache())
    assert watch.sampled == 1


def test_a_pass_inside_a_transform_is_left_out() -> None:
    model = Base()
    watch = attemper.watch(model, observe="shadow")
    torch.func.grad(lambda x: model(x).sum())(X)
    with pytest.warns(UserWarning, match=r"inside a transform of torch\.func"):
        watch.step()
    watch.close()


class Writing(Base):
    """Its forward writes a parameter, each time in the way that ``writes`` names."""

    def __init__(self, writes: str) -> None:
        super().__init__()
        self.codes, self.writes, self.passes = nn.Parameter(torch.ones(3, 16)), writes, 0
        self.words = nn.Embedding(4, 16, max_norm=0.5)

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        WRITES[self.writes](self)
        return self.attend(x + self.codes.mean(0) + self.words(torch.tensor([0, 1])).sum())


def every_third(model: Any) -> None:
    if model.training and model.passes % 3 == 0:
        model.codes.data.mul_(0.9)


def in_place(model: Any) -> None:
    with torch.no_grad():
        model.codes.mul_(0.9)


def replaced(model: Any) -> None:
    model.codes = nn.Parameter(model.codes.detach() * 0.9)


def given_memory(model: Any) -> None:
    model.codes.data = model.codes.data * 0.9


def given_other_sizes(model: Any) -> None:
    model.codes.data = torch.cat([model.codes.data, model.codes.data[:1]])


def all_at_once(model: Any) -> None:
    torch.ops.aten._foreach_mul_.Scalar([parameter.data for parameter in model.parameters()], 0.9)


WRITES: dict[str, Callable[[Any], object]] = {
    "exponential moving average": lambda model: model.codes.data.mul_(0.9).add_(0.1 * model.passes),
    "one row": lambda model: model.codes.data[1].fill_(model.passes),
    "a view": lambda model: model.codes.detach().view(-1)[4:9].neg_(),
    "out=": lambda model: torch.add(model.codes.data, 0.5, out=model.codes.data),
    "memory that grows": lambda model: model.codes.data.resize_(4, 16)[3].fill_(model.passes),
    "another memory set": lambda model: model.codes.data.set_(torch.full((3, 16), 1.0 * model.passes)),
    "deleted": lambda model: model.__delattr__("codes") or setattr(model, "codes", nn.Parameter(torch.zeros(3, 16))),
    "nothing but what max_norm does": lambda model: None,
    **{
        one.__name__: one for one in (every_third, in_place, replaced, given_memory, given_other_sizes, all_at_once)
    },
}  # fmt: skip


@pytest.mark.parametrize("writes", WRITES)
@pytest.mark.turns(2)
def test_a_forward_that_writes_parameters_is_read_and_trains_as_without_a_watch(writes: str) -> None:
    def run(model: Writing) -> None:
        model.zero_grad()
        parameters = list(model.project.parameters())
        memory = [one.data_ptr() for one in parameters]
        model(X).sum().backward()
        assert all(one is two for one, two in zip(parameters, model.project.parameters(), strict=True))
        assert memory == [one.data_ptr() for one in parameters]

    check_as_unwatched(
        lambda: Writing(writes),
        lambda model: ({name: one.tolist() for name, one in model.named_parameters()}, model.gradients, model.passes),
        run,
    )


def test_a_parameter_that_is_written_out_of_sight_is_told_and_the_pass_run_beside_itself_once_at_most() -> None:
    class Normed(Base):
        def forward(self, x: Tensor) -> Tensor:
            RAN.append(1)
            with torch.no_grad(), _disable_current_modes():
                self.project.weight.div_(self.project.weight.norm())
            return self.attend(x)

    RAN.clear()
    model = Normed()
    with attemper.watch(model, observe="shadow") as watch:
        model(X)
        with pytest.warns(UserWarning, match=r"its forward changes the parameter project\.weight"):
            watch.step()
        for _ in range(3):
            model(X)
            watch.step()
    assert len(RAN) == 1 + 4


def test_a_failing_shadow_pass_leaves_the_training_alone() -> None:
    class Failing(Base):
        def forward(self, x: Tensor) -> Tensor:
            RAN.append(1)
            out = self.attend(x)
            if len(RAN) % 2:
                raise RuntimeError("once")
            return out

    RAN.clear()
    model = Failing()
    with attemper.watch(model, observe="shadow") as watch:
        with pytest.warns(UserWarning, match="Failing could not be measured: once"):
            model(X).sum().backward()
        assert watch.failures == 1
        assert not torch.is_inference_mode_enabled()


def test_a_pass_that_does_not_go_through_is_not_read() -> None:
    class Failing(Base):
        def forward(self, x: Tensor) -> Tensor:
            out = self.attend(x)
            if torch.is_grad_enabled():
                raise KeyError("no")
            return out

    model = Failing()
    with attemper.watch(model, observe="shadow") as watch:
        with pytest.raises(KeyError):
            model(X)
        with torch.no_grad():
            model(X)
        assert watch.table().sites[0].heads[0].rows == 2 * 5


@pytest.mark.parametrize("observe", ["beside", "shadow"])
@pytest.mark.parametrize("first", [True, False], ids=["in the first of its runs", "in the training's own"])
def test_a_watch_that_is_closed_in_the_middle_of_a_pass_reads_and_holds_nothing_of_it(
    observe: str, first: bool
) -> None:
    class Closing(Base):
        def forward(self, x: Tensor) -> Tensor:
            out = self.attend(x)
            if first or torch.is_grad_enabled():
                watch.close()
            if torch.is_grad_enabled():
                with pytest.raises(InputError, match="saw no attention"):
                    watch.table()
            return out

    model, x = Closing(), X.clone()
    watch = attemper.watch(model, observe=observe)
    model(x)
    held = weakref.ref(x)
    del x
    assert held() is None
    with pytest.raises(InputError, match="saw no attention"):
        watch.table()


def test_another_threads_compiled_calls_stay_compiled_meanwhile() -> None:
    """The model's file names no compiled function (this one does, so the model says that it is of another)."""
    ran: list[bool] = []

    @partial(torch.compile, backend="eager")
    def helper(x: Tensor) -> Tensor:
        return x + 1 if torch.compiler.is_compiling() else x - 1

    class Waiting(Base):
        __module__ = Base.__module__ = "attemper.errors"

        def forward(self, x: Tensor) -> Tensor:
            if not torch.is_grad_enabled():
                thread = threading.Thread(target=lambda: ran.append(bool((helper(torch.zeros(3)) == 1).all())))
                thread.start()
                thread.join()
            return self.attend(x)

    model = Waiting()
    helper(torch.zeros(3))
    with attemper.watch(model, observe="shadow") as watch:
        model(X)
        assert len(watch.table().sites) == 1
    assert ran == [True]


def test_penalties_and_thermostats_receive_the_trainings_own_pass_alone() -> None:
    model = Base()
    received: list[int] = []
    with attemper.regularize(model, attemper.ZLoss(1e-3)) as penalty, attemper.watch(model, observe="shadow") as watch:
        own = penalty.receive
        penalty.receive = lambda *given: received.append(1) or own(*given)  # type: ignore[method-assign]
        model(X)
        assert len(watch.table().sites) == 1
    assert received == [1]


def test_two_watches_count_a_pass_once_each() -> None:
    model = Base()
    with attemper.watch(model, observe="shadow") as one, attemper.watch(model) as two:
        model(X)
        assert [watch.passes for watch in (one, two)] == [1, 1]
        assert [watch.table().sites[0].heads[0].rows for watch in (one, two)] == [10, 10]


@partial(torch.compile, backend="eager")
def compiled_helper(x: Tensor) -> Tensor:
    return x * 2


class Helped(Base):
    helper = staticmethod(compiled_helper)

    def forward(self, x: Tensor) -> Tensor:
        return compiled_helper(self.attend(x))


def test_functions_that_a_models_file_compiles_are_not_compiled_anew() -> None:
    def make() -> Helped:
        model = Helped()
        model.compile(backend="eager")
        return model

    check_as_unwatched(make, lambda _: dict(counters["stats"]), lambda model: model(X).sum().backward(), observe="auto")


class Sized(Base):
    """Notes how many sequences it runs without gradients, and fails above a number of them."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most, self.ran = most, []

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        assert len(x) == len(mask)
        if not torch.is_grad_enabled():
            RAN.append(len(x))
            if len(x) > self.most:
                raise torch.OutOfMemoryError("no memory")
        rows = self.project(x).unflatten(-1, (2, 8)).transpose(1, 2)
        return F.scaled_dot_product_attention(rows, rows, rows)


RAN: list[int] = []


def run_sized(watch: Any, model: nn.Module, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(8, 5, 16), torch.ones(8, 5)).sum().backward()
        watch.step()


def test_without_memory_a_shadow_pass_is_given_up_and_the_next_ones_run_half_as_many_sequences() -> None:
    RAN.clear()
    model = Sized(2)
    watch = attemper.watch(model, observe="shadow")
    with pytest.warns(UserWarning, match="ran out of memory; the next samples run 4 of 8 sequences"):
        model(torch.ones(8, 5, 16), torch.ones(8, 5)).sum().backward()
    with pytest.warns(UserWarning, match=r"nothing was measured in the first step(.|\n)*ran out of memory"):
        watch.step()
    run_sized(watch, model, 4)
    assert RAN == [8, 4, 2, 2, 2]
    assert watch.failures == 2
    assert watch.table().sites[0].heads[0].rows == 2 * 5
    watch.close()


def test_shadow_batch_runs_so_many_sequences() -> None:
    RAN.clear()
    model = Sized(100)
    with attemper.watch(model, observe="shadow", shadow_batch=3) as watch:
        run_sized(watch, model, 2)
        assert watch.table().tokens == 3 * 5
    assert RAN == [3, 3]
    with pytest.raises(InputError, match=r"watch\(shadow_batch=\.\.\.\)"):
        attemper.watch(model, shadow_batch=0)


def test_the_history_says_which_samples_are_of_shadow_passes(tmp_path: Any) -> None:
    def run(steps: int) -> tuple[str, ...]:
        with attemper.watch(model, store=tmp_path) as watch:
            for _ in range(steps):
                model(X)
                watch.step(watch.steps + len(before))
        before.extend([0] * steps)
        return attemper.open(tmp_path).remarks

    before: list[int] = []
    model = Base()
    assert run(2) == ()
    model.compile(backend="eager")
    shadow = "from step 2 on the model ran compiled; its numbers come from uncompiled shadow passes"
    assert run(2) == (shadow,)
    assert run(1) == (shadow,)
    model._compiled_call_impl = None
    assert run(1) == (shadow, "from step 5 on the numbers come from the training passes themselves")


def test_whatever_class_a_wrapper_was_given_it_is_found() -> None:
    model = nn.Linear(2, 2)
    made: list[Any] = [torch.compile(one, backend="eager") for one in (model, model, nn.Linear(2, 2))]
    wrapper, other, _ = made
    other.__class__ = type("FSDPOptimizedModule", (type(other),), {})  # what fully_shard does
    assert {id(one) for one in wrappers_of(model)} == {id(wrapper), id(other)}
    assert [id(one) for one in wrappers_of(wrapper)] == [id(other)]
