"""Where the live file lies: in its folder, or in the temporary folder, and what is told then."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

import attemper
from attemper import Store
from attemper.store import place, schema
from attemper.store.place import place_of
from attemper.store.writer import open_writer
from tests.support.samples import sample


@pytest.fixture
def network(tmp_path, monkeypatch) -> Path:
    """A folder on NFS, beside a temporary folder that is local."""
    shared, local = tmp_path / "shared", tmp_path / "local"
    local.mkdir()
    monkeypatch.setattr(place, "kind", lambda folder: "nfs4" if shared in (folder, *folder.parents) else "ext4")
    monkeypatch.setattr(tempfile, "tempdir", str(local))
    return shared / "run"


def test_on_a_known_file_system_the_live_file_lies_in_the_folder_of_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(place, "kind", lambda folder: "ext4")
    found = place_of(Store(tmp_path / "a"), 0)
    assert (found.folder, found.write_ahead, found.target, found.why) == (tmp_path / "a", True, None, None)
    assert (tmp_path / "a").is_dir()


def test_elsewhere_it_lies_in_a_folder_of_the_user_alone_and_a_resumed_run_finds_it(network, tmp_path):
    first, second = place_of(Store(network), 0), place_of(Store(network), 0)
    assert first.folder == second.folder
    assert tmp_path / "local" in first.folder.parents
    assert first.write_ahead
    assert first.folder.parent.stat().st_mode & 0o777 == 0o700
    assert place_of(Store(network), 1).folder != first.folder
    assert place_of(Store(network.with_name("other")), 0).folder != first.folder


def test_a_run_that_was_deleted_and_begun_anew_does_not_find_the_old_one(network):
    first = place_of(Store(network), 0).folder
    (network / "fragment-0.token").unlink()
    assert place_of(Store(network), 0).folder != first


def test_a_temporary_folder_that_another_user_made_is_not_used(network, tmp_path, monkeypatch):
    monkeypatch.setattr(place.os, "getuid", lambda: 12345)
    (tmp_path / "local" / "attemper-12345").mkdir()
    found = place_of(Store(network), 0).folder
    assert found.parent.name != "attemper-12345"
    assert tmp_path / "local" in found.parents


def test_a_token_that_somebody_wrote_names_no_other_folder(network, tmp_path):
    network.mkdir(parents=True)
    (network / "fragment-0.token").write_text("../../../etc/\u00e9 x")
    found = place_of(Store(network), 0).folder
    assert found.name == "etcx"
    assert found.parent.parent == tmp_path / "local"


def test_without_pyarrow_one_warning_says_where_the_file_lies(network, monkeypatch, caplog):
    monkeypatch.setattr(place, "PARQUET", "no_such_package")
    run = open_writer(network)
    for step in range(5):
        run.take(sample(step))
    run.close()
    assert (run.written, run.dropped) == (5, 0)
    (record,) = caplog.records
    live = run._fragment.path
    assert live is not None
    assert f"the run is kept in {live}: its own folder is on a file system that takes no live file" in record.message
    assert "parts need pyarrow, which is not installed: pip install 'attemper[parquet]'" in record.message
    tables = schema.open_to_read(live)
    assert tables.rows("SELECT count(*) FROM sample") == [(5,)]
    tables.close()
    assert os.listdir(network) == ["fragment-0.token"]


def test_a_url_that_cannot_be_reached_is_told_and_training_goes_on(network, caplog):
    run = open_writer("nosuch://bucket/run")
    run.take(sample(0))
    run.close()
    assert run.written == 1
    (record,) = caplog.records
    assert "the run is kept in" in record.message


def test_where_the_temporary_folder_is_no_better_there_is_no_log_beside_the_file(network, monkeypatch):
    monkeypatch.setattr(place, "kind", lambda folder: "nfs4")
    run = open_writer(network)
    run.take(sample(0))
    run.flush()
    live = run._fragment.path
    assert live is not None
    assert not live.with_name(live.name + "-wal").exists()
    tables = run.open_reader()
    assert tables.rows("PRAGMA journal_mode") == [("delete",)]
    tables.close()
    run.close()


def test_a_relative_path_is_of_the_folder_in_which_the_watch_began(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    writer = open_writer("runs/a")
    monkeypatch.chdir("elsewhere")
    for step in range(3):
        assert writer.take(sample(step))
    writer.close()
    assert writer.dropped == 0
    assert list(attemper.open("../runs/a").steps) == [0, 1, 2]
