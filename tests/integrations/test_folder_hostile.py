"""A tempered model's folder that is damaged, contradicts itself or wants to run something: told, and nothing runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import attemper
from attemper import InputError
from attemper.integrations import pretrained
from attemper.nn import Entmax, LearnedTemperature
from tests.integrations.test_folder import llama, logits
from tests.support.command import Run, one_line, run

pytest.importorskip("transformers")
__all__ = ["run"]


def saved(tmp_path: Path) -> Path:
    model = llama()
    attemper.temper(model, temperature=LearnedTemperature(4), normalizer=Entmax(1.3))
    model.save_pretrained(tmp_path)
    return tmp_path / "attemper.json"


SITE = "model.layers.0.self_attn"
LEARNED = {"kind": "LearnedTemperature", "floor": 0.01, "ceiling": 100.0}


def with_site(document: Any, temperatures: Any, normalizer: Any = None) -> Any:
    return document | {"sites": document["sites"] | {SITE: {"temperatures": temperatures, "normalizer": normalizer}}}


def nested(depth: int) -> Any:
    form: Any = LEARNED
    for _ in range(depth):
        form = {"kind": "ProductTemperature", "factors": [form]}
    return form


HOSTILE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "code by name": (lambda d: with_site(d, [{"kind": "os.system", "floor": "true"}]), "'os.system' is not a temper"),
    "a class of python": (lambda d: with_site(d, [{"kind": "__class__"}]), "'__class__' is not a temperature"),
    "a module of attemper.nn": (lambda d: with_site(d, [{"kind": "MultiheadAttention"}]), "is not a temperature"),
    "a kind of no name": (lambda d: with_site(d, [{"kind": ["TopK"]}]), "is not a temperature or normalizer"),
    "another option": (lambda d: with_site(d, [LEARNED | {"forward": "x"}]), "with the options .*'forward'.* is not"),
    "a missing option": (lambda d: with_site(d, [{"kind": "LearnedTemperature"}]), "cannot be made of"),
    "an option of another type": (lambda d: with_site(d, [LEARNED | {"floor": "low"}]), "LearnedTemperature"),
    "a bound out of range": (lambda d: with_site(d, [LEARNED | {"floor": -1.0}]), "must be"),
    "deep products": (lambda d: with_site(d, [nested(30)]), "ProductTemperature with the options"),
    "a normalizer for a temperature": (lambda d: with_site(d, [{"kind": "TopK", "k": 3}]), "TopK"),
    "a temperature for a normalizer": (lambda d: with_site(d, [], LEARNED), "LearnedTemperature"),
    "many keys": (lambda d: with_site(d, [LEARNED], {"kind": "TopK", "k": -3}), "k"),
    "a schedule by name": (
        lambda d: with_site(d, [{"kind": "ScheduledTemperature", "total_steps": 5, "schedule": {"name": "eval"}}]),
        "'eval' is not a schedule",
    ),
    "a site that is none": (lambda d: d | {"sites": {"nowhere": d["sites"][SITE]}}, "nowhere"),
    "sites that are none": (lambda d: d | {"sites": {SITE: []}}, "is damaged"),
    "no sites": (lambda d: d | {"sites": {}}, "is damaged"),
    "another version": (lambda d: d | {"version": 99}, "it says .*99"),
    "a list": (lambda d: [d], "not a description of a tempered model"),
    "infinity": (lambda d: with_site(d, [LEARNED | {"ceiling": float("inf")}]), "Infinity is not a JSON number"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.turns(2)
def test_a_hostile_description_is_told_and_runs_nothing(name: str, tmp_path: Path):
    path = saved(tmp_path)
    change, message = HOSTILE[name]
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(InputError, match=message):
        attemper.load(tmp_path)


@pytest.mark.parametrize("text", ["garbage", "[" * 100_000, "", "{"])
def test_a_description_that_is_no_json_is_told(text: str, tmp_path: Path):
    path = saved(tmp_path)
    path.write_text(text)
    with pytest.raises(InputError, match=r"attemper\.json cannot be read"):
        attemper.load(tmp_path)


def test_files_that_contradict_each_other_are_told(tmp_path: Path, run: Run):
    path = saved(tmp_path)
    description = path.read_text()
    path.unlink()
    for load in (attemper.load, lambda folder: pretrained.load(str(folder))):
        with pytest.raises(InputError, match=r"this model was tempered, and attemper\.json, .* is missing"):
            load(tmp_path)
    one_line(run("scan", tmp_path), 1, "this model was tempered")
    llama().save_pretrained(tmp_path)
    path.write_text(description)
    with pytest.raises(InputError, match="saved over a tempered one"):
        attemper.load(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"attemper": {}}))
    (tmp_path / "attemper.safetensors").unlink()
    with pytest.raises(InputError, match=r"attemper\.safetensors is not a file"):
        attemper.load(tmp_path)


def test_a_description_of_more_heads_than_its_tensors_have_is_told_by_the_model(tmp_path: Path):
    model = llama()
    attemper.temper(model, temperature=torch.ones(3) * 2)
    model.save_pretrained(tmp_path)
    again = attemper.load(tmp_path)
    with pytest.raises(InputError, match="has 3 temperatures; the query's heads are 4"):
        logits(again)


def test_a_config_that_names_code_or_kernels_chooses_neither(tmp_path: Path):
    saved(tmp_path)
    config = tmp_path / "config.json"
    content = json.loads(config.read_text())
    kernels = {"_attn_implementation_internal": "org/kernel", "attn_implementation": "org/kernel"}
    config.write_text(json.dumps(content | kernels))
    assert attemper.load(tmp_path).config._attn_implementation == "sdpa"
    for named in (["os.system"], ["Trainer"], [7], "GPT2Model", [], None):
        config.write_text(json.dumps(content | {"architectures": named}))
        with pytest.raises(InputError, match=r"names no class of transformers\. Pass cls=|could not be loaded"):
            attemper.load(tmp_path)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("nowhere", None), "there is no folder 'nowhere'"),
        ((".", None), "holds no model"),
        ((".", 7), r"must be a class with from_pretrained, got 7"),
    ],
)
def test_mistakes_are_told(given: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message):
        attemper.load(*given)
