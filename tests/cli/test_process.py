"""How the process of a command starts and ends: what is searched for garbage, what still runs at the end."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from attemper import cli
from attemper.cli import process
from attemper.integrations import pretrained

ROOT = Path(__file__).parents[2]


def python(*arguments: object) -> subprocess.CompletedProcess[str]:
    """A fresh Python."""
    command = [sys.executable, *map(str, arguments)]
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=buffered)


# --- the start ---

INTERRUPTED = """
import os, signal, sys
from importlib.abc import MetaPathFinder

class Ctrl(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Ctrl())
signal.signal(signal.SIGINT, signal.default_int_handler)
from attemper.__main__ import program
sys.argv = ["attemper", "demo", "--seed", "-1"]
program()
"""


@pytest.mark.quick("typer", "show")
@pytest.mark.parametrize("module", ["attemper.cli", "typer", "attemper.cli.runs", "attemper.cli.show"])
def test_ctrl_c_while_modules_load_is_one_line(module: str):
    run = python("-c", INTERRUPTED.replace("sys.argv[1]", repr(module)))
    assert (run.returncode, run.stdout, run.stderr) == (130, "", "attemper: interrupted.\n")


def test_the_command_has_ctrl_c_as_it_found_it():
    code = "from attemper import __main__, cli; cli.program = lambda: print(signal.getsignal(2)); __main__.program()"
    for name in ("SIG_IGN", "default_int_handler"):
        run = python("-c", f"import signal; signal.signal(2, signal.{name}); print(signal.getsignal(2)); {code}")
        before, after = run.stdout.splitlines()
        assert before == after


SHIPPED = """
import gc, weakref
from attemper.cli.arguments import Dtype, Input
from attemper.cli.scan import model_and_text
model, batches, _ = model_and_text(None, "a text of some words", Input(None, None, 8, "cpu", Dtype.float32))
import torch
listed = {id(object) for object in gc.get_objects()}  # without those that are never searched
assert gc.isenabled() and gc.get_freeze_count() > 100_000, gc.get_freeze_count()
assert id(torch.nn.Module.__dict__["forward"]) not in listed
assert id(model.blocks) in listed and id(model.blocks[0]) in listed
model.itself = model
gone = weakref.ref(model)
del model
gc.collect()
assert gone() is None
"""


@pytest.mark.slow("starts torch in a process")
def test_modules_are_never_searched_for_garbage_and_a_model_is():
    done = python("-c", SHIPPED)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("terminal", "offline"), [(True, "0"), (True, "1"), (False, "0")])
def test_a_terminal_is_told_that_the_hub_is_asked(
    terminal: bool, offline: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    process.import_for("organisation/model-of-nobody")
    told = capsys.readouterr().err.startswith("organisation/model-of-nobody is not a folder here: looking for it")
    assert told == (terminal and offline == "0")


COMMAND = """
import gc, json, sys
from attemper import cli
for command in json.loads(sys.argv[1]):
    sys.argv = ["attemper", *command]
    try:
        cli.main()
    except SystemExit as ended:
        assert ended.code == 1
    assert ("torch" in sys.modules) == (gc.get_freeze_count() > 100_000) == (command[-1] == "100000"), command
"""


@pytest.mark.slow("starts torch in a process")
@pytest.mark.parametrize("options", [["calibrate"], ["scan", "--texts", "texts.txt"]])
def test_a_command_that_loads_a_model_imports_torch_without_a_search_for_garbage(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("texts.txt").write_text("a text", encoding="utf-8")
    done = python("-c", COMMAND, json.dumps([[*options, "--max-length", "100000"]]))
    assert (done.returncode, "reads at most" in done.stderr) == (0, True), done.stderr


def test_a_folder_that_is_not_there_is_told_before_torch_is_imported_and_anything_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("texts.txt").write_text("a text", encoding="utf-8")
    commands = (
        *("scan", "calibrate", "fingerprint --out parts", "scan --texts texts.txt"),
        "scan --texts texts.txt --workers 1 --out parts",
    )
    done = python("-c", COMMAND, json.dumps([[*command.split(), str(tmp_path / "none")] for command in commands]))
    assert (done.returncode, done.stderr.count("there is no folder")) == (0, len(commands)), done.stderr
    assert not Path("parts").exists()


INSIDE = """
import gc, sys
from attemper.cli.process import loading
try:
    with loading():
        assert not gc.isenabled()
        raise ImportError
except ImportError:
    assert gc.isenabled() and gc.get_freeze_count()
gc.unfreeze()
sys.modules["torch"] = sys  # as in a program of somebody else
with loading():
    assert gc.isenabled()
