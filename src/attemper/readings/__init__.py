"""What was read, without torch."""

from attemper.former import FormerModule

for _name in ("comparison", "scan"):
    FormerModule(f"attemper.readings.{_name}", f"attemper.results.{_name}")
