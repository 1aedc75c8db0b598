"""What a cause finds in a site, and what is said of it."""

from __future__ import annotations

from dataclasses import dataclass

ACCEPTED = 0.25
"""A cause explains a difference only if it leaves at most so much of its square."""


@dataclass(frozen=True)
class Finding:
    """One cause that explains how a site differs."""

    kind: str
    stage: str
    residual: float
    """What is left of the squared difference, 0 to 1."""
    value: float | None = None
    """Its number, of run b where the two have one each."""
    heads: tuple[int, ...] | None = None
    """Where it is seen; None for all heads."""
    message: str = ""
    """How the runs differ, as the end of a sentence."""
    before: float | None = None
    """The number of run a, where it has one."""
    own: bool = False
    """Whether each run shows it by itself, so that what differs before it is without effect on it."""
    reproduced: bool = True
    """Whether it makes run b of run a, up to rounding."""


def in_words(heads: tuple[int, ...] | None) -> str:
    """ "head 3", "heads 1, 2", or nothing for all."""
    if heads is None:
        return ""
    listed = f"{', '.join(map(str, heads[:8]))}{', ...' if len(heads) > 8 else ''}"
    return f"{'head' if len(heads) == 1 else 'heads'} {listed}: "


def short(value: float) -> str:
    """A number as it stands in a message."""
    return f"{value:.5g}"
