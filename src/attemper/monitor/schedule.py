"""Which steps a watch samples, and which numbers they have, also in a run that goes on."""

from __future__ import annotations


class Schedule:
    """Counts steps (or passes, where these are the steps): one in ``every`` is sampled, the first one included.

    A run that goes on samples the steps that it would have sampled had it never ended. Which these are is known with
    the first number that the loop gives, so its first step is sampled and kept only if it is one of them.
    """

    def __init__(self, every: int, first: int | None, last: int | None, start: int | None = None) -> None:
        """
        Args:
            first, last: steps of the run that goes on; None for a new one.
            start: the number of the step that is running, where the loop knows it before the step ends.
        """
        self._every, self._resumed = every, first
        self.last, self.numbered = last, start is not None
        """``numbered``: whether the loop has given a number."""
        self._known, self._start = start is not None, (0 if last is None else last + 1) if start is None else start
        self.restart()

    @property
    def sampling(self) -> bool:
        """Whether the step that is running is sampled."""
        return self.place % self._every == 0

    @property
    def place(self) -> int:
        """Of the step that is running among those of the run, from 0."""
        return self._count + self._shift

    def restart(self) -> None:
        """Counts from the beginning: what was counted were passes of the first step."""
        self._first = self._resumed
        """The number from which others are counted; None until it is known."""
        self._count = 0
        """Steps that have ended."""
        self._shift = self._start - self._first if self._known and self._first is not None else 0
        """How many the run had before this watch."""
        self.number = self._start
        """Of the step that is running."""
        self.sampled = self.kept = True
        """Whether the step that ended last was to be sampled, and whether its number is one of those that are kept."""

    def end(self, number: int | None) -> int:
        """Ends the step that is running; returns its number, by default one more than the last."""
        self.numbered = self.numbered or number is not None
        self.sampled, ended = self.sampling, self.number if number is None else number
        self._first = ended if self._first is None else self._first
        if self._count == 0 or ended < self.number:
            self._shift = ended - self._first - self._count
        self.kept = self.sampling
        self._count, self.number = self._count + 1, ended + 1
        return ended
