"""``attemper doctor``: what it says is what "auto" does on this machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version

import pytest
import torch

from attemper import __version__
from attemper.backends.table import BACKENDS, FEATURES, Inputs, resolve
from tests.support.command import Run

doctor = sys.modules["attemper.cli.doctor"]
"""The module: the name of the package is the verb."""


@pytest.fixture
def asked(run: Run) -> Callable[..., str]:
    """What ``attemper doctor`` prints."""

    def printed(*arguments: str) -> str:
        ended = run("doctor", *arguments, columns=120)
        assert not ended.code
        return ended.out

    return printed


def told(asked: Callable[..., str], name: str) -> dict[str, object]:
    return next(one for one in json.loads(asked("--json"))["backends"] if one["name"] == name)


@pytest.mark.parametrize(
    ("gpus", "interpreted", "here", "auto", "note", "devices"),
    [
        (0, False, False, False, "installed, but there is no GPU that torch sees", "no GPU that torch sees"),
        (1, False, True, True, None, "cuda:0 (GPU 0)"),
        (0, True, True, False, "interpreted, on the CPU: for tests, by name only", "no GPU that torch sees"),
    ],
    ids=["no device", "a GPU", "interpreted"],
)
def test_doctor_takes_no_kernels_for_a_device_that_is_not_there(
    asked, monkeypatch: pytest.MonkeyPatch, gpus: int, interpreted: bool, here: bool, auto: bool, note, devices: str
):
    there = tuple(replace(one, missing=None) if one.name == "triton" else one for one in BACKENDS)
    monkeypatch.setattr(doctor, "BACKENDS", there)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    monkeypatch.setenv("TRITON_INTERPRET", "1" if interpreted else "0")
    triton = told(asked, "triton")
    assert (triton["here"], triton["auto"], triton["note"]) == (here, auto, note)
    out = asked()
    assert devices in out
    taken = next(line for line in out.splitlines() if "taken by auto" in line)
    assert [cell.strip() for cell in taken.strip("│").split("│")][-1] == ("yes" if auto else "no")


def test_native_kernels_whose_library_does_not_load_are_not_here(asked, monkeypatch: pytest.MonkeyPatch):
    there = tuple(replace(one, missing=None) if one.name == "native" else one for one in BACKENDS)
    monkeypatch.setattr(doctor, "BACKENDS", there)
    monkeypatch.setattr("attemper.backends.native.why_unusable", lambda: "its library cannot be loaded (no symbol)")
    native = told(asked, "native")
    assert (native["here"], native["auto"]) == (False, False)
    assert "no symbol" in str(native["note"])


def test_the_document_has_versions_devices_and_the_features_of_every_backend(asked):
    document = json.loads(asked("--json"))
    assert (document["schema"], document["attemper"]) == (1, __version__)
    assert document["packages"]["torch"] == version("torch")
    assert document["devices"]["threads"] == torch.get_num_threads()
    assert [one["name"] for one in document["backends"]] == [one.name for one in BACKENDS]
    taken = {one["name"] for one in document["backends"] if one["auto"]}
    assert resolve("auto", frozenset(), Inputs()).name in taken
    for one, backend in zip(document["backends"], BACKENDS, strict=True):
        assert one["features"] == [feature for feature in FEATURES if feature in backend.features]


def test_a_machine_without_torch_is_told_and_has_no_backend(asked, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "_devices", lambda: doctor.Devices(None, (), "torch cannot be imported: no libfoo"))
    document = json.loads(asked("--json"))
    assert document["devices"]["failure"] == "torch cannot be imported: no libfoo"
    assert not any(one["here"] or one["auto"] for one in document["backends"])
