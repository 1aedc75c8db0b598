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


def with_triton(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    """A machine on which the package triton is installed, with so many GPUs."""
    there = tuple(replace(one, missing=None) if one.name == "triton" else one for one in BACKENDS)
    monkeypatch.setattr(doctor, "BACKENDS", there)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def told(asked: Callable[..., str], name: str) -> dict[str, object]:
    return next(one for one in json.loads(asked("--json"))["backends"] if one["name"] == name)


def test_doctor_takes_no_kernels_for_a_device_that_is_not_there(asked, monkeypatch: pytest.MonkeyPatch):
    with_triton(monkeypatch, gpus=0)
    triton = told(asked, "triton")
    assert (triton["here"], triton["auto"]) == (False, False)
    assert triton["note"] == "installed, but there is no GPU that torch sees"
    out = asked()
    assert "no GPU that torch sees" in out
    taken = next(line for line in out.splitlines() if "taken by auto" in line)
    assert [cell.strip() for cell in taken.strip("│").split("│")][-1] == "no"


def test_doctor_takes_them_where_there_is_one(asked, monkeypatch: pytest.MonkeyPatch):
    with_triton(monkeypatch, gpus=1)
    triton = told(asked, "triton")
    assert (triton["here"], triton["auto"], triton["note"]) == (True, True, None)
    assert "cuda:0 (GPU 0)" in asked()


def test_interpreted_kernels_are_for_whoever_names_them(asked, monkeypatch: pytest.MonkeyPatch):
    with_triton(monkeypatch, gpus=0)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    triton = told(asked, "triton")
    assert (triton["here"], triton["auto"]) == (True, False)


def test_native_kernels_whose_library_does_not_load_are_not_here(asked, monkeypatch: pytest.MonkeyPatch):
    there = tuple(replace(one, missing=None) if one.name == "native" else one for one in BACKENDS)
    monkeypatch.setattr(doctor, "BACKENDS", there)
    monkeypatch.setattr("attemper.backends.native.why_unusable", lambda: "its library cannot be loaded (no symbol)")
    native = told(asked, "native")
    assert (native["here"], native["auto"]) == (False, False)
    assert "no symbol" in str(native["note"])


def test_what_auto_takes_for_a_plain_call_is_said_to_be_taken(asked):
    document = json.loads(asked("--json"))
    taken = {one["name"]: one["auto"] for one in document["backends"]}
    assert taken[resolve("auto", frozenset(), Inputs()).name]


def test_the_document_has_versions_devices_and_the_features_of_every_backend(asked):
    document = json.loads(asked("--json"))
    assert (document["schema"], document["attemper"]) == (1, __version__)
    assert document["packages"]["torch"] == version("torch")
    assert document["devices"]["threads"] == torch.get_num_threads()
    assert [one["name"] for one in document["backends"]] == [one.name for one in BACKENDS]
    for one, backend in zip(document["backends"], BACKENDS, strict=True):
        assert one["features"] == [feature for feature in FEATURES if feature in backend.features]


def test_a_machine_without_torch_is_told_and_has_no_backend(asked, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "_devices", lambda: doctor.Devices(None, (), "torch cannot be imported: no libfoo"))
    document = json.loads(asked("--json"))
    assert document["devices"]["failure"] == "torch cannot be imported: no libfoo"
    assert not any(one["here"] or one["auto"] for one in document["backends"])
