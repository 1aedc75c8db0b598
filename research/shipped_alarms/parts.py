"""The parts of the plan, and what one run of it is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from attemper.lab.corpus import Corpus
from research.early_warning import run_file
from research.early_warning.grid import Trial

NAME = "shipped-alarms"
GRID, ENCODER, UNSEEN, LONG, WATCHED = "grid", "encoder", "unseen", "long", "watched"
"""Runs of the benchmark of early warnings and of its encoder, which are trained there; then those of this one."""


@dataclass(frozen=True)
class Job:
    """One run of the plan."""

    part: str
    trial: Trial

    def path(self, folder: Path, corpus: Corpus) -> Path:
        return folder / run_file.file_name(self.trial, corpus, part=self.part)
