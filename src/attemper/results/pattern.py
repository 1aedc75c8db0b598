"""The weights of heads on a text, with its tokens: as heat maps in a notebook, as pictures, and as a page."""

from __future__ import annotations

import base64
import io
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from attemper.errors import InputError, needs
from attemper.files import check_target, write_whole
from attemper.readings.labels import layer_of
from attemper.readings.reading import Skipped
from attemper.report.notebook import colours
from attemper.text import clean, count, cut, token_text

MOST_CELLS = 48
"""Rows and columns up to which HTML is a table with labels; beyond, an image without."""
MOST_LABELS = 80
"""Labels on an axis of a picture; of more, every so many-th is shown."""
LONGEST_LABEL = 24
MOST_PIXELS = 32
"""Pixels of a map on each side, in a picture of many; of the weights that share one, the largest is drawn."""
_SMALL = "font-size:12px;color:inherit;opacity:0.75"


@dataclass(frozen=True, eq=False)
class Pattern:
    """The attention weights of one head for one text. In a notebook it shows itself as a heat map.

    Attributes:
        weights: [Q, K] on the CPU, float64 for float64 queries, float32 otherwise: what is applied to the values,
            before dropout. A row sums to 1, or to its ``mass`` under a sink or a sigmoid; one whose mask hides every
            key is 0, although an eager attention makes equal weights of the lowest number and NaN of -inf.
        tokens: a label for each query.
        site, head: which head it is.
        key_tokens: a label for each key; those of the queries too, unless it is cross attention or a cache is read.
        kind: "self" or "cross".
        padding: queries and keys that were left out as padding.
        layer: number of the block that the site is in, as in ``Scan.sites``; None where it has none.
        role: what the head does on this text, as in ``Scan.sites`` ("previous token"); None where it has no role.
    """

    weights: Tensor
    tokens: tuple[str, ...]
    site: str
    head: int
    key_tokens: tuple[str, ...]
    kind: str = "self"
    padding: tuple[int, int] = (0, 0)
    layer: int | None = None
    role: str | None = None

    def __post_init__(self) -> None:
        if self.layer is None:
            object.__setattr__(self, "layer", layer_of(self.site))

    @property
    def title(self) -> str:
        """The head, the size and the padding in one line."""
        queries, keys = self.weights.shape
        left_out = f", padding left out (of queries {self.padding[0]}, of keys {self.padding[1]})"
        told = left_out if any(self.padding) else ""
        return f"{self.site} head {self.head}: {count(queries, 'query')} x {count(keys, 'key')}{told}"

    def to_png(self, path: str | os.PathLike[str]) -> Path:
        """Draws the heat map with its tokens (up to 80 on an axis), as :meth:`Patterns.to_png` those of many heads."""
        return _write_picture(path, lambda: picture(self.weights, self.tokens, self.key_tokens, self.title))

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Writes the page of this head alone, as :meth:`Patterns.to_html` does of many."""
        return Patterns((self,), name=self.site).to_html(path)

    def _repr_html_(self) -> str:
        return html(self.weights, self.tokens, self.key_tokens, self.title)

    def __repr__(self) -> str:
        return f"Pattern({self.title})"


class Patterns(Sequence[Pattern]):
    """The attention weights of all heads of a layer or model, for one text. They stand in the order of calls.

    ``patterns[0]`` and ``for pattern in patterns`` give a :class:`Pattern` each; a slice gives ``Patterns``.

    Attributes:
        name: of the model.
        skipped: what attends, or may, and could not be read, with the reason; empty for those of one layer or site.
    """

    def __init__(self, patterns: Sequence[Pattern], *, name: str = "", skipped: Sequence[Skipped] = ()) -> None:
        self._patterns, self.name, self.skipped = tuple(patterns), name, tuple(skipped)

    @overload
    def __getitem__(self, place: int) -> Pattern: ...
    @overload
    def __getitem__(self, place: slice) -> Patterns: ...
    def __getitem__(self, place: int | slice) -> Pattern | Patterns:
        if isinstance(place, slice):
            return Patterns(self._patterns[place], name=self.name, skipped=self.skipped)
        return self._patterns[place]

    def __len__(self) -> int:
        return len(self._patterns)

    @property
    def title(self) -> str:
        """The model, how many heads there are, and of how many tokens."""
        queries, keys = (max((one.weights.shape[axis] for one in self), default=0) for axis in (0, 1))
        size = f"{count(queries, 'query')} x {count(keys, 'key')}"
        return f"{self.name}: {count(len(self), 'head')} of {count(len(self._sites()), 'site')}, {size}"

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Writes the page of these heads: one HTML file of at most 2 MB that opens offline, for people.

        It has a small map of each head with its role, and each of them large, with its tokens and lines between them.
        A page that would be larger shows the first tokens alone, or coarser weights, and says so.

        Returns:
            Where the file is, links followed.

        Raises:
            InputError: no file can be written there.
        """
        from attemper.report.patterns import patterns_page

        return write_whole(path, patterns_page(self.name, self._sites(), self.skipped))

    def to_png(self, path: str | os.PathLike[str]) -> Path:
        """Draws a small map of every head into ``path``, whole or not at all: a row is a layer, a column a head.

        Returns:
            Where the file is, links followed.

        Raises:
            MissingExtraError: matplotlib is not installed (the extra ``plot``).
            InputError: no file can be written there.
        """
        return _write_picture(path, lambda: _grid_picture(self._sites(), self.title))

    def _sites(self) -> list[list[Pattern]]:
        """The heads of each site."""
        return [list(own) for _, own in groupby(self, lambda one: (one.site, one.tokens, one.key_tokens))]

    def _repr_html_(self) -> str:
        told = f"{self.title}. Dark is 0, light is the largest weight, by its root. A row is a layer, a column a head."
        image = _image(_colours(_mosaic(self._sites())), self.title) if len(self) else ""
        return f'<div style="overflow-x:auto;color:inherit"><div>{escape(clean(told))}</div>{image}</div>'

    def __repr__(self) -> str:
        return f"Patterns({self.title})"


