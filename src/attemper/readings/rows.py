"""Statistics of single rows that a scan kept, as arrays: ``Scan.rows()``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attemper.errors import InputError, needs
from attemper.text import count

if TYPE_CHECKING:
    import numpy as np
    import pandas


@dataclass(frozen=True)
class SiteRows:
    """The kept rows of one site, in the order in which they were read."""

    name: str
    kind: str
    mode: str
    texts: np.ndarray
    """[R] int64: which text a row is of. Sequences of the site's calls, counted through all batches."""
    queries: np.ndarray
    """[R] int64: the place of the query in its sequence, padding counted."""
    values: Mapping[str, np.ndarray]
    """Statistic -> [R, heads], float32 or float64 (counts: int64), as ``AttentionStats`` has it."""
    layer: int | None = None
    """The block that the site is in."""

    @property
    def heads(self) -> int:
        return next(iter(self.values.values())).shape[1]

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.values:
            raise InputError(
                f"{name!r} was not measured: pass stats=({name!r},) to attemper.scan. Kept: {', '.join(self.values)}."
            )
        return self.values[name]


@dataclass(frozen=True)
class Rows:
    """The rows that ``attemper.scan(..., keep_rows=...)`` kept: ``rows[site][statistic]`` is [R, heads]."""

    sites: tuple[SiteRows, ...]

    def __getitem__(self, name: str) -> SiteRows:
        found = next((site for site in self.sites if site.name == name), None)
        if found is None:
            names = ", ".join(site.name for site in self.sites)
            raise InputError(f"no rows were kept of a site {name!r}. Sites: {names}.")
        return found

    def __iter__(self) -> Iterator[SiteRows]:
        return iter(self.sites)

    def __len__(self) -> int:
        """Sites."""
        return len(self.sites)

    def __repr__(self) -> str:
        kept = sum(len(site.texts) for site in self.sites)
        return f"Rows({count(len(self.sites), 'site')}, {count(kept, 'row')}, {count(self.nbytes, 'byte')})"

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        arrays = (array for site in self.sites for array in (site.texts, site.queries, *site.values.values()))
        return sum(array.nbytes for array in arrays)

    def matrix(self, *names: str) -> np.ndarray:
        """[R, features]: of each kept row these statistics of every site and head, site by site, as a probe takes them.

        Raises:
            InputError: no statistic is named, a site has none of this name, or sites hold different rows.
        """
        import numpy as np

        if not names or not self.sites:
            raise InputError(
                "Rows.matrix needs the names of statistics, and kept rows: matrix('entropy', 'self_weight')."
            )
        first = self.sites[0]
        for site in self.sites:
            if not (np.array_equal(site.texts, first.texts) and np.array_equal(site.queries, first.queries)):
                raise InputError(
                    f"Rows.matrix: {site.name} holds other rows than {first.name}: take them site by site, rows[name]."
                )
        return np.concatenate([site[name] for site in self.sites for name in names], 1)

    def to_pandas(self) -> pandas.DataFrame:
        """A row for each kept query and head: site, layer, kind, mode, head, text, query, and every statistic.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        with needs("Rows.to_pandas", "pandas", "pandas"):
            import pandas
        frame = pandas.concat([pandas.DataFrame(_columns(site)) for site in self.sites], ignore_index=True)
        return frame.astype({"layer": "Int64"})  # whole numbers, also where some sites have none


def _columns(site: SiteRows) -> dict[str, Any]:
    import numpy as np

    count, heads = len(site.texts), site.heads
    labels = {"site": site.name, "layer": site.layer, "kind": site.kind, "mode": site.mode}
    return {name: [label] * (count * heads) for name, label in labels.items()} | {
        "head": np.tile(np.arange(heads), count),
        "text": np.repeat(site.texts, heads),
        "query": np.repeat(site.queries, heads),
        **{name: array.reshape(-1) for name, array in site.values.items()},
    }
