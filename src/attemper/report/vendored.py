"""The one file of others that a page carries: ECharts, as its authors published it."""

from __future__ import annotations

from pathlib import Path

VERSION = "6.1.0"
FILE = Path(__file__).parent / "vendor" / "echarts" / "echarts.common.min.js"
SHA256 = "61f13280aba3161f77fc801bf5f9c786f55f10432153a0683fc5cc0700b013d5"
"""Of the file as it lies in the npm package ``echarts``; the test of it keeps anyone from editing the copy."""


def echarts() -> str:
    """The library as JavaScript: lines, bars and scatter plots on a canvas, Apache-2.0."""
    return FILE.read_text(encoding="utf-8")
