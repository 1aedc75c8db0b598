"""``attemper runs``, ``show``, ``watch``, ``export``, ``report`` and ``compare`` of runs; their mistakes."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import attemper
from attemper.readings.sample import Sample, SiteLabel
from attemper.store.fragment import Fragment
from attemper.store.parts import FolderTarget, Parts
from attemper.store.process import Lock
from tests.support.command import Run, one_line, run_command
from tests.support.runs import collapsing, written
from tests.support.samples import NAMES, sample, samples, sites

SHOW = sys.modules["attemper.cli.show"]  # as an attribute of the package, ``show`` is the verb


@pytest.fixture
def command(run: Run) -> Run:
    """On a narrower screen."""
    return partial(run, columns=120)


def sharpening(many: int, labels: tuple[SiteLabel, ...] | None = None) -> Iterator[Sample]:
    """Entropies near 0.8, but for head 1 of the second site, which falls by 0.4 in 1,000 steps; logits that grow."""
    names = ("normalized_entropy", "max_logit")
    labels = labels or sites(2)
    heads = sum(label.heads for label in labels)
    for step in range(many):
        values = np.stack([np.full(heads, 0.8), np.full(heads, 5 + step / 100)]).astype(np.float32)
        values += 1e-3 * np.random.default_rng(step).standard_normal(values.shape, np.float32)
        values[0, 4] -= 4e-4 * step
        yield Sample(step, 1000.0 + step, labels, names, values)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs: one described, one of two segments, and one that is damaged."""
    tmp_path = tmp_path_factory.mktemp("runs")
    fragment = Fragment(_made(tmp_path / "a") / "fragment-0.sqlite")
    fragment.describe({"name": "warm-up", "tags": ["lr 3e-4"], "model": "tiny", "notes": "hot"})
    fragment.cover({("layers.9.attn", "self", "train"): "it has no queries"})
    fragment.lose(7, 3, "disk full")
    for one in sharpening(600):
        fragment.append(one)
        fragment.fold()
    fragment.close()
    written(tmp_path / "deep" / "b", samples(20))
    written(tmp_path / "deep" / "b", (sample(step) for step in range(10, 30)))
    (_made(tmp_path / "c") / "fragment-0.sqlite").write_bytes(b"garbage" * 1000)
    return tmp_path


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy of them."""
    return shutil.copytree(made, tmp_path, dirs_exist_ok=True)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_runs_lists_what_is_below_a_folder_and_says_what_cannot_be_read(command: Run, folder: Path) -> None:
    code, out, err = command("runs", folder)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].split() == ["run", "model", "steps", "samples", "size", "last", "written", "(UTC)"]
    assert lines[1].split()[:7] == ["a", "(warm-up)", "tiny", "0", "to", "599", "600"]
    assert lines[2].split()[:5] == ["c", "cannot", "be", "read", "7.0"]
    assert lines[4].startswith("c: fragment-0.sqlite is not a file of an attemper run")
    code, out, _ = command("runs", folder, "--json")
    document = json.loads(out)
    assert [row["path"] for row in document["runs"]] == ["a", "c", "deep/b"]
    assert [row["samples"] for row in document["runs"]] == [600, None, 30]
    assert document["runs"][0]["live"] is False
    assert document["runs"][0]["bytes"] > 0


def test_runs_of_a_folder_without_one_says_how_to_make_one(command: Run, tmp_path: Path) -> None:
    code, out, err = command("runs", tmp_path)
    assert (code, out) == (0, "")
    assert "there is no run below" in err
    assert json.loads(command("runs", tmp_path, "--json")[1]) == {"schema": 1, "runs": []}
    assert command("runs", tmp_path / "x")[0] == 1


def test_show_draws_every_layer_and_names_the_head_that_changed_most(command: Run, folder: Path) -> None:
    code, out, err = command("show", folder / "a")
    assert (code, err) == (0, "")
    text = " ".join(out.split())
    assert "warm-up tiny #lr 3e-4" in text
    assert "600 samples, steps 0 to 599; 2 sites, 6 heads; ended 1970-01-01 00:26 UTC" in text
    assert "7 samples are lost: disk full" in text
    assert "not read layers.9.attn (train): it has no queries" in text
    assert "not judged: first_token (needs judged_first_token_mass)." in text
    layers = [line for line in out.splitlines() if line.strip().startswith(("0 ", "1 "))]
    entropy, low, high, now, logit, *_ = layers[0].split()[1:]
    assert len(entropy) == len(logit) == 34  # means of 18 samples
    assert {*"▁█"} <= {*entropy}, "each has a scale of its own"
    assert 0.79 < float(low) <= float(high) < 0.81
    assert now[:4] in ("0.79", "0.80"), "as before"
    assert layers[1].split()[5][0] == "▁"
    assert layers[1].split()[5][-1] == "█"
    changes = out[out.index("largest changes of normalized_entropy") :].splitlines()
    assert changes[2].split() == ["layers.1.attn", "1", "0.788", "0.572"], "600 steps have no trend per 1,000"


def test_what_is_shown_as_now_is_the_last_sample_whatever_the_width(command: Run, tmp_path: Path) -> None:
    def course() -> Iterator[Sample]:
        both = sites(2)
        for step in range(400):
            labels = both if step < 50 else both[:1]  # the second site was seen at first only
            heads = sum(label.heads for label in labels)
            values = [np.full(heads, 0.9 - step / 500), np.full(heads, 1000.0 - step)]
            yield Sample(step, 1000.0, labels, ("normalized_entropy", "max_logit"), np.array(values, np.float32))

    written(tmp_path / "a", course())
    for columns in (60, 80, 120):
        _, out, _ = command("show", tmp_path / "a", columns=columns)
        layers = [line.split() for line in out.splitlines() if line.strip().startswith(("0 ", "1 "))]
        now = [(row[4], row[8]) if columns >= 80 else (row[2], row[4]) for row in layers]
        assert now == [("0.102", "601.0"), ("0.802", "951.0")]
    _, out, _ = command("watch", tmp_path / "a")
    assert "least entropy of a layer 0.102, largest logit 951" in out


@pytest.mark.quick("few", "long")
@pytest.mark.parametrize(
    ("every", "samples", "noise", "statistic", "told"),
    [
        (1, 240, 0.05, "normalized_entropy", False),
        (1, 240, 0.05, "max_logit", False),
        (500, 4, 0.05, "normalized_entropy", False),
        (100, 12, 3.0, "normalized_entropy", False),
        (10, 240, 0.05, "normalized_entropy", True),
        (100, 12, 3.0, "max_logit", True),
    ],
    ids=["short", "short, without a range", "few", "wide", "long", "wide, without a range"],
)
def test_a_trend_is_told_where_it_says_something(
    command: Run, tmp_path: Path, every: int, samples: int, noise: float, statistic: str, told: bool
) -> None:
    """It speaks of 1,000 steps, and its interval holds no change that a number from 0 to 1 cannot make."""

    def restless() -> Iterator[Sample]:
        drawn = np.random.default_rng(0)
        for place in range(samples):
            entropies = np.clip(0.7 - 1e-4 * every * place + noise * drawn.standard_normal(6), 0, 1)
            values = np.array([entropies, 100 * entropies], np.float32)
            yield Sample(place * every, 1000.0, sites(2), ("normalized_entropy", "max_logit"), values)

    written(tmp_path / "a", restless())
    out = command("show", tmp_path / "a", "--statistic", statistic)[1]
    assert ("95% interval" in out, "too short or too restless for a trend" in out) == (told, not told)
    assert "inf" not in out.replace("interval", "")
    changes = json.loads(command("show", tmp_path / "a", "--json", "--statistic", statistic)[1])["changes"]
    numbers = {(one["per_1000_steps"], one["low"], one["high"]) for one in changes}
    assert (numbers != {(None, None, None)}) == told
    if told and statistic == "normalized_entropy":
        assert all(abs(end) <= 1 for one in numbers for end in one if end is not None)


@pytest.mark.quick("80")
@pytest.mark.parametrize("columns", [80, 120])
def test_long_names_of_sites_take_one_line(command: Run, tmp_path: Path, columns: int) -> None:
    names = ("layers.{}.self_attn", "model.language_model.decoder.layers.{}.encoder_decoder_attention.attention")
    labels = tuple(replace(label, name=name.format(label.layer)) for name in names for label in sites(2))
    written(tmp_path, (replace(one, step=2 * one.step) for one in sharpening(600, labels)))
    _, out, _ = command("show", tmp_path, columns=columns)
    lines = [line.rstrip() for line in out.splitlines()]
    assert max(map(len, lines)) <= columns
    start = lines.index(next(line for line in lines if line.startswith("largest changes")))
    rows = lines[start + 2 : lines.index("", start)]
    assert len(rows) == 10
    assert all(len(line.split()) == 8 for line in rows)
    assert sum(line.startswith("layers.1.self_attn ") for line in rows) == 3
    cut = {line.split()[0] for line in rows} - {"layers.0.self_attn", "layers.1.self_attn"}
    assert cut
    assert all(name.startswith("…") and ("layers.0.encoder" in name or "layers.1.encoder" in name) for name in cut)
    assert next(line for line in lines if "encoder_decoder_attention" in line).endswith("self attention, train")


def test_show_json_has_what_the_view_shows(command: Run, folder: Path) -> None:
    code, out, _ = command("show", folder / "a", "--json", "--statistic", "max_logit", "--top", "2")
    document = json.loads(out)
    assert code == 0
    wanted = {"schema": 1, "name": "warm-up", "samples": 600, "last_step": 599}
    assert {name: document[name] for name in wanted} == wanted
    assert document["statistic"] == "max_logit"
    assert [change["per_1000_steps"] for change in document["changes"]] == [None, None], "599 steps are no 1,000"
    assert document["sites"][1]["normalized_entropy"][0] == pytest.approx(0.8, abs=0.01)
    assert document["coverage"]["skipped"][0]["reason"] == "it has no queries"
    assert document["lost"][0]["samples"] == 7
    assert document["segments"][0]["last_step"] == 599


def test_show_says_where_a_run_was_resumed_and_shows_one_without_a_sample(command: Run, folder: Path) -> None:
    assert "resumed at step 10" in command("show", folder / "deep" / "b")[1]
    written(folder / "empty", ())
    code, out, _ = command("show", folder / "empty")
    assert code == 1
    assert "0 samples; 0 sites, 0 heads; ended" in out
    assert json.loads(command("show", folder / "empty", "--json")[1])["samples"] == 0


def test_show_tells_since_when_an_alarm_stands_and_can_fail_on_one(command: Run, tmp_path: Path) -> None:
    written(tmp_path / "a", collapsing(400))
    code, out, _ = command("show", tmp_path / "a", "--fail-on-alarm")
    assert code == 3
    text = " ".join(out.split())
    changes = out[out.index("largest changes of normalized_entropy") :].splitlines()
    assert [line.split()[0] for line in changes[2:5]] == ["layers.1.attn"] * 3
    assert "warning layer_fallen: 1 alarm" in text
    assert "layers.1.attn" in text
    assert "; since step 2" in text
    assert "; steps 100 to 150" in text
    document = json.loads(command("show", tmp_path / "a", "--json")[1])
    assert {"layer_fallen", "logits"} <= {alarm["kind"] for alarm in document["alarms"]}
    (listed,) = json.loads(command("runs", tmp_path, "--alarms", "--json")[1])["runs"]
    assert listed["alarms"] == len(document["alarms"])
    written(tmp_path / "b", collapsing(90))
    assert command("show", tmp_path / "b", "--fail-on-alarm")[0] == 0


def test_names_in_a_run_cannot_write_to_the_terminal(command: Run, tmp_path: Path) -> None:
    label = replace(sites(1)[0], name="evil\x1b[2J\u202e\x9b2J")
    fragment = Fragment(tmp_path / "fragment-0.sqlite")
    fragment.describe({"name": "n\x1b[31m", "model": "[red]m", "tags": ["t\x07"], "notes": "x\u202ey"})
    fragment.cover({("s\x1b", "self", "train"): "r\x1b"})
    for step in range(30):
        fragment.append(sample(step, (label,)))
    fragment.close()
    for verb in ("show", "runs", "watch"):
        _, out, err = command(verb, tmp_path)
        assert not set("\x1b\x07\u202e\x9b") & set(out + err)
        assert verb == "watch" or "[red]m" in out


def test_names_in_json_are_shown_and_not_obeyed(command: Run, tmp_path: Path) -> None:
    name = "evil\x9b2J\u202e"
    written(tmp_path, (sample(step, (replace(sites(1)[0], name=name),)) for step in range(30)))
    for verb in ("show", "watch"):
        _, out, _ = command(verb, tmp_path, "--json")
        assert not set(name[4:]) & set(out) - set("2J")
        assert json.loads(out)["sites"][0]["name"] == name


@pytest.mark.skipif(sys.platform != "linux", reason="names that are no text")
def test_a_folder_whose_name_is_no_text_is_listed(command: Run, tmp_path: Path) -> None:
    written(tmp_path / os.fsdecode(b"r\xff"), samples(3))
    code, out, err = command("runs", tmp_path, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["runs"][0]["path"] == "r\\udcff"


def test_a_terminal_without_unicode_gets_bars_of_ascii(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setenv("COLUMNS", "80")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        run_command(patch, capsys, "show", folder / "a")
    stream.seek(0)
    out = stream.read()
    assert "\\u" not in out
    assert re.search(r"\n +0 [_.:=+*#-]{8,15} +0\.\d{3} 0\.\d{3} 0\.\d{3} +[_.:=+*#-]{8,15} ", out)


def test_watch_follows_a_run_to_its_end(command: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, fragment = Lock(tmp_path / "fragment-0.lock"), Fragment(tmp_path / "fragment-0.sqlite")
    fragment.append(sample(0))
    steps = iter(range(1, 5))

    def train(_seconds: float) -> None:
        """One step between two looks, however long a look takes."""
        step = next(steps, None)
        if step is not None:
            fragment.append(sample(step))
            return
        fragment.close()
        lock.release()

    with monkeypatch.context() as patch:
        patch.setattr(SHOW, "time", SimpleNamespace(monotonic=time.monotonic, sleep=train))
        code, out, err = command("watch", tmp_path, "--json")
    assert (code, err) == (0, "")
    documents = [json.loads(line) for line in out.splitlines()]
    assert documents[-1]["samples"] == 5
    assert [document["live"] for document in documents[:5]] == [True] * 5
    code, out, _ = command("watch", tmp_path)
    assert out.startswith("step 4: 5 samples, least entropy of a layer ")


def test_watch_says_new_alarms_in_the_language_that_is_asked_for(command: Run, tmp_path: Path) -> None:
    fragment = Fragment(tmp_path / "fragment-0.sqlite")
    for step in range(3):
        one = sample(step)
        numbers = one.values.copy()
        numbers[NAMES.index("max_logit"), 4] = 143.25
        fragment.append(replace(one, values=numbers))
    fragment.close()
    code, out, err = command("watch", tmp_path)
    assert (code, err) == (0, "")
    assert "\n  warning logits: layers.1.attn head 1: largest logit 143.2; since step 0" in out
    _, out, _ = command("watch", tmp_path, "--language", "zh")
    assert out.startswith("第 2 步：3 次采样，各层最低的熵")
    assert "\n  警告 logit 过大：layers.1.attn 第 1 头：最大 logit 143.2；自第 0 步起" in out
    _, out, _ = command("show", tmp_path, "--language", "zh")
    assert "最大 logit 143.2" in out
    assert command("watch", tmp_path, "--language", "fr")[0] == 2


def test_watch_follows_parts_to_their_end(command: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed (extra parquet)")
    monkeypatch.setattr(SHOW, "REFRESH_SECONDS", 0.05)
    monkeypatch.setattr("attemper.store.parts.PART_SECONDS", 1.0)
    fragment = Fragment(None)
    published = Parts(fragment, FolderTarget(tmp_path), 0)

    def publish(step: int) -> None:
        fragment.append(replace(sample(step), time=time.time()))
        published.publish()

    def train() -> None:
        for step in range(1, 5):
            time.sleep(0.3)
            publish(step)

    publish(0)
    thread = threading.Thread(target=train)
    thread.start()
    code, out, err = command("watch", tmp_path, "--json")
    thread.join()
    documents = [json.loads(line) for line in out.splitlines()]
    assert (code, err, documents[0]["live"], documents[-1]["samples"]) == (0, "", True, 5)
    assert len(documents) > 2


def test_ctrl_c_leaves_watch_cleanly(command: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(SHOW, "_line", interrupted)
    assert command("watch", folder / "a") == (0, "", "")


def test_export_writes_rows_or_a_copy(command: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    code, out, err = command("export", folder / "a", "--to", "csv")
    assert (code, out) == (0, "")
    assert err == "wrote warm-up.csv: 3,600 rows\n"
    assert len(list(csv.reader(Path("warm-up.csv").read_text("utf-8").splitlines()))) == 3601
    _, out, _ = command("export", "a", "--to", "sqlite", "--out", "copy.sqlite", "--json")
    assert json.loads(out) == {"schema": 1, "path": "copy.sqlite", "format": "sqlite", "files": 1}
    assert len(attemper.open("copy.sqlite")) == 600
    assert command("export", "a", "--to", "excel")[0] == 2


def test_report_writes_the_page_of_the_run(command: Run, folder: Path) -> None:
    code, out, err = command("report", folder / "a", "--html", folder / "page.html")
    assert (code, out) == (0, "")
    assert err.endswith("page.html: 600 samples, the last of step 599\n")
    assert "layers.1.attn" in (folder / "page.html").read_text("utf-8")
    assert command("report", folder / "a", "--html", folder / "x" / "page.html")[0] == 1


def test_report_of_several_runs_is_one_page_of_them(command: Run, folder: Path) -> None:
    given = (folder / "a", folder / "deep" / "b", folder / "a")
    code, out, err = command("report", *given, "--html", folder / "page.html")
    assert (code, out) == (0, "")
    assert err.endswith("page.html: 2 runs\n")
    html = (folder / "page.html").read_text("utf-8")
    assert "2 runs in one picture" in html
    _, out, _ = command("report", *given, "--html", folder / "page.html", "--json")
    assert json.loads(out)["runs"] == ["warm-up", "b"]
    code, _, err = command("report", *given, "--live")
    assert (code, "serves one run: leave the others out" in err) == (2, True)
    assert command("report", folder / "a", folder / "a", "--html", folder / "page.html")[0] == 1


def test_compare_takes_runs_and_steps_of_them(command: Run, folder: Path) -> None:
    code, out, err = command("compare", f"{folder}/a@0", folder / "a", "--top", 1)
    assert (code, err) == (0, "")
    assert out.startswith("tiny (a@0) -> tiny (a)")
    assert "layers.1.attn, head 1: 8" in " ".join(out.split())
    document = json.loads(command("compare", f"{folder}/a@0", f"{folder}/a@599", "--json")[1])
    assert len(document["heads"]) == 6


def test_delete_asks_first_and_takes_only_a_run(command: Run, folder: Path) -> None:
    assert command("runs", "--delete", folder / "a", stdin="n\n").code == 130
    assert (folder / "a").exists()
    code, out, err = command("runs", "--delete", folder / "a", "--yes")
    assert (code, out) == (0, "")
    assert err.startswith("deleted 1 file of the run")
    assert not (folder / "a").exists()
    code, _, err = command("runs", "--delete", folder, "--yes")
    assert code == 1
    assert "nothing was deleted" in err
    assert (folder / "deep" / "b").exists()
    code, out, err = command("runs", "--delete", folder / "deep" / "b", "--yes", "--json")
    deleted = json.loads(out)["deleted"]
    assert (code, err, deleted["path"], deleted["files"]) == (0, "", str(folder / "deep" / "b"), 1)
    assert deleted["bytes"] > 1000
    code, out, err = command("runs", "--delete", folder / "c")  # it does not even ask
    assert (code, out) == (1, "")
    assert err.startswith("attemper: fragment-0.sqlite is not a file of an attemper run")
    assert err.endswith("Nothing was deleted.\n")
    assert (folder / "c" / "fragment-0.sqlite").exists()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("show", "missing"), "there is no run missing."),
        (("show", "."), "is a folder of 3 runs"),
        (("show", "model"), "there is no run at model. This is a model: attemper scan model"),
        (("scan", "a"), "a holds no model. This is a stored run: attemper show a"),
        (("show", "c"), "fragment-0.sqlite is not a file of an attemper run"),
        (("show", "a", "--statistic", "entrpy"), "Did you mean 'entropy'?"),
        (("show", "a", "--statistic", "gini"), "statistic 'gini' is not in the run 'warm-up'."),
        (("compare", "a@7000", "a"), "step 7000 has no sample. The nearest is 599."),
        (("compare", "a", "typo"), "typo is neither a file nor a run here, so it was read as a model: typo is "),
        (("compare", "a@last", "a"), "a step is a whole number, such as a@1000."),
        (("watch", "c"), "not a file of an attemper run"),
        (("export", "c"), "not a file of an attemper run"),
        (("report", "c"), "not a file of an attemper run"),
    ],
)
def test_a_mistake_is_one_line(command: Run, folder: Path, monkeypatch, arguments, line: str) -> None:
    monkeypatch.chdir(folder)
    Path("model").mkdir()
    Path("model", "config.json").touch()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # else it tries for 20 seconds
    one_line(command(*arguments), 1, line)


@pytest.mark.slow("takes many seconds")
def test_no_verb_of_runs_loads_torch(folder: Path) -> None:
    code = (
        "import sys\nfrom attemper.cli import main\n"
        "for arguments in (['runs', '.'], ['show', 'a'], ['watch', 'a'], ['compare', 'a@0', 'a'],\n"
        "                  ['export', 'a', '--to', 'csv'], ['report', 'a']):\n"
        "    sys.argv = ['attemper', *arguments]\n"
        "    try: main()\n"
        "    except SystemExit as stop: assert not stop.code, arguments\n"
        "    assert 'torch' not in sys.modules, arguments\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, capture_output=True)


def test_one_bad_run_leaves_the_others_in_the_list(command: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Path) -> object:
        if path.name == "a":
            raise KeyError("something nobody thought of")
        return opened(path)

    opened = attemper.open
    whole = json.loads(command("runs", str(folder), "--json")[1])["runs"]
    monkeypatch.setattr("attemper.results.run.open_run", broken)
    code, out, _ = command("runs", str(folder), "--json")
    found = json.loads(out)["runs"]
    assert code == 0
    assert [one["path"] for one in found] == [one["path"] for one in whole]
    assert [one["error"] for one in found if one["path"] == "a"] == ["KeyError: 'something nobody thought of'"]
