"""Alarms in the table of a reading: how many of what, at which step, since when."""

from __future__ import annotations

from attemper import Scan
from tests.report import readings


def test_tables_say_since_when_an_alarm_stands_and_count_layers_as_layers():
    alarms = (
        readings.alarm("layer_fallen", "warning", "layers.0", None, 0.01, step=30, since=30),
        readings.alarm("fallen", "warning", "layers.1", 2, 0.01, step=40, since=40),
        readings.alarm("fallen", "warning", "layers.1", 3, 0.01, step=20, since=20),
        readings.alarm("diffuse", "notice", "layers.1", 0, 0.99, step=40, since=40),
        readings.alarm("logits", "warning", "layers.1", 0, 200.0),
    )
    lines = str(Scan(readings.reading(readings.site("layers.0"), alarms=alarms), None)).splitlines()
    assert [line for line in lines if line.startswith(("warning", "notice"))] == [
        "warning layer_fallen: 1 layer, since step 30",
        "warning fallen: 2 heads, since step 20",
        "warning logits: 1 head",
        "notice diffuse: 1 head, since step 40",
    ]
