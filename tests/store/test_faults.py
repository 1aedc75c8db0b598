"""Whatever happens to the file of a run, training goes on, one warning says so, and what is lost is counted."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from attemper.store.writer import open_writer
from tests.support.faults import Outcome, data_loader_workers
from tests.support.samples import sample

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    """Short forms of all faults, from a process without torch."""
    command = [sys.executable, "-m", "tests.support.faults", "--kills", "4", "--many", "60"]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, timeout=120
    )
    assert not done.returncode, done.stderr
    found = [Outcome(**json.loads(line)) for line in done.stdout.splitlines()]
    return {outcome.fault: outcome for outcome in found}


@pytest.mark.parametrize(
    ("fault", "message", "written", "dropped"),
    [
        ("disk full (RLIMIT_FSIZE)", "failed at step .*: (disk I/O error|database or disk is full)", True, False),
        ("disk full (max_page_count)", "failed at step .*: database or disk is full", True, True),
        ("disk full at the start", "cannot be stored: disk I/O error.*retried every second", True, False),
        ("disk full from start to end", "cannot be stored: disk I/O error.*retried every second", False, True),
        ("read-only folder", "run cannot be stored: Permission denied", False, True),
        ("deleted folder", "is gone: it was moved or deleted while it was written to", True, True),
        ("slow disk", "the disk is slower than the samples come", True, True),
        (
            "garbage file",
            "garbage_file cannot be stored: fragment-0.sqlite is not a file of an attemper run",
            False,
            True,
        ),
        ("two writers", "two_writers cannot be stored: another watch is writing to it", False, True),
        ("locks refused at the start", "cannot be stored: database is locked", False, True),
        ("locks refused for a while", "failed at step 30: database is locked", True, False),
    ],
)
def test_training_goes_on_with_one_warning_and_what_is_lost_is_counted(outcomes, fault, message, written, dropped):
    outcome = outcomes[fault]
    assert outcome.went_on, outcome.note
    (warning,) = outcome.warnings
    assert re.search(message, warning)
    assert "Training goes on" in warning
    assert outcome.written + outcome.dropped == outcome.taken
    assert (outcome.written > 0, outcome.dropped > 0) == (written, dropped)
    if outcome.read is not None:
        assert outcome.read == max(outcome.written, 1)  # of two writers the other one's


def test_a_disk_that_is_full_from_start_to_end_leaves_word_of_what_is_lost_and_no_half_of_a_file(outcomes):
    assert outcomes["disk full from start to end"].note == "fragment-0.lost-60"


def test_a_process_that_is_killed_at_a_random_moment_loses_no_acknowledged_sample(outcomes):
    outcome = outcomes["killed at random"]
    assert outcome.went_on, outcome.note
    assert outcome.note == "4 of 4 files open, 0 acknowledged samples lost"
    assert outcome.written


def test_a_fork_takes_nothing_and_leaves_the_file_to_its_parent(outcomes):
    outcome = outcomes["fork"]
    assert outcome.went_on, outcome.note
    assert (outcome.written, outcome.read, outcome.warnings) == (60, 60, [])


@pytest.mark.parametrize("end", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_a_signal_ends_the_process_as_without_a_store_and_nothing_is_lost(outcomes, end):
    outcome = outcomes[f"ended by {end}"]
    assert outcome.went_on, outcome.note
    assert outcome.read == outcome.taken


def test_an_exception_in_the_loop_loses_nothing(outcomes):
    assert outcomes["ended by an exception"].read == 200, outcomes["ended by an exception"].note


def test_workers_of_a_data_loader_leave_the_store_alone(tmp_path):
    outcome = data_loader_workers(tmp_path / "run", 20)
    assert (outcome.written, outcome.read, outcome.dropped, outcome.warnings) == (20, 20, 0, [])


def test_a_second_writer_of_this_process_ends_the_first_one_and_goes_on(tmp_path, caplog):
    first = open_writer(tmp_path)
    other = open_writer(tmp_path, rank=1)
    assert first.take(sample(0))
    second = open_writer(os.path.relpath(tmp_path))
    assert (second.last_step, first.live, other.live) == (0, False, True)
    assert second.take(sample(1))
    for one in (other, second):
        one.close()
    assert (first.written, second.written, second.dropped) == (1, 1, 0)
    assert second.open_reader().rows("SELECT count(*) FROM sample") == [(2,)]
    (record,) = caplog.records
    assert f"an earlier watch of this process wrote to {tmp_path.name}. It has ended" in record.message
