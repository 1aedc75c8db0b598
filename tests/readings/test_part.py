"""Readings that merge: their law, their order, their files, and every file that is refused."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from torch import Tensor, nn

import attemper
from attemper.call.spans import spans_in_words
from attemper.errors import InputError
from attemper.readings import part_file
from attemper.readings.part import Part, label_list, merge
from attemper.readings.sums import places
from attemper.statistics import SHOWN

SHARDS = 4


class Two(nn.Module):
    """Two attentions; the second runs for batches of more than one sequence only."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.MultiheadAttention(16, 2, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x, x, x)[0]
        return self.layers[1](x, x, x)[0] if len(x) > 1 else x


def batches(index: int = 0, of: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(1 + n % 3, 36 + n, 16, generator=generator) for n in range(8)][index::of]


@cache
def plain(index: int, of: int, seed: int) -> attemper.Scan:
    return attemper.scan(Two(seed).eval(), batches(index, of), shard=(index, of))


def scan(index: int, of: int = SHARDS, seed: int = 0, **options: Any) -> attemper.Scan:
    if not options:
        return plain(index, of, seed)
    return attemper.scan(Two(seed).eval(), batches(index, of), shard=(index, of), **options)


def scans(**options: Any) -> list[attemper.Scan]:
    return [scan(index, **options) for index in range(SHARDS)]


def part(scan: attemper.Scan) -> Part:
    assert scan._part is not None
    return scan._part


def equal(one: attemper.Scan, two: attemper.Scan) -> bool:
    """Whether two scans are the same bits."""
    pairs = zip(part(one).sites, part(two).sites, strict=True)
    same = all(a.key == b.key and np.array_equal(a.sums, b.sums) for a, b in pairs)
    return same and replace(one.reading, date=None) == replace(two.reading, date=None)


# --- merging ---


def test_merged_shards_are_the_scan_of_everything():
    whole = attemper.scan(Two().eval(), batches())
    first, *others = scans()
    merged = first.merge(*others)
    assert merged.tokens == whole.tokens
    assert [site.name for site in merged.sites] == [site.name for site in whole.sites] == ["layers.0", "layers.1"]
    for mine, theirs in zip(merged.reading.heads, whole.reading.heads, strict=True):
        assert (mine.rows, mine.batches) == (theirs.rows, theirs.batches)
        assert mine.normalized_entropy_histogram == theirs.normalized_entropy_histogram
        for name in SHOWN:
            one, two = getattr(mine, name), getattr(theirs, name)
            assert one is two or one == pytest.approx(two, rel=1e-12, abs=1e-12), name
    assert merged.shards == ("0/4", "1/4", "2/4", "3/4")
    assert merged.missing == ()
    assert merged.notes == whole.notes


def test_any_order_and_any_grouping_give_the_same_bits(tmp_path: Path):
    parts = scans()
    expected = parts[0].merge(*parts[1:])
    for order in itertools.permutations(range(SHARDS)):
        a, b, c, d = (parts[place] for place in order)
        for merged in (a.merge(b, c, d), a.merge(b).merge(c.merge(d)), a.merge(b.merge(c).merge(d))):
            assert equal(merged, expected), order


def test_a_missing_shard_is_named_and_may_come_later(tmp_path: Path):
    parts = scans()
    assert parts[2].missing == ("0/4", "1/4", "3/4")
    some = parts[3].merge(parts[0])
    assert some.missing == ("1/4", "2/4")
    assert some.notes[-1] == "shards are missing, so the numbers leave out their texts: 1/4 to 2/4."
    assert some.reading.missing_shards == "1/4 to 2/4"
    later = attemper.open(some.save(tmp_path / "some.safetensors"))
    assert equal(later.merge(parts[2], parts[1]), parts[0].merge(*parts[1:]))


