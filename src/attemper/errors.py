"""What attemper raises. A message says where, what was expected, what came and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class InputError(ValueError):
    """An argument has a value that is not allowed."""


class BackendError(RuntimeError):
    """The named backend is missing or cannot do this call. The message names one that can."""


class MissingExtraError(ImportError):
    """An optional dependency is not installed. The message names the extra that brings it."""

    def __init__(self, feature: str, package: str, extra: str) -> None:
        super().__init__(
            f"{feature} needs the package {package}, which is not installed: pip install 'attemper[{extra}]'"
        )


@contextmanager
def needs(feature: str, package: str, extra: str) -> Iterator[None]:
    """For imports of an optional dependency: where it is missing, ``MissingExtraError``."""
    try:
        yield
    except ImportError as error:
        raise MissingExtraError(feature, package, extra) from error
