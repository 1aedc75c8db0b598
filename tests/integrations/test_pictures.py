"""Every head as a picture or a table, and how each kind of tracker takes it."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from attemper.integrations.trackers import Pictures, Range, draw_method, grid, pixels, table, table_method
from attemper.readings.reading import Reading
from attemper.report.notebook import VIRIDIS
from attemper.results.scan import Scan
from tests.report.readings import site
from tests.support.trackers import Kept

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


def test_pictures_of_one_run_share_their_ranges(scan: Scan):
    pictures = Pictures()
    first = pictures.pixels(scan, "max_logit")
    assert (pictures.pixels(scan, "max_logit") == first).all()


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


def test_the_real_summary_writer_takes_a_picture(tmp_path: Any):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        draw = draw_method(writer)
        assert draw is not None
        draw("attention/map/max_logit", PIXELS, 7)
    events = EventAccumulator(str(tmp_path)).Reload()
    (image,) = events.Images("attention/map/max_logit")
    assert (image.step, image.width, image.height) == (7, 4, 8)
