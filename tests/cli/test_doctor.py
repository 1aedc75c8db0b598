"""``attemper doctor``: what it says is what "auto" does on this machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version

import pytest
import torch

from attemper import __version__, cli
from attemper.backends.table import BACKENDS, FEATURES, Inputs, resolve

doctor = sys.modules["attemper.cli.doctor"]
"""The module: the name of the package is the verb."""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def command(*arguments: str) -> str:
        monkeypatch.setenv("COLUMNS", "120")
        monkeypatch.setattr("sys.argv", ["attemper", "doctor", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert not stop.value.code
        return capsys.readouterr().out

    return command


def with_triton(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    """A machine on which the package triton is installed, with so many GPUs."""
    there = tuple(replace(one, missing=None) if one.name == "triton" else one for one in BACKENDS)
    monkeypatch.setattr(doctor, "BACKENDS", there)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def told(run: Callable[..., str], name: str) -> dict[str, object]:
    return next(one for one in json.loads(run("--json"))["backends"] if one["name"] == name)


def test_doctor_takes_no_kernels_for_a_device_that_is_not_there(run, monkeypatch: pytest.MonkeyPatch):
    with_triton(monkeypatch, gpus=0)
    triton = told(run, "triton")
    assert (triton["here"], triton["auto"]) == (False, False)
    assert triton["note"] == "installed, but there is no GPU that torch sees"
    out = run()
    assert "no GPU that torch sees" in out
    taken = next(line for line in out.splitlines() if "taken by auto" in line)
    assert [cell.strip() for cell in taken.strip("│").split("│")][-1] == "no"


def test_doctor_takes_them_where_there_is_one(run, monkeypatch: pytest.MonkeyPatch):
    with_triton(monkeypatch, gpus=1)
    triton = told(run, "triton")
    assert (triton["here"], triton["auto"], triton["note"]) == (True, True, None)
    assert "cuda:0 (GPU 0)" in run()


def test_interpreted_kernels_are_for_whoever_names_them(run, monkeypatch: pytest.MonkeyPatch):
    with_triton(monkeypatch, gpus=0)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    triton = told(run, "triton")
    assert (triton["here"], triton["auto"]) == (True, False)


def test_native_kernels_whose_library_does_not_load_are_not_here(run, monkeypatch: pytest.MonkeyPatch):
    there = tuple(replace(one, missing=None) if one.name == "native" else one for one in BACKENDS)
    monkeypatch.setattr(doctor, "BACKENDS", there)
    monkeypatch.setattr("attemper.backends.native.why_unusable", lambda: "its library cannot be loaded (no symbol)")
    native = told(run, "native")
    assert (native["here"], native["auto"]) == (False, False)
    assert "no symbol" in str(native["note"])


def test_what_auto_takes_for_a_plain_call_is_said_to_be_taken(run):
    document = json.loads(run("--json"))
    taken = {one["name"]: one["auto"] for one in document["backends"]}
    assert taken[resolve("auto", frozenset(), Inputs()).name]


def test_the_document_has_versions_devices_and_the_features_of_every_backend(run):
    document = json.loads(run("--json"))
    assert (document["schema"], document["attemper"]) == (1, __version__)
    assert document["packages"]["torch"] == version("torch")
    assert document["devices"]["threads"] == torch.get_num_threads()
    assert [one["name"] for one in document["backends"]] == [one.name for one in BACKENDS]
    for one, backend in zip(document["backends"], BACKENDS, strict=True):
        assert one["features"] == [feature for feature in FEATURES if feature in backend.features]


def test_a_machine_without_torch_is_told_and_has_no_backend(run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "_devices", lambda: doctor.Devices(None, (), "torch cannot be imported: no libfoo"))
    document = json.loads(run("--json"))
    assert document["devices"]["failure"] == "torch cannot be imported: no libfoo"
    assert not any(one["here"] or one["auto"] for one in document["backends"])
