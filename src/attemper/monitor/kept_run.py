"""The run that a watch keeps: samples and numbers of steps on their way to its writer, in a file or in memory."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from attemper.monitor.checked_model import versions
from attemper.readings.sample import Sample, SiteKey
from attemper.store.store import DEFAULT_BITS, Store
from attemper.text import clean, clean_name

if TYPE_CHECKING:
    from attemper.results.run import Run
    from attemper.store.ranks import Ranks
    from attemper.store.writer import Writer

logger = logging.getLogger("attemper")

KEPT = 128
"""Without a store, so many samples stay as they are; more, or a question, make tables in memory of them."""
MOST_NUMBERS = 4096
"""Without a store, numbers of so many steps wait at most."""


class KeptRun:
    """What a watch keeps, and what is known of it."""

    def __init__(self, store: Store | None, about: Mapping[str, Any], number: int | None) -> None:
        """
        Args:
            store: where; None for memory.
            about: what is known of the run.
            number: of this process' fragment; None for that of its rank.
        """
        self.store, self.about, self._number = store, dict(about), number
        self.coverage: dict[SiteKey, str | None] = {}
        """Every site that was expected: None for one that is read, else the reason why it is not."""
        self._waiting: list[Sample] = []
        self._numbers: list[tuple[int, dict[str, float]]] = []
        """Of steps, which the writer does not have."""
        self._handed = time.monotonic()
        """When the writer got numbers of steps last."""
        self.writer: Writer | None = None
        self._run: Run | None = None
        self._closed = False

    @property
    def name(self) -> str:
        """Of the place, for people."""
        return "memory" if self.store is None else clean_name(self.store.last_name)

    @property
    def bits(self) -> int | None:
        """Mantissa bits of what is kept; None for all."""
        return DEFAULT_BITS if self.store is None else self.store.bits

    @property
    def last_step(self) -> int | None:
        """Of the last sample that the writer has; None without one."""
        return None if self.writer is None else self.writer.last_step

    def open(self) -> Writer:
        """The writer, which has all samples so far.

        Raises:
            InputError: the store's path is a file, or no path.
        """
        from attemper.store.writer import open_writer

        if self.writer is None:
            self.writer = open_writer(self.store, rank=self._rank, about=self.about, versions=versions())
            if self.coverage:
                self.writer.cover(self.coverage)
        while self._waiting:
            self.writer.take(self._waiting.pop(0))
        self.hand_numbers()
        if self._closed:
            self.writer.close()
        return self.writer

    def take(self, sample: Sample) -> None:
        self.hand_numbers()
        if self.writer is not None:
            self.writer.take(sample)
            return
        self._waiting.append(sample)
        if len(self._waiting) > KEPT:
            self.open()

    def take_numbers(self, step: int, numbers: dict[str, float]) -> None:
        """Keeps the numbers of a step; the writer gets them with ``hand_numbers``."""
        self._numbers.append((step, numbers))
        if len(self._numbers) > MOST_NUMBERS:
            self.open()

    def hand_numbers(self, *, seconds: float = 0.0) -> None:
        """Hands numbers of steps to the writer, unless it got some within so many seconds."""
        if time.monotonic() - self._handed < seconds:
            return
        self._handed = time.monotonic()
        if self._numbers and self.writer is not None:
            steps, self._numbers = self._numbers, []
            self.writer.keep_scalars(steps)

    def describe(self, about: Mapping[str, Any]) -> None:
        """Keeps what is known of the run, where that has changed."""
        if not about.items() <= self.about.items():
            self.about |= about
            if self.writer is not None:
                self.writer.describe(about)

    def cover(self, sites: Mapping[SiteKey, str | None]) -> None:
        """Keeps which sites were expected, as in ``coverage``."""
        self.coverage |= sites
        if self.writer is not None:
            self.writer.cover(self.coverage)

    @contextmanager
    def earlier(self) -> Iterator[Ranks]:
        """What the run has so far. A damaged part of its file is told, and must not end somebody's training run."""
        ranks = self._ranks()
        try:
            yield ranks
        except Exception as error:
            logger.warning(
                "attemper: earlier samples of the run in %s cannot be read: %s Training goes on; alarms start anew.",
                self.name,
                clean(str(error)),
            )
        finally:
            ranks.close()

    def read(self) -> Run:
        """Everything that was kept."""
        from attemper.results.run import Run

        writer = self.open()
        writer.flush()
        if writer.pending:  # its file will be another place to read
            return Run(self._ranks())
        if self._run is None:
            self._run = Run(self._ranks())
        return self._run

    def _ranks(self) -> Ranks:
        """What this process has written, to be read."""
        from attemper.store.ranks import Ranks
        from attemper.store.series import FragmentReader

        return Ranks([FragmentReader(self.open().open_reader(), self._rank)])

    @property
    def _rank(self) -> int:
        """Of this process' fragment: its own among those that train together."""
        if self._number is not None:
            return self._number
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank()
        rank = os.environ.get("RANK", "")  # torchrun's, before the processes have found each other
        return int(rank) if rank.isdecimal() else 0

    def close(self) -> None:
        """Ends the file. What is there can be read afterwards."""
        self._closed = True
        if self._run is not None:
            self._run, run = None, self._run  # a reader that is open would keep the file's log beside it
            run.close()
        if self.writer is not None:
            self.writer.close()

    def forget(self, lost: int) -> None:
        """Ends the file in the middle of somebody's code, where nothing can be read; ``lost`` samples are dropped."""
        if self._closed or self.writer is None:
            return
        self._closed = True
        self.hand_numbers()
        if self.store is None:
            self.writer.end(float("inf"))
        else:
            self.writer.drop(lost, "the watch was dropped without watch.close()")
            self.writer.close()