def _write_picture(path: str | os.PathLike[str], drawn: Callable[[], bytes]) -> Path:
    """Draws only where the file can be written."""
    check_target(path, "picture")
    return write_whole(path, drawn(), "picture")


def _mosaic(sites: list[list[Pattern]]) -> Tensor:
    """The roots of all weights as one picture; a row of maps is a site, and between maps there is NaN."""
    side = min(MOST_PIXELS, max(max(one.weights.shape) for own in sites for one in own)) or 1
    whole = torch.full((len(sites), side + 1, max(map(len, sites)), side + 1), torch.nan)
    for row, own in enumerate(sites):
        for column, one in enumerate(own):
            if one.weights.numel():
                small = torch.nn.functional.adaptive_max_pool2d(one.weights[None].float(), side)[0]
                whole[row, :side, column, :side] = small.clamp(0, 1).sqrt()
    return whole.flatten(2).flatten(0, 1)[:-1, :-1]


def html(weights: Tensor, rows: tuple[str, ...], columns: tuple[str, ...], title: str) -> str:
    """The grid as HTML that needs no script, loads nothing and is readable on light and on dark ground.

    Up to ``MOST_CELLS`` rows and columns as a table, each cell with its weight on hover; larger ones as an image.
    """
    largest = _largest(weights)
    scale = f"Dark is 0, light is {largest:.3g}, the largest weight. Rows are queries, columns are keys."
    small = not weights.numel() or max(weights.shape) <= MOST_CELLS
    body = _table(weights, rows, columns) if small else _image(_colours(weights), title)
    return (
        f'<div style="overflow-x:auto;color:inherit"><div style="font-weight:600">{escape(clean(title))}</div>'
        f'{body}<div style="{_SMALL}">{escape(scale)}</div></div>'
    )


def _grid_picture(sites: list[list[Pattern]], title: str) -> bytes:
    if not any(one.weights.numel() for own in sites for one in own):
        raise InputError(f"there is nothing to draw: {title}.")
    figure, axes = _figure("Patterns.to_png", (2.0 + 0.55 * max(map(len, sites)), 1.2 + 0.55 * len(sites)))
    mosaic = _mosaic(sites)
    drawn = axes.imshow(mosaic.numpy(), cmap="viridis", vmin=0.0, vmax=1.0, interpolation="nearest")
    pitch = (mosaic.shape[0] + 1) // len(sites)
    names = [clean(own[0].site if own[0].layer is None else str(own[0].layer)) for own in sites]
    _label(axes.yaxis, [cut(name, LONGEST_LABEL) for name in names], pitch)
    _label(axes.xaxis, [str(head) for head in range(max(map(len, sites)))], pitch)
    axes.set_title(cut(clean(title), 120), fontsize=9, parse_math=False)
    axes.set_xlabel("heads")
    axes.set_ylabel("layers")
    for row, own in enumerate(sites):
        for column, one in enumerate(own):
            if one.role is not None:
                axes.text(
                    pitch * (column + 0.5),
                    pitch * row + 1,
                    one.role,
                    fontsize=3.5,
                    color="white",
                    ha="center",
                    va="top",
                )
    figure.colorbar(drawn, ax=axes, label="root of weight", shrink=0.6)
    return _png_of(figure)


