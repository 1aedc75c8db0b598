"""Trackers: every kind of them as one function, each head as a picture or a table, and one that fails ends nothing."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from attemper import InputError
from attemper.integrations.trackers import Range, Trackers, draw_method, grid, pixels, sink, table, table_method
from attemper.readings.reading import Reading
from attemper.report.notebook import VIRIDIS
from attemper.results.scan import Scan
from tests.report.readings import site
from tests.support.trackers import Kept

VALUES = {"a/b": 1.5, "c": 2.0}


class LogMetrics(Kept):
    """Lightning's loggers, mlflow, Comet."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.got.append((metrics, step))


class Log(Kept):
    """Weights & Biases, trackio, accelerate's trackers."""

    def log(self, values: dict[str, float], step: int | None = None, **_: Any) -> None:
        self.got.append((values, step))


class AddScalar(Kept):
    """SummaryWriter."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None:
        self.got.append((tag, scalar_value, global_step))


class Track(Kept):
    """Aim's Run, whose ``log`` is another thing."""

    def track(self, value: float, name: str, step: int | None = None) -> None:
        self.got.append((name, value, step))

    def log(self, level: int, message: str) -> None:
        raise AssertionError


class Both(LogMetrics, Log):
    """Something with several ways: the first of the documented order is taken."""

    def log(self, values: dict[str, float], step: int | None = None, **_: Any) -> None:
        raise AssertionError


@pytest.mark.parametrize("kind", [LogMetrics, Log, Both])
def test_a_tracker_of_dicts_gets_one_dict_and_the_step(kind: type[Any]) -> None:
    tracker = kind()
    sink(tracker)(VALUES, 7)
    assert tracker.got == [(VALUES, 7)]


@pytest.mark.parametrize("kind", [AddScalar, Track])
def test_a_tracker_of_scalars_gets_each_with_its_name_and_the_step(kind: type[Any]) -> None:
    tracker = kind()
    sink(tracker)(VALUES, 7)
    assert tracker.got == [("a/b", 1.5, 7), ("c", 2.0, 7)]


def test_a_function_and_a_module_are_trackers_too() -> None:
    got: list[Any] = []
    sink(lambda values, step: got.append((values, step)))(VALUES, 7)
    sink(SimpleNamespace(log_metrics=lambda metrics, step: got.append((metrics, step))))(VALUES, 8)
    assert got == [(VALUES, 7), (VALUES, 8)]


def test_missing_and_infinite_values_are_left_out_and_nothing_is_sent_for_none() -> None:
    tracker = Log()
    write = sink(tracker)
    write({"a": None, "b": float("nan"), "c": float("inf"), "d": 1.0}, 0)
    write({"a": None}, 1)
    assert tracker.got == [({"d": 1.0}, 0)]


@pytest.mark.parametrize(
    ("tracker", "message"),
    [
        (3, r"int is not a known tracker\. Accepted: something with \.log_metrics\(dict, step=\)"),
        (logging.getLogger("x"), r"Logger is not a known tracker.*\.add_scalar\(name, value, step\)"),
        (
            SimpleNamespace(log=lambda name, value: None),
            r"not a known tracker.*\.track\(value, name=, step=\).*or a function",
        ),
        (lambda values: None, "function is not a known tracker"),
        (AddScalar, "AddScalar is a class. Pass an instance of it"),
    ],
)
def test_what_is_no_tracker_is_told_with_all_that_is(tracker: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        sink(tracker)


def test_the_real_summary_writer_and_lightnings_loggers_are_known(tmp_path: Any) -> None:
    pytest.importorskip("lightning")
    pytest.importorskip("tensorboard")
    from lightning.pytorch.loggers import CSVLogger
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "board")) as writer:
        sink(writer)(VALUES, 3)
        drawn_by(writer)
    (image,) = EventAccumulator(str(tmp_path / "board")).Reload().Images("map")
    assert (image.step, image.width, image.height) == (7, 4, 8)
    logger = CSVLogger(tmp_path)
    sink(logger)(VALUES, 3)
    logger.save()
    rows = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()
    assert rows == ["a/b,c,step", "1.5,2.0,3"]


