"""What a reading says of where it came from: a text's name, a date, types, a revision, versions; no paths, no text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import attemper
from attemper import cli
from attemper.errors import InputError
from attemper.monitor.checked_model import hash_of, provenance, title
from attemper.readings.reading import Reading
from tests.report import readings
from tests.sites import own_models

FIELDS = ("text", "date", "dtype", "revision", "versions")


def own() -> tuple[nn.Module, torch.Tensor]:
    return own_models.Own().eval(), torch.randn(1, 6, 32)


def test_a_scan_says_what_it_read_and_when_and_with_what() -> None:
    model, x = own()
    before = datetime.now(UTC).replace(microsecond=0)
    reading = attemper.scan(model.double(), [x.double()], text="three poems").reading
    assert (reading.text, reading.dtype, reading.revision) == ("three poems", "float64", None)
    assert reading.date is not None
    assert before <= datetime.strptime(reading.date, "%Y-%m-%dT%H:%M:%S%z") <= datetime.now(UTC)
    versions = reading.versions or {}
    assert {"attemper", "python", "torch"} <= set(versions)
    assert versions["attemper"] == attemper.__version__
    assert versions["torch"] == str(torch.__version__)


def test_a_watch_says_when_it_sampled_and_tells_the_same_again() -> None:
    model, x = own()
    with attemper.watch(model) as watch:
        model(x)
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", watch.table().reading.date or "")
        assert watch.table().to_json() == watch.table().to_json()
        assert watch.table().reading.dtype == "float32"


def test_they_are_fields_of_the_document_and_null_in_older_ones() -> None:
    old = readings.minilm()
    assert [old.to_dict()[name] for name in FIELDS] == [None] * 5
    document = {name: value for name, value in old.to_dict().items() if name not in FIELDS}
    assert Reading.from_dict(document) == old
    given = {
        "text": "a",
        "date": "2026-01-31T09:30:00Z",
        "dtype": "float32",
        "revision": "ab12",
        "versions": {"x": "1"},
    }
    found = Reading.from_json(json.dumps(document | given))
    assert {name: getattr(found, name) for name in FIELDS} == given
    assert Reading.from_json(found.to_json()) == found
    assert hash(found) == hash(found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text": 3}, "text must be text or null, got 3"),
        ({"versions": ["1"]}, "versions must be an object or null"),
        ({"versions": {"torch": 2}}, "versions.torch must be text, got 2"),
    ],
)
def test_fields_of_another_type_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Reading.from_dict(readings.minilm().to_dict() | change)


class Configured(nn.Module):
    def __init__(self, source: str, commit: object = None) -> None:
        super().__init__()
        self.config = type("Config", (), {"_name_or_path": source, "_commit_hash": commit})()


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("org/model", "org/model"),
        ("/home/somebody/models/mine", "models/mine"),
        ("~/models/mine", "models/mine"),
        ("/mine", "mine"),
        ("", ""),
    ],
)
def test_a_model_is_named_without_the_place_where_a_machine_keeps_it(source: str, shown: str) -> None:
    assert title(Configured(source)) == f"Configured {shown}".strip()


@pytest.mark.parametrize(("commit", "told"), [("0a" * 20, "0a" * 20), (None, None), ("<script>", None), (7, None)])
def test_a_revision_is_a_commit_or_nothing(commit: object, told: str | None) -> None:
    assert provenance(Configured("a", commit), None)["revision"] == told


@pytest.mark.parametrize("text", [None, "file"])
def test_the_command_line_names_the_text_without_its_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str | None
) -> None:
    file = tmp_path / "poems.txt"
    file.write_text("Shall I compare thee to a summer's day? " * 3)
    options = [] if text is None else ["--text", str(file)]
    monkeypatch.setattr("sys.argv", ["attemper", "scan", "--json", "--max-length", "64", *options])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code
    printed = capsys.readouterr().out
    assert json.loads(printed)["text"] == ("the text that ships" if text is None else "poems.txt")
    assert str(tmp_path) not in printed
    assert "summer's day" not in printed


# --- the hash of a model ---


def layers(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(40, 60), nn.MultiheadAttention(32, 4), nn.BatchNorm1d(4))


def test_a_model_has_one_hash_and_its_copy_has_it_too() -> None:
    model = layers()
    assert re.fullmatch("[0-9a-f]{32}", hash_of(model))
    assert hash_of(model) == hash_of(layers()) == hash_of(model.eval())


def change_all(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data *= 1.0001


@pytest.mark.parametrize(
    "change",
    [
        change_all,
        lambda model: model[0].weight.data.mul_(1.0001),
        lambda model: model[2].running_mean.add_(1),
        lambda model: model.double(),
        lambda model: model.bfloat16(),
        lambda model: model.append(nn.Linear(1, 1)),
        lambda model: model.to("meta"),
        lambda model: attemper.temper(model, temperature=0.5, sites=["1"]),
    ],
    ids=["weights", "a weight", "a buffer", "float64", "bfloat16", "a layer", "nothing here", "temperature"],
)
def test_another_model_has_another_hash(change: Any) -> None:
    model = layers()
    change(model)
    assert hash_of(model) != hash_of(layers())


def test_without_buffers_ranks_whose_running_means_differ_have_one_hash() -> None:
    model = layers()
    model[2].running_mean.add_(1)  # type: ignore[index]
    assert hash_of(model, buffers=False) == hash_of(layers(), buffers=False) != hash_of(layers())
    change_all(model)
    assert hash_of(model, buffers=False) != hash_of(layers(), buffers=False)


def test_two_normalizers_have_two_hashes() -> None:
    hashes = set()
    for normalizer in ("softmax", attemper.nn.Entmax(1.3), attemper.nn.Entmax(1.6)):
        torch.manual_seed(0)
        hashes.add(hash_of(attemper.nn.MultiheadAttention(32, 4, normalizer=normalizer)))
    assert len(hashes) == 3


RUNS: dict[str, Callable[[nn.Module, torch.Tensor], object]] = {
    "check": attemper.check,
    "scan": lambda model, states: attemper.scan(model, [states]),
    "pattern": lambda model, states: attemper.pattern(model, states, head=0, sequence=0),
    "fingerprint": lambda model, states: attemper.fingerprint(model, [states]),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_whose_weights_are_on_the_meta_device_has_to_be_loaded(device: str) -> None:
    with torch.device("meta"):
        model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    states = torch.zeros(2, 8, 16, device=device)
    said = r"TransformerEncoderLayer is not loaded: its weights are on the meta device and hold no numbers \(self_attn"
    for name, run in RUNS.items():
        with pytest.raises(attemper.InputError, match=rf"^{name}: .*{said}.*Load it with from_pretrained, or with to_"):
            run(model, states)


def test_a_watch_says_that_its_model_is_not_loaded() -> None:
    with torch.device("meta"):
        model = nn.MultiheadAttention(16, 2, batch_first=True).eval()
    said = "could not be measured: MultiheadAttention is not loaded: its weights are on the meta device"
    with pytest.warns(UserWarning, match=said), attemper.watch(model):
        model(*(torch.zeros(2, 8, 16, device="meta"),) * 3)
