"""How a change of a model ends: ``remove()``, or the end of a ``with``."""

from __future__ import annotations

from typing import Self
from warnings import warn


class Handle:
    """Something that acts on a model until ``remove()``. A context manager, too."""

    def remove(self) -> None:
        """Takes it off the model."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def former_close(handle: Handle) -> None:
    """``remove()``, under its name before attemper 0.3."""
    warn(f"{type(handle).__name__}.close() goes in attemper 0.4; write .remove().", DeprecationWarning, stacklevel=2)
    handle.remove()
