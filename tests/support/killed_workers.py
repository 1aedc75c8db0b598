"""A small model for processes of a scan, some of which are killed in the middle of a shard."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from attemper.cli.arguments import Dtype, Input
from attemper.cli.shards import load_model
from attemper.distributed.shards import ShardTask, TextModel
from attemper.distributed.text_files import Texts
from attemper.monitor.scan import ScanOptions

WORDS = "attention entropy"


def text_file(path: Path, many: int) -> Path:
    """So many short texts of two lengths, no two alike."""
    lines = (f"{n:05d} {WORDS[: 8 + n % 2]}" for n in range(many))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def load(kills: Path | None = None) -> TextModel:
    """The model that ships. Each file in the folder ``kills`` ends one process, at its second block."""
    loaded = load_model(None, Input(None, 64, 16, "cpu", Dtype.float32))
    if kills is None:
        return loaded
    return replace(loaded, batches=partial(_batches, kills, loaded, []))


def _batches(kills: Path, loaded: TextModel, seen: list[int], texts: Sequence[str]) -> Iterator[Any]:
    seen.append(1)
    if len(seen) > 1:
        for file in sorted(kills.iterdir()):
            try:
                file.unlink()
            except FileNotFoundError:  # another process took it
                continue
            os.kill(os.getpid(), signal.SIGKILL)
    yield from loaded.batches(texts)


def task(texts: Path, out: Path, shards: int, kills: Path | None = None, **options: Any) -> ShardTask:
    """Shards of the texts of a file."""
    out.mkdir(exist_ok=True)
    source = Texts(texts)
    checked = ScanOptions(name="a model", text=source.name, **options)
    return ShardTask(partial(load, kills), source, source.survey(), shards, out, checked)
