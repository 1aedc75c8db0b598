"""Which steps a watch samples, and which numbers they have, also in a run that goes on."""

from __future__ import annotations


class Schedule:
    """Counts steps (or passes, where these are the steps): one in ``every`` is sampled, the first one included.

    A run that goes on samples the steps that it would have sampled had it never ended. Which these are is known with
    the first number that the loop gives, so its first step is sampled and kept only if it is one of them.
    """

    def __init__(self, every: int, first: int | None, last: int | None) -> None:
        """``first``, ``last``: steps of the run that goes on; None for a new one."""
        self._every, self._resumed = every, first
        self._start = 0 if last is None else last + 1
        self.restart()

    @property
    def sampling(self) -> bool:
        """Whether the step that is running is sampled."""
        return (self._count + self._shift) % self._every == 0

    def restart(self) -> None:
        """Counts from the beginning: what was counted were passes of the first step."""
        self._first = self._resumed
        """The number from which others are counted; None until it is known."""
        self._count = 0
        """Steps that have ended."""
        self._shift = 0
        """How many the run had before this watch."""
        self.number = self._start
        """Of the step that is running."""
        self.kept = True
        """Whether the step that ended last is one of those that are sampled."""

    def end(self, number: int | None) -> int:
        """Ends the step that is running; returns its number, by default one more than the last."""
        ended = self.number if number is None else number
        self._first = ended if self._first is None else self._first
        if self._count == 0 or ended < self.number:
            self._shift = ended - self._first - self._count
        self.kept = self.sampling
        self._count, self.number = self._count + 1, ended + 1
        return ended
