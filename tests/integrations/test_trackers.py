"""Several trackers: one that fails costs the others nothing, and pictures go to those that take them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from attemper.integrations.trackers import Trackers
from attemper.readings.reading import Reading
from attemper.results.scan import Scan
from tests.report.readings import site

VALUES = {"a/b": 1.5, "c": 2.0}
SCAN = Scan(Reading("M", 10, "auto", (site("layers.0"), site("layers.1"))), None)


def test_a_tracker_that_raises_is_told_once_and_the_others_still_get_theirs():
    def broken(values: dict[str, float], step: int) -> None:
        raise ConnectionError("no network")

    steps: list[int] = []
    trackers = Trackers([broken, lambda values, step: steps.append(step)])
    with pytest.warns(UserWarning, match="tracker function raised ConnectionError: no network. Training goes on"):
        trackers.write(VALUES, 1)
    trackers.write(VALUES, 2)
    assert trackers.failures == 2
    assert steps == [1, 2]


class Takes:
    """A tracker of numbers that keeps what it gets."""

    def __init__(self) -> None:
        self.numbers: list[Any] = []
        self.pictures: list[Any] = []
        self.tables: list[Any] = []

    def log(self, values: dict[str, float], step: int) -> None:
        self.numbers.append((values, step))


class TakesPictures(Takes):
    def log_image(self, key: str, images: list[Any], step: int) -> None:
        self.pictures.append((key, images[0].shape, step))


class TakesTables(Takes):
    def log_table(self, name: str, columns: list[str], data: list[Any], step: int) -> None:
        self.tables.append((name, columns, len(data), step))


class TakesBoth(TakesPictures, TakesTables):
    pass


def test_pictures_go_to_those_that_take_them_and_a_table_to_those_that_take_no_picture():
    pictures, tables, both, neither = everyone = TakesPictures(), TakesTables(), TakesBoth(), Takes()
    Trackers(everyone).write_map(SCAN, ["normalized_entropy", "max_logit"], 50)
    assert pictures.pictures == both.pictures
    assert [(name, step) for name, _, step in pictures.pictures] == [
        ("attention/map/normalized_entropy", 50),
        ("attention/map/max_logit", 50),
    ]
    columns = ["site", "layer", "head", "normalized_entropy", "max_logit"]
    assert tables.tables == [("attention/map", columns, 8, 50)]
    assert both.tables == []
    assert (neither.pictures, neither.tables, neither.numbers) == ([], [], [])


def test_a_tracker_whose_pictures_fail_still_gets_its_numbers():
    class NoDisk(Takes):
        def log_image(self, key: str, images: list[Any], step: int) -> None:
            raise OSError("disk full")

    tracker = NoDisk()
    trackers = Trackers([tracker])
    with pytest.warns(UserWarning, match="tracker NoDisk raised OSError: disk full"):
        trackers.write_map(SCAN, ["max_logit"], 0)
    trackers.write(VALUES, 0)
    assert (trackers.failures, tracker.numbers) == (1, [(VALUES, 0)])


def test_what_wraps_a_tracker_and_cannot_be_asked_for_it_is_told_once():
    class Offline:
        def log(self, values: dict[str, float], step: int) -> None: ...

        @property
        def experiment(self) -> Any:
            raise ConnectionError("offline")

    trackers = Trackers([Offline(), SimpleNamespace(log=lambda values, step: None)])
    with pytest.warns(UserWarning, match="tracker Offline raised ConnectionError: offline"):
        trackers.write_map(SCAN, ["max_logit"], 0)
    assert trackers.failures == 1