def test_accelerates_own_tracker_is_known() -> None:
    accelerate = pytest.importorskip("accelerate.tracking")

    class Mine(Log, accelerate.GeneralTracker):
        name, requires_logging_directory, tracker = "mine", False, None

        def __init__(self) -> None:
            accelerate.GeneralTracker.__init__(self, _blank=True)
            self.got = []

    tracker = Mine()
    sink(tracker)(VALUES, 3)
    assert tracker.got == [(VALUES, 3)]


# --- every head ---

PIXELS = np.arange(8 * 4 * 3, dtype=np.uint8).reshape(8, 4, 3)


@pytest.fixture
def scan() -> Scan:
    """Two sites: of two heads and of one, which has no entropy."""
    first, second = site("layers.0", heads=2), site("layers.1", heads=1)
    blind = replace(second.heads[0], normalized_entropy=None)
    return Scan(Reading("M", 10, "auto", (first, replace(second, heads=(blind,)))), None)


def test_a_grid_has_a_row_a_site_and_no_number_where_there_is_no_head(scan: Scan):
    values = grid(scan, "normalized_entropy")
    heads = scan.sites[0].heads
    assert values.shape == (2, 2)
    assert values[0].tolist() == [heads[0].normalized_entropy, heads[1].normalized_entropy]
    assert np.isnan(values[1]).all()


def test_colours_run_from_dark_to_light_and_are_grey_where_there_is_no_number():
    picture = pixels(np.array([[0.0, 1.0], [np.nan, 1 / 15]]))
    cell = picture.shape[0] // 2
    assert picture.shape == (2 * cell, 2 * cell, 3)
    assert picture.dtype == np.uint8
    assert tuple(picture[0, 0]) == VIRIDIS[0]
    assert tuple(picture[0, -1]) == VIRIDIS[-1]
    assert tuple(picture[-1, 0]) == (160, 160, 160)
    assert tuple(picture[-1, -1]) == VIRIDIS[1]
    assert (picture[:cell, :cell] == picture[0, 0]).all()


@pytest.mark.parametrize(("shape", "size"), [((4, 4), (64, 64)), ((32, 32), (512, 512)), ((96, 200), (384, 800))])
def test_cells_shrink_with_the_number_of_heads(shape: tuple[int, int], size: tuple[int, int]):
    assert pixels(np.zeros(shape)).shape[:2] == size


def test_a_statistic_with_bounds_keeps_them_and_one_without_grows_its_range():
    entropy = Range("normalized_entropy")
    assert entropy.shares(np.array([[0.25, 0.5]])).tolist() == [[0.25, 0.5]]
    logit = Range("max_logit")
    assert logit.shares(np.array([[10.0, 20.0]])).tolist() == [[0.0, 1.0]]
    assert logit.shares(np.array([[10.0, 60.0]])).tolist() == [[0.0, 1.0]]
    assert logit.shares(np.array([[10.0, 35.0]])).tolist() == [[0.0, 0.5]]


def test_a_range_takes_equal_and_missing_values():
    logit = Range("max_logit")
    assert np.isnan(logit.shares(np.array([[np.nan]]))).all()
    shares = logit.shares(np.array([[5.0, 5.0, np.nan]]))
    assert shares[0, :2].tolist() == [0.0, 0.0]
    assert np.isnan(shares[0, 2])


def test_a_logarithmic_statistic_is_coloured_by_its_logarithm():
    tokens = Range("effective_tokens")
    assert tokens.shares(np.array([[1.0, 10.0, 100.0]]))[0].tolist() == pytest.approx([0.0, 0.5, 1.0])


def test_a_table_has_a_row_for_each_head(scan: Scan):
    columns, rows = table(scan, ["normalized_entropy", "max_logit"])
    assert columns == ["site", "layer", "head", "normalized_entropy", "max_logit"]
    assert [row[:3] for row in rows] == [[site.name, site.layer, h.head] for site in scan.sites for h in site.heads]
    assert rows[2][3] is None


class Writer(Kept):
    """TensorBoard's SummaryWriter."""

    def add_image(self, tag, img_tensor, global_step=None, walltime=None, dataformats="CHW") -> None:
        self.got.append((tag, img_tensor.shape, global_step, dataformats))