def test_scans_that_are_no_shards_have_a_digest_and_merge_once():
    one = attemper.scan(Two().eval(), batches()[:4])
    two = attemper.scan(Two().eval(), batches()[4:])
    assert re.fullmatch("#[0-9a-f]{12}", one.shards[0])
    assert one.shards == attemper.scan(Two().eval(), batches()[:4]).shards
    assert equal(one.merge(two), two.merge(one))
    assert one.merge(two).tokens == attemper.scan(Two().eval(), batches()).tokens
    with pytest.raises(InputError, match=r"shard #[0-9a-f]{12} is there twice"):
        one.merge(one)


def test_a_site_with_another_number_of_heads_elsewhere_is_not_shown():
    first, second = (part(scan(index)) for index in (0, 1))
    (segment,) = second.segments
    key = next(iter(segment.sites))
    site = segment.sites[key]
    fewer = replace(site, label=replace(site.label, heads=1), sums=site.sums[:1])
    changed = replace(second, segments=(replace(segment, sites={**segment.sites, key: fewer}),))
    third = part(scan(2))
    for order in itertools.permutations((first, changed, third)):
        reading = merge(order).reading()
        assert [site.name for site in reading.sites] == ["layers.1"]
        assert [(skip.name, skip.reason[:30]) for skip in reading.skipped] == [
            ("layers.0", "its number of heads changed fr")
        ]


def test_unlike_machines_are_words():
    first, second = part(scan(0)), replace(part(scan(1)), computed_on=("another processor",))
    reading = merge([second, first]).reading()
    assert "another processor" in (reading.computed_on or "")
    assert reading.notes[-1].startswith("the parts come from different machines, which affects the last bits: ")
    assert merge([first, part(scan(1))]).reading().computed_on is None


# --- what does not merge ---


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            lambda: scan(1, seed=1),
            r"shards 0/4 and 1/4 are of different models, Two and Two \(same name, other weights\)",
        ),
        (lambda: scan(1, fewest_keys=16), "differ in fewest_keys: 32 and 16. Their sums are of other things"),
        (lambda: scan(1, stats="gini"), "differ in the statistics: "),
        (lambda: scan(1, of=3), "differ in the number of shards: 4 and 3"),
        (lambda: attemper.scan(Two().eval(), batches()), "differ in the number of shards: none and 4"),
        (lambda: scan(0), "shard 0/4 is there twice: its texts would count double"),
        (
            lambda: attemper.Scan.from_json(scan(1).to_json()),
            "loaded from JSON, or is a sample of a watch; means do not add",
        ),
        (lambda: "part.safetensors", "takes scans, got str: attemper.open"),
    ],
)
def test_what_is_not_of_one_whole_is_refused(other: Any, message: str):
    with pytest.raises(InputError, match=message):
        scan(0).merge(other())


def test_spans_are_kept_as_ranges_of_keys_and_marks_of_each_sequence_as_a_digest():
    for spans, law in (
        (((4, 5), (0, 2), (3, 3), (7, 7)), [[0, 5], [7, 7]]),
        (torch.tensor([True, True, False, True]), [[0, 1], [3, 3]]),
        (torch.tensor([[False, True, True]]), [[1, 2]]),
        (torch.zeros(3, dtype=torch.bool), []),
        (lambda batch: batch, "a function of each batch"),
    ):
        assert spans_in_words(spans) == law
    each = torch.tensor([[True, False, True], [True, False, False]])
    assert spans_in_words(each) == spans_in_words(each.T.contiguous().T) != spans_in_words(each.flip(0))


def test_scans_of_other_spans_do_not_merge(tmp_path: Path):
    first = scan(0, stats="span_mass", spans=[(0, 1), (2, 3)])
    path = first.save(tmp_path / "first.safetensors")
    merged = attemper.open(path).merge(scan(1, stats="span_mass", spans=[(0, 3)]))
    assert merged.reading.sites[0].heads[0].span_mass is not None
    with pytest.raises(
        InputError, match=r"differ in the spans of keys that span_mass sums: \[\[0, 3\]\] and \[\[0, 4\]\]"
    ):
        first.merge(scan(1, stats="span_mass", spans=[(0, 4)]))


