"""A comparison as a table in the terminal: the heads that changed most, before and after."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from attemper.monitor.compare import ALWAYS, STATISTICS, Comparison, HeadChange

_SHOWN = 20
_TITLES = {
    "normalized_entropy": "entropy, % of log n",
    "effective_tokens": "effective tokens",
    "max_logit": "max logit",
    "first_token_mass": "first token, %",
    "support_size": "support size",
    "mean_distance": "mean distance",
    "gini": "gini, %",
    "entropy_with_sink_nats": "entropy with sink",
    "score_variance": "score variance",
}
_SHARES = ("normalized_entropy", "first_token_mass", "gini")
"""Shown in percent."""


def table(comparison: Comparison) -> RenderableType:
    """The first heads, then the sites that only one of the two has."""
    heads = comparison.heads
    parts: list[RenderableType] = [
        Text.assemble((comparison.before, "bold"), " -> ", (comparison.after, "bold"), f"  {len(heads)} heads")
    ]
    grid = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    grid.add_column("site", overflow="fold")
    grid.add_column("layer", justify="right")
    grid.add_column("head", justify="right")
    shown = [
        name for name in STATISTICS if name in ALWAYS or any(getattr(head, name) != (None, None) for head in heads)
    ]
    for name in shown:
        grid.add_column(_TITLES[name], justify="right", no_wrap=True)
    modes = {head.mode for head in heads}
    for head in heads[:_SHOWN]:
        site = f"{head.site} ({head.mode})" if len(modes) > 1 else head.site
        layer = "-" if head.layer is None else str(head.layer)
        grid.add_row(site, layer, str(head.head), *(_cell(head, statistic) for statistic in shown))
    parts.append(grid)
    if len(heads) > _SHOWN:
        parts.append(Text(f"and {len(heads) - _SHOWN} heads that changed less", style="dim"))
    for side, names in (("before", comparison.only_before), ("after", comparison.only_after)):
        parts += [Text.assemble((f"only {side} ", "yellow"), name) for name in names]
    return Group(*parts)


def _cell(head: HeadChange, statistic: str) -> Text:
    """``before -> after``, darker where nothing changed."""
    factor = 100.0 if statistic in _SHARES else 1.0
    before, after = ("-" if value is None else f"{value * factor:.1f}" for value in getattr(head, statistic))
    return Text(f"{before} -> {after}", style="dim" if before == after else "")