class WandbLogger(Kept):
    """Lightning's logger of Weights & Biases."""

    def log_image(self, key: str, images: list[Any], step: int | None = None, **kwargs: Any) -> None:
        self.got.append((key, images[0].shape, step))


class Mlflow(Kept, ModuleType):
    def __init__(self) -> None:
        ModuleType.__init__(self, "mlflow")
        self.got = []

    def log_image(self, image, artifact_file=None, key=None, step=None, timestamp=None, synchronous=False) -> None:
        self.got.append((key, image.shape, step))


class Comet(Kept):
    def log_image(self, image_data, name=None, overwrite=False, image_minmax=None, step=None) -> None:
        assert image_minmax == (0, 255)
        self.got.append((name, image_data.shape, step))


class MlflowClient(Kept):
    def log_image(self, run_id, image, artifact_file=None, key=None, step=None) -> None:
        self.got.append((key, image.shape, step))


def drawn_by(tracker: Any) -> Any:
    """What the tracker gets of a picture."""
    draw = draw_method(tracker)
    assert draw is not None
    draw("map", PIXELS, 7)
    return tracker


@pytest.mark.parametrize("kind", [WandbLogger, Mlflow, Comet])
def test_a_method_for_images_is_known_by_its_arguments(kind: type[Any]):
    assert drawn_by(kind()).got == [("map", (8, 4, 3), 7)]


def test_a_summary_writer_is_told_the_order_of_axes_also_where_something_wraps_it():
    for wrap in (
        lambda one: one,
        lambda one: SimpleNamespace(experiment=one),
        lambda one: SimpleNamespace(tracker=one),
    ):
        writer = Writer()
        drawn_by(wrap(writer))
        assert writer.got == [("map", (8, 4, 3), 7, "HWC")]


def test_a_client_of_mlflow_is_told_its_run():
    client = MlflowClient()
    assert draw_method(SimpleNamespace(experiment=client)) is None
    drawn_by(SimpleNamespace(experiment=client, run_id="abc"))
    assert client.got == [("map", (8, 4, 3), 7)]


def package(monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    """A package with a class Image."""
    module: Any = ModuleType(name)
    module.Image = lambda data: ("image", data.shape)
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.mark.parametrize("name", ["wandb", "trackio", "swanlab"])
def test_a_run_gets_an_image_object_of_its_package_and_so_does_the_package(monkeypatch: pytest.MonkeyPatch, name: str):
    module: Any = package(monkeypatch, name)

    class Run(Kept):
        def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
            self.got.append((data, step))

    Run.__module__ = f"{name}.sdk.run"
    run = Run()
    module.log = run.log
    for tracker in (run, module):
        drawn_by(tracker)
    assert run.got == [({"map": ("image", (8, 4, 3))}, 7)] * 2


def test_a_run_of_aim_tracks_an_image_object(monkeypatch: pytest.MonkeyPatch):
    package(monkeypatch, "aim")
    got: list[Any] = []

    class Run:
        def track(self, value: Any, name: str, step: int | None = None) -> None:
            got.append((name, value, step))

    drawn_by(Run())
    assert got == [("map", ("image", (8, 4, 3)), 7)]


def test_a_table_goes_to_what_has_log_table(scan: Scan):
    got: list[Any] = []

    def log_table(table_name: str, columns: Any = None, data: Any = None, dataframe: Any = None, step: Any = None):
        got.append((table_name, columns, len(data), step))

    tabulate = table_method(SimpleNamespace(log_table=log_table))
    assert tabulate is not None
    tabulate("map", *table(scan, ["max_logit"]), 7)
    assert got == [("map", ["site", "layer", "head", "max_logit"], 3, 7)]


@pytest.mark.parametrize(
    "tracker",
    [
        print,
        SimpleNamespace(),
        SimpleNamespace(log=lambda values, step: None),
        SimpleNamespace(log_image=lambda path: None),
        SimpleNamespace(log_image=3, add_image=3, log_table=3),
        SimpleNamespace(log_table=lambda data, artifact_file: None),
    ],
)
def test_a_tracker_without_either_gets_neither(tracker: Any):
    assert draw_method(tracker) is None
    assert table_method(tracker) is None


# --- several trackers ---

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
