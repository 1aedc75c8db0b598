"""One shard of many texts, from the texts to its file: done again, it is the same file; stopped, it goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from attemper.distributed.text_files import Survey, Texts
from attemper.errors import BackendError, InputError, MissingExtraError
from attemper.files import check_target
from attemper.monitor.scan import BlockScan, ScanOptions, block_scan
from attemper.readings import part_file
from attemper.readings.part import BLOCK, Part
from attemper.text import clean_name

SAVE_SECONDS = 30.0
"""Between two saves of a shard under way, at least."""
TRIES = 3
"""How often a shard is begun before it is given up: its worker was killed each time."""
Progress = Callable[[int], object]
"""Called with the number of texts that are done, after each block."""


@dataclass(frozen=True)
class TextModel:
    """A model, and how texts become its batches."""

    model: nn.Module
    batches: Callable[[Sequence[str]], Iterable[Any]]
    max_length: int
    """Tokens in a window."""
    batch_size: int
    tokenizer: str
    """Tells what makes tokens of texts from others."""
    names: Any = None
    """Names ids of tokens, as ``scan(tokenizer=...)`` takes it."""


@dataclass(frozen=True)
class ShardTask:
    """Shards to be scanned: what another process needs to scan any of them."""

    load: Callable[[], TextModel]
    """Another process can import it."""
    texts: Texts
    survey: Survey
    shards: int
    """How many there are."""
    out: Path
    """The folder of their files."""
    options: ScanOptions
    device: str = "cpu"

    def path(self, index: int) -> Path:
        return self.out / part_file.part_name(index, self.shards)


def scan_shard(task: ShardTask, loaded: TextModel, index: int, progress: Progress = lambda texts: None) -> bool:
    """Writes the file of a shard; whether there was anything to do.

    Every 30 seconds at most, at the end of a block, what is done goes to a file beside it: another try begins there.
    """
    path = task.path(index)
    begun = path.with_name(f"{path.name}.partial")
    with block_scan(loaded.model, replace(task.options, tokenizer=loaded.names)) as reader:
        empty = _part(task, loaded, reader, index)
        if path.exists():
            _check_same(path, empty)
            progress(task.survey.texts_of(index, task.shards))
            return False
        check_target(path, "reading")
        ready = _go_on(begun, empty, reader)
        last = time.monotonic()
        for number, texts in enumerate(task.texts.blocks(index, task.shards, task.survey)):
            if number >= ready:
                reader.read(loaded.batches(texts), len(texts))
                if time.monotonic() - last > SAVE_SECONDS:
                    part_file.save(_part(task, loaded, reader, index), begun, unfinished=True)
                    last = time.monotonic()
            progress(len(texts))
    if task.survey.texts_of(index, task.shards):
        reader.check()
    part_file.save(_part(task, loaded, reader, index), path)
    begun.unlink(missing_ok=True)
    return True


def scan_texts(task: ShardTask, loaded: TextModel, progress: Progress) -> Part:
    """All texts of a task of one shard, without a file."""
    with block_scan(loaded.model, replace(task.options, tokenizer=loaded.names)) as reader:
        for block in task.texts.blocks(0, 1, task.survey):
            reader.read(loaded.batches(block), len(block))
            progress(len(block))
    reader.check()
    return _part(task, loaded, reader, 0)


def _part(task: ShardTask, loaded: TextModel, reader: BlockScan, index: int) -> Part:
    law = {
        "shards": task.shards,
        "block": BLOCK,
        "input": task.survey.digest,
        "max_length": loaded.max_length,
        "batch_size": loaded.batch_size,
        "tokenizer": loaded.tokenizer,
    }
    return reader.part(law, index)


def _check_same(path: Path, wanted: Part) -> None:
    """Raises InputError if the file of a shard is not of the same model, arguments and texts."""
    try:
        found = part_file.load(path)
    except InputError as error:
        raise InputError(f"{error} Or name another folder with --out.") from error
    if (reason := _difference(found, wanted)) is not None:
        raise InputError(
            f"{clean_name(path.name)} is there already, of {reason}. Name another folder with --out, or remove it."
        )


def _difference(found: Part, wanted: Part) -> str | None:
    if found.model_hash != wanted.model_hash:
        return f"another model ({clean_name(found.model)})"
    names = [name for name in wanted.law if found.law.get(name) != wanted.law[name]]
    return f"another {names[0]} ({clean_name(found.law.get(names[0]))})" if names else None


def _go_on(begun: Path, wanted: Part, reader: BlockScan) -> int:
    """Takes up what an earlier try left; how many blocks that are. A file of something else is of no use."""
    with suppress(InputError):
        found = part_file.load(begun, unfinished=True)
        if _difference(found, wanted) is None:
            return reader.go_on(found)
    return 0


def error_of(kind: str, message: str) -> Exception:
    """What a worker raised, by the name of its class, as far as it is ours."""
    if kind in (InputError.__name__, MissingExtraError.__name__):
        return InputError(message)
    return BackendError(message) if kind == BackendError.__name__ else RuntimeError(f"{kind}: {message}")


def check_lost(task: ShardTask, lost: list[int], last: dict[int, str]) -> None:
    """Raises ChildProcessError if there are shards whose worker died each time. ``last`` says how."""
    if lost:
        names = ", ".join(f"{shard}/{task.shards}" for shard in lost)
        raise ChildProcessError(
            f"the process of shard {names} ended {TRIES} times without a word ({last[lost[0]]}). Too little memory is "
            "the usual cause: take fewer --workers or a smaller --batch-size. The other shards are done, and the same "
            "command goes on from them"
        )
