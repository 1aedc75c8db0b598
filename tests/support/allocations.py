"""What torch's allocator of the CPU holds while something runs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_allocated_bytes(run: Callable[[], object]) -> int:
    """The most that is held at once while ``run`` runs, beyond what is held before: torch's profiler counts it."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    results: Any = found.profiler.kineto_results if found.profiler is not None else None
    events = [event for event in results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most
