"""What ``attemper.fingerprint`` gives: the attention of a model over some tokens, small enough to send to somebody."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attemper.fingerprints.site import ModelOutput, SiteFingerprint
from attemper.text import counts


@dataclass(frozen=True, eq=False)
class Fingerprint:
    """The result of :func:`attemper.fingerprint`. It holds no text and no token ids.

    Attributes:
        model: its class and what it was loaded from.
        tokens: a hash of the token ids of every sequence, without padding; None where the model was given no ids.
        lengths: tokens of each sequence, without padding.
        sites: in the order in which they ran.
        skipped: name of a site that was seen and could not be read -> the reason.
        about: date, type of the weights, versions; ``given``, a hash of the token ids with padding.
        output: what the model gives; None where that was not seen, as in files of before version 3.
    """

    model: str
    tokens: str | None
    lengths: tuple[int, ...]
    sites: tuple[SiteFingerprint, ...]
    skipped: Mapping[str, str] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    output: ModelOutput | None = None

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes it as one safetensors file, whole or not at all; :func:`attemper.open` reads it.

        Returns:
            Where the file is, links followed.

        Raises:
            InputError: no file can be written there.
        """
        from attemper.fingerprints import file

        facts = {"model": self.model, "tokens": self.tokens, "lengths": self.lengths}
        facts |= {"skipped": dict(self.skipped), "about": dict(self.about)}
        return file.save(path, self.sites, self.output, facts)

    def __repr__(self) -> str:
        rows = max((len(site.rows) for site in self.sites), default=0)
        return f"Fingerprint({self.model}: {counts(site=len(self.sites), row=rows, sequence=len(self.lengths))})"


def load_fingerprint(path: str | os.PathLike[str]) -> Fingerprint:
    """A fingerprint from a file of :meth:`Fingerprint.save` or of ``attemper fingerprint --out``.

    Raises:
        InputError: the file cannot be read, is cut off, is of a newer version, or is something else.
    """
    from attemper.fingerprints import file

    return Fingerprint(**file.read(path))
