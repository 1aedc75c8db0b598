"""Where the live file lies, by the type of its file system, and folders and object stores that take files whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import attemper
from attemper import Store
from attemper.errors import MissingExtraError
from attemper.store import place, schema
from attemper.store.parts import FolderTarget, open_target
from attemper.store.place import place_of
from attemper.store.writer import open_writer
from tests.support.runs import taken_by
from tests.support.samples import sample, samples


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
    run = taken_by(open_writer(network), samples(5))
    assert (run.written, run.dropped) == (5, 0)
    (record,) = caplog.records
    live = run._fragment.path
    assert live is not None
    assert (
        f"the run is kept in {live}: its folder is on a file system where SQLite cannot keep a live file"
        in record.message
    )
    assert "parts need pyarrow, which is not installed: pip install 'attemper[parquet]'" in record.message
    tables = schema.open_to_read(live)
    assert tables.rows("SELECT count(*) FROM sample") == [(5,)]
    tables.close()
    assert os.listdir(network) == ["fragment-0.token"]


def test_a_url_that_cannot_be_reached_is_told_and_training_goes_on(network, caplog):
    assert taken_by(open_writer("nosuch://bucket/run"), [sample(0)]).written == 1
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
    assert taken_by(writer, samples(3)).dropped == 0
    assert list(attemper.open("../runs/a").steps) == [0, 1, 2]


MOUNTS = r"""
21 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 21 0:40 / /home rw - nfs4 server:/home rw,vers=4.2
31 30 0:41 / /home/ada/local\040disk rw shared:3 - xfs /dev/vdb rw
32 21 0:42 / /scratch rw - lustre mds@tcp:/scratch rw
33 21 0:43 / /mnt/bucket rw - fuse.s3fs s3fs rw
34 21 0:44 / /over rw - ext4 /dev/vdc rw
35 34 0:45 / /over rw - fuse rw rw
"""
MAC = """
/dev/disk3s1s1 on / (apfs, sealed, local, read-only, journaled)
map auto_home on /System/Volumes/Data/home (autofs, automounted, nobrowse)
//ada@server/share on /Volumes/share (smbfs, nodev, nosuid, mounted by ada)
"""


@pytest.fixture
def mounted(tmp_path, monkeypatch):
    listed = tmp_path / "mountinfo"
    listed.write_text(MOUNTS.lstrip())
    monkeypatch.setattr(place, "_MOUNTS", listed)
    monkeypatch.setattr(place.os.path, "realpath", str)


@pytest.mark.parametrize(
    ("folder", "kind", "good"),
    [
        ("/", "ext4", True),
        ("/var/runs", "ext4", True),
        ("/home", "nfs4", False),
        ("/home/ada/runs", "nfs4", False),
        ("/home/ada/local disk/runs", "xfs", True),
        ("/homeless", "ext4", True),
        ("/scratch/a/b", "lustre", False),
        ("/mnt/bucket/a", "fuse.s3fs", False),
        ("/over/a", "fuse", False),
    ],
)
def test_the_longest_mount_that_a_folder_is_under_tells_the_type_and_of_equals_the_last(mounted, folder, kind, good):
    assert place.kind(Path(folder)) == kind
    assert place.takes_write_ahead(Path(folder)) == good


@pytest.mark.parametrize(("folder", "kind"), [("/Users/ada", "apfs"), ("/Volumes/share/runs", "smbfs")])
def test_where_there_is_no_proc_mount_is_asked(monkeypatch, folder, kind):
    monkeypatch.setattr(place, "_MOUNTS", Path("/nowhere"))
    monkeypatch.setattr(place.os.path, "realpath", str)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, MAC.lstrip()))
    assert place.kind(Path(folder)) == kind


def test_this_machine_tells_the_type_and_a_system_that_does_not_tell_is_not_known_to_be_good(tmp_path, monkeypatch):
    assert place.kind(tmp_path)
    monkeypatch.setattr(place, "_MOUNTS", Path("/nowhere"))
    monkeypatch.setenv("PATH", "/nowhere")
    assert place.kind(Path("/")) == ""
    assert not place.takes_write_ahead(Path("/"))


@pytest.fixture(params=["folder", "memory", "local"])
def target(request, tmp_path):
    if request.param == "folder":
        return open_target(tmp_path / "runs" / "a")
    memory = pytest.importorskip("fsspec.implementations.memory", reason="fsspec is not installed")
    if request.param == "local":
        return open_target((tmp_path / "runs" / "a").as_uri())
    memory.MemoryFileSystem.store.clear()
    return open_target("memory://bucket/run/")


def test_files_are_listed_read_and_replaced(target):
    assert target.names() == []
    target.write("b.parquet", b"two")
    target.write("a.parquet", b"one")
    target.write("b.parquet", b"three")
    assert target.names() == ["a.parquet", "b.parquet"]
    assert (target.read("a.parquet"), target.read("b.parquet")) == (b"one", b"three")


def test_a_write_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    target = FolderTarget(tmp_path)
    target.write("a", b"one")

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(OSError, match="No space left"):
        target.write("a", b"two")
    assert os.listdir(tmp_path) == ["a"]
    assert target.read("a") == b"one"


def test_a_protocol_that_nobody_knows_is_an_error_of_the_system():
    pytest.importorskip("fsspec", reason="fsspec is not installed")
    with pytest.raises(OSError, match="nosuch:// cannot be reached"):
        open_target("nosuch://bucket/run")


def test_a_url_without_fsspec_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(MissingExtraError, match=r"a run at s3:// needs the package fsspec.*attemper\[parquet\]"):
        open_target("s3://bucket/run")


def test_a_relative_path_is_of_the_folder_in_which_it_was_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    target = open_target("run")
    monkeypatch.chdir(tmp_path.parent)
    target.write("one", b"1")
    assert (tmp_path / "run" / "one").read_bytes() == b"1"
