"""Any file that is damaged gives one error of ours, ``InputError``, and never another."""

from __future__ import annotations

import random
import shutil
import traceback
import warnings
from pathlib import Path

import pytest

import attemper
from attemper.errors import InputError
from tests.damage.files import FILES, read_run, run, scan_json
from tests.damage.mutations import mutate

RUNS, MORE_RUNS, OTHERS = 2000, 300, 4000
SOME_RUNS, SOME_OTHERS = 5, 40
"""Cases of a default run; ``--all`` has more, and ``--long`` all."""


def foreign(path: Path, reader, seed: int) -> str | None:
    """What is wrong with how a damaged copy is read; None if it was read, or refused by an error of ours."""
    draw = random.Random(seed)
    for _ in range(1 if draw.random() < 0.7 else 3):
        mutate(path, draw)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            reader(path)
        except InputError as error:
            return None if "\n" not in str(error) else f"seed {seed}: several lines: {error!r:.200}"
        except Exception as error:
            places = [
                f"{Path(one.filename).name}:{one.lineno}" for one in traceback.extract_tb(error.__traceback__)[-4:]
            ]
            return f"seed {seed}: {type(error).__name__}: {str(error)[:120]} at {' '.join(places)}"
    return None


def damaged_runs(seeds: range, folder: Path) -> list[str]:
    whole, found = run(folder / "whole"), []
    for seed in seeds:
        shutil.copytree(whole.parent, folder / "copy")
        found.append(foreign(folder / "copy" / whole.name, read_run, seed))
        shutil.rmtree(folder / "copy")
    return [line for line in found if line]


def damaged_files(seeds: range, folder: Path) -> list[str]:
    found = []
    for number, (write, read) in enumerate(FILES.items()):
        (folder / write.__name__).mkdir()
        path = write(folder / write.__name__)
        for seed in seeds[number :: len(FILES)]:
            shutil.copytree(path.parent, folder / "copy")
            line = foreign(folder / "copy" / path.name, read, seed)
            found.append(line and f"{write.__name__}, {line}")
            shutil.rmtree(folder / "copy")
    return [line for line in found if line]


@pytest.mark.parametrize(
    "many",
    [
        SOME_RUNS,
        pytest.param(MORE_RUNS, marks=pytest.mark.slow("takes many seconds")),
        pytest.param(RUNS, marks=pytest.mark.long("thousands of damaged files")),
    ],
)
def test_a_damaged_run_is_told_by_one_error_of_ours(many: int, tmp_path: Path):
    wrong = damaged_runs(range(many), tmp_path) + damaged_runs(range(3172, 3173), tmp_path / "lines")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("many", [SOME_OTHERS, pytest.param(OTHERS, marks=pytest.mark.slow("takes many seconds"))])
def test_a_damaged_file_is_told_by_one_error_of_ours(many: int, tmp_path: Path):
    wrong = damaged_files(range(many), tmp_path)
    assert not wrong, "\n".join(wrong)


def test_an_error_of_another_kind_is_found_with_its_seed(tmp_path: Path):
    def careless(path: Path) -> None:
        raise KeyError(path.name)

    assert "seed 7: KeyError: 'scan.json' at" in (foreign(scan_json(tmp_path), careless, 7) or "")


def test_most_damage_is_refused(tmp_path: Path):
    def refused(seed: int) -> bool:
        path, draw = scan_json(tmp_path), random.Random(seed)
        mutate(path, draw)
        try:
            attemper.open(path)
        except InputError:
            return True
        return False

    assert sum(map(refused, range(20))) > 10
