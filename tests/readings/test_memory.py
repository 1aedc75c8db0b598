"""What a judge remembers: provisional until it is kept, marks apart by steps, a baseline of healthy readings."""

from __future__ import annotations

import numpy as np

from attemper.readings.laws import FIRST, LAWS, MARKS, RECENT
from attemper.readings.memory import Memory


def memory(*laws: str, heads: int = 1, spacing: float = 6.25) -> Memory:
    one = Memory(tuple(LAWS[name] for name in laws))
    one.grow(np.full(heads, spacing))
    return one


def fed(one: Memory, values: list[float], apart: int = 10, healthy: bool = True) -> Memory:
    for place, value in enumerate(values):
        one.write(apart * place, np.array([value]))
        one.commit(np.array([healthy]))
    return one


def test_what_is_written_last_can_be_written_again():
    one = memory("dead", "rate")
    fed(one, [1.0, 2.0])
    for value in (9.0, 3.0):
        one.write(20, np.array([value]))
    window = one.window
    assert window.recent[-3:, 0].tolist() == [1.0, 2.0, 3.0]
    assert window.marks[-3:, 0].tolist() == [1.0, 2.0, 2.0], "of three readings the median"
    assert window.steps[-3:, 0].tolist() == [0.0, 10.0, 20.0]
    assert len(window.recent) == RECENT
    assert len(window.marks) == MARKS + 1


def test_a_reading_that_is_missing_leaves_no_trace():
    with_gap, without = memory("dead", "rate"), memory("dead", "rate")
    fed(with_gap, [1.0, np.nan, 2.0, 5.0], apart=10)
    for step, value in ((0, 1.0), (20, 2.0), (30, 5.0)):
        without.write(step, np.array([value]))
        without.commit(np.array([True]))
    for name in ("recent", "marks", "steps", "baseline"):
        np.testing.assert_array_equal(getattr(with_gap.window, name)[:-1], getattr(without.window, name)[:-1])


def test_marks_are_apart_by_steps_and_those_ahead_of_a_run_that_went_back_are_dropped():
    one = fed(memory("rate"), [float(value) for value in range(120)], apart=1)
    assert np.diff(one.window.steps[:-1, 0]).tolist() == [7.0] * (MARKS - 1)
    one.write(60, np.array([1.0]))
    assert np.nanmax(one.window.steps[:-1]) < 60


def test_the_baseline_is_of_the_first_healthy_readings_and_of_the_very_first_until_then():
    one = fed(memory("fall_from_baseline"), [0.9])
    assert one.window.baseline.tolist() == [0.9]
    fed(one, [0.1] * 5, healthy=False)
    fed(one, [0.5, 0.6, 0.7])
    assert one.window.baseline.tolist() == [0.9]
    fed(one, [0.8, 0.2, 0.2, 0.2])
    assert one.window.baseline.tolist() == [0.7], f"of 0.9, 0.5, 0.6, 0.7, 0.8: {FIRST} of them"


def test_a_head_settles_once():
    one = fed(memory("drift"), [0.5] * (MARKS + 1))
    assert one.window.centre.tolist() == [0.5]
    fed(one, [0.9] * 100)
    assert one.window.centre.tolist() == [0.5]
    moving = fed(memory("drift"), list(np.linspace(0.9, 0.1, 100)))
    assert np.isnan(moving.window.centre).all()


def test_the_origin_of_a_change_is_the_latest_value_half_or_twice_as_large_and_else_the_earliest():
    one = fed(memory("rate"), [1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 3.0])
    one.write(70, np.array([8.0]))
    assert one.origin(slice(0, 1), above=True) == (2.0, 60)
    assert one.origin(slice(0, 1), above=False) == (1.0, 0)
    one.write(70, np.array([0.5]))
    assert one.origin(slice(0, 1), above=False) == (2.0, 60)
    assert memory("level").origin(slice(0, 1), above=True) is None
