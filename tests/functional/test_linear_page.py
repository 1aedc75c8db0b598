"""The code of docs/linear-attention.md runs as it stands, and gives what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

PAGE = Path(__file__).parents[2] / "docs" / "linear-attention.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_page_runs():
    text = PAGE.read_text("utf-8")
    names: dict[str, Any] = {"__name__": "page"}
    found = list(BLOCK.finditer(text))
    assert len(found) == 2
    for match in found:
        line = text[: match.start(1)].count("\n")
        exec(compile("\n" * line + match[1], "docs/linear-attention.md", "exec"), names)
    assert len(names["rows"]) == 11
    assert names["state"].values.shape == (2, 8, 64, 64)
    torch.testing.assert_close(names["padded"].output[1, :, :700], names["whole"].output[1, :, :700])
    torch.testing.assert_close(names["padded"].output[0], names["whole"].output[0])
