"""Shards by real Ray, in a process of its own: its packages are in build/ray, where nothing else finds them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from attemper.distributed import ray_cluster
from attemper.errors import InputError, MissingExtraError
from attemper.readings import part_file
from tests.integrations.test_shards import bits, by_processes, kills
from tests.support.killed_workers import task, text_file

ROOT = Path(__file__).parents[2]
PACKAGES = ROOT / "build" / "ray"
needs_ray = pytest.mark.skipif(
    not (PACKAGES / "ray").is_dir(), reason="Ray is not in build/ray: `bash scripts/test.sh --long` installs it there"
)

SCAN = """
import os
import sys
from contextlib import suppress
from pathlib import Path
from attemper.distributed import ray_cluster
from tests.support.killed_workers import task

texts, out, kills = map(Path, sys.argv[1:4])
shards, workers = map(int, sys.argv[4:])
work, progress = task(texts, out, shards, kills), []


def sockets():
    # Of all processes that have this home folder: this one and those of its Ray.
    home = f"HOME={os.environ['HOME']}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if home in (process / "environ").read_bytes().split(b"\\0"):
                for file in (process / "fd").iterdir():
                    with suppress(OSError):
                        yield os.readlink(file)


def listening():
    # Addresses on which one of them listens, as Linux writes them.
    own = set(sockets())
    lines = (line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}").read().splitlines()[1:])
    return {line[1] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in own}


def progress_and_look(texts):
    found.update(listening())
    progress.append(texts)


found = set()
ray_cluster.run(work, range(shards), workers, progress_and_look)
assert found and all(address.split(":")[0].endswith("0100007F") for address in found), found
assert sum(progress) == work.survey.texts, progress
"""


def by_ray(folder: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join((str(ROOT / "src"), str(ROOT), str(PACKAGES)))
    # Ray writes a token into the home folder.
    kept = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        env=kept | {"PYTHONPATH": paths, "HOME": str(folder), **environment},
    )


@pytest.mark.long("starts Ray")
@needs_ray
def test_64_shards_by_actors_of_which_five_are_killed_have_the_bits_of_processes(tmp_path: Path):
    texts = text_file(tmp_path / "texts.txt", 64 * 64 + 17)
    expected = by_processes(texts, tmp_path / "processes", 64, 1)
    killed = kills(tmp_path / "kills", 5)
    out = tmp_path / "actors"
    out.mkdir()
    done = by_ray(tmp_path, "-c", SCAN, *map(str, (texts, out, killed, 64, 2)))
    assert done.returncode == 0, done.stderr[-4000:]
    assert not list(killed.iterdir())
    assert bits(part_file.merge_files(part_file.part_files(out))) == bits(expected)


JOIN = """
import os, subprocess, sys
import ray
context = ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
environment = os.environ | {"RAY_ADDRESS": context.address_info["gcs_address"]}
command = "scan --texts texts.txt --out parts --shards 3 --max-length 32 --engine ray --json".split()
done = subprocess.run([sys.executable, "-m", "attemper", *command], env=environment)
ray.shutdown()
sys.exit(done.returncode)
"""


@pytest.mark.long("starts Ray")
@needs_ray
def test_a_cluster_that_is_there_is_joined(tmp_path: Path):
    text_file(tmp_path / "texts.txt", 200)
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    done = by_ray(tmp_path, "-c", JOIN, **quiet)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.startswith('{"schema": 2')
    assert len(part_file.part_files(tmp_path / "parts")) == 3


@needs_ray
@pytest.mark.long("starts Ray")
def test_a_cluster_that_is_not_there_is_one_line(tmp_path: Path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    texts = text_file(tmp_path / "texts.txt", 20)
    command = ("-m", "attemper", "scan", "--texts", str(texts), "--engine", "ray")
    done = by_ray(tmp_path, *command, RAY_ADDRESS=address)
    assert done.returncode == 1
    assert done.stderr.startswith(
        f"attemper: Ray at {address} cannot be reached: [Errno 111] Connection refused. Start a"
    )
    assert done.stderr.count("\n") == 1


@pytest.mark.long("starts Ray")
@needs_ray
def test_the_example_merges_what_its_actors_scanned(tmp_path: Path):
    done = by_ray(tmp_path, str(ROOT / "examples" / "ray_scan.py"))
    assert done.returncode == 0, done.stderr[-4000:]
    assert "TransformerEncoder  2 sites, 8 heads, 2,560 tokens" in done.stdout
    assert "shards are missing" not in done.stdout


def test_an_address_that_is_none_is_refused():
    with pytest.raises(InputError, match="RAY_ADDRESS is 'my-cluster', not HOST:PORT"):
        ray_cluster._check_reachable("my-cluster")


def test_without_ray_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    work = task(text_file(tmp_path / "texts.txt", 20), tmp_path / "parts", 1)
    with pytest.raises(MissingExtraError, match=r"--engine ray needs the package ray.*attemper\[ray\]"):
        ray_cluster.run(work, range(1), 1, lambda texts: None)
