"""``attemper scan --texts`` and ``attemper merge`` as a person, or a job of a cluster, meets them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import attemper
from attemper.cli.shards import shard_of
from attemper.errors import InputError
from tests.support.command import Run, bad_usage, one_line
from tests.support.killed_workers import text_file

ROOT = Path(__file__).parents[2]
SMALL = ("--max-length", 48, "--batch-size", 16)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No job of a cluster."""
    for name in ("RANK", "WORLD_SIZE", *(f"SLURM_ARRAY_TASK_{part}" for part in ("ID", "MIN", "MAX", "COUNT"))):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return text_file(tmp_path / "texts.txt", 150)


def numbers(document: str) -> dict[str, Any]:
    found = json.loads(document)
    del found["date"]
    return found


@pytest.mark.slow("takes many seconds")
def test_parts_of_a_slurm_array_and_of_torchrun_are_the_same_and_merge(run: Run, texts: Path, tmp_path: Path):
    for task in (5, 3, 4):
        ended = run(
            *("scan", "--texts", texts, "--out", tmp_path / "slurm", *SMALL),
            SLURM_ARRAY_TASK_ID=task, SLURM_ARRAY_TASK_MIN=3, SLURM_ARRAY_TASK_MAX=5, SLURM_ARRAY_TASK_COUNT=3,
        )  # fmt: skip
        assert (ended.code, ended.out) == (0, ""), ended.err
        assert ended.err.endswith(f"part-{task - 3:05d}-of-00003.safetensors\n")
    for rank in range(3):
        assert run("scan", "--texts", texts, "--out", tmp_path / "ranks", *SMALL, RANK=rank, WORLD_SIZE=3).code == 0
        named = run("scan", "--texts", texts, "--out", tmp_path / "ranks", "--shard", f"{rank}/3", *SMALL)
        assert (named.code, named.out) == (0, "")
        assert "is there already, of this model, these texts and arguments: nothing to do" in named.err
    one, two = (numbers(run("merge", tmp_path / folder, "--json").out) for folder in ("slurm", "ranks"))
    assert one == two
    assert one["text"] == "texts.txt"
    assert one["missing_shards"] is None
    driven = numbers(run("scan", "--texts", texts, "--shards", 3, *SMALL, "--json").out)
    assert driven == one
    whole = numbers(run("scan", "--texts", texts, *SMALL, "--json").out)
    assert whole["tokens"] == one["tokens"]
    heads = zip(*(document["sites"][0]["heads"] for document in (one, whole)), strict=True)
    assert all(a["entropy_nats"] == pytest.approx(b["entropy_nats"], rel=1e-12) for a, b in heads)


def test_merging_names_what_is_missing_and_writes_what_merges_again(run: Run, texts: Path, tmp_path: Path):
    parts, some = tmp_path / "parts", tmp_path / "parts" / "some.safetensors"
    for index in (0, 2):
        run("scan", "--texts", texts, "--out", parts, "--shard", f"{index}/3", *SMALL)
    refused = run("merge", parts)
    assert (refused.code, refused.out) == (1, "")
    assert refused.err == (
        "attemper: 1 of 3 shards is missing: 1/3. Scan them with --shard, or merge the others with --allow-missing.\n"
    )
    ended = run("merge", parts, "--allow-missing", "--out", some, "--html", tmp_path / "page.html")
    assert ended.code == 0
    assert "shards are missing, so the numbers leave out their texts: 1/3." in ended.out.replace("\n", " ")
    assert (tmp_path / "page.html").stat().st_size > 1000
    assert attemper.open(some).shards == ("0/3", "2/3")
    run("scan", "--texts", texts, "--out", tmp_path / "rest", "--shard", "1/3", *SMALL)
    whole = run("merge", some, tmp_path / "rest" / "part-00001-of-00003.safetensors", "--json")
    assert json.loads(whole.out)["missing_shards"] is None
    twice = run("merge", parts)
    assert twice.code == 1
    assert "shard 0/3 is there twice, in part-00000-of-00003.safetensors and some.safetensors" in twice.err
    named = run("merge", parts / "part-00000-of-00003.safetensors", tmp_path / "rest" / ".." / "parts")
    assert f"in {parts}/part-00000-of-00003.safetensors and {tmp_path}/rest/../parts/part-00000" in named.err
    again = run("merge", parts, "--allow-missing", "--out", some)
    assert again.code == 0, "the file that is written is no part to read"


