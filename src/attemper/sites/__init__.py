"""Attention sites of models that exist: find them, name them, see what they compute."""

from attemper.former import FormerModule

for _name in ("act", "wrap"):
    FormerModule(f"attemper.sites.{_name}", "attemper.sites.actions")
