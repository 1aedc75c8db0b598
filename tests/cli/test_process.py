"""How the process of a command starts and ends: what is searched for garbage, what still runs at the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def python(code: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """A fresh Python."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300, env=os.environ | environment
    )


def attemper(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "attemper", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


# --- the start ---

SHIPPED = """
import gc, weakref
from attemper.cli.options import Dtype, Input
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


def test_modules_are_never_searched_for_garbage_and_a_model_is():
    done = python(SHIPPED)
    assert done.returncode == 0, done.stderr


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
    done = python(INSIDE)
    assert done.returncode == 0, done.stderr


AHEAD = """
import sys
from pathlib import Path
from attemper.integrations import pretrained
for refused in sys.argv[1:-1]:
    pretrained.import_ahead(refused)
    assert "transformers.modeling_utils" not in sys.modules, refused
pretrained.import_ahead(sys.argv[-1])
assert "transformers.modeling_utils" in sys.modules
"""


def test_only_for_a_known_kind_of_model_its_modules_are_imported_ahead(tmp_path: Path):
    configs = {
        "damaged": "{",
        "deep": "[" * 100_000,
        "list": "[]",
        "unnamed": "{}",
        "no name": json.dumps({"model_type": ["bert"]}),
        "unknown": json.dumps({"model_type": "none-of-transformers"}),
        "known": json.dumps({"model_type": "bert"}),
    }
    for name, config in configs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(config, encoding="utf-8")
    done = python(AHEAD, tmp_path / "nowhere", *(tmp_path / name for name in configs))
    assert done.returncode == 0, done.stderr


# --- the end ---

END = """
import atexit, sys, threading, time, types
from attemper.cli.process import leave
if "torch" in sys.argv:
    sys.modules["torch"] = types.ModuleType("torch")
class Kept:
    def __del__(self):
        print("taken apart")
kept = Kept()
atexit.register(print, "atexit")
def late():
    time.sleep(0.2)
    print("thread")
threading.Thread(target=late).start()
print("on stderr", file=sys.stderr, end="")
print("printed")
leave(3)
"""


@pytest.mark.parametrize(("given", "last"), [(["torch"], []), ([], ["taken apart"])])
def test_threads_and_atexit_come_first_then_objects_go_with_the_process(given: list[str], last: list[str]):
    done = python(END, *given, PYTHONUNBUFFERED="")
    assert (done.returncode, done.stderr) == (3, "on stderr")
    assert done.stdout.splitlines() == ["printed", "thread", "atexit", *last]


PROFILED = """
import sys, types
from attemper.cli.process import leave
sys.modules["torch"] = types.ModuleType("torch")
sys.setprofile(lambda *of: None)
try:
    leave(3)
except SystemExit as stop:
    print("goes on", stop.code)
"""


def test_a_profiler_sees_the_end_of_the_command():
    assert python(PROFILED).stdout == "goes on 3\n"


def test_a_command_ends_with_its_whole_output_and_its_code(tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_text("as bytes " * 40, encoding="utf-8")
    done = attemper("scan", "--text", text, "--limit", "collapsed=0.99", "--limit", "logits=0.001", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert document["sites"]
    done = attemper("scan", "--text", text, "--limit", "logits=0.001", "--fail-on-alarm")
    assert done.returncode == 3, done.stderr
    assert "logits" in done.stdout


def test_the_installed_program_ends_so_too():
    table = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'attemper = "attemper.cli:program"' in table
