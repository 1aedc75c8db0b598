"""Shards by processes of this machine, each with its own model and one thread. A process that dies is replaced."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from attemper.distributed.shards import TRIES, ShardTask, check_lost, error_of, scan_shard
from attemper.monitor.hooks import set_for_now

_SINGLE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""The environment of processes that have one thread, in every library."""


def run(task: ShardTask, shards: Sequence[int], workers: int | None, progress: Callable[[int], object]) -> None:
    """Writes the files of ``shards``.

    Args:
        workers: processes; None for one on each processor.
        progress: called with the number of texts that were done since the last call; negative where a try was lost.

    Raises:
        InputError, BackendError: as ``scan_shard``, of whichever shard fails first.
        ChildProcessError: the processes of some shards were killed, three times each. The other shards are done.
    """
    workers = min(workers or os.cpu_count() or 1, len(shards))
    pending, tries, last = deque(shards), Counter[int](), {}
    team: list[_Worker] = []
    try:
        with ExitStack() as environment:
            for name, value in _SINGLE_THREAD.items():
                set_for_now(environment, os.environ, name, value)
            while pending or any(worker.shard is not None for worker in team):
                while pending and len(team) < workers:
                    team.append(_Worker(task))
                for worker in team:
                    if worker.shard is None and pending:
                        worker.begin(pending.popleft())
                for connection in wait([worker.connection for worker in team]):
                    worker = next(worker for worker in team if worker.connection is connection)
                    try:
                        progress(worker.receive())
                    except EOFError:
                        team.remove(worker)
                        shard, last_words = worker.shard, worker.end()
                        progress(-worker.texts)
                        if shard is None:
                            continue
                        tries[shard] += 1
                        last[shard] = last_words
                        if tries[shard] < TRIES:
                            pending.append(shard)
    finally:
        for worker in team:
            worker.end()
    check_lost(task, [shard for shard in shards if tries[shard] >= TRIES], last)


class _Worker:
    """A process, and the shard that it is at."""

    def __init__(self, task: ShardTask) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.shard: int | None = None
        self.texts = 0
        """Of the shard, that are done."""
        self._process: BaseProcess = context.Process(target=_work, args=(theirs, task), daemon=True)
        with block_interrupts():
            self._process.start()
        theirs.close()

    def begin(self, shard: int) -> None:
        self.shard, self.texts = shard, 0
        with suppress(OSError):  # it is dead already, which the next look tells
            self.connection.send(shard)

    def receive(self) -> int:
        """How many more texts are done. ``EOFError``: the process is dead."""
        try:
            kind, value = self.connection.recv()
        except (OSError, EOFError) as error:
            raise EOFError from error
        if kind == "done":
            self.shard, self.texts = None, 0
            return 0
        if kind != "texts":
            raise error_of(kind, value)
        self.texts += value
        return value

    def end(self) -> str:
        self.connection.close()
        self._process.join(0.5 if self.shard is None else 0)
        if self._process.exitcode is None:
            self._process.terminate()
        self._process.join()
        code = self._process.exitcode or 0
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _work(connection: Connection, task: ShardTask) -> None:
    """What a process does: one shard after another, until the connection is closed."""
    import torch

    torch.set_num_threads(1)
    loaded: Any = None
    with suppress(EOFError, OSError):
        while True:
            shard = connection.recv()
            try:
                loaded = loaded or task.load()
                scan_shard(task, loaded, shard, lambda texts: connection.send(("texts", texts)))
                connection.send(("done", shard))
            except OSError:
                raise
            except Exception as error:
                connection.send((type(error).__name__, str(error)))


@contextmanager
def block_interrupts() -> Iterator[None]:
    """Processes that start inside inherit the block: Ctrl-C reaches all of them, and one that acts on it is enough.

    In this process an interrupt is only put off to the end.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    # A helper of multiprocessing, which the first process would start: it lifts the block before that one begins.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
