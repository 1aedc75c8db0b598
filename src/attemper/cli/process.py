"""The process of a command, its start and its end. torch and transformers make half a million objects that live to the
end: Python is kept from searching them for garbage while they load, and from taking them apart at the end.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn


@contextmanager
def loading() -> Iterator[None]:
    """No search for garbage while modules are imported inside, nor in them later. For imports alone: what else is made
    inside is never searched either. Where torch is loaded already, in a program of somebody else, nothing happens.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    atexit.register(gc.unfreeze)  # where the process ends as others do: libraries complain of objects that are left
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def leave(code: int) -> NoReturn:
    """Ends the process. With torch in it, as Python's multiprocessing ends processes of its own: threads end, functions
    of ``atexit`` run, what was printed is written, and the system takes the memory back.

    Raises:
        SystemExit: without torch, or where the process is not ours alone.
    """
    if "torch" not in sys.modules or not _is_ours() or _is_watched():
        raise SystemExit(code)
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or the reader went away
            stream.flush()
    os._exit(code)


def _is_ours() -> bool:
    """Whether Python was started for the command, and not for a program that runs it."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    name = Path(getattr(main, "__file__", None) or "").stem if spec is None else spec.name
    return name in ("attemper", "attemper.__main__")


def _is_watched() -> bool:
    """Whether a debugger, a profiler or a Python that goes on (-i) waits for the command's end."""
    monitoring = getattr(sys, "monitoring", None)  # from Python 3.12 on
    tools = monitoring is not None and any(monitoring.get_tool(number) for number in range(6))
    return bool(tools or sys.flags.inspect or sys.gettrace() or sys.getprofile())
