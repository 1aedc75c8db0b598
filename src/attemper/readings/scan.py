"""Until 0.4: where pickles of 0.2 look for ``Scan``."""

from typing import Any


def __getattr__(name: str) -> Any:
    from attemper.results import scan

    return getattr(scan, name)
