"""Many texts, ``attemper scan --texts``: one shard of them, all shards by workers, or all of them at once."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from attemper.cli.arguments import Input, byte_names, shipped_model, title_of
from attemper.cli.output import bar, say, usage_of
from attemper.cli.process import import_for
from attemper.errors import InputError
from attemper.integrations.checkpoint import check_folder
from attemper.text import clean_name, count

if TYPE_CHECKING:
    from attemper.distributed.shards import ShardTask, TextModel
    from attemper.results.scan import Scan

SHARDS = 64
"""How many shards a driver of workers cuts, by default."""
_SAY_SECONDS = 60.0
"""Between two lines of progress where stderr is no terminal."""


class Engine(StrEnum):
    """What runs the workers."""

    processes = "processes"
    ray = "ray"


@dataclass(frozen=True)
class Cut:
    """The options of ``--texts``."""

    texts: Path
    field: str | None = None
    shard: str | None = None
    out: Path | None = None
    workers: int | None = None
    shards: int | None = None
    engine: Engine | None = None

    @property
    def drives(self) -> bool:
        return self.workers is not None or self.engine is not None

    def one_shard(self, environment: Mapping[str, str]) -> tuple[int, int] | None:
        """The shard that this process is to scan; None if it is to scan all of them. ``BadParameter``: options that
        contradict each other, or a shard that does not exist.
        """
        if self.shard is not None:
            if self.drives or self.shards is not None:
                raise typer.BadParameter(
                    "is one of several that other processes scan; --workers, --engine and --shards are for all of them "
                    "at once.",
                    param_hint="--shard",
                )
            if self.out is None:
                raise typer.BadParameter("needs --out FOLDER, where its part goes.", param_hint="--shard")
            return _parse(self.shard)
        if self.out is None:
            return None
        with usage_of("--shard"):
            found = shard_of(environment)
        if found is not None and (self.drives or self.shards is not None) and found[1] > 1:
            raise typer.BadParameter(
                "is for all shards at once, as --engine and --shards are, and this process is "
                f"{found[0]} of {found[1]} by its environment: leave it out, or unset SLURM_ARRAY_TASK_ID (RANK).",
                param_hint="--workers",
            )
        return None if self.drives or self.shards is not None else found


def _parse(shard: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", shard)
    if match is None or not int(match[1]) < int(match[2]):
        raise typer.BadParameter(
            f"{shard!r} is not I/N, I of N shards with I from 0 to N - 1: the first of 64 is 0/64, the last 63/64.",
            param_hint="--shard",
        )
    return int(match[1]), int(match[2])


def shard_of(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """(I, N) of a task of a SLURM array, or of a process that torchrun started; None of any other."""
    if "SLURM_ARRAY_TASK_ID" in environment:
        names = [f"SLURM_ARRAY_TASK_{part}" for part in ("ID", "MIN", "MAX", "COUNT")]
        task, first, last, tasks = (_whole(environment, name) for name in names)
        if last - first + 1 != tasks:
            raise InputError(
                f"this SLURM array has {tasks} tasks from {first} to {last}, so it has gaps: "
                "shards cannot be assigned to tasks. Submit one without gaps, as in --array=0-63, "
                "or name the shard with --shard I/N."
            )
        return task - first, tasks
    if "RANK" in environment and "WORLD_SIZE" in environment:
        rank, world = _whole(environment, "RANK"), _whole(environment, "WORLD_SIZE")
        if not rank < world:
            raise InputError(f"RANK is {rank} and WORLD_SIZE {world}: a rank is below the number of processes.")
        return rank, world
    return None


def _whole(environment: Mapping[str, str], name: str) -> int:
    value = environment.get(name, "")
    if not value.isdecimal():
        raise InputError(f"{name} is {value!r}, not a whole number: name the shard with --shard I/N.")
    return int(value)


def scan_one(model: str | None, given: Input, cut: Cut, one: tuple[int, int], **options: Any) -> None:
    """Writes the part of one shard (I, N), unless it is there. ``options``: backend, limits, fewest_keys of a scan."""
    assert cut.out is not None
    _check_model(model, cut)
    _make(cut.out)
    task = _task(model, given, cut, one[1], cut.out, options)
    from attemper.distributed.shards import scan_shard

    loaded = task.load()
    with _bar(task.survey.texts_of(one[0], one[1]), f"{one[0]}/{one[1]}") as advance:
        new = scan_shard(task, loaded, one[0], advance)
    path = clean_name(task.path(one[0]))
    say(f"wrote {path}" if new else f"{path} is there already, of this model, these texts and arguments: nothing to do")


def scan_all(model: str | None, given: Input, cut: Cut, **options: Any) -> Scan:
    """All texts: as one shard without a file, or as shards whose parts are written and merged. ``options``: of
    ``attemper.scan``: backend, limits, fewest_keys.
    """
    _check_model(model, cut)
    if cut.out is not None:
        _make(cut.out)
        return _scan_shards(_task(model, given, cut, cut.shards or SHARDS, cut.out, options), cut)
    if cut.drives or cut.shards is not None:
        with tempfile.TemporaryDirectory(prefix="attemper-") as folder:
            return _scan_shards(_task(model, given, cut, cut.shards or SHARDS, Path(folder), options), cut)
    task = _task(model, given, cut, 1, Path(), options)
    from attemper.distributed.shards import scan_texts
    from attemper.results.scan import Scan

    loaded = task.load()
    with _bar(task.survey.texts) as advance:
        part = scan_texts(task, loaded, advance)
    return Scan(part.reading(), None, part=part)


def _scan_shards(task: ShardTask, cut: Cut) -> Scan:
    """All shards, by workers or in this process, and the merged reading."""
    from attemper.distributed.shards import scan_shard
    from attemper.readings.part_file import merge_files
    from attemper.results.scan import Scan

    shards = range(task.shards)
    with _bar(task.survey.texts) as advance:
        if cut.drives:
            _engine(cut.engine or Engine.processes)(task, shards, cut.workers, advance)
        else:
            loaded = task.load()
            for index in shards:
                scan_shard(task, loaded, index, advance)
    part = merge_files([task.path(index) for index in shards])
    return Scan(part.reading(), None, part=part)


def _engine(engine: Engine) -> Callable[..., None]:
    if engine is Engine.ray:
        from attemper.distributed.ray_cluster import run
    else:
        from attemper.distributed.workers import run
    return run


def _task(model: str | None, given: Input, cut: Cut, shards: int, out: Path, options: dict[str, Any]) -> ShardTask:
    """What is to be scanned. All texts are read once here: what is wrong with them is told before a model is loaded."""
    from attemper.distributed.text_files import FIELD, Texts

    texts = Texts(cut.texts, cut.field or FIELD)
    with usage_of("--texts"):
        survey = texts.survey()
    import_for(None if cut.drives else model)  # workers load the model themselves
    from attemper.distributed.shards import ShardTask
    from attemper.monitor.scan import ScanOptions

    checked = ScanOptions(**options, name=title_of(model), text=texts.name)
    return ShardTask(partial(load_model, model, given), texts, survey, shards, out, checked, given.device)


def load_model(model: str | None, given: Input) -> TextModel:
    """A pretrained model, or the one that ships (None), with its way to read texts."""
    from attemper.distributed.shards import TextModel

    if model is None:
        shipped = shipped_model(given.max_length, given.device, given.dtype)
        length = given.max_length or shipped.config.context
        return TextModel(shipped, partial(_byte_batches, given, length), length, given.batch_size, "bytes", byte_names)
    from attemper.integrations import pretrained

    known = pretrained.load(model, device=given.device, dtype=given.dtype.value)
    length = pretrained.window_length(known, given.max_length)
    batches = partial(pretrained.text_batches, known, longest=length, batch_size=given.batch_size)
    digest = pretrained.digest_of(known.tokenizer)
    return TextModel(known.model, batches, length, given.batch_size, digest, known.tokenizer)


def _byte_batches(given: Input, length: int, texts: Sequence[str]) -> Iterator[Any]:
    """Texts as batches of windows of bytes. The model knows no padding: windows of one length come together."""
    import torch

    windows: dict[int, list[bytes]] = {}
    for text in texts:
        data = text.encode()
        for start in range(0, len(data), length):
            window = data[start : start + length]
            windows.setdefault(len(window), []).append(window)
    for alike in (windows[size] for size in sorted(windows)):
        for start in range(0, len(alike), given.batch_size):
            batch = [list(window) for window in alike[start : start + given.batch_size]]
            yield torch.tensor(batch, dtype=torch.int64, device=given.device)


def _check_model(model: str | None, cut: Cut) -> None:
    """A folder that is not there is told before texts are read. On the machines of a cluster it may be there."""
    if model is not None and cut.engine is not Engine.ray:
        check_folder(model)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(
            f"no parts can be kept in {clean_name(folder)}: {error.strerror or error}.", param_hint="--out"
        ) from error


@contextmanager
def _bar(total: int, what: str = "scan") -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, a line a minute elsewhere, with an estimate of the time that is left."""
    with bar(what, total) as move:
        yield _Lines(total, what).advance if move is None else lambda texts: move(advance=texts)


class _Lines:
    """Progress as lines, for the log of a job."""

    def __init__(self, total: int, what: str) -> None:
        self._total, self._what, self._done = total, what, 0
        self._began = self._told = time.monotonic()

    def advance(self, texts: int) -> None:
        self._done += texts
        now = time.monotonic()
        if now - self._told < _SAY_SECONDS or not 0 < self._done < self._total:
            return
        self._told = now
        minutes = (now - self._began) / self._done * (self._total - self._done) / 60
        left = f"about {count(max(1, round(minutes)), 'minute')} left"
        say(f"{self._what}: {self._done:,} of {count(self._total, 'text')}, {left}")
