"""A watch that does not see a model, or not all of it, says so once, at its first step."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attemper
from attemper import QKClip
from attemper.integrations.training import Monitor
from attemper.monitor.checked_model import why_not_all
from attemper.monitor.sampled_steps import MOST_PASSES
from tests.sites.own_models import Own
from tests.support.shadow_models import torch_warns

X = torch.randn(2, 10, 32)


class Channels(Own):
    """Attends over channels, and not over keys."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.split(x)
        return value @ (query.transpose(-2, -1) @ key).softmax(-1)


class Part(nn.Module):
    """One attention that is seen, and a part that is not, or that does not run."""

    def __init__(self, part: nn.Module, runs: bool) -> None:
        super().__init__()
        self.seen, self.part, self.runs = Own(), part, runs

    def forward(self, x: Tensor) -> Any:
        return self.seen(x), self.part(x) if self.runs else None


def compiled() -> nn.Module:
    torch._dynamo.reset()
    return torch.compile(Own(), backend="eager")  # type: ignore[return-value]


NOTHING: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "no attention": (lambda: nn.Linear(32, 3), {}, r"saw no attention in Linear\..*attemper\.tap\(query, key, name="),
    "compiled": (compiled, {"observe": "beside"}, r"its calls run compiled.*attemper\.tap\(query, key, name="),
    "sites": (
        Own,
        {"sites": ["nope"]},
        r"matches none of the sites that were seen: Own\. Name some of these, or leave",
    ),
    "skipped": (Channels, {}, r"saw no attention in Channels that(.|\n)*\n  Channels: "),
}


@pytest.mark.parametrize("name", NOTHING)
@pytest.mark.parametrize("before", [True, False], ids=["stepped before the loop", "not stepped before"])
def test_a_first_step_in_which_nothing_was_seen_is_told_once_with_the_line_to_write(name: str, before: bool) -> None:
    made, options, said = NOTHING[name]
    model = made()
    with attemper.watch(model, **options) as watch:
        if before:
            watch.step()
        model(X)
        with pytest.warns(UserWarning, match="attemper: nothing was measured in the first step") as told:
            watch.step()
        for _ in range(2):
            model(X)
            watch.step()
        assert "nothing was measured so far" in repr(watch)
    (warning,) = told
    assert re.search(said, str(warning.message)), warning.message


def test_a_step_before_the_loop_shows_nothing_and_is_not_told_and_two_of_them_are() -> None:
    with attemper.watch(Own()) as watch:
        watch.step()
        with pytest.warns(
            UserWarning, match=r"nothing was measured.*run the model inside.*torch\.compile or a wrapper"
        ):
            watch.step()


@torch_warns
def test_a_training_step_that_is_compiled_as_one_function_is_told_in_one_line_with_what_to_do() -> None:
    torch._dynamo.reset()
    model = Own()

    @partial(torch.compile, backend="eager")
    def train_step() -> Tensor:
        loss = model(X).square().mean()
        loss.backward()
        return loss

    with attemper.watch(model) as watch:
        train_step()
        watch.step()  # which may stand before the loop
        train_step()
        with pytest.warns(UserWarning, match="nothing was measured in the first step") as told:
            watch.step()
    (warning,) = told
    said = str(warning.message)
    assert "one function of a whole training step, compile the model in it instead, or use attemper.tap" in said
    assert "\n" not in said


def test_taps_inside_such_a_step_are_read_and_no_module_is_said_to_be_unseen() -> None:
    torch._dynamo.reset()

    class Tapped(Own):
        def forward(self, x: Tensor) -> Tensor:
            query, key, _ = self.split(x)
            attemper.tap(query, key, name="mine")
            return super().forward(x)

    model = Tapped()
    train_step = torch.compile(lambda: model(X).square().mean().backward(), backend="eager")
    with attemper.watch(model) as watch:
        train_step()
        watch.step()
        assert [site.name for site in watch.table().sites] == ["mine"]


def test_a_step_that_every_leaves_out_says_nothing_of_what_it_shows() -> None:
    model = Own()
    with attemper.watch(model, every=3) as watch:
        watch.step(99)
        for _ in range(3):
            model(X)
            watch.step()
    assert watch.history("entropy").steps.tolist() == [102]


def test_passes_that_become_steps_of_their_own_are_told_as_well() -> None:
    model = nn.Linear(32, 3)
    with attemper.watch(model, every=7) as watch:
        for _ in range(MOST_PASSES):
            model(X)
        with pytest.warns(UserWarning, match="nothing was measured in the first step"):
            model(X)
        assert repr(watch) == "Watch('Linear': 3 samples in memory, nothing was measured so far)"


def test_a_watch_with_a_store_that_was_never_stepped_is_told_when_it_is_closed(tmp_path: Path) -> None:
    model = nn.Linear(32, 3)
    watch = attemper.watch(model, store=tmp_path / "run")
    model(X)
    assert repr(watch) == (
        "Watch('Linear': 1 sample in run, 0 dropped, nothing was measured so far, 1 pass held until the first step)"
    )
    with pytest.warns(UserWarning, match="nothing was measured in the first step"):
        watch.close()
    with pytest.raises(RuntimeError), attemper.watch(model, store=tmp_path / "failed"):
        model(X[..., :3])


@pytest.mark.parametrize(
    ("part", "runs", "reason"),
    [
        (Channels, True, "its softmax runs over channels, not over tokens"),
        (lambda: nn.MultiheadAttention(32, 4), False, "no attention of it was seen in a sampled step"),
    ],
    ids=["skipped", "not run"],
)
def test_parts_that_were_not_measured_are_named_at_the_first_step(
    part: Callable[[], nn.Module], runs: bool, reason: str
) -> None:
    model = Part(part(), runs)
    with attemper.watch(model) as watch:
        model(X)
        with pytest.warns(UserWarning, match=rf"1 part of Part was not measured:\n  part: .*{reason}") as told:
            watch.step()
        model(X)
        watch.step()
    assert len(told) == 1


def test_many_parts_are_a_line_for_each_reason_and_no_more_than_twelve() -> None:
    skipped = {f"layers.{number}.a": "why" for number in range(40)} | {f"p{'x' * number}": "y" for number in range(30)}
    lines = why_not_all(nn.Linear(1, 1), skipped).splitlines()
    assert lines[:2] == ["70 parts of Linear were not measured:", "  layers.*.a (0 to 39): why"]
    assert (len(lines), lines[-1]) == (14, "  and 19 more")


def test_the_watch_of_a_control_leaves_it_to_the_control_to_say_what_it_does_not_see() -> None:
    model = Part(nn.MultiheadAttention(32, 4), False)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with QKClip(model, sites=["seen"]) as clip:
            model(X)
            clip.step()
    assert [str(one.message) for one in told if "was not measured" in str(one.message)] == []


def test_a_callback_whose_model_stays_in_eval_mode_says_so() -> None:
    model = Own().eval()
    monitor = Monitor(every=1)
    monitor.begin(model)
    model(X)
    with pytest.warns(
        UserWarning, match=r"nothing was measured.* no forward pass ran in training mode.*model\.train\(\)"
    ):
        monitor.step(0)
    monitor.close()


def test_an_attention_whose_forward_is_called_without_its_hooks_is_measured_and_not_said_to_be_missing() -> None:
    class Attention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Attention()

        def forward(self, x: Tensor) -> Tensor:
            return self.attention.forward(x)

    model = nn.Sequential(Block(), Block())
    with attemper.watch(model) as watch:  # a warning would be an error here
        model(torch.randn(1, 2, 8, 4))
        watch.step()
    assert [site.name for site in watch.table().sites] == ["0", "1"]
