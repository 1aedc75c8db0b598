"""How commands begin and end: help, version, completion, mistyped names, full disks, closed pipes, interrupts."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from attemper import __version__
from attemper.cli.output import exit_code, print_json
from attemper.errors import InputError
from tests.support.command import Run, bad_usage


def in_a_process(*arguments: str, shell: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """The command as a process of its own; ``shell`` is what follows it in a line of sh."""
    line = f'"$0" -m attemper "$@" {shell}'
    return subprocess.run(
        ["sh", "-c", line, sys.executable, *arguments],
        capture_output=True, text=True, check=False, env=os.environ | environment,
    )  # fmt: skip


# --- the start ---


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_without_a_verb_the_help_is_printed_and_all_is_well(run: Run, arguments: tuple[str, ...]):
    code, out, err = run(*arguments)
    assert (code, err) == (0, "")
    assert re.match(r"Usage: attemper \[OPTIONS\] (COMMAND|\[COMMAND\]) \[ARGS\]\.\.\.", out)  # the word is typer's
    assert all(verb in out for verb in ("scan", "compare", "calibrate", "lab", "bench", "doctor"))


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_the_version_is_one_line(run: Run, option: str):
    assert run(option) == (0, f"attemper {__version__}\n", "")


PROBE = """
import json, os, sys
from attemper.cli import main
for arguments, completion in json.loads(sys.argv[1]):
    typed = {"COMP_WORDS": completion, "COMP_CWORD": str(completion.count(" ")), "_ATTEMPER_COMPLETE": "complete_bash"}
    os.environ.update(typed if completion else {})
    sys.argv = ["attemper", *arguments]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code
    assert "torch" not in sys.modules
    print("----")
"""


def test_version_help_and_completion_start_without_torch():
    asked = {"attemper sc": "scan", "attemper scan --so": "--sort", "attemper scan --sort max_l": "max_logit"}
    asked |= {"attemper lab col": "collapse"}
    commands = [(["--version"], ""), ([], ""), *(([], typed) for typed in asked)]
    done = subprocess.run([sys.executable, "-c", PROBE, json.dumps(commands)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    printed = done.stdout.split("----")
    for word, out in zip(("attemper", "Usage", *asked.values()), printed, strict=False):
        assert word in out


# --- mistyped names ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("scna",), "there is no command 'scna'. Did you mean 'scan'?"),
        (("xyz",), "there is no command 'xyz'."),
        (("scan", "--baatch-size", "3"), "there is no option '--baatch-size'. Did you mean '--batch-size'?"),
        (("scan", "--dtype", "float33"), "Did you mean 'float32'"),
        (("scan", "--backend", "nativ"), "Did you mean 'native'?"),
        (("scan", "--limit", "colapsed=1"), "Did you mean 'collapsed'?"),
        (("bench", "--what", "memori"), "Did you mean 'memory'?"),
        (("sc\x1b[31m\u202ean",), "there is no command 'sc\\x1b[31m\\u202ean'."),
    ],
)
def test_a_mistyped_name_ends_with_2_and_the_nearest_name(run: Run, arguments: tuple[str, ...], message: str):
    ended = run(*arguments)
    bad_usage(ended, message)
    assert ended.err.startswith("Usage: attemper ")


# --- the end ---


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (InputError("no \x1b[2J model\r\n\u202ecba"), 1, "attemper: no \\u001b[2J model\\u000d\\u000a\\u202ecba\n"),
        (OSError(errno.EACCES, "Denied", "/etc/\x1bshadow"), 1, "attemper: /etc/\\u001bshadow: Denied.\n"),
        (KeyboardInterrupt(), 130, "attemper: interrupted.\n"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 1, ""),  # the reader went away, which is no error to tell
    ],
    ids=lambda one: type(one).__name__,
)
def test_an_error_is_one_line_without_what_could_move_the_cursor(
    capsys: pytest.CaptureFixture[str], error: BaseException, code: int, line: str
):
    assert exit_code(Mock(side_effect=error)) == code
    assert capsys.readouterr() == ("", line)


def test_every_line_on_stderr_goes_through_the_function_that_shows_names():
    for path in Path(sys.modules["attemper.cli.output"].__file__ or "").parent.glob("*.py"):
        prints = path.read_text("utf-8").count("file=sys.stderr")
        assert prints == (path.name == "output.py"), path.name


def test_the_exit_code_of_the_verb_is_that_of_the_command(capsys: pytest.CaptureFixture[str]):
    assert [exit_code(lambda code=code: code) for code in (None, 0, 3, 130)] == [0, 0, 3, 130]
    assert capsys.readouterr().err == "attemper: interrupted.\n"


FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which Linux has")


@FULL
@pytest.mark.quick("version", "lab]")
@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("lab", "--json"), ("lab",)], ids=" ".join)
def test_a_full_disk_is_one_line_and_no_traceback(arguments: tuple[str, ...]):
    done = in_a_process(*arguments, shell="> /dev/full")
    assert done.returncode == 1
    assert done.stderr == "attemper: the output cannot be written: No space left on device.\n"


def test_a_pipe_that_is_closed_at_once_ends_without_a_word():
    done = in_a_process("lab", "--json", shell="| true")
    assert done.stderr == ""


def test_closed_streams_are_no_traceback():
    done = in_a_process("--version", shell=">&-")
    assert (done.returncode, done.stderr) == (
        1, "attemper: standard output is closed: there is nowhere to print to.\n"
    )  # fmt: skip
    done = in_a_process("scna", shell="2>&-")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


@pytest.mark.slow("takes a second")
def test_a_terminal_that_knows_few_letters_gets_the_numbers_of_the_rest():
    done = in_a_process("compare", "a\u0416.json", "b.json", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "there is no file a\\u0416.json" in done.stderr


@pytest.mark.parametrize("name", ["a" * 5000, "a/b/" * 1250, "\udc80\x1b[2J/x/y"])
def test_a_model_of_an_impossible_name_is_one_short_line(run: Run, name: str):
    pytest.importorskip("transformers")
    code, out, err = run("scan", name)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert len(err) < 500
    assert "\x1b" not in err


def test_a_text_and_a_page_of_an_impossible_name_are_one_short_line(run: Run):
    for option, name in (
        ("--text", "a" * 5000),
        ("--html", "a" * 5000),
        ("--html", "/dev/full"),
        ("--csv", "a" * 5000),
    ):
        code, out, err = run("scan", option, name)
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert len(err) < 500


@pytest.mark.parametrize(("encoding", "printed"), [("utf-8", '{"model": "\u0416"}'), ("ascii", '{"model": "\\u0416"}')])
def test_json_is_json_whatever_letters_stdout_takes(encoding: str, printed: str, monkeypatch: pytest.MonkeyPatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr("sys.stdout", stream)
    print_json('{"model": "\u0416"}')
    stream.seek(0)
    assert stream.read() == f"{printed}\n"
