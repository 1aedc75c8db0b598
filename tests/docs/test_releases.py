"""The lanes of other releases: what they install is what pyproject.toml claims, and docs/compatibility.md has their rows."""

import re
import tomllib
from pathlib import Path

from scripts import releases

ROOT = Path(__file__).parents[2]


def rows() -> dict[str, list[str]]:
    lines = releases.PAGE.read_text(encoding="utf-8").splitlines()
    start = lines.index(releases.HEADER) + 2
    found = {}
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        found[cells[0]] = cells[1:]
    return found


def test_the_oldest_lane_pins_every_lower_bound_that_users_are_promised():
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    floors = releases.floors()
    for one in project["dependencies"]:
        name, _, bound = one.partition(">=")
        assert floors[name] == bound
    assert {"transformers", "lightning", "keras"} <= set(floors)


def test_a_lane_that_stands_in_the_table_ran_with_the_floors_that_are_claimed_today_and_nothing_failed():
    found, floors = rows(), releases.floors()
    assert set(found) <= {"newest", "oldest"}
    said = "No whole run of the oldest lane stands here yet" in releases.PAGE.read_text(encoding="utf-8")
    assert said != ("oldest" in found)
    for lane, cells in found.items():
        versions = dict(zip(releases.SHOWN, cells[1:], strict=False))
        passed, failed = (int(cells[place].replace(",", "")) for place in (-3, -2))
        assert passed > 5500, lane
        assert failed == 0, lane
        if lane == "oldest":
            for name in set(releases.SHOWN) - {"torch"}:
                assert re.match(rf"{re.escape(floors[name])}(\.|$)", versions[name]), name
