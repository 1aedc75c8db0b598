"""One file of each kind that attemper reads, small, and everything that a user does with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import attemper
from attemper.cli.runs import _row
from attemper.control.calibration import Calibration
from attemper.control.saved_model import parts_in, read_temperatures, write_temperatures
from attemper.fingerprints.taking.engine import fingerprint_of_folder
from attemper.nn import LearnedTemperature
from attemper.readings.part_file import merge_files
from attemper.report.live import LiveServer, RunSource
from attemper.report.overview import overview
from attemper.report.run_table import table
from attemper.store.fragment import Fragment
from tests.support.runs import restless, written


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.MultiheadAttention(16, 2, batch_first=True).eval()


def batch() -> tuple[Tensor, Tensor, Tensor]:
    rows = torch.randn(1, 40, 16, generator=torch.Generator().manual_seed(1))
    return rows, rows, rows


def reading(folder: Path) -> Path:
    return attemper.scan(model(), (batch(),), shard=(0, 2)).save(folder / "reading.safetensors")


def scan_json(folder: Path) -> Path:
    path = folder / "scan.json"
    path.write_text(attemper.scan(model(), (batch(),)).to_json())
    return path


def fingerprint(folder: Path) -> Path:
    return attemper.fingerprint(model(), (batch(),)).save(folder / "fingerprint.safetensors")


def calibration(folder: Path) -> Path:
    found = {"a": (1.0, 2.0), "b": (0.5, 0.75)}
    one = Calibration(found, 2.0, 1.5, (-0.6, -0.4), "head", "gradient", 4, 4, 20, True, (0.1, 10.0))
    return one.save(folder / "calibration.safetensors")


def temperatures(folder: Path) -> Path:
    return write_temperatures(folder / "temperatures.safetensors", {"a": LearnedTemperature(2)})


def _saved(folder: Path) -> None:
    write_temperatures(folder / "attemper.safetensors", {"a": LearnedTemperature(2)})
    form = {"kind": "LearnedTemperature", "floor": 0.1, "ceiling": 10.0}
    sites = {"a": {"temperatures": [form], "normalizer": None}}
    document = {"format": "attemper-tempered-model", "version": 1, "sites": sites}
    (folder / "attemper.json").write_text(json.dumps(document))


def saved_document(folder: Path) -> Path:
    _saved(folder)
    return folder / "attemper.json"


def saved_tensors(folder: Path) -> Path:
    _saved(folder)
    return folder / "attemper.safetensors"


def layers(folder: Path) -> Path:
    from safetensors.torch import save_file

    query, key = (torch.randn(1, 2, 12, 8, generator=torch.Generator().manual_seed(n)) for n in range(2))
    save_file(
        {"q": query, "k": key, "v": key.clone()}, folder / "0.safetensors", metadata={"causal": "true", "scale": "0.3"}
    )
    return folder / "0.safetensors"


def _use(*_: object) -> None:
    """Takes what a user looks at: it was made, and that is all."""


def read_reading(path: Path) -> None:
    scan = attemper.open(path)
    _use(str(scan), scan.to_json(), str(attemper.compare(scan, scan)), scan.to_html(path.with_suffix(".html")))
    merge_files([path])


def read_scan_json(path: Path) -> None:
    scan = attemper.open(path)
    _use(str(scan), scan.to_json(), str(attemper.compare(scan, scan)), scan.to_html(path.with_suffix(".html")))


def read_fingerprint(path: Path) -> None:
    found = attemper.open(path)
    _use(str(found), str(attemper.explain(found, found)))


def read_calibration(path: Path) -> None:
    found = Calibration.load(path)
    _use(str(found), found.to_json(), found.doubt)


def read_saved(path: Path) -> None:
    parts_in(path.parent)


def read_temperature_file(path: Path) -> None:
    read_temperatures(path, {"a": LearnedTemperature(2)})


def read_layers(path: Path) -> None:
    fingerprint_of_folder(path.parent)


FILES: dict[Callable[[Path], Path], Callable[[Path], Any]] = {
    reading: read_reading,
    scan_json: read_scan_json,
    fingerprint: read_fingerprint,
    calibration: read_calibration,
    temperatures: read_temperature_file,
    saved_document: read_saved,
    saved_tensors: read_saved,
    layers: read_layers,
}
"""What writes a file of each kind -> everything that is done with it."""


def run(folder: Path, samples: int = 160) -> Path:
    written(folder, restless(samples, 3))
    fragment = Fragment(folder / "fragment-0.sqlite")
    fragment.keep_scalars([(step, {"loss": 2.0 - step / 1000, "lr": 0.5}) for step in range(600)])
    fragment.keep_scalars([(500, {}), (501, {"loss": 9.0})])
    fragment.close()
    return folder / "fragment-0.sqlite"


def read_run(path: Path) -> None:
    """`attemper show`, `runs`, `report`, and what the live server answers."""
    _row(path.parent, path.parent.parent, True)
    server = LiveServer(RunSource(str(path.parent)))
    try:
        _use(server.page(), server.look())
    finally:
        server.server_close()
    with attemper.open(path.parent) as opened:
        table(overview(opened), 120)
        opened.to_html(path.parent / "page.html")
        for name in opened.statistics:
            opened.history(name)
        if len(opened):
            opened.at(int(opened.steps[-1]))