@pytest.mark.slow("a process of its own")
def test_merge_loads_no_torch(run: Run, texts: Path, tmp_path: Path):
    run("scan", "--texts", texts, "--out", tmp_path, "--shards", 2, *SMALL)
    code = (
        "import sys; from attemper import cli\n"
        f"sys.argv = ['attemper', 'merge', {str(tmp_path)!r}, '--json', '--html', {str(tmp_path / 'a.html')!r}]\n"
        "try: cli.main()\nexcept SystemExit as end: assert not end.code\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["schema"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--texts", "TEXTS", "--text", "TEXTS"), "reads many texts and --text reads one"),
        (("--shard", "0/2"), "needs --texts, which names many texts"),
        (("--workers", "2"), "needs --texts, which names many texts"),
        (("--texts", "none.txt"), "there is no file or folder none.txt"),
        (("--texts", "TEXTS", "--field", "body", "--out", "EMPTY.txt/a"), "no parts can be kept in"),
        (("--texts", "EMPTY.txt"), "EMPTY.txt holds no text: every line or record is blank"),
        (("--texts", "BAD.jsonl"), "BAD.jsonl:2 has no field 'text'. It has body: name one with --field."),
        (("--texts", "TEXTS", "--shard", "2/2", "--out", "parts"), "'2/2' is not I/N, I of N shards with I from 0 to"),
        (("--texts", "TEXTS", "--shard", "one", "--out", "parts"), "'one' is not I/N"),
        (("--texts", "TEXTS", "--shard", "0/2"), "needs --out FOLDER, where its part goes"),
        (("--texts", "TEXTS", "--shard", "0/2", "--out", "parts", "--workers", "2"), "is one of several that other"),
        (("--texts", "TEXTS", "--shard", "0/2", "--out", "parts", "--json"), "needs all shards, and this process"),
    ],
)  # fmt: skip
def test_bad_usage_is_told_before_a_model_is_loaded(
    arguments: tuple[str, ...], message: str, run: Run, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("EMPTY.txt").write_text("\n \n")
    Path("BAD.jsonl").write_text('{"text": "one"}\n{"body": "two"}\n')
    monkeypatch.setattr("attemper.cli.shards.load_model", None)
    bad_usage(run("scan", *(str(texts) if word == "TEXTS" else word for word in arguments)), message)


def test_workers_inside_an_array_are_refused(run: Run, texts: Path, tmp_path: Path):
    ended = run("scan", "--texts", texts, "--out", tmp_path / "a", "--workers", 2, RANK=1, WORLD_SIZE=4)
    bad_usage(ended, "this process is 1 of 4 by its environment")


def array(task: int, first: int, last: int, count: int) -> dict[str, str]:
    names = ("ID", "MIN", "MAX", "COUNT")
    return {f"SLURM_ARRAY_TASK_{name}": str(n) for name, n in zip(names, (task, first, last, count), strict=True)}


@pytest.mark.parametrize(
    ("environment", "shard"),
    [
        ({}, None),
        ({"RANK": "1"}, None),
        ({"RANK": "1", "WORLD_SIZE": "4"}, (1, 4)),
        (array(0, 0, 63, 64), (0, 64)),
        (array(7, 4, 11, 8), (3, 8)),
        (array(5, 5, 5, 1) | {"RANK": "3", "WORLD_SIZE": "4"}, (0, 1)),
    ],
)
def test_the_shard_of_a_job_is_in_its_environment(environment: dict[str, str], shard: tuple[int, int] | None):
    assert shard_of(environment) == shard


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (array(4, 0, 6, 4), "this SLURM array has 4 tasks from 0 to 6, so it has gaps"),
        ({"SLURM_ARRAY_TASK_ID": "4"}, "SLURM_ARRAY_TASK_MIN is '', not a whole number: name the shard with --shard"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK is 4 and WORLD_SIZE 4"),
        ({"RANK": "a", "WORLD_SIZE": "4"}, "RANK is 'a', not a whole number"),
    ],
)
def test_an_environment_that_says_no_shard_is_refused(environment: dict[str, str], message: str):
    with pytest.raises(InputError, match=message):
        shard_of(environment)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("merge", "FOLDER"), "there is no part in the folder"),
        (("merge", "FOLDER/none.safetensors"), "none.safetensors cannot be read: No such file"),
        (("merge", "FOLDER/scan.json"), "scan.json is the JSON of a scan: its numbers are means, which do not add up"),
    ],
)
def test_what_cannot_be_merged_is_one_line(arguments: tuple[str, ...], message: str, run: Run, tmp_path: Path):
    (tmp_path / "scan.json").write_text('{"schema": 2}')
    one_line(run(*(word.replace("FOLDER", str(tmp_path)) for word in arguments)), 1, message)


SBATCH = """#!/usr/bin/env bash
# A SLURM of one machine: runs each task of an array, one after another, and prints the job's number.
array=0-0 command=
for argument in "$@"; do
    [[ $argument == --array=* ]] && array=${argument#--array=}
done
while (($#)); do [[ $1 == --wrap ]] && command=$2; shift; done
first=${array%-*} last=${array#*-}
last=$((last < 2 ? last : 2)) # three tasks will do
many=$((last - first + 1))
[[ $many == 1 ]] || export SLURM_ARRAY_TASK_MIN=$first SLURM_ARRAY_TASK_MAX=$last SLURM_ARRAY_TASK_COUNT=$many
for ((task = first; task <= last; task++)); do
    [[ $array == 0-0 ]] || export SLURM_ARRAY_TASK_ID=$task
    bash -c "${command//--device cuda/}" >&2 || exit
done
echo 7
"""


ATTEMPER = """#!/usr/bin/env bash
# The command, of the model that ships.
arguments=()
for argument in "$@"; do [[ $argument == {model} ]] || arguments+=("$argument"); done
exec {python} -m attemper "${{arguments[@]}}"
"""


@pytest.mark.slow("starts processes")
def test_the_slurm_script_submits_an_array_and_its_merge(texts: Path, tmp_path: Path):
    tools = tmp_path / "tools"
    tools.mkdir()
    model = tmp_path / "model"
    for name, content in (("sbatch", SBATCH), ("attemper", ATTEMPER.format(model=model, python=sys.executable))):
        (tools / name).write_text(content)
        (tools / name).chmod(0o755)
    done = subprocess.run(
        ["bash", str(ROOT / "examples" / "slurm_scan.sh"), str(model), str(texts), str(tmp_path / "job")],
        env=os.environ | {"PATH": f"{tools}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "job" / "page.html").exists()
    assert attemper.open(tmp_path / "job" / "whole.safetensors").shards == ("0/3", "1/3", "2/3")


@pytest.mark.slow("takes a second")
def test_compare_takes_merged_readings(run: Run, texts: Path, tmp_path: Path):
    run("scan", "--texts", texts, "--shards", 2, "--out", tmp_path, *SMALL)
    one, whole = tmp_path / "part-00000-of-00002.safetensors", tmp_path / "whole.safetensors"
    run("merge", tmp_path, "--out", whole)
    ended = run("compare", one, whole, "--json")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["heads"]
