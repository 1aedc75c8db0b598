"""Shards by actors of Ray, each with its own model: on the cluster of RAY_ADDRESS, or on this machine for the time."""

from __future__ import annotations

import logging
import os
import socket
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from attemper.distributed.shards import TRIES, ShardTask, TextModel, check_lost, error_of, scan_shard
from attemper.errors import BackendError, InputError, needs
from attemper.text import clean_name

CONNECT_SECONDS = 10.0
"""How long a cluster may take to answer."""


def run(task: ShardTask, shards: Sequence[int], workers: int | None, progress: Callable[[int], object]) -> None:
    """Writes the files of ``shards``. The texts and the folder are where every node of the cluster finds them.

    Args:
        workers: actors; None for one on each processor of the cluster (on each GPU, if they need one).
        progress: called with the number of texts of each shard that is done.

    Raises:
        InputError, BackendError: as ``scan_shard``, of whichever shard fails first; or the cluster cannot be reached.
        ChildProcessError: the actors of some shards died, three times each. The other shards are done.
        MissingExtraError: Ray is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if not os.environ.get("RAY_ADDRESS"):
        # Without it Ray listens on all addresses of the machine, whatever address it is given.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    with needs("--engine ray", "ray", "ray"):
        import ray
    task = replace(task, out=task.out.absolute(), texts=replace(task.texts, path=task.texts.path.absolute()))
    needs_gpu = task.device.startswith("cuda")
    with _cluster(ray, workers):
        kind = ray.remote(num_cpus=1, num_gpus=1 if needs_gpu else 0)(_Scanner)
        room = _room(ray.cluster_resources(), needs_gpu)
        many = min(workers or room, len(shards))
        given = ray.put(task)
        pending, tries, last = deque(shards), Counter[int](), {}
        idle = [kind.remote(given) for _ in range(many)]
        running: dict[Any, tuple[Any, int]] = {}
        while pending or running:
            while idle and pending:
                actor, shard = idle.pop(), pending.popleft()
                running[actor.scan.remote(shard)] = actor, shard
            (done,), _ = ray.wait(list(running), num_returns=1)
            actor, shard = running.pop(done)
            try:
                failure = ray.get(done)
            except ray.exceptions.RayActorError as error:
                tries[shard] += 1
                last[shard] = str(error).split("\n")[0][:200]
                idle.append(kind.remote(given))
                if tries[shard] < TRIES:
                    pending.append(shard)
                continue
            if failure is not None:
                raise error_of(*failure)
            progress(task.survey.texts_of(shard, task.shards))
            idle.append(actor)
    check_lost(task, [shard for shard in shards if tries[shard] >= TRIES], last)


class _Scanner:
    """Holds the model on some node, and scans one shard after another."""

    def __init__(self, task: ShardTask) -> None:
        import torch

        torch.set_num_threads(1)
        self._task = task
        self._loaded: TextModel | None = None

    def scan(self, shard: int) -> tuple[str, str] | None:
        """Name and message of what went wrong; None where the shard is done."""
        try:
            self._loaded = self._loaded or self._task.load()
            scan_shard(self._task, self._loaded, shard)
        except Exception as error:  # its class may be one that Ray cannot send
            return type(error).__name__, str(error)
        return None


@contextmanager
def _cluster(ray: Any, workers: int | None) -> Iterator[None]:
    """Ray is there inside: the cluster that this process is part of, that of RAY_ADDRESS, or one of its own."""
    if ray.is_initialized():
        yield
        return
    address = os.environ.get("RAY_ADDRESS")
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
    try:
        if address:
            _check_reachable(address)
            ray.init(address=address, **quiet)
        else:
            ray.init(num_cpus=workers, include_dashboard=False, **quiet)
    except InputError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        where = f"at {clean_name(address)} cannot be reached" if address else "cannot be started on this machine"
        reason = str(error).strip().split("\n")[0][:200]
        raise BackendError(
            f"Ray {where}: {reason}. Start a cluster with `ray start --head`, unset RAY_ADDRESS for one on this "
            "machine, or take --engine processes."
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _room(resources: dict[str, float], needs_gpu: bool) -> int:
    what = "GPU" if needs_gpu else "CPU"
    if (room := int(resources.get(what, 0))) < 1:
        raise BackendError(f"this Ray cluster has no {what} for an actor: add a node that has one, or change --device.")
    return room


def _check_reachable(address: str) -> None:
    """Ray itself tries for minutes. ``OSError``: nothing listens there."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    elif address not in ("auto", "local"):
        raise InputError(f"RAY_ADDRESS is {clean_name(address)!r}, not HOST:PORT, ray://HOST:PORT or auto.")
