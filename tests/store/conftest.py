"""Where runs of these tests lie."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from attemper.store import place


@pytest.fixture
def network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on NFS, beside a temporary folder that is local."""
    shared, local = tmp_path / "shared", tmp_path / "local"
    local.mkdir()
    monkeypatch.setattr(place, "kind", lambda folder: "nfs4" if shared in (folder, *folder.parents) else "ext4")
    monkeypatch.setattr(tempfile, "tempdir", str(local))
    return shared / "run"


@pytest.fixture(params=["folder", "url"])
def where(request: pytest.FixtureRequest, network: Path) -> str:
    """A place that takes no live file."""
    if request.param == "folder":
        return str(network)
    memory = pytest.importorskip("fsspec.implementations.memory", reason="fsspec is not installed")
    memory.MemoryFileSystem.store.clear()
    return "memory://bucket/run"