def relabelled(one: Part, **changes: Any) -> Part:
    """The part with other labels of its sites."""
    (segment,) = one.segments
    sites = {key: replace(site, label=replace(site.label, **changes)) for key, site in segment.sites.items()}
    return replace(one, segments=(replace(segment, sites=sites),))


def test_another_normalizer_is_refused():
    with pytest.raises(InputError, match="weights of softmax in one part and of sparsemax in another"):
        merge([part(scan(0)), relabelled(part(scan(1)), normalizer="sparsemax")])


@pytest.mark.parametrize("shard", [0, 1])
def test_heads_of_another_rank_are_refused(shard: int, tmp_path: Path):
    first = part(scan(0))
    other = relabelled(part(scan(shard, seed=1)), first_head=2)  # its part of the weights is another
    message = "begins with head 0 in one part and with head 2 in another: they are of ranks that split a model by heads"
    with pytest.raises(InputError, match=message):
        merge([first, other])
    files = [part_file.save(one, tmp_path / f"{n}.safetensors") for n, one in enumerate((first, other))]
    with pytest.raises(InputError, match=message):
        part_file.merge_files(files)


def test_a_shard_is_one_of_so_many():
    message = r"scan\(shard=\.\.\.\) must be \(I, N\), I of N shards, with I from 0 to N - 1"
    for shard in ((4, 4), (-1, 4), (0, 0), 3, "3/4", (1.0, 4), (True, 4), (1, 2, 3)):
        with pytest.raises(InputError, match=message):
            attemper.scan(Two().eval(), batches(), shard=shard)  # pyright: ignore[reportArgumentType]


# --- files ---


def test_a_file_is_the_scan_again(tmp_path: Path):
    saved = scan(1, stats=("gini", "score_variance"), fewest_keys=24, limits={"logits": 3.0}, name="a", text="b")
    path = saved.save(tmp_path / "one.safetensors")
    loaded = attemper.open(path)
    assert loaded.reading == saved.reading
    assert loaded.shards == ("1/4",)
    assert equal(loaded, saved)
    with pytest.raises(InputError, match="loaded from JSON or a file, or merged"):
        loaded.row_statistics("layers.0")


def test_a_file_holds_no_path_and_no_number_of_the_texts(tmp_path: Path):
    path = scan(0).save(tmp_path / "one.safetensors")
    assert str(tmp_path).encode() not in path.read_bytes()
    assert str(Path.home()).encode() not in path.read_bytes()


def test_a_json_document_loads_to_read_and_to_compare(tmp_path: Path):
    saved = scan(1)
    path = tmp_path / "scan.json"
    path.write_text(saved.to_json())
    assert attemper.open(path).reading == saved.reading
    assert attemper.compare(attemper.open(path), saved).heads
    assert attemper.open(path).shards == ()
    with pytest.raises(InputError, match=r"Scan\.save: this scan has means of heads and no sums"):
        attemper.open(path).save(tmp_path / "a.safetensors")
    with pytest.raises(
        InputError, match=r"scan\.json is the JSON of a scan: its numbers are means, which do not add up"
    ):
        part_file.merge_files([path])


def header_of(path: Path) -> dict[str, Any]:
    with safe_open(path, "np") as file:
        return json.loads(file.metadata()["attemper"])


def edited(path: Path, arrays: dict[str, np.ndarray] | None = None, **fields: Any) -> Path:
    """The same file with other sums, or with other fields in its header."""
    metadata = {"attemper": json.dumps(header_of(path) | fields)}
    save_file(load_file(path) if arrays is None else arrays, path, metadata=metadata)
    return path


