"""``python -m attemper`` is the command ``attemper``. Ctrl-C while its modules load is one line, too."""

from __future__ import annotations

import os
import signal
from typing import NoReturn


def program() -> NoReturn:
    """The ``attemper`` command as a process of its own, which ends with it."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # and not ignored, or taken by a program that calls this
        signal.signal(signal.SIGINT, _leave)
    from attemper import cli

    signal.signal(signal.SIGINT, before)
    cli.program()


def _leave(*_: object) -> NoReturn:
    os.write(2, b"attemper: interrupted.\n")
    os._exit(130)


if __name__ == "__main__":
    program()