def picture(weights: Tensor, rows: tuple[str, ...], columns: tuple[str, ...], title: str) -> bytes:
    """The grid as PNG, with labels and a scale."""
    if not weights.numel():
        raise InputError(f"there is nothing to draw: {title}.")
    wide, tall = (min(14.0, 3.0 + 0.2 * size) for size in (len(columns), len(rows)))
    figure, axes = _figure("Pattern.to_png", (wide + 1, tall))
    drawn = axes.imshow(weights.double().numpy(), cmap="viridis", vmin=0.0, interpolation="nearest", aspect="auto")
    axes.set_title(cut(clean(title), 120), fontsize=9, parse_math=False)
    axes.set_xlabel("keys")
    axes.set_ylabel("queries")
    for axis, names in ((axes.xaxis, columns), (axes.yaxis, rows)):
        _label(axis, [cut(token_text(name), LONGEST_LABEL) for name in names])
    axes.tick_params(axis="x", rotation=90)
    figure.colorbar(drawn, ax=axes, label="weight", shrink=0.8)
    return _png_of(figure)


def _figure(caller: str, inches: tuple[float, float]) -> tuple[Any, Any]:
    with needs(caller, "matplotlib", "plot"):
        from matplotlib.figure import Figure
    figure = Figure(figsize=inches, layout="constrained")
    return figure, figure.add_subplot()


def _label(axis: Any, names: Sequence[str], pitch: int = 1) -> None:
    """Names, or every so many-th, at the centres of cells of ``pitch`` pixels."""
    places = range(0, len(names), max(1, -(-len(names) // MOST_LABELS)))
    at = [pitch * place + (pitch - 1) // 2 for place in places]
    for label in axis.set_ticks(at, [names[place] for place in places], fontsize=7):
        label.label1.set_parse_math(False)  # a token may be a dollar sign


def _png_of(figure: Any) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150)
    return file.getvalue()


def _largest(weights: Tensor) -> float:
    known = weights.detach()[torch.isfinite(weights)]
    return float(known.max()) if known.numel() else 0.0


def _colours(weights: Tensor) -> np.ndarray:
    """[Q, K, 3] bytes, from 0 to the largest weight."""
    return colours((weights.detach().double() / (_largest(weights) or 1.0)).numpy())


def _table(weights: Tensor, rows: tuple[str, ...], columns: tuple[str, ...]) -> str:
    names = [[escape(cut(token_text(name), LONGEST_LABEL)) for name in axis] for axis in (rows, columns)]
    plain = "border:0;padding:0 4px;text-align:right;font-weight:400;white-space:pre;background:transparent"
    turned = "border:0;padding:0;vertical-align:bottom;font-weight:400;background:transparent"
    upright = (
        "display:inline-block;writing-mode:vertical-rl;transform:rotate(180deg);white-space:pre;max-height:9em;"
        "overflow:hidden;padding:3px 0"
    )
    heading = "".join(
        f'<th scope="col" style="{turned}"><span style="{upright}">{name}</span></th>' for name in names[1]
    )
    lines = []
    for row, (values, line) in enumerate(zip(weights.tolist(), _colours(weights).tolist(), strict=True)):
        cells = "".join(
            f'<td style="border:0;padding:0;min-width:14px;height:14px;background:rgb({r},{g},{b})" '
            f'title="{names[0][row]} → {names[1][column]}: {value:.4g}"></td>'
            for column, (value, (r, g, b)) in enumerate(zip(values, line, strict=True))
        )
        name = f'<th scope="row" style="{plain}">{names[0][row]}</th>'
        lines.append(f'<tr style="background:transparent">{name}{cells}</tr>')
    return (
        '<table style="border-collapse:collapse;font-size:11px;line-height:14px;color:inherit;margin:6px 0">'
        f"<thead><tr><td></td>{heading}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    )


def _image(pixels: np.ndarray, title: str) -> str:
    data = base64.b64encode(_png(pixels)).decode("ascii")
    tall, wide, _ = pixels.shape
    factor = max(1.0, min(640 / wide, 640 / tall))
    size = f"width:{round(wide * factor)}px;height:{round(tall * factor)}px"
    return (
        f'<img alt="Heat map: {escape(clean(title))}" src="data:image/png;base64,{data}" '
        f'style="{size};max-width:none;image-rendering:pixelated;display:block;margin:6px 0;border:1px solid #808080">'
    )


def _png(pixels: np.ndarray) -> bytes:
    """[rows, columns, 3] bytes as a PNG."""
    tall, wide = pixels.shape[:2]
    # Each row begins with the number of its filter, 0 for none.
    lines = np.insert(pixels.reshape(tall, 3 * wide), 0, 0, axis=1)
    header = struct.pack(">IIBBBBB", wide, tall, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
