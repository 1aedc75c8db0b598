"""Scalars of a reading: names, aggregates, and the budget that keeps a tracker from drowning."""

from __future__ import annotations

import importlib
import inspect
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import attemper
from attemper import InputError, Scan
from attemper.integrations.metrics import budget, check_statistics, scalars
from attemper.readings.alarms import OF_HEADS
from tests.sites.own_models import Own

STATS = ("normalized_entropy", "max_logit")


class Two(nn.ModuleList):
    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [layer(x) for layer in self]


@pytest.fixture
def scan() -> Scan:
    """Two sites of four heads."""
    return attemper.scan(Two([Own(), Own()]), [torch.randn(2, 40, 32)])


def test_levels_hold_the_numbers_of_the_reading(scan: Scan) -> None:
    levels = scalars(scan, STATS)
    heads = {(site.name, head.head): head for site in scan.sites for head in site.heads}
    assert len(levels["head"]) == 2 * 8
    assert len(levels["site"]) == 2 * 3 * 2
    for (site, number), head in heads.items():
        assert levels["head"][f"attention/{site}/head{number}/max_logit"] == head.max_logit
    entropies = [head.normalized_entropy for head in heads.values() if head.normalized_entropy is not None]
    first = entropies[:4]
    assert levels["model"]["attention/normalized_entropy/mean"] == pytest.approx(sum(entropies) / 8, abs=1e-15)
    assert levels["model"]["attention/normalized_entropy/min"] == min(entropies)
    assert levels["site"]["attention/0/normalized_entropy/max"] == max(first)
    assert levels["site"]["attention/0/normalized_entropy/mean"] == pytest.approx(sum(first) / 4, abs=1e-15)


def test_alarms_are_counted_by_kind_with_zeros_so_that_lines_do_not_break() -> None:
    model, batch = Own(), torch.randn(2, 40, 32)
    model.qkv.weight.data *= 40
    scan = attemper.scan(model, [batch], limits={"logits": 1.0})
    found = scalars(scan, STATS)["model"]
    assert found["attention/alarms/logits"] == 4.0
    assert found["attention/alarms/nonfinite"] == 0.0
    assert sum(value for name, value in found.items() if "/alarms/" in name) == len(scan.alarms)


def test_a_value_that_a_head_lacks_is_left_out(scan: Scan) -> None:
    assert scalars(scan, ["gini"])["head"] == {}
    assert "attention/gini/mean" not in scalars(scan, ["gini"])["model"]


def test_calls_of_one_module_and_kinds_of_one_name_are_told_apart(scan: Scan) -> None:
    one = scan.sites[0]
    sites = (replace(one, name="a"), replace(one, name="a", kind="cross"), replace(one, name="b#2"))
    names = scalars(Scan(replace(scan.reading, sites=sites), {}), ["max_logit"])["head"]
    assert {name.split("/")[1] for name in names} == {"a.self.train", "a.cross.train", "b.call2"}


OF_THE_MODEL = 6 + sum(not kind.needs_ranks for kind in OF_HEADS)
"""Mean, least and largest of two statistics, and a count of each kind of alarm."""


@pytest.mark.parametrize(
    ("more_keys", "levels"),
    [(28, "model site head"), (27, "model site"), (12, "model site"), (11, "model"), (0, "model"), (-1, "")],
)
def test_a_level_is_sent_whole_or_not_at_all(
    scan: Scan, more_keys: int, levels: str, caplog: pytest.LogCaptureFixture
) -> None:
    found, max_keys = scalars(scan, STATS), OF_THE_MODEL + more_keys
    assert [len(values) for values in found.values()] == [OF_THE_MODEL, 12, 16]
    chosen = budget(max_keys, None)
    with caplog.at_level(logging.INFO, "attemper"):
        sent = chosen.choose(found)
        chosen.choose(found)
    assert sent == {name: value for level in levels.split() for name, value in found[level].items()}
    left_out = OF_THE_MODEL + 28 - len(sent)
    assert [record.getMessage().split(" are not")[0] for record in caplog.records] == (
        [f"{left_out} scalars by {' and '.join(list(found)[len(levels.split()) :])}"] if left_out else []
    )
    assert [record.levelname for record in caplog.records] == (["WARNING"] if left_out else [])
    assert all(f"max_keys={max_keys}. Raise max_keys=, or choose some by" in line for line in caplog.messages)


def test_by_default_layers_of_any_number_are_sent_and_heads_are_not_and_nothing_is_left_out(
    scan: Scan, caplog: pytest.LogCaptureFixture
) -> None:
    site = replace(scan.sites[0], heads=tuple(replace(scan.sites[0].heads[0], head=head) for head in range(32)))
    sites = tuple(replace(site, name=f"layers.{layer}") for layer in range(126))
    found = scalars(Scan(replace(scan.reading, sites=sites), {}), STATS)
    assert [len(values) for values in found.values()] == [OF_THE_MODEL, 6 * 126, 2 * 32 * 126]
    assert set(budget(None, None).choose(found)) == {*found["model"], *found["site"]}
    heads = budget(None, "attention/*/head3/max_logit").choose(found)
    assert heads.keys() == {f"attention/layers.{layer}/head3/max_logit" for layer in range(126)}
    assert caplog.records == []


def test_the_callbacks_of_all_frameworks_have_the_same_defaults() -> None:
    defaults = {
        "every": 50, "rows": 128, "stats": ("normalized_entropy", "max_logit"), "trackers": None, "max_keys": None,
        "filter": None, "picture_every": 10, "store": True, "evaluation": False, "on_alarm": None,
    }  # fmt: skip
    for framework, module in (("transformers", "transformers"), ("lightning.pytorch", "lightning")):
        pytest.importorskip(framework)
        callback = importlib.import_module(f"attemper.integrations.{module}").AttemperCallback
        parameters = inspect.signature(callback).parameters
        assert {name: p.default for name, p in parameters.items() if p.kind is not p.VAR_KEYWORD} == defaults


def test_a_filter_comes_before_the_budget(scan: Scan) -> None:
    found = scalars(scan, STATS)
    assert set(budget(16, ["*/head?/*"]).choose(found)) == set(found["head"])
    assert set(budget(200, lambda name: name.endswith("/min")).choose(found)) == {
        name for values in found.values() for name in values if name.endswith("/min")
    }
    assert list(budget(1, "attention/normalized_entropy/min").choose(found)) == ["attention/normalized_entropy/min"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, None), "max_keys must be an int of at least 1, or None, got 0"),
        ((True, None), "max_keys must be an int of at least 1, or None, got True"),
        ((9, 3), r"filter must be a function \(name\) -> bool or glob patterns such as .* got 3"),
        ((9, [3]), "filter must be a function"),
        ((9, []), "filter must be a function"),
    ],
)
def test_a_budget_without_meaning_is_an_error(arguments: tuple[Any, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        budget(*arguments)


def test_statistics_are_fields_of_a_head() -> None:
    assert check_statistics("mass") == ("mass",)
    assert check_statistics(["mass", "gini", "mass"]) == ("mass", "gini")
    with pytest.raises(InputError, match=r"stats must be one of 'entropy_nats'.*; got 'entropy'"):
        check_statistics(["entropy"])
    with pytest.raises(InputError, match="stats must be some of entropy_nats"):
        check_statistics([])
