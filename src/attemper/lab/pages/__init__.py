"""Pages to play with: one file an experiment, with sliders, whose curves the page computes by the lab's formulas.

The formulas stand once in Python, in the experiment's own file, and once in JavaScript, in the file of the same name
here; the browser test holds them against one another. What both need (constants, random rows) the page is given.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from jinja2 import FileSystemLoader
from markupsafe import Markup

from attemper import __version__
from attemper.checks import one_of
from attemper.files import write_whole
from attemper.report.page import asset, policy, script_of, templates
from attemper.report.texts import LANGUAGES
from attemper.text import script_json

ROWS = 32
"""Random rows that a page holds, the first of the lab's own."""
DIGITS = 5
"""After the point, of a score of a random row."""

_HERE = Path(__file__).parent

Texts = dict[str, dict[str, str]]


def page(name: str, *, seed: int = 0) -> str:
    """The page of the experiment ``name``. The same seed gives the same page, to the byte.

    Raises:
        InputError: no experiment of this name has a page.
    """
    one_of("lab page", name, PAGES)
    given = texts(name)
    style = asset("page.css") + _own("page.css")
    own = [_own(f"{part}.js") for part in ("controls", "formulas", "charts", name)]
    script = script_of([*own, asset("theme.js"), _own("main.js")])
    data = _data(name, seed) | {"texts": given, "languages": LANGUAGES}
    environment = templates().overlay(loader=FileSystemLoader(_HERE))
    return environment.get_template("page.html.j2").render(
        name=name,
        seed=seed,
        texts=given,
        policy=policy(style, (script,)),
        style=Markup(style),
        script=Markup(script),
        data=Markup(script_json(data)),
        version=__version__,
    )


def write(name: str, path: str | os.PathLike[str], *, seed: int = 0) -> Path:
    """Writes the page of an experiment to ``path``, whole or not at all, and gives the file's place.

    Raises:
        InputError: no experiment of this name has a page, or no file can be written there.
    """
    return write_whole(path, page(name, seed=seed))


def texts(name: str) -> Texts:
    """Key -> language -> what stands on the page of an experiment."""
    table = json.loads(_own("texts.json"))
    return table["every page"] | table[name]


def _own(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _data(name: str, seed: int) -> dict[str, Any]:
    from attemper.lab.temperature import CURVE

    return {"temperatures": CURVE} | _DATA[name](import_module(f"attemper.lab.{name}"), seed)


def random_rows(seed: int) -> list[list[float]]:
    """The first random rows of "saturation" and "temperature", rounded: scores of variance 1."""
    import torch

    from attemper.lab.saturation import KEYS
    from attemper.lab.saturation import ROWS as DRAWN

    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(DRAWN, KEYS, generator=generator, dtype=torch.float64)[:ROWS]
    return [[round(score, DIGITS) for score in row] for row in rows.tolist()]


_DATA: dict[str, Callable[[Any, int], dict[str, Any]]] = {
    "scaling": lambda lab, seed: {
        "divisors": lab.DIVISORS,
        "exponents": lab.EXPONENTS,
        "rows": random_rows(seed),
    },
    "saturation": lambda lab, seed: {"spreads": (lab.SPREADS[0], lab.SPREADS[-1]), "rows": random_rows(seed)},
    "temperature": lambda lab, seed: {
        "tied": lab.TIED,
        "biased": lab.BIASED,
        "bias": lab.BIAS,
        "rows": random_rows(seed),
    },
    "entropy": lambda lab, _: {
        "shapes": {name: weights.tolist() for name, weights in lab.distributions().items()},
        "epsilons": lab.EPSILONS,
        "low": lab.ALARM_LOW,
        "high": lab.ALARM_SHARE * math.log(lab.ALARM_KEYS),
    },
    "complexity": lambda lab, _: {"per_score": len(lab.PER_SCORE), "bytes": lab.BYTES, "block": lab.ROWS},
}
"""Experiment -> what its page needs of its module, for a seed."""
PAGES = tuple(_DATA)
"""Experiments whose curves are formulas that a page can compute; the others read a model or train one."""
