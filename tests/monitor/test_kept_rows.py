"""``scan(..., keep_rows=...)``: rows of chosen queries, exactly those of a call on the same text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import attemper
from attemper import InputError
from attemper.statistics import ONE_PASS
from tests.sites.own_models import Own

X = torch.randn(3, 20, 32, generator=torch.Generator().manual_seed(0))
BATCHES = [X[:1], X[1:]]
NAMES = (*ONE_PASS, "self_weight", "span_mass")


def model() -> Own:
    torch.manual_seed(0)
    return Own().eval()


def scanned(keep_rows: Any, batches: Any = BATCHES, spans: Any = ((0, 3),), **options: Any) -> attemper.Scan:
    names = ("self_weight", "span_mass")
    return attemper.scan(model(), batches, stats=names, spans=spans, keep_rows=keep_rows, **options)


def statistics(text: Tensor) -> attemper.types.AttentionStats:
    query, key, _ = (part.detach() for part in model().split(text))
    return attemper.attention_statistics(query, key, is_causal=True, stats=NAMES, spans=[(0, 3)], backend="reference")


@pytest.mark.parametrize("backend", ["auto", "blocked"])
def test_a_kept_row_is_that_of_its_text(backend: str):
    (site,) = scanned([0, 7, -1], backend=backend).rows()
    assert site.texts.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert site.queries.tolist() == [0, 7, 19] * 3
    assert set(site.values) == set(NAMES)
    want = [statistics(X[text : text + 1]) for text in range(3)]
    for name in NAMES:
        rows = torch.stack(
            [want[text][name][0, :, query] for text, query in zip(site.texts, site.queries, strict=True)]
        )
        assert site[name].shape == (9, 4)
        np.testing.assert_allclose(site[name], rows.numpy(), rtol=2e-5, atol=2e-6, err_msg=name)


def test_last_is_the_last_token_that_is_not_padding():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    torch.manual_seed(0)
    llama = transformers.LlamaModel(config).eval()
    tokens = torch.randint(1, 32, (2, 12))
    for side, lasts in (("right", [6, 11]), ("left", [11, 11])):
        mask = torch.ones(2, 12, dtype=torch.long)
        mask[0, 7:] = 0
        mask = mask if side == "right" else mask.flip(1)
        batch = {"input_ids": tokens, "attention_mask": mask}
        rows = attemper.scan(llama, [batch], keep_rows="last").rows()
        assert [site.queries.tolist() for site in rows] == [lasts, lasts]
        assert [site.layer for site in rows] == [0, 1]
        assert rows.sites[0]["visible_keys"].tolist() == [[7, 7], [12, 12]]
        # A place before a text begins, or in its padding, is of no token.
        first = attemper.scan(llama, [batch], keep_rows=[0, -12]).rows().sites[0]
        assert first.texts.tolist() == ([0, 1] if side == "right" else [1])


def test_a_function_of_a_batch_chooses_and_marks_spans():
    def marks(batch: Tensor) -> Tensor:
        return (torch.arange(20) >= 18).expand(len(batch), 20)

    scan = scanned(marks, spans=lambda batch: torch.arange(20).expand(len(batch), 20) < 4)
    (site,) = scan.rows()
    assert site.queries.tolist() == [18, 19] * 3
    want = torch.cat([statistics(X[text : text + 1]).span_mass[0, :, 18:].T for text in range(3)])
    np.testing.assert_allclose(site["span_mass"], want.numpy(), rtol=2e-5, atol=2e-6)


def test_they_become_a_table_and_a_matrix():
    pytest.importorskip("pandas")
    rows = scanned("last").rows()
    frame = rows.to_pandas()
    assert len(frame) == 3 * 4
    assert list(frame.columns[:7]) == ["site", "layer", "kind", "mode", "head", "text", "query"]
    (site,) = rows
    chosen = frame[(frame["text"] == 1) & (frame["head"] == 2)]
    assert chosen["entropy"].item() == site["entropy"][1, 2]
    matrix = rows.matrix("entropy", "self_weight")
    np.testing.assert_array_equal(matrix, np.concatenate([site["entropy"], site["self_weight"]], 1))
    assert repr(rows) == f"Rows(1 site, 3 rows, {rows.nbytes} bytes)"
    assert rows.nbytes == 3 * (2 * 8 + 4 * sum(values.itemsize for values in site.values.values()))


def test_memory_is_that_of_the_kept_rows_alone():
    one, many = (scanned("last", [X[:1]] * number).rows().nbytes for number in (1, 5))
    assert many == 5 * one


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ("first", r"cannot choose queries by 'first'\. Pass 'last', a list of places"),
        ([], r"cannot choose queries by \[\]"),
        ([1.5], r"cannot choose queries by \[1\.5\]"),
        ([True], r"cannot choose queries by \[True\]"),
        (7, r"cannot choose queries by 7"),
        ([40], r"kept nothing: no text has a token that it chooses"),
        (torch.ones(3), r"marks of queries are bool, \[Q\] or \[B, Q\], got torch.float32"),
        (lambda _: torch.ones(3, dtype=torch.bool), r"marks \[3\], but Own attends with queries \[1, 20\]"),
    ],
)
def test_what_chooses_nothing_is_refused(keep: Any, message: str):
    with pytest.raises(InputError, match=rf"scan\(keep_rows=...\) ?:? ?{message}"):
        scanned(keep)


def test_a_scan_that_kept_none_says_how():
    scan = attemper.scan(model(), BATCHES)
    with pytest.raises(InputError, match=r"this scan kept none. Pass keep_rows='last'"):
        scan.rows()
    rows = scanned("last").rows()
    with pytest.raises(InputError, match=r"'gini' was not measured: pass stats=\('gini',\)"):
        rows.sites[0]["gini"]
    with pytest.raises(InputError, match=r"no rows were kept of a site 'x'\. Sites: Own"):
        rows["x"]
    with pytest.raises(InputError, match=r"Rows.matrix needs the names of statistics"):
        rows.matrix()


def test_the_reading_is_the_same_whether_rows_are_kept_or_not():
    kept, not_kept = (scanned(keep_rows).reading for keep_rows in ("last", None))
    assert replace(kept, date=not_kept.date) == not_kept  # when they were read is all that may differ
