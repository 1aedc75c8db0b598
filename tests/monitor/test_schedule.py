"""Which steps are sampled, and under which numbers, also where a run goes on."""

from __future__ import annotations

import pytest

from attemper.monitor.options import Schedule


def sampled(schedule: Schedule, numbers: list[int | None]) -> list[tuple[int, bool]]:
    """(number, whether it is kept) of the steps that are sampled."""
    found = []
    for number in numbers:
        asked = schedule.sampling
        ended = schedule.end(number)
        if asked:
            found.append((ended, schedule.kept))
    return found


def test_one_step_in_so_many_is_sampled_the_first_one_included() -> None:
    assert sampled(Schedule(3, None, None), [None] * 8) == [(0, True), (3, True), (6, True)]


def test_numbers_are_the_loops_own_whatever_their_distance() -> None:
    schedule = Schedule(2, None, None)
    assert sampled(schedule, [8, 16, 24, 32, None]) == [(8, True), (24, True), (33, True)]
    assert schedule.number == 34


@pytest.mark.parametrize("begin", [97, 100, 101, 150])
def test_a_run_that_goes_on_keeps_the_steps_that_it_would_have_kept(begin: int) -> None:
    whole = [number for number, _ in sampled(Schedule(50, None, None), list(range(1, 400)))]
    resumed = sampled(Schedule(50, 1, 151), list(range(begin, 400)))
    assert resumed[0][0] == begin, "the first step is measured in any case: its number is known at its end"
    assert [number for number, kept in resumed if kept] == [number for number in whole if number >= begin]


def test_without_numbers_counting_goes_on_after_the_last_sample() -> None:
    assert sampled(Schedule(10, 0, 20), [None] * 25) == [(21, False), (30, True), (40, True)]


def test_a_loop_that_goes_back_samples_the_steps_that_it_sampled_before() -> None:
    schedule = Schedule(4, None, None)
    assert [number for number, _ in sampled(schedule, list(range(10)))] == [0, 4, 8]
    assert [number for number, kept in sampled(schedule, list(range(3, 14))) if kept] == [4, 8, 12]


def test_passes_of_a_first_step_are_not_counted() -> None:
    schedule = Schedule(2, None, None)
    sampled(schedule, [None] * 3)
    schedule.restart()
    assert sampled(schedule, [700, 701, 702]) == [(700, True), (702, True)]
