"""The view of a run in the terminal: whole lines in Chinese, with nothing left in English."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

import attemper
from attemper import Scan
from attemper.readings.alarms import ALARMS, KINDS
from attemper.report import texts
from attemper.report.overview import Overview, overview
from attemper.report.run_table import table
from attemper.results.run import open_run
from attemper.store.fragment import Fragment
from tests.report import readings
from tests.support.runs import restless, written

STAYS = """
    token logit softmax query key value batch padding sink checkpoint kernel rank one-hot NaN log UTC nats Transformer
    mask attention attn layers self weights shape head heads tap names n of tokens entropy normalized_entropy
    transformers FlexAttention watch loss lr attemper bfloat
"""
"""Words that stay in Chinese texts (CONTRIBUTING.md), and those of the names that the test gives."""


SAW_NOTHING = "watch saw no attention in Linear"
FILLINGS = {"kinds": "drift", "kind": "drift", "said": SAW_NOTHING}


def english(said: str, *names: str) -> set[str]:
    """English words of a text, names and code left out."""
    for name in names:
        said = said.replace(name, "")
    said = said.replace("one-hot", "")
    said = re.sub(r"[\w.]*[._=()\[\]*#][\w.=()\[\]*]*", " ", said)  # names of sites and code
    return {word for word in re.findall(r"[A-Za-z]{2,}", said) if word.lower() not in STAYS.lower().split()}


def drawn(found: Overview, language: str) -> str:
    console = Console(file=io.StringIO(), width=400, markup=False, highlight=False, emoji=False)
    console.print(table(found, 400, language=language))
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Overview:
    folder: Path = tmp_path_factory.mktemp("runs") / "a"
    written(folder, restless(220, 1))
    fragment = Fragment(folder / "fragment-0.sqlite")
    fragment.keep_scalars([(step, {"lr": 0.5, "loss": 2 - step / 1000}) for step in range(1320)])
    fragment.close()
    return overview(open_run(folder), "max_logit")


def test_the_view_of_a_run_is_chinese_in_every_line(found: Overview) -> None:
    said = drawn(found, "zh")
    assert english(said) == set()
    assert "layers.0.attn" in said
    assert len(said.splitlines()) == len(drawn(found, "en").splitlines())


def test_what_is_in_no_ordinary_run_is_chinese_too(found: Overview) -> None:
    rare = [
        {"samples": 0, "courses": (), "changes": (), "alarms": (), "unmeasured": why, "live": live, "last_time": None}
        for why in (said for key in texts.keys_of("why") for said in filled(key))
        for live in (True, False)
    ]
    for one in rare:
        assert english(drawn(Overview(**(vars(found) | one)), "zh"), "Linear", "`with attemper.watch(model)`") == set()


def test_an_alarm_of_every_kind_is_one_chinese_line() -> None:
    figures = {"now": 0.5, "before": 1.0, "total": 4.0}
    history = {"step": 4, "since": 4, "worst": 0.4, "worst_step": 8, "latest": 0.3, "latest_step": 9}
    for kind, ended in product(ALARMS, (None, 12)):
        head = None if kind.whole else 2
        alarm = kind.alarm("layers.0.attn", head, 0.5, 1.0, (0.25, 2), figures, ended=ended, **history)
        line = texts.alarm_line(alarm, "zh")
        assert english(line) == set(), line
        assert "；" in line
        assert line.startswith("损失：" if kind.of_loss else "layers.0.attn")


def test_the_loss_stands_above_the_layers_and_in_the_document(found: Overview) -> None:
    lines = [line.split() for line in drawn(found, "en").splitlines()]
    (loss,), (rate,) = ([place for place, line in enumerate(lines) if line[:1] == [name]] for name in ("loss", "lr"))
    assert loss + 1 == rate < min(place for place, line in enumerate(lines) if line[:1] == ["layer"])
    assert (lines[loss][1][0], lines[loss][1][-1], lines[loss][-1]) == ("█", "▁", "0.681")
    assert [one["name"] for one in found.to_dict()["scalars"]] == ["loss", "lr"]
    assert found.to_dict()["scalars"][0]["last_step"] == 1319
    plain = io.StringIO()
    Console(file=plain, width=80).print(table(found, 80, plain=True))
    assert "█" not in plain.getvalue()


def test_each_course_has_a_scale_of_its_own_with_its_ends(found: Overview) -> None:
    """On one scale for all, a layer with small logits is flat beside one with large ones."""
    site = found.courses[0].site
    small, large = ((place / 10, place / 5, place) for place in (0.02, 400.0))
    courses = tuple(
        replace(found.courses[0], site=replace(site, name=f"layers.{place}.attn"), normalized_entropy=values,
                max_logit=values, last_normalized_entropy=values[1], last_max_logit=values[1])
        for place, values in enumerate((small, large, (0.5, None, 0.5)))
    )  # fmt: skip
    said = [line.split() for line in drawn(replace(found, courses=courses, alarms=(), changes=()), "en").splitlines()]
    rows = {line[0]: line[1:] for line in said if line[:1] in (["0"], ["1"], ["2"])}
    assert rows["0"] == ["▁▁█", "0.002", "0.020", "0.004", "▁▁█", "0.0", "0.0", "0.0"]
    assert rows["1"] == ["▁▁█", "40.000", "400.000", "80.000", "▁▁█", "40.0", "400.0", "80.0"]
    assert rows["2"][:3] == ["▁", "▁", "0.500"]
    (heading,) = (line for line in said if line[-4:] == ["logit", "min", "max", "now"])
    assert heading[-8:-4] == ["min", "max", "now", "largest"]
    for width in (60, 80, 100, 120):
        console = Console(file=io.StringIO(), width=width)
        console.print(table(found, width))
        assert isinstance(console.file, io.StringIO)
        said = console.file.getvalue()
        lines = said.splitlines()
        assert max(map(len, lines)) <= width
        assert ("min" in " ".join(lines)) == (width >= 80)
        assert "…" not in said.partition("largest changes")[0], "no column is cut"


def test_an_alarm_of_few_rows_says_so_beside_a_table_of_all_rows(found: Overview) -> None:
    def shown(kind: str, language: str = "en") -> str:
        one = KINDS[kind].alarm("layers.0.attn", 2, 0.97, 0.95, None, {}, step=4, since=4)
        return drawn(replace(found, alarms=(one,), fewest_keys=32), language)

    told = "judged over rows that see 32 keys or more: diffuse. The table above shows all rows."
    assert told in shown("diffuse").splitlines()
    assert "只判断看到至少 32 个 key 的行：接近均匀。上面的表包含所有行。" in shown("diffuse", "zh")
    assert "The table above" not in shown("logits")
    assert found.to_dict()["fewest_keys"] == found.fewest_keys
    scanned = readings.reading(
        readings.site("h.0.attn", value=0.99), alarms=(KINDS["diffuse"].alarm("h.0.attn", 0, 0.99, 0.95),)
    )
    assert told in str(Scan(scanned, {}))


def test_an_alarm_that_a_layer_takes_over_says_as_what_it_continues(found: Overview) -> None:
    one = KINDS["collapsed"].alarm("layers.0.attn", 2, 0.01, 0.05, None, {}, step=4, since=4, ended=9)
    one = replace(one, continues_as="layer_fallen", continues_since=9)
    assert texts.alarm_line(one, "en").endswith("; steps 4 to 9, continues as layer_fallen since step 9")
    assert texts.alarm_line(one, "zh").endswith("；第 4 到 9 步、自第 9 步起由整层坍缩接替")
    assert texts.say(texts.brief(one)[1]) == "steps 4 to 9, continues as layer collapsed since step 9"
    (document,) = replace(found, alarms=(one,)).to_dict()["alarms"]
    assert (document["continues_as"], document["continues_since"]) == ("layer_fallen", 9)


def filled(key: str) -> Iterator[str]:
    text = texts.texts("en")[key]
    for one in [text] if isinstance(text, str) else text.values():
        yield re.sub(r"\{(\w+)\}", lambda place: FILLINGS.get(place[1], "12"), one)


def test_notes_and_remarks_are_recognised_and_chinese() -> None:
    for key in (*texts.keys_of("note"), *texts.keys_of("remark")):
        for said in filled(key):
            assert english(texts.say(texts.note(said), "zh")) == set()


def test_a_run_whose_watch_saw_nothing_says_why_in_chinese(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    with attemper.watch(model, store=tmp_path / "a") as watch:
        model(torch.zeros(2, 3))
        with pytest.warns(UserWarning, match=SAW_NOTHING):
            watch.step()
    with open_run(tmp_path / "a") as run:
        said = drawn(overview(run), "zh")
    assert english(said, "Linear") == set()