assert not gc.get_freeze_count()
"""


def test_an_import_that_fails_leaves_the_search_on_and_a_program_with_torch_is_left_alone():
    done = python("-c", INSIDE)
    assert done.returncode == 0, done.stderr


def test_only_for_a_known_kind_of_model_its_modules_are_imported_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("transformers")
    imported: list[str] = []
    monkeypatch.setattr(pretrained, "import_module", imported.append)
    pretrained.import_ahead(str(tmp_path / "nowhere"))
    configs = {
        "damaged": "{",
        "deep": "[" * 100_000,
        "list": "[]",
        "unnamed": "{}",
        "no name": json.dumps({"model_type": ["bert"]}),
        "unknown": json.dumps({"model_type": "none-of-transformers"}),
        "pickled": json.dumps({"model_type": "bert"}),
        "known": json.dumps({"model_type": "bert"}),
    }
    for name, config in configs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(config, encoding="utf-8")
        (tmp_path / name / ("model.safetensors" if name != "pickled" else "pytorch_model.bin")).touch()
        pretrained.import_ahead(str(tmp_path / name))
        assert imported == (["transformers.modeling_utils"] if name == "known" else []), name


# --- the end ---

END = """
import atexit, sys, threading, time, types
from attemper.cli.process import leave
if "torch" in sys.argv:
    sys.modules["torch"] = types.ModuleType("torch")
if "profiler" in sys.argv:
    sys.setprofile(lambda *of: None)
atexit.register(print, "atexit")
def late():
    time.sleep(0.2)
    print("thread")
threading.Thread(target=late).start()
print("on stderr", file=sys.stderr, end="")
print("printed")
try:
    leave(3)
except SystemExit:
    print("goes on")
    raise
"""


@pytest.mark.parametrize(
    ("name", "given", "more"),
    [
        ("attemper", ["torch"], []),
        ("attemper", [], ["goes on"]),
        ("attemper", ["torch", "profiler"], ["goes on"]),
        ("mine.py", ["torch"], ["goes on"]),
    ],
    ids=["the command", "no torch", "a profiler", "a script"],
)
@pytest.mark.quick("the command", "a script")
def test_only_the_program_ends_at_once_after_threads_and_atexit(
    name: str, given: list[str], more: list[str], tmp_path: Path
):
    (tmp_path / name).write_text(END, encoding="utf-8")
    done = python(tmp_path / name, *given)
    assert (done.returncode, done.stderr) == (3, "on stderr")
    assert done.stdout.splitlines() == ["printed", *more, "thread", "atexit"]


LATE = """
import atexit, os, signal, sys, threading, time, types
from attemper.cli.process import leave
sys.modules["torch"] = types.ModuleType("torch")
if "full" in sys.argv:
    atexit.register(print, "lost")
else:
    threading.Thread(target=time.sleep, args=(60,)).start()
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
leave(0 if "full" in sys.argv else 3)
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_what_the_end_could_not_write_makes_the_code_that_of_python(tmp_path: Path):
    (tmp_path / "attemper").write_text(LATE, encoding="utf-8")
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run([sys.executable, tmp_path / "attemper", "full"], stdout=full, check=False, env=buffered)
    assert done.returncode == 120


def test_an_interrupt_at_the_end_does_not_wait_for_threads_and_keeps_the_code(tmp_path: Path):
    (tmp_path / "attemper").write_text(LATE, encoding="utf-8")
    assert python(tmp_path / "attemper").returncode == 3


MODULE = """
import sys, types
sys.argv = ["attemper", "--version"]
import attemper.cli
sys.modules["torch"] = types.ModuleType("torch")
import runpy
try:
    runpy.run_module("attemper", run_name="__main__", alter_sys=True)
except SystemExit as stop:
    print("goes on", stop.code)
"""


def test_a_program_that_runs_the_command_goes_on_after_it():
    assert python("-c", MODULE).stdout.splitlines()[1:] == ["goes on 0"]


KEPT = """
import builtins, os
class Kept:
    def __del__(self):
        os.write(2, b"taken apart")
builtins.kept = Kept()
"""


@pytest.mark.slow("takes many seconds")
def test_a_command_ends_with_its_whole_output_and_its_code_and_at_once_if_torch_was_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "sitecustomize.py").write_text(KEPT, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    text = tmp_path / "text.txt"
    text.write_text("as bytes " * 40, encoding="utf-8")
    done = python("-m", "attemper", "scan", "--text", text, "--json", "--fail-on-alarm", "--limit", "logits=0.001")
    assert (done.returncode, done.stderr) == (3, "")
    assert json.loads(done.stdout)["sites"]
    done = python("-m", "attemper", "--version")
    assert (done.returncode, done.stderr) == (0, "taken apart")


def test_the_installed_program_ends_so_too(monkeypatch: pytest.MonkeyPatch):
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    module, _, name = table["project"]["scripts"]["attemper"].partition(":")
    ended: list[bool] = []
    monkeypatch.setattr(cli, "program", lambda: ended.append(True))
    getattr(importlib.import_module(module), name)()
    assert ended == [True]
