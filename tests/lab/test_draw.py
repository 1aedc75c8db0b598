"""Pictures: written, the same bytes again, told apart without colour, and refused with a reason."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from attemper.errors import InputError, MissingExtraError
from attemper.lab.draw import STYLES, _marks, check_picture, draw
from attemper.lab.trained.interventions import INTERVENTIONS
from tests.lab.test_experiment import EXPERIMENT

DRAWN = replace(EXPERIMENT, charts=(replace(EXPERIMENT.charts[0], series=(
    replace(EXPERIMENT.charts[0].series[0], y=(1.0, None)), replace(EXPERIMENT.charts[0].series[0], y=(1.0, 2.0)),
)),))  # fmt: skip


@pytest.mark.slow("takes many seconds")
def test_a_picture_is_a_png_and_the_same_bytes_again(tmp_path: Path):
    pytest.importorskip("matplotlib")
    path = draw(DRAWN, tmp_path / "a.png")
    assert path == tmp_path / "a.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.read_bytes() == draw(DRAWN, tmp_path / "b.png").read_bytes()
    three = replace(DRAWN, charts=DRAWN.charts * 3)
    assert draw(three, tmp_path / "c.png").read_bytes() != path.read_bytes()


@pytest.mark.parametrize("name", ["x.jpg", "x", "x.png.svg"])
def test_another_ending_is_refused_and_not_filled_with_a_png(name: str, tmp_path: Path):
    pytest.importorskip("matplotlib")
    with pytest.raises(
        InputError, match=rf"written to '.*{name}': a PNG picture needs a name that ends in \.png\. Name"
    ):
        draw(DRAWN, tmp_path / name)
    assert not (tmp_path / name).exists()
    draw(DRAWN, tmp_path / "x.PNG")


def test_marks_of_two_curves_that_lie_on_each_other_do_not():
    places = [set(range(start, 64, step)) for start, step in (_marks(64, number, 3) for number in range(3))]
    assert not places[0] & places[1]
    assert not places[0] & places[2]
    assert all(len(each) == 8 for each in places)


def test_curves_differ_without_colour():
    assert len({(str(dash), mark) for _, dash, mark in STYLES}) == len(STYLES)
    assert len({mark for _, _, mark in STYLES}) == len(STYLES)
    assert len({color for color, _, _ in STYLES}) == len(STYLES) >= len(INTERVENTIONS), "a chart of all of them"


def test_a_missing_matplotlib_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for call in (lambda: draw(DRAWN, tmp_path / "a.png"), lambda: check_picture(tmp_path / "a.png")):
        with pytest.raises(MissingExtraError, match=r"needs the package matplotlib.*pip install 'attemper\[plot\]'"):
            call()


def test_a_place_where_no_picture_can_be_written_is_told_and_an_earlier_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("matplotlib")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(InputError, match=r"cannot be written to '.*/no/a\.png': No such file or directory\. Name"):
        draw(DRAWN, tmp_path / "no" / "a.png")
    with pytest.raises(InputError, match="it is a folder or a device, not a file"):
        draw(DRAWN, tmp_path / "folder.png")
    with pytest.raises(InputError, match="experiment made has no chart to draw"):
        draw(replace(DRAWN, charts=()), tmp_path / "a.png")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    before = draw(DRAWN, tmp_path / "a.png").read_bytes()
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(InputError, match="No space left on device"):
        draw(replace(DRAWN, charts=DRAWN.charts * 3), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "folder.png"]
