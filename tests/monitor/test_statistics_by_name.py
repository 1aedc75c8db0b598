"""What is asked for by name is reported wherever heads are, or refused: nothing is accepted and left out."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from rich.console import Console

import attemper
from attemper import InputError
from attemper.integrations import metrics
from attemper.integrations.training import Monitor
from attemper.monitor.compare import compare
from attemper.readings.reading import HeadReading, Reading
from attemper.report.page import scan_page
from attemper.results.comparison import Comparison, table
from attemper.statistics import BY_NAME, COUNTED, NAMES, OF_SCANS, SHOWN_BY_NAME
from tests.sites.own_models import Own
from tests.support.calls import had
from tests.support.fixtures import NATIVE

OF_ROWS = ("lse", "mean_logit")
"""Of "all", and not of a reading: ``row_statistics`` has them."""
REPORTED = [name for name in BY_NAME if name != "key_mass"]
SPANS = [(0, 2), (9, 9)]
X = torch.randn(2, 40, 32, generator=torch.Generator().manual_seed(0))


FIELDS_OF = {name: f"{name}_nats" if name == "entropy_with_sink" else name for name in REPORTED}


def model() -> Own:
    torch.manual_seed(0)
    return Own().eval()


def scanned(*stats: str, **options: Any) -> attemper.Scan:
    if "span_mass" in stats:
        options["spans"] = SPANS
    return attemper.scan(model(), [X[:1], X], stats=stats, **options)


def watched(*stats: str, **options: Any) -> attemper.Scan:
    own = model()
    with attemper.watch(own, stats=stats, **options) as watch:
        watch.step()
        for batch in (X[:1], X):
            own(batch)
        return watch.table()


@pytest.mark.parametrize("read", [scanned, watched])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.turns(2)
def test_every_statistic_is_reported_or_of_rows_or_refused(name: str, read: Callable[..., attemper.Scan]) -> None:
    if name == "key_mass":
        where = "scan" if read is scanned else "watch"
        with pytest.raises(
            InputError, match=rf"{where}\(stats=...\): key_mass is a number of each key.*attention_stati"
        ):
            read(name)
        return
    if name == "span_mass" and read is watched:
        with pytest.raises(InputError, match=r"watch\(stats=...\): span_mass needs the spans of keys.*attemper.scan"):
            read(name)
        return
    scan = read(name)
    assert name in scan.row_statistics(scan.sites[0].name)
    shown = {part.name for part in fields(HeadReading)}
    known = {name, f"{name}_nats", {"logit_variance": "logit_std"}.get(name, name)} & shown
    assert len(known) == (0 if name in OF_ROWS else 1)
    assert all(getattr(head, field) is not None for head in scan.sites[0].heads for field in known)


@pytest.mark.parametrize("backend", ["blocked", *NATIVE, "auto"])
@pytest.mark.parametrize("name", REPORTED)
@pytest.mark.turns(2)
def test_a_reading_is_the_mean_over_the_rows_of_all_batches(name: str, backend: str) -> None:
    backend = "auto" if backend in NATIVE and name not in had(backend, REPORTED) else backend
    scan = scanned(name, backend=backend)
    total = torch.zeros(4, dtype=torch.float64)
    for batch in (X[:1], X):
        query, key, _ = (part.detach().double() for part in model().split(batch))
        stats = attemper.attention_statistics(
            query, key, is_causal=True, stats=(name,), spans=SPANS, backend="reference"
        )
        total += stats[name].double().sum((0, 2))
    for head, wanted in zip(scan.sites[0].heads, total / 120, strict=True):
        assert getattr(head, FIELDS_OF[name]) == pytest.approx(float(wanted), rel=2e-6)


def test_the_names_of_records_are_those_of_statistics() -> None:
    assert set(SHOWN_BY_NAME) == {*FIELDS_OF.values(), *(row.name for row in OF_SCANS), *COUNTED}


def heading(comparison: Comparison) -> str:
    """The titles of the columns of its table."""
    file = io.StringIO()
    Console(file=file, width=200, color_system=None).print(table(comparison, 200, statistic="normalized_entropy"))
    return file.getvalue().splitlines()[5]


@pytest.mark.parametrize("name", REPORTED)
@pytest.mark.turns(2)
def test_it_stands_in_every_table(name: str) -> None:
    pytest.importorskip("pandas")
    field = FIELDS_OF[name]
    plain, scan = scanned(), scanned(name)
    values = [getattr(head, field) for head in scan.sites[0].heads]
    assert None not in values
    assert list(scan.to_pandas()[field]) == values
    assert [head[field] for head in json.loads(scan.to_json())["sites"][0]["heads"]] == values
    digits = {"gini": 3, "entropy_with_sink": 2, "score_variance": 2, "self_weight": 3, "span_mass": 3}.get(name, 1)
    mean = f"{sum(values) / len(values):.{digits}f}"
    title = {
        "support_size": "support", "mean_distance": "distance", "gini": "gini", "entropy_with_sink": "H with sink",
        "score_variance": "score variance", "self_weight": "own key", "span_mass": "span",
    }  # fmt: skip
    assert title[name] in str(scan)
    assert title[name] not in str(plain)
    assert mean in str(scan).splitlines()[4].split()
    for one, there in ((plain, False), (scan, True)):
        html = scan_page(one.reading)
        data = json.loads(re.findall(r'id="data">(.*?)</script>', html, re.DOTALL)[0])
        assert (field in [quantity["key"] for quantity in data["quantities"]]) == there
    comparison = compare(plain, scan)
    assert [getattr(head, field) for head in comparison.heads] == [
        (None, getattr(scan.sites[0].heads[head.head], field)) for head in comparison.heads
    ]
    assert {f"{field}_before", f"{field}_after", f"{field}_change"} <= set(comparison.to_pandas().columns)
    assert field in comparison.to_dict()["heads"][0]
    headings = [heading(compare(one, one)) for one in (plain, scan)]
    assert headings[0] != headings[1]
    assert compare(scan, scan).largest(field, 1)[0].change(field) == 0


@pytest.mark.parametrize("name", [name for name in REPORTED if name != "span_mass"])
def test_a_tracker_gets_it_by_its_name(name: str) -> None:
    field = FIELDS_OF[name]
    assert field in metrics.STATISTICS
    monitor = Monitor(
        every=1, rows=None, stats=(field,), trackers=None, max_keys=100, filter=None, on_alarm=None
    )  # fmt: skip
    own = model().train()
    monitor.begin(own)
    own(X)
    sent = monitor.step(1)
    assert f"attention/{field}/mean" in sent
    monitor.close()


@pytest.mark.parametrize(("normalizer", "most"), [("sparsemax", 15), (attemper.nn.TopK(3), 3), ("entmax15", 15)])
@pytest.mark.parametrize("read", ["scan", "watch"])
def test_the_sparsity_of_a_tempered_model_is_shown_without_asking(normalizer: Any, most: int, read: str) -> None:
    own = model()
    with attemper.temper(own, normalizer=normalizer):
        if read == "scan":
            scan = attemper.scan(own, [X])
        else:
            with attemper.watch(own) as watch:
                own(X)
            scan = watch.table()
    stats = scan.row_statistics(scan.sites[0].name)
    for head in scan.sites[0].heads:
        assert head.support_size == pytest.approx(float(stats.support_size[:, head.head].double().mean()), rel=1e-12)
        assert head.support_size is not None
        assert 1 <= head.support_size <= most
    assert "support" in str(scan)
    assert '"support_size"' in scan_page(scan.reading)
    assert Reading.from_json(scan.to_json()) == scan.reading


def test_the_table_fits_its_width_with_every_statistic() -> None:
    scan = scanned(*REPORTED)
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(scan)
    assert isinstance(console.file, io.StringIO)
    assert max(map(len, console.file.getvalue().splitlines())) <= 80
