"""``attemper.explain``: where two runs over the same tokens first differ, why, and what to do next."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from attemper.checks import indentation
from attemper.files import write_whole
from attemper.fingerprints.explain import first_difference
from attemper.fingerprints.explanation import FirstDifference, Runs
from attemper.fingerprints.record import Fingerprint


class Explanation(FirstDifference):
    """Where two runs first differ, and why. Prints as the message and what to do.

    Attributes:
        kind: "none", "rounding", "few_tokens", "equivalent", "too_small", "input", "scale", "softcap", "logn",
            "key_shift", "distance_bias", "window", "causality", "padding", "sink", "rotary", "swapped", "not_loaded",
            "transposed", "order_of_layers", "documents",
            "head_order", "grouping", "key_rounding", "bias", "weights", "values" or "scores" (which differ, by no rule
            that is known), "output" (what is behind the last attention).
        site: name in run a of the first site that differs; None where none does.
        stage: "residual", "input", "q and k", "visible keys", "final score", "kept mass", "head output",
            "attention output" or "model output".
        extent: how many sites show it, and which heads where not all do. Where only what both runs have tells it, as
            in queries and keys, later sites differ already by what enters them: "from site 3 of 12 on".
        value: its number: factor, cap, length, base, bits; None where there is none.
        residual: what the cause leaves of the squared difference, 0 to 1.
        confidence: "high", "medium" or "low".
        also: other findings, and how other weights make the same function: "rescaled", "rotated", "centred", "folded",
            "permuted", "repeated", "shifted", "rounded".
        message: all of it in words.
        advice: what to do next. Where the cause is not known, where to look next and no more.
        is_fault: whether the difference changes what the model computes.
        runs: names of the two, and how far each site is apart, as the page shows it. It is not in JSON.
    """

    def to_dict(self) -> dict[str, Any]:
        """Its fields, for JSON."""
        found = asdict(replace(self, runs=Runs()))
        del found["runs"]
        return found

    def to_json(self, indent: int | None = 2) -> str:
        """One JSON document."""
        return json.dumps(self.to_dict(), allow_nan=False, ensure_ascii=False, indent=indentation(indent, "found"))

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Writes one page that opens offline: what differs, what to do, every stage of every site. It holds no text.

        It is written whole or not at all, and the same runs give the same bytes.

        Returns:
            Where the file is, links followed.

        Raises:
            InputError: no file can be written there.
        """
        from attemper.report.explanation import explanation_page

        return write_whole(path, explanation_page(self))

    def __str__(self) -> str:
        return f"{self.message}\nWhat to do: {self.advice}"


def explain(a: Fingerprint, b: Fingerprint) -> Explanation:
    """Finds where two runs of one model first differ, and why. Both runs read the same tokens.

    Each run is first tested against itself: its final scores as a function of its own products q.k, its visible keys,
    the mass that its sink takes. Rounding of queries and keys cancels there. What is left is compared stage by stage
    with the level that rounding reaches, by the precision of both and by the stage before. A cause is accepted only if
    it leaves little of the difference.

    Args:
        a, b: of :func:`attemper.fingerprint` or :func:`attemper.open`, over the same tokens.

    Returns:
        :class:`attemper.types.Explanation`: ``kind``, ``site``, ``stage``, ``extent``, ``value``, ``message``,
        ``advice``; ``to_html`` writes its page.

    Raises:
        InputError: they are of other tokens, or of models of another architecture or number of layers.
    """
    return Explanation(**vars(first_difference(a, b)))
