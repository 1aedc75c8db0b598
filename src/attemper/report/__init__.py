"""A reading as a page: one HTML file that opens offline, for people. Never imports torch.

``build`` puts it together from ``templates`` and ``assets`` (ours) and ``vendor`` (ECharts); ``document`` is the data
it carries, ``verdict`` the sentence at its top, ``overview`` what is seen without scripts, ``target`` the file.
``comparison`` is the page of two scans.
"""

from __future__ import annotations

from attemper.report.comparison import write_comparison
from attemper.report.page import page, write
from attemper.report.target import checked_target

__all__ = ["checked_target", "page", "write", "write_comparison"]
