"""Types of file systems, as each system tells them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from attemper.store import place

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


def test_a_system_that_does_not_tell_is_not_known_to_be_good(monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(place, "_MOUNTS", Path("/nowhere"))
    monkeypatch.setattr(subprocess, "run", refuse)
    assert place.kind(Path("/")) == ""
    assert not place.takes_write_ahead(Path("/"))


def test_this_machine_tells_the_type_of_its_own_folders(tmp_path):
    assert place.kind(tmp_path)
