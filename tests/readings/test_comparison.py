"""Two scans head by head: differences, their order, what has no partner, mistakes."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import attemper
from attemper import InputError, MissingExtraError
from attemper.monitor.compare import compare
from attemper.readings.reading import Reading
from attemper.results.comparison import ALWAYS, Comparison, HeadChange, table
from tests.monitor.tiny_models import TINY, inputs


@functools.cache
def scans() -> tuple[attemper.Scan, attemper.Scan]:
    """A tiny Llama, and the same with the queries of one head of its second layer ten times as long."""
    model = TINY["llama"].build().eval()
    batch = inputs("decoder", None)
    before = attemper.scan(model, [batch])
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[24:36] *= 10  # head 2 of size 12
    return before, attemper.scan(model, [batch])


def test_the_head_that_changed_comes_first_with_its_differences():
    before, after = scans()
    comparison = compare(before, after)
    assert isinstance(comparison, Comparison)
    assert (comparison.before, comparison.after) == ("LlamaForCausalLM", "LlamaForCausalLM")
    assert len(comparison.heads) == 8
    assert comparison.only_before == comparison.only_after == ()
    first = comparison.heads[0]
    assert (first.site, first.kind, first.mode, first.head) == ("model.layers.1.self_attn", "self", "eval", 2)
    old, new = (scan.sites[1].heads[2] for scan in (before, after))
    for statistic in ALWAYS:
        one, other = getattr(old, statistic), getattr(new, statistic)
        assert getattr(first, statistic) == (one, other)
        assert first.change(statistic) == pytest.approx(other - one, abs=0)
    assert first.change("normalized_entropy") < 0 < first.change("max_logit")  # type: ignore[operator]
    for head in comparison.heads[1:]:
        assert [head.change(statistic) for statistic in ALWAYS] == [0, 0, 0, 0]


def changed(reading: Reading, site: int, head: int, **numbers: float | None) -> Reading:
    heads = list(reading.sites[site].heads)
    heads[head] = dataclasses.replace(heads[head], **numbers)  # type: ignore[arg-type]
    sites = list(reading.sites)
    sites[site] = dataclasses.replace(sites[site], heads=tuple(heads))
    return dataclasses.replace(reading, sites=tuple(sites))


def test_heads_are_in_order_of_what_they_changed_and_missing_numbers_come_first():
    before = scans()[0].reading
    entropy = before.sites[0].heads[1].normalized_entropy
    assert entropy is not None
    after = changed(before, 0, 1, normalized_entropy=entropy - 0.2, max_logit=None)
    after = changed(after, 1, 3, normalized_entropy=(before.sites[1].heads[3].normalized_entropy or 0) + 0.1)
    after = changed(after, 0, 0, first_token_mass=0.9)
    after = changed(after, 1, 0, normalized_entropy=None)
    comparison = compare(before, after)
    found = [(head.site[13:14], head.head) for head in comparison.heads[:4]]
    assert found == [("1", 0), ("0", 1), ("1", 3), ("0", 0)]
    assert comparison.heads[0].change("normalized_entropy") is None
    assert comparison.heads[1].change("normalized_entropy") == pytest.approx(-0.2)
    assert [head.head for head in comparison.largest("max_logit", 1)] == [1]
    assert [head.head for head in comparison.largest("first_token_mass", 1)] == [0]
    with pytest.raises(InputError, match=r"largest\(statistic\) must be one of 'normalized_entropy', .* got 'mass'"):
        comparison.largest("mass")


def test_scans_readings_documents_and_files_compare_the_same(tmp_path: Path):
    before, after = scans()
    wanted = compare(before, after).to_dict()
    paths = [tmp_path / name for name in ("before.json", "after.json")]
    for path, scan in zip(paths, (before, after), strict=True):
        path.write_text(scan.to_json(), "utf-8")
    assert compare(before.reading, after.to_dict()).to_dict() == wanted
    assert compare(paths[0], str(paths[1])).to_dict() == wanted
    assert compare(before.to_json(), after.to_json()).to_dict() == wanted
    assert compare(before.to_dict() | {"schema": 1}, after).to_dict() == wanted
    assert json.loads(attemper.compare(before, after).to_json(2)) == wanted
    one = wanted["heads"][0]["max_logit"]
    assert one["change"] == one["after"] - one["before"]


def test_sites_without_a_partner_are_listed():
    before, after = (scan.reading for scan in scans())
    renamed = dataclasses.replace(after.sites[1], name="model.layers.9.self_attn")
    trained = dataclasses.replace(after.sites[0], mode="train")
    comparison = compare(before, dataclasses.replace(after, sites=(*after.sites[:1], renamed, trained)))
    assert len(comparison.heads) == 4
    assert comparison.only_before == ("model.layers.1.self_attn",)
    assert comparison.only_after == ("model.layers.9.self_attn", "model.layers.0.self_attn")
    assert repr(comparison).endswith("4 heads, 3 sites on one side only)")
    assert "only after model.layers.9.self_attn" in str(comparison)


def drawn(found: Comparison, width: int, **options: Any) -> str:
    """Its table in a terminal."""
    file = io.StringIO()
    Console(file=file, width=width).print(table(found, width, **options))
    return file.getvalue()


def test_it_prints_a_table_of_the_largest_changes():
    before, after = scans()
    text = str(compare(before, after))
    lines = text.splitlines()
    assert lines[0] == "LlamaForCausalLM -> LlamaForCausalLM"
    for line, side in zip(lines[1:3], ("before", "after"), strict=True):
        assert re.fullmatch(rf"{side}: float32, text [0-9a-f]{{8}}, .* UTC, all rows, 120 tokens", line)
    assert lines[3].startswith("1 of 8 heads differs beyond rounding; mean normalised entropy ")
    (title,) = (place for place, line in enumerate(lines) if line.startswith("site  "))
    row = lines[title + 1]
    assert "  points (floor)  " in lines[title]
    assert row.split()[:3] == ["model.layers.1.self_attn", "1", "2"]
    old, new = (scan.sites[1].heads[2] for scan in (before, after))
    assert f"{old.max_logit:.1f} -> {new.max_logit:.1f}" in row
    assert f"{old.normalized_entropy * 100:.1f} -> {new.normalized_entropy * 100:.1f}" in row  # type: ignore[operator]
    change = f"{(new.normalized_entropy - old.normalized_entropy) * 100:+.3g}"  # type: ignore[operator]
    assert f"{change} ({compare(before, after).heads[0].floors['normalized_entropy'] * 100:.2g})" in row  # type: ignore[operator]
    many = changed(before.reading, 0, 0, normalized_entropy=None)
    sites = [dataclasses.replace(many.sites[0], name=f"layer.{place}") for place in range(9)]
    long = dataclasses.replace(many, sites=tuple(sites))
    told = drawn(compare(long, long), 60, statistic="normalized_entropy")
    assert "and 16 heads that changed less" in told
    assert "- -> -" in told


def test_a_narrow_terminal_leaves_columns_out_and_cuts_no_digit():
    before, after = scans()
    told = drawn(compare(before, after), 60, statistic="max_logit", top=1)
    lines = told.splitlines()
    assert max(map(len, lines)) <= 60
    row = lines[next(place for place, line in enumerate(lines) if line.startswith("site  ")) + 1]
    old, new = (scan.sites[1].heads[2].max_logit for scan in (before, after))
    assert f"{old:.1f} -> {new:.1f}" in row
    assert "…" not in told
    assert "and 7 heads that changed less" in told


def test_a_line_says_how_many_heads_differ_where_most_and_what_it_does_not_cover():
    one = scans()[0].reading
    assert compare(one, one).summary().startswith("8 heads, none differs; mean normalised entropy ")
    first = one.sites[0].heads[1].max_logit
    assert first is not None
    other = changed(changed(one, 0, 1, max_logit=first + 80), 1, 0, max_logit=None)
    told = compare(one, other).summary("max_logit")
    begins = "the first is head 1 of layer 0, and 1 in a later layer may follow from it"
    assert told.startswith(f"2 of 8 heads differ beyond rounding; {begins}; mean largest logit ")
    place = "in model.layers.0.self_attn, head 1"
    assert f"largest change 80 {place}: {first:.4g} -> {first + 80:.4g}; " in told
    assert "1 head has a number on one side only" in told
    told = compare(one, dataclasses.replace(other, tokens=one.tokens + 1, text_digest=None)).summary("max_logit")
    assert told.startswith("1 of 1 head differs beyond rounding and the spread of batches (7 heads are not judged); ")
    assert f"the texts differ (tokens: {one.tokens} and {one.tokens + 1})" in told
    fewer = compare(one, dataclasses.replace(one, sites=one.sites[:1]))
    assert "; 1 site is on one side only" in fewer.summary()
    with pytest.raises(InputError, match=r"summary\(statistic\) must be one of .* Did you mean 'max_logit'"):
        fewer.summary("max_logits")


def test_the_two_sides_may_be_named():
    one = scans()[0]
    comparison = compare(one, one, names=("yesterday", "today"))
    assert (comparison.before, comparison.after) == ("yesterday", "today")
    assert comparison.to_dict()["tokens"] == {"before": one.tokens, "after": one.tokens}


def test_to_pandas_has_a_row_for_each_head(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("pandas")
    comparison = compare(*scans())
    frame = comparison.to_pandas()
    assert list(frame["head"]) == [head.head for head in comparison.heads]
    assert list(frame.columns[:5]) == ["site", "layer", "kind", "mode", "head"]
    assert list(frame["layer"]) == [int(head.site.split(".")[2]) for head in comparison.heads]
    assert list(frame["max_logit_change"]) == [head.change("max_logit") for head in comparison.heads]
    assert list(frame["effective_tokens_after"]) == [head.effective_tokens[1] for head in comparison.heads]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtraError, match=r"Comparison\.to_pandas needs the package pandas"):
        comparison.to_pandas()


def test_the_change_stays_on_a_narrow_terminal_which_says_what_it_leaves_out_and_lists_no_head_that_is_alike():
    before, after = scans()
    found = compare(before, after)
    wide = dataclasses.replace(found, heads=tuple(replace_pair(head) for head in found.heads))
    for width in (60, 80):
        told = drawn(wide, width, statistic="max_logit")
        assert "change (floor)" in " ".join(told.split())
        assert "no room for: " in told
    assert "no room for" not in drawn(found, 200)
    same = str(compare(before, before))
    assert "self_attn" not in same
    assert "that changed less" not in same


def replace_pair(head: HeadChange) -> HeadChange:
    """The same with numbers that need much room."""
    return dataclasses.replace(head, pairs={**head.pairs, "max_logit": (1e11, 1e12)})


def test_mistakes_are_told(tmp_path: Path):
    before, after = (scan.reading for scan in scans())
    fewer = dataclasses.replace(after.sites[0], heads=after.sites[0].heads[:3])
    with pytest.raises(InputError, match=r"model\.layers\.0\.self_attn has 4 heads before and 3 after"):
        compare(before, dataclasses.replace(after, sites=(fewer,)))
    other = dataclasses.replace(after.sites[0], name="encoder")
    with pytest.raises(InputError, match=r"no site in common. Before: model.* After: encoder \(eval\)\."):
        compare(before, dataclasses.replace(after, sites=(other,)))
    train = tuple(dataclasses.replace(site, mode="train") for site in after.sites)
    with pytest.raises(
        InputError, match=r"before is in mode eval and after in mode train\. .*call model\.train\(\) or"
    ):
        compare(before, dataclasses.replace(after, sites=train))
    inner = tuple(dataclasses.replace(site, name=site.name.removeprefix("model.")) for site in after.sites)
    for where, pair in (("After", (inner, after.sites)), ("Before", (after.sites, inner))):
        with pytest.raises(
            InputError, match=rf"{where} has the same names behind 'model\.': .*scan\(model\.model, bat"
        ):
            compare(dataclasses.replace(after, sites=pair[0]), dataclasses.replace(after, sites=pair[1]))
    with pytest.raises(InputError, match=r"compare\(after\) must be a Scan, its reading, or .* got int"):
        compare(before, 3)  # type: ignore[arg-type]
    with pytest.raises(
        InputError, match=r"compare\(before\): this scan is of schema 7; this version of attemper reads 1 and 2"
    ):
        compare(before.to_dict() | {"schema": 7}, after)
    with pytest.raises(InputError, match=r"compare\(before\): the file '.*nowhere.json' cannot be read: No such file"):
        compare(tmp_path / "nowhere.json", after)
    with pytest.raises(InputError, match=r"compare\(after\): sites\[0\] has no 'kind': it is not what"):
        compare(before, before.to_dict() | {"sites": [{"name": "x"}]})
