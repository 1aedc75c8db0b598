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
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from attemper.cli.output import say
from attemper.integrations.checkpoint import check_folder
from attemper.integrations.hub import asks_hub, near_folder
from attemper.text import clean_name


@contextmanager
def loading() -> Iterator[None]:
    """No search for garbage while modules are imported inside, nor in them later. For imports alone: what else is made
    inside is never searched either. Where torch is loaded already, in a program of somebody else, nothing happens.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    atexit.register(gc.unfreeze)  # nanobind, say, complains at the end of objects that were never taken apart
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def import_for(model: str | None) -> None:
    """Imports what running a model takes, one of transformers or the one that ships (None), under ``loading``. To be
    called before anything else imports torch. In a terminal it says that the hub is asked, which takes its time.
    """
    if model is not None:
        check_folder(model)
        if asks_hub(model) and sys.stderr.isatty():
            say(
                f"{clean_name(model)} is not a folder here: looking for it on the Hugging Face hub (takes half a "
                f"minute if the hub cannot be reached).{near_folder(model)}"
            )
    with loading():
        import attemper.monitor.scan  # noqa: F401 - with torch and all that ways into a model stand on

        if model is not None:
            from attemper.integrations import pretrained

            pretrained.import_ahead(model)


def leave(code: int) -> NoReturn:
    """Ends the process. With torch loaded it first waits for threads, runs ``atexit`` functions and flushes output.
    Then it ends at once, without freeing objects: an open file that is not flushed loses its last lines.

    Raises:
        SystemExit: without torch, or where the process is not ours alone.
    """
    if "torch" not in sys.modules or not _is_ours() or _is_watched():
        raise SystemExit(code)
    try:
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()
    except KeyboardInterrupt:
        pass  # of somebody who does not wait for the threads; the code is that of the command
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # full, or closed, since the command wrote its own
            code = code or _LOST_OUTPUT
    os._exit(code)


_LOST_OUTPUT = 120
"""The code that Python ends with where it cannot write out what was printed."""


def _is_ours() -> bool:
    """Whether Python was started for the command (`attemper`, `python -m attemper`), and not for a program that runs
    it, as `memray run -m attemper` does, or a notebook.
    """
    place = len(sys.orig_argv) - len(sys.argv)
    before = sys.orig_argv[1:place]
    return place > 0 and Path(sys.orig_argv[place]).stem == "attemper" and all(word.startswith("-") for word in before)


def _is_watched() -> bool:
    """Whether a debugger, a profiler or a Python that goes on (-i) waits for the command's end."""
    monitoring = getattr(sys, "monitoring", None)  # from Python 3.12 on
    tools = monitoring is not None and any(monitoring.get_tool(number) for number in range(6))
    return bool(tools or sys.flags.inspect or sys.gettrace() or sys.getprofile())
