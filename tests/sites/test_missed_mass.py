"""The missed mass of layers that choose their keys, against weights of their own eager attention over all keys."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor, nn

import attemper

pytest.importorskip("transformers")

from tests.sites.architectures import BY_TITLE

MORE = pytest.mark.slow("more of what a few cases show by default")


@contextmanager
def missed(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Missed mass [B, H, Q] of every layer that has an indexer, by name: its eager function is called once more, with
    the mask that the layer was given, and the weights of keys that its own call hides are added up.
    """
    file, given, found = sys.modules[type(model).__module__], {}, {}
    names = {module: name for name, module in model.named_modules()}
    plain: Any = file.eager_attention_forward  # pyright: ignore[reportAttributeAccessIssue]

    def note(module: nn.Module, _: Any, kwargs: dict[str, Any]) -> None:
        given[module] = kwargs["attention_mask"]

    def spy(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        weights = plain(module, query, key, value, given[module], *args, **kwargs)[1]
        hidden = (mask < -1e30) & (given[module] > -1e30)
        found[names[module]] = (weights.double() * hidden).sum(-1)
        return plain(module, query, key, value, mask, *args, **kwargs)

    handles = [
        module.register_forward_pre_hook(note, with_kwargs=True) for module in names if hasattr(module, "indexer")
    ]
    file.eager_attention_forward = spy  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield found
    finally:
        file.eager_attention_forward = plain  # pyright: ignore[reportAttributeAccessIssue]
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize(
    ("title", "padding"),
    [
        ("DeepSeek V3.2", "left"),
        pytest.param("DeepSeek V3.2", "right", marks=MORE),
        pytest.param("GLM 5", None, marks=MORE),
        pytest.param("GLM 5", "left", marks=MORE),
        ("HunYuan V4", None),
        pytest.param("MiniMax M3", "right", marks=MORE),
    ],
)
@pytest.mark.parametrize("implementation", ["sdpa", pytest.param("eager", marks=MORE)])
def test_it_is_the_weight_of_keys_that_were_not_chosen(title: str, padding: str | None, implementation: str) -> None:
    model, batch = BY_TITLE[title].build(), BY_TITLE[title].batch(padding)
    for name, parameter in model.named_parameters():
        if "q_b_proj" in name:
            parameter.data.mul_(20.0)  # weights far from uniform: what is missed is no count of keys
    with torch.no_grad(), missed(model) as expected:
        model(**batch)
    real = batch["attention_mask"].bool() if padding else torch.ones_like(batch["input_ids"], dtype=torch.bool)
    model.set_attn_implementation(implementation if model._supports_sdpa else "eager")
    found = attemper.scan(model, [batch])
    if (title, implementation) == ("MiniMax M3", "eager"):  # its call has a keyword that is not known: read by hand
        reasons = [skip.reason for skip in found.skipped if skip.name.endswith(".missed_mass")]
        assert reasons == ["its scores are made by hand, and those of keys that it did not choose are gone"]
        return
    choosing = {name for name, values in expected.items() if bool(values.any())}
    assert choosing == {site.name for site in found.sites if site.heads[0].missed_mass is not None}
    for site in (one for one in found.sites if one.name in choosing):
        rows = expected[site.name].transpose(1, 2)[real]
        assert float(rows.mean(0).max()) > 0.02
        assert float(rows.std(0).max()) > 0.05
        assert [head.missed_mass for head in site.heads] == pytest.approx(rows.mean(0).tolist(), abs=2e-6)


def test_tables_files_and_merged_scans_have_it(tmp_path: Path) -> None:
    model = BY_TITLE["DeepSeek V3.2"].build()
    batches = [BY_TITLE["DeepSeek V3.2"].batch(None) for _ in range(2)]
    whole = attemper.scan(model, batches)
    parts = [attemper.scan(model, [batch], shard=(place, 2)) for place, batch in enumerate(batches)]
    loaded = [attemper.open(part.save(tmp_path / f"{place}.safetensors")) for place, part in enumerate(parts)]
    merged = loaded[0].merge(loaded[1])
    masses = [[head.missed_mass for head in scan.reading.heads] for scan in (whole, merged)]
    assert masses[0] == pytest.approx(masses[1], rel=1e-12)
    assert "missed" in str(whole)
    assert json.loads(whole.to_json())["sites"][0]["heads"][0]["missed_mass"] == whole.sites[0].heads[0].missed_mass
    assert "Missed mass" in whole.to_html(tmp_path / "page.html").read_text("utf-8")


def test_a_choice_that_leaves_nothing_out_misses_nothing() -> None:
    model = BY_TITLE["DeepSeek V3.2"].build()
    for module in model.modules():
        if hasattr(module, "index_topk"):
            module.index_topk = 1000
    found = attemper.scan(model, [BY_TITLE["DeepSeek V3.2"].batch(None)])
    assert [head.missed_mass for head in found.reading.heads] == pytest.approx([0.0] * 8, abs=2e-6)


def test_where_it_cannot_be_told_the_reason_is() -> None:
    model = BY_TITLE["DeepSeek V4"].build()
    found = attemper.scan(model, [BY_TITLE["DeepSeek V4"].batch(None)])
    reasons = {skip.name: skip.reason for skip in found.skipped if skip.name.endswith(".missed_mass")}
    assert reasons
    assert all("of the keys that it chooses from, and there are" in reason for reason in reasons.values())
    assert all(head.missed_mass is None for head in found.reading.heads)


def test_files_from_before_there_was_missed_mass_are_read(tmp_path: Path) -> None:
    model, batch = BY_TITLE["SmolLM3"].build(), BY_TITLE["SmolLM3"].batch(None)
    path = attemper.scan(model, [batch]).save(tmp_path / "now.safetensors")
    expected = attemper.open(path)
    from safetensors import safe_open

    with safe_open(path, "np") as file:
        header = json.loads(file.metadata()["attemper"])
    keep, start, columns = [], 0, []
    for name, width in header["columns"]:
        if "missed_mass" not in name:
            keep += list(range(start, start + width))
            columns.append([name, width])
        start += width
    arrays = {name: sums[:, keep].copy() for name, sums in load_file(path).items()}
    old = tmp_path / "old.safetensors"
    save_file(arrays, old, {"attemper": json.dumps({**header, "columns": columns})})
    assert attemper.open(old).reading == expected.reading