def test_a_column_may_stand_elsewhere(tmp_path: Path):
    saved = scan(0)
    path = saved.save(tmp_path / "one.safetensors")
    columns = places(32)
    order = sorted(columns, reverse=True)
    shuffled = {
        name: np.concatenate([sums[:, columns[column]] for column in order] + [sums[:, :1]], 1)
        for name, sums in load_file(path).items()
    }
    widths = [[name, columns[name].stop - columns[name].start] for name in order]
    assert attemper.open(edited(path, shuffled, columns=[*widths, ["of tomorrow", 1]])).reading == saved.reading


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"version": 2}, "of version 2 of the format; this attemper reads version 1. Read it with the attemper that"),
        ({"version": True}, "of version True of the format; this attemper reads version 1"),
        ({"format": "other"}, "is a safetensors file, but no reading: Scan.save writes one"),
        ({"unfinished": True}, "is an unfinished shard"),
        ({"segments": []}, "is damaged: its header names no shards"),
        ({"segments": 3}, "is damaged: its header names no shards"),
        ({"columns": [["rows", 1]]}, "it has no sums of empty, which this version shows"),
        ({"columns": None}, "is damaged: its header does not fit its numbers"),
        ({"law": {}}, "is damaged: its header does not fit its numbers"),
        ({"skipped": [1]}, "is damaged: its header does not fit its numbers"),
    ],
)
def test_a_file_that_is_no_reading_of_this_version_is_refused(fields: dict[str, Any], message: str, tmp_path: Path):
    path = edited(scan(0).save(tmp_path / "one.safetensors"), **fields)
    with pytest.raises(
        InputError, match=f"^one.safetensors.* {re.escape(message)}|^one.safetensors: {re.escape(message)}"
    ):
        attemper.open(path)


def test_files_merge_as_scans_do(tmp_path: Path):
    parts = scans()
    paths = [one.save(tmp_path / part_file.part_name(place, SHARDS)) for place, one in enumerate(parts)]
    assert part_file.part_files(tmp_path) == paths
    merged = part_file.merge_files(reversed(paths))
    assert equal(attemper.Scan(merged.reading(), None, part=merged), parts[0].merge(*parts[1:]))
    with pytest.raises(InputError, match=r"shard 2/4 is there twice, in part-00002-of-00004\.safetensors and copy\."):
        part_file.merge_files([*paths, parts[2].save(tmp_path / "copy.safetensors")])
    scan(3, seed=2).save(paths[3])
    with pytest.raises(
        InputError, match=r"^part-00003-of-00004\.safetensors: shards 0/4 to 2/4 and 3/4 are of different"
    ):
        part_file.merge_files(paths)


def test_shards_are_listed_in_a_line():
    assert label_list(["3/64"]) == "3/64"
    assert label_list(["0/64", "1/64", "2/64", "17/64"]) == "0/64 to 2/64, 17/64"
    assert label_list(["#ab"]) == "#ab"
    twelve = ", ".join(f"{2 * n}/99" for n in range(12))
    assert label_list([f"{2 * n}/99" for n in range(14)]) == f"{twelve} and 2 others"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("rows", -1.0, "numbers of rows that are no whole numbers from 0 on"),
        ("empty", 0.5, "numbers of rows that are no whole numbers from 0 on"),
        ("histogram", float("inf"), "numbers of rows that are no whole numbers from 0 on"),
        ("logit_variance", -1.0, "variances below 0"),
    ],
)
def test_sums_that_no_scan_gives_are_refused(name: str, value: float, message: str, tmp_path: Path):
    path = scan(0).save(tmp_path / "one.safetensors")
    arrays = load_file(path)
    arrays["0.0"][:, places(32)[name]] = value
    with pytest.raises(InputError, match=rf"one\.safetensors is damaged: .*{message}"):
        attemper.open(edited(path, arrays))


def test_a_file_of_parts_that_were_read_and_merged_holds_their_numbers(tmp_path: Path) -> None:
    """Read, the columns of a part are put in order, and their memory lies by columns."""
    for index, one in enumerate(scans()):
        one.save(tmp_path / f"{index}.safetensors")
    read = [part_file.load(tmp_path / f"{index}.safetensors") for index in range(SHARDS)]
    merged = merge(read)
    part_file.save(merged, tmp_path / "merged.safetensors")
    again = part_file.load(tmp_path / "merged.safetensors")
    for one, two in zip(merged.segments, again.segments, strict=True):
        for key, site in one.sites.items():
            np.testing.assert_array_equal(two.sites[key].sums, site.sums)
