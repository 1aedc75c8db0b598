"""``watch``: what it sees beside a model's own attention, and that the model does not notice."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attemper
from attemper import InputError
from attemper.monitor.options import WatchOptions
from attemper.sites.observation import current
from tests.sites.own_models import LIBRARY, OWN, ROWS, Own, entropies
from tests.support.identical_training import assert_identical_training
from tests.support.scans import hooks, of_heads

tf = pytest.importorskip("transformers")


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", OWN)
def test_models_of_ones_own_are_seen(name: str, seen: Callable[..., None]) -> None:
    model, batch = OWN[name]()
    expected = entropies(model, batch)
    with attemper.watch(model) as watch:
        model(*batch)
    found = watch.table()
    assert len(found.sites) == len(expected), [site.name for site in found.sites]
    worst = 0.0
    for site, entropy in zip(found.sites, expected, strict=True):
        worst = max(worst, float((of_heads(site) - entropy).abs().max()))
        assert worst < 2e-5, site.name
    seen(LIBRARY, *ROWS[name], error_nats=worst)


@pytest.mark.quick("sdpa", "encoder-decoder")
@pytest.mark.parametrize("name", ["sdpa", "softmax", "folded", "encoder", "encoder-decoder"])
def test_training_with_dropout_is_bit_identical(name: str, steps: int, seen: Callable[..., None]) -> None:

    def made() -> tuple[nn.Module, Callable[[Any], Tensor]]:
        model, batch = OWN[name](dropout=0.1)
        return model, lambda root: root(*batch).square().mean()

    assert_identical_training(made, steps)
    seen(LIBRARY, *ROWS[name], identical_steps=steps)


def test_sampled_rows_estimate_the_mean_and_say_that_the_maximum_is_a_bound() -> None:
    model, batch = OWN["sdpa"](tokens=256)
    with attemper.watch(model, rows=32) as watch:
        model(*batch)
    scan = watch.table()
    exact = entropies(model, batch)[0]
    stats = scan.row_statistics(scan.sites[0].name)
    assert stats.lower_bounds == ("max_logit",)
    error = stats.standard_error()["entropy"]
    assert ((of_heads(scan.sites[0]) - exact).abs() <= 5 * error).all()
    assert scan.sites[0].heads[0].rows == 2 * 32
    assert (scan.sites[0].queries, scan.tokens) == (256, 2 * 256)


def test_two_watches_see_the_same_and_leave_nothing_behind() -> None:
    model, batch = OWN["sdpa"]()
    one, two = attemper.watch(model), attemper.watch(model)
    model(*batch)
    assert one.table().to_dict()["sites"] == two.table().to_dict()["sites"]
    two.close()
    one.close()
    one.close()
    assert hooks(model) == 0
    assert current() == ()


def test_closed_in_the_middle_nothing_more_is_read_and_nothing_is_lost() -> None:
    model, batch = OWN["sdpa"]()
    watch = attemper.watch(model)
    model(*batch)
    before = watch.table().to_json()
    watch.close()
    model(*batch)
    assert watch.table().to_json() == before


def test_a_model_that_raises_is_left_as_it_was() -> None:
    model, batch = OWN["sdpa"]()
    with attemper.watch(model) as watch:
        with pytest.raises(RuntimeError):
            model(torch.zeros(2, 3, 5))
        assert current() == ()
        assert hooks(model) == 2
        model(*batch)
    assert len(watch.table().sites) == 1
    assert hooks(model) == 0


def test_a_copy_and_a_pickle_of_a_watched_model_do_not_report() -> None:
    model, batch = OWN["sdpa"]()
    with attemper.watch(model) as watch:
        twin = copy.deepcopy(model)
        buffer = io.BytesIO()
        pickle.dump(model, buffer)
        buffer.seek(0)
        again = pickle.load(buffer)
        twin(*batch)
        again(*batch)
        assert watch.passes == 0
        model(*batch)
        assert watch.passes == 1


def test_memory_stays_flat_over_many_steps(full_size: bool) -> None:
    model, batch = OWN["sdpa"]()
    with attemper.watch(model, rows=2) as watch:
        for _ in range(10):
            model(*batch).sum().backward()
            watch.step()
        gc.collect()
        before = sum(1 for thing in gc.get_objects() if type(thing) is Tensor)
        for _ in range(1000 if full_size else 20):
            model(*batch).sum().backward()
            watch.step()
        gc.collect()
        after = sum(1 for thing in gc.get_objects() if type(thing) is Tensor)
    assert after == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every": 0}, r"watch\(every=\.\.\.\) must be an int of at least 1, got 0"),
        ({"rows": 1.5}, r"watch\(rows=\.\.\.\) must be an int of at least 1, got 1.5"),
        ({"observe": "aside"}, "must be one of 'auto', 'beside', 'shadow', 'replace'"),
        ({"stats": "sharpness"}, "does not know 'sharpness'"),
        ({"store": __file__}, r"is a file\. A run is stored in a folder"),
        ({"store": 3}, r"Store\(path=\.\.\.\) must be the path of a folder, got 3"),
        ({"on_alarm": "print"}, r"watch\(on_alarm=\.\.\.\) must be a function of an Alarm"),
    ],
)
def test_arguments_without_meaning_are_errors(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        attemper.watch(Own(), **arguments)


def test_a_model_without_attention_says_what_to_do() -> None:
    model = nn.Linear(3, 3)
    with attemper.watch(model) as watch:
        with pytest.raises(
            InputError, match=r"has sampled nothing yet.* or another object, such as a deep copy, watch that"
        ):
            watch.table()
        model(torch.zeros(2, 3))
        with pytest.raises(InputError, match=r"watch saw no attention in Linear\. Seen are .* attemper\.tap"):
            watch.table()


def test_a_softmax_that_meets_no_values_is_no_attention() -> None:
    class Router(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.softmax(-1).topk(2).values

    model = Router()
    with attemper.watch(model) as watch:
        model(torch.randn(2, 3, 4, 5))
    with pytest.raises(InputError, match="saw no attention"):
        watch.table()


@pytest.mark.parametrize(("joint", "kind"), [(True, "self"), (False, "cross")])
def test_joint_attention_over_both_sequences_is_self_attention(joint: bool, kind: str) -> None:
    class Block(nn.Module):
        def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor) -> Tensor:
            both = torch.cat([encoder_hidden_states, hidden_states], 1)
            query, key = (both, both) if joint else (hidden_states, encoder_hidden_states)
            return F.scaled_dot_product_attention(query[:, None], key[:, None], key[:, None])

    model = Block()
    with attemper.watch(model) as watch:
        model(torch.randn(2, 7, 8), encoder_hidden_states=torch.randn(2, 5, 8))
    assert [site.kind for site in watch.table().sites] == [kind]


def test_the_options_of_a_watch_are_those_of_the_function() -> None:
    by_keyword = inspect.signature(attemper.watch).parameters.values()
    options = {part.name: part.default for part in fields(WatchOptions) if part.init}
    assert {one.name: one.default for one in by_keyword if one.name != "model"} == options
