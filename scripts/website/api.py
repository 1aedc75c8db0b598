"""The reference of Python: a page for each public module, with every name that it has, documented once.

What a name is, its docstring says: here stands only in which order. A public name that is missing here stops the build.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from attemper.errors import InputError


@dataclass(frozen=True)
class Page:
    """A public module and its names in groups: title -> names. A name with a dot is one of another module, in full."""

    name: str
    title: str
    module: str
    groups: dict[str, tuple[str, ...]]
    whole: bool = True
    """Whether the groups must hold every public name of the module."""


PAGES = (
    Page(
        "attemper", "attemper", "attemper",
        {
            "Reading a model": ("scan", "Scan", "open", "pattern", "compare", "check"),
            "Explaining a difference": ("fingerprint", "explain"),
            "Watching a training": ("watch", "tap", "AlarmLimits", "Store"),
            "Attention that reports": ("attention", "attention_statistics", "varlen_attention"),
            "Acting on a model": (
                "temper", "calibrate", "load", "regularize", "EntropyTarget", "EntropyBonus", "EntropyDiversity",
                "ZLoss", "Thermostat", "QKClip", "sigma_reparam_",
            ),
            "Errors": ("InputError", "BackendError", "MissingExtraError"),
        },
    ),
    Page(
        "types", "attemper.types", "attemper.types",
        {
            "Of reading": (
                "Check", "Comparison", "Explanation", "Fingerprint", "Pattern", "Patterns", "Run", "Scan", "Watch",
            ),
            "Of attention": ("AttentionOutput", "AttentionStats"),
            "Of acting": ("Calibration", "Regularizer", "SigmaReparam", "Tempered"),
        },
    ),
    Page(
        "functional", "attemper.functional", "attemper.functional",
        {
            "Measures of scores": (
                "entropy", "softmax", "softmax_jacobian", "statistics", "logit_variance", "entropy_slope",
            ),
            "Measures of weights": ("entropy_of", "effective_tokens", "max_weight", "gini"),
            "Temperatures": ("temperature_for_entropy", "SolvedTemperature", "length_temperature"),
            "Normalizers": (
                "sparsemax", "entmax15", "entmax", "entmax_iterations", "topk_softmax", "threshold_softmax", "sigmoid",
                "softmax_with_sink", "softmax_plus_one", "scalable_softmax",
            ),
            "Losses": ("entropy_target", "entropy_bonus", "entropy_diversity", "z_loss"),
            "Linear attention": ("linear_attention", "LinearOutput", "LinearState"),
            "Information": (
                "kl_to_uniform", "mutual_information", "rate_distortion", "RateDistortion", "pac_bayes_bound",
            ),
            "Attention and what it returns": (
                "attention", "attention_statistics", "varlen_attention", "dense_weights", "AttentionOutput",
                "AttentionStats", "HeadSummary", "VisibleKeyCurve",
            ),
        },
    ),
    Page(
        "nn", "attemper.nn", "attemper.nn",
        {
            "Attention": ("MultiheadAttention", "CrossAttention", "LinearAttention"),
            "Temperatures": (
                "Temperature", "FixedTemperature", "LearnedTemperature", "ConditionalTemperature", "LengthTemperature",
                "ScheduledTemperature", "ProductTemperature", "bounded_exponential",
            ),
            "Normalizers": (
                "Normalizer", "Softmax", "Sparsemax", "Entmax15", "Entmax", "TopK", "Threshold", "Sigmoid", "Sink",
                "SoftmaxPlusOne", "ScalableSoftmax",
            ),
        },
    ),
    Page(
        "schedules", "attemper.schedules", "attemper.schedules",
        {"": ("constant", "warmup_anneal", "curriculum", "piecewise", "layerwise", "schedule_form", "schedule_of")},
    ),
    Page(
        "transformers", "attemper.integrations.transformers", "attemper.integrations.transformers",
        {"": ("AttemperCallback", "register", "NAME")},
    ),
    Page(
        "lightning", "attemper.integrations.lightning", "attemper.integrations.lightning",
        {"": ("AttemperCallback",)},
    ),
    Page(
        "keras", "attemper.integrations.keras", "attemper.integrations.keras",
        {"": ("CrossAttention", "EntropyTarget", "RowMean", "TabulatedSchedule", "attention_weights")}, whole=False,
    ),
    Page(
        "records", "What functions return", "attemper",
        {
            "A scan": (
                "attemper.readings.reading.Reading", "attemper.readings.reading.SiteReading",
                "attemper.readings.reading.HeadReading", "attemper.readings.reading.VisibleKeyBucket",
                "attemper.readings.reading.Alarm", "attemper.readings.reading.Skipped",
                "attemper.readings.rows.Rows", "attemper.readings.rows.SiteRows",
            ),
            "Fingerprints": (
                "attemper.fingerprints.site.SiteFingerprint", "attemper.fingerprints.site.ModelOutput",
                "attemper.fingerprints.explanation.Remark", "attemper.fingerprints.explanation.Runs",
            ),
            "A check": ("attemper.results.check.Rule",),
            "A comparison": ("attemper.results.comparison.HeadChange",),
            "A stored run": (
                "attemper.results.run.Run", "attemper.store.run.Coverage", "attemper.store.run.Unread",
                "attemper.store.series.Segment", "attemper.store.series.Lost", "attemper.readings.sample.SiteLabel",
                "attemper.readings.history.History", "attemper.readings.history.Trend",
            ),
            "Functions of tensors": ("attemper.functional.measures.ScoreStatistics", "attemper.call.result.CallFacts"),
            "Acting on a model": (
                "attemper.control.handle.Handle", "attemper.control.regularize.Penalty",
                "attemper.control.thermostat.Reading", "attemper.control.sigma_reparam.SpectralScale",
            ),
            "Numbers for trackers": (
                "attemper.integrations.metrics.scalars", "attemper.integrations.metrics.budget",
                "attemper.integrations.metrics.Budget", "attemper.integrations.trackers.sink",
            ),
            "The lab": (
                "attemper.lab.run", "attemper.lab.train", "attemper.lab.read_results",
                "attemper.lab.experiment.Experiment", "attemper.lab.experiment.Table",
                "attemper.lab.experiment.Column", "attemper.lab.experiment.Chart", "attemper.lab.experiment.Axis",
                "attemper.lab.experiment.Series",
            ),
        },
        whole=False,
    ),
)  # fmt: skip

SAID = "Every public name. An object that has two names is described under the shorter one."
ROLE = re.compile(r":\w+:`~?(?:[\w.]+\.)?(\w+)`")
"""A reference, which docstrings make from where they stand."""


def pages() -> dict[str, str]:
    """File -> reStructuredText, of every page of the reference.

    Raises:
        InputError: a public name stands in no group, or a name in a group is not public.
    """
    for one in PAGES:
        check_complete(one)
    return {"index.rst": index(), **{f"{one.name}.rst": page(one) for one in PAGES}}


def check_complete(page: Page) -> None:
    names = {name for group in page.groups.values() for name in group}
    public = public_names(page.module) if page.whole else names
    if names != public:
        raise InputError(
            f"scripts/website/api.py, page {page.name!r} must have every public name of {page.module}, once; "
            f"missing: {sorted(public - names)}, not public: {sorted(names - public)}."
        )


def public_names(module: str) -> set[str]:
    """``__all__`` without modules; where there is none, the functions and classes that are defined there."""
    home = import_module(module)
    names = getattr(home, "__all__", None) or [
        name for name, one in vars(home).items()
        if not name.startswith("_") and getattr(one, "__module__", None) == module and callable(one)
    ]  # fmt: skip
    return {name for name in names if not inspect.ismodule(getattr(home, name))}


def page(page: Page) -> str:
    """The directives of autodoc for a page."""
    parts = [heading(page.title, "="), *said(page)]
    for title, names in page.groups.items():
        parts += [heading(title, "-")] if title else []
        parts += [entry(page, name) for name in names]
    return "\n\n".join(parts) + "\n"


def said(page: Page) -> list[str]:
    """What the module says of itself, on the pages of public modules."""
    return [f".. automodule:: {page.module}"] if page.whole else []


def home_of(page: Page, name: str) -> tuple[str, str]:
    """(module, name)"""
    module, _, last = name.rpartition(".")
    return module or page.module, last


def entry(page: Page, name: str) -> str:
    module, short = documented(page, name)
    thing = getattr(import_module(module), short)
    if (module, short) != home_of(page, name):
        return f"``{name}``: see :py:{'class' if inspect.isclass(thing) else 'func'}:`{module}.{short}`."
    if inspect.isclass(thing):
        return f".. autoclass:: {module}::{short}\n   :members:\n   :show-inheritance:"
    return f".. auto{'function' if callable(thing) else 'data'}:: {module}::{short}"


def documented(page: Page, name: str) -> tuple[str, str]:
    """(module, name) under which this very object comes first in ``PAGES``: it is documented there."""
    home, short = home_of(page, name)
    thing = getattr(import_module(home), short)
    for other in PAGES:
        for one in (one for group in other.groups.values() for one in group):
            module, last = home_of(other, one)
            if last == short and getattr(import_module(module), last) is thing:
                return module, last
    raise AssertionError(name)


def index() -> str:
    """Every page with its names, each with the first sentence of what it is."""
    parts = [
        heading("Python", "="),
        SAID,
    ]
    parts.append(".. toctree::\n   :hidden:\n\n" + "\n".join(f"   {one.name}" for one in PAGES))
    for one in PAGES:
        parts += [heading(one.title, "-"), f":doc:`{one.name}`", table(one)]
    return "\n\n".join(parts) + "\n"


def table(page: Page) -> str:
    rows = [row(page, name) for group in page.groups.values() for name in group]
    return ".. list-table::\n   :widths: 30 70\n\n" + "\n".join(rows)


def row(page: Page, name: str) -> str:
    module, short = documented(page, name)
    return f"   * - :py:obj:`~{module}.{short}`\n     - {summary(getattr(import_module(module), short))}"


def summary(thing: Any) -> str:
    """The first sentence of a docstring, on one line."""
    text = inspect.getdoc(thing) if callable(thing) else None
    sentence = " ".join((text or "").partition("\n\n")[0].split()).removesuffix(":")
    return ROLE.sub(r"``\1``", sentence) or "\\ "


def heading(text: str, line: str) -> str:
    return f"{text}\n{line * len(text)}"
