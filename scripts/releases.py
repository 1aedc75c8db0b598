"""The lanes of scripts/test.sh --releases: which versions each installs, and the table of docs/compatibility.md.

    python scripts/releases.py versions newest|oldest [--torch]    constraints for pip, on stdout
    python scripts/releases.py record newest|oldest JUNIT          writes the lane's row of the table

newest: nothing is pinned. oldest: the lower bounds of pyproject.toml for all that users install. torch is the newest or
oldest CPU build that the index has, and the one of constraints.txt where it has none. The ordinary build takes 5 GB;
--torch asks for it. pip and the packages of a row are those of the Python that runs this.
"""

from __future__ import annotations

import argparse
import platform
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "compatibility.md"
EXTRAS = ("transformers", "lightning", "keras", "pandas", "plot", "parquet")
"""Extras whose lower bounds are tested. A release of triton belongs to one of torch."""
SHOWN = ("torch", "transformers", "lightning", "keras", "numpy")
HEADER = f"| lane | Python | {' | '.join(SHOWN)} | passed | failed | skipped |"


def floors() -> dict[str, str]:
    """Package -> the lower bound that pyproject.toml claims."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    wanted = [*project["dependencies"], *(one for extra in EXTRAS for one in project["optional-dependencies"][extra])]
    return dict(re.match(r"([\w-]+)>=([\d.]+)", one).groups() for one in wanted)  # pyright: ignore


def tested_torch() -> str:
    return next(
        line.partition("==")[2]
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line.startswith("torch==")
    )


def cpu_builds() -> list[str]:
    """Versions of torch that the index has as CPU builds, oldest first."""
    pip = [sys.executable, "-m", "pip", "index", "versions", "torch", "--disable-pip-version-check"]
    listed = subprocess.run(pip, capture_output=True, text=True, check=True).stdout
    found = set(re.findall(r"(\d+\.\d+\.\d+)\+cpu", listed))
    return sorted(found, key=lambda one: tuple(map(int, one.split("."))))


def versions(lane: str, ordinary_torch: bool) -> list[str]:
    """Constraints for pip."""
    bounds = floors() if lane == "oldest" else {}
    floor = bounds.pop("torch", None)
    pinned = [f"{name}=={bound}" for name, bound in bounds.items()]
    if not ordinary_torch:
        builds = [one for one in cpu_builds() if one.startswith(f"{floor}.")] if floor else cpu_builds()
        return [f"torch=={builds[-1] if builds else tested_torch()}", *pinned]
    return [*([f"torch=={floor}.*"] if floor else []), *pinned]


def installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def record(lane: str, junit: Path) -> None:
    """Writes what a lane ran with and what came out as its row of the table."""
    suites = list(ElementTree.parse(junit).getroot().iter("testsuite"))
    total, failed, errors, skipped = (
        sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    )
    passed = total - failed - errors - skipped
    cells = [
        lane,
        platform.python_version(),
        *map(installed, SHOWN),
        f"{passed:,}",
        f"{failed + errors:,}",
        f"{skipped}",
    ]
    text = PAGE.read_text(encoding="utf-8")
    start = text.index(HEADER)
    lines = text[start:].partition("\n\n")[0].splitlines()
    rows = {line.split("|")[1].strip(): line for line in lines[2:]}
    rows[lane] = f"| {' | '.join(cells)} |"
    table = "\n".join([*lines[:2], *(rows[name] for name in ("newest", "oldest") if name in rows)])
    PAGE.write_text(text.replace("\n".join(lines), table), encoding="utf-8")
    print(rows[lane])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("action", choices=("versions", "record"))
    parser.add_argument("lane", choices=("newest", "oldest"))
    parser.add_argument("junit", nargs="?", type=Path)
    parser.add_argument("--torch", action="store_true")
    options = parser.parse_args()
    if options.action == "versions":
        print("\n".join(versions(options.lane, options.torch)))
    elif options.junit is None:
        parser.error("record needs the file that pytest --junitxml wrote")
    else:
        record(options.lane, options.junit)


if __name__ == "__main__":
    main()
