"""The code of each page of docs/tasks runs as it stands, and gives what its page says."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import attemper
from tests.docs.pages import ROOT, run_code

PAGES = ROOT / "docs" / "tasks"
RUN = (
    "my-loss-spikes", "longer-context", "sharpen-a-retrieval-head", "hold-entropy-while-training",
    "many-ranks", "past-one-machine", "scan-a-model-that-does-not-fit", "features-for-a-probe",
    "two-engines-differ", "does-my-model-attend-where-it-should",
)  # fmt: skip
ADVICE = "recommended-temperatures"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """From a page's name to the names that its blocks define."""
    monkeypatch.chdir(tmp_path)

    return lambda page: run_code(f"docs/tasks/{page}.md")


def largest_logit(scan: Any) -> float:
    return max(head.max_logit for site in scan.sites for head in site.heads)


def test_my_loss_spikes(run: Any) -> None:
    names = run("my-loss-spikes")
    assert names["calm"] == []
    assert names["later"] == []
    assert {alarm.site for alarm in names["rung"]} == {"blocks.1.attention"}
    assert names["rose"] == [60]
    assert set(names["clipped"])
    assert largest_logit(names["scan"]) < 105, "1343 before; the optimizer moved the weights after they were measured"
    assert not any("parametrizations" in name for name, _ in names["model"].named_parameters())
    assert set(names["readings"]) == {"blocks.0.attention", "blocks.1.attention"}
    assert set(names["saved"]) == {"steps", "log_temperatures"}
    normed = names["ByteModel"](names["ByteConfig"](layers=2, width=64, context=32, qk_norm=True))
    with pytest.raises(attemper.InputError, match="normalise"):
        attemper.QKClip(normed)


def test_past_one_machine(run: Any) -> None:
    names = run("past-one-machine")
    assert names["whole"].shards == ("0/3", "1/3", "2/3")
    assert names["whole"].missing == ()
    assert names["whole"].tokens == 6 * 2 * 40


def test_scan_a_model_that_does_not_fit(run: Any) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    names = run("scan-a-model-that-does-not-fit")
    assert {parameter.device.type for parameter in names["model"].parameters()} == {"cpu", "meta"}
    whole = names["LlamaForCausalLM"].from_pretrained(names["folder"]).eval()
    assert names["scan"].reading.sites == names["attemper"].scan(whole, names["batches"]).reading.sites


@pytest.mark.slow("takes many seconds")
def test_two_engines_differ(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    names = run("two-engines-differ")
    said = capsys.readouterr().out.splitlines()
    page = " ".join((PAGES / "two-engines-differ.md").read_text("utf-8").split())
    assert said[0] == "14.7 keys, 30.4 in the engine"
    assert said[1] in page
    assert said[2] in page
    assert said[3] == "equivalent"
    assert names["found"].value == pytest.approx((1 + 0.1 * math.log(8)) ** -2, rel=1e-5)
    assert names["apart"] < 1e-4


@pytest.mark.slow("takes many seconds")
def test_does_my_model_attend_where_it_should(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    names = run("does-my-model-attend-where-it-should")
    said = capsys.readouterr().out.splitlines()
    page = " ".join((PAGES / "does-my-model-attend-where-it-should.md").read_text("utf-8").split())
    assert said[1] == "kept broken"
    assert said[2] in page
    assert said[0].partition(" of the weight")[0] in page
    assert names["report"]["documents"].site == "model.layers.0.self_attn"


def test_many_ranks(run: Any) -> None:
    names = run("many-ranks")
    assert names["watch"].run.steps.tolist() == [0, 4, 8]
    assert torch.allclose(names["ring"], names["whole"].stats.entropy, atol=1e-5)


@pytest.mark.slow("takes many seconds")
def test_longer_context(run: Any) -> None:
    names = run("longer-context")
    curves = [head.by_visible_keys for site in names["scan"].sites for head in site.heads]
    assert len(curves) == 16
    assert {curve[-1].first for curve in curves} == {256}
    assert max(curve[-1].normalized_entropy for curve in curves) < 0.7, "no head is diffuse, as the page says"
    assert names["by_place"][5] > 2 * max(names["by_place"][:5]), "the loss rises all the same"
    assert set(names["found"]) == {"plain", "log", "yarn", "llama4"}
    assert len(set(names["found"].values())) == 4
    assert names["calibration"].per == "model"
    assert names["again"] == names["calibration"]
    assert len(names["calibration"].temperatures) == 4
    assert not names["calibration"].tells
    assert names["difference"] < 1e-4
    assert not any("attemper" in name for name in names["folded"].state_dict())


@pytest.mark.slow("takes many seconds")
def test_sharpen_a_retrieval_head(run: Any) -> None:
    names = run("sharpen-a-retrieval-head")
    place = (names["site"], names["head"])
    assert place[0] == "blocks.3.attention"
    assert names["missed"][place] > 0
    assert names["looked_up"] > 5 * names["at_itself"]
    assert names["best"] < 1
    assert names["tempered"][1] < names["plain"][1], "what was found on some texts helps on others"
    assert (names["changed"].site, names["changed"].head) == place
    assert names["changed"].change("normalized_entropy") < 0
    torch.testing.assert_close(torch.stack(names["folded"]), torch.stack(names["tempered"]), rtol=1e-5, atol=0)
    assert not any("attemper" in name for name in names["model"].state_dict())


@pytest.mark.slow("takes many seconds")
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:.gradient_checkpointing_enable.:FutureWarning", "ignore:'pin_memory' argument"
)
def test_hold_entropy_while_training(run: Any) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    names = run("hold-entropy-while-training")
    assert names["trained"].global_step == 2
    assert names["scheduled"].goal(names["steps"]) == pytest.approx(0.5)
    for site, reading in names["history"][-1].items():
        held = torch.stack([readings[site].entropy for readings in names["history"][-12:]]).mean(0)
        assert (held - 0.7).abs().max() < 0.02
        assert (names["history"][0][site].entropy - 0.7).abs().max() > 0.1
        assert not reading.bounded.any()
    assert not any("attemper" in name for name in names["model"].state_dict())


def test_features_for_a_probe(run: Any) -> None:
    """Each feature of one head on one text is that of its n x n weights, by the definition of its paper."""
    names = run("features-for-a-probe")
    assert names["table"].shape == (8, 4 * 4 * 5)
    site, text, head, context = names["rows"].sites[1], 3, 2, names["context"]
    pattern = attemper.pattern(names["model"], names["texts"][text : text + 1], site=site.name, head=head)
    weights = torch.as_tensor(pattern.weights).double()
    found = {name: part[site.texts == text, head] for name, part in names["features"](site).items()}
    for place, query in enumerate(range(context, names["length"])):
        p = weights[query, : query + 1]
        of_key, of_answer = p[:context].mean(), p[context:].mean()
        wanted = {
            "renyi": -(p * p).sum().log(),
            "divergence": (p * (p * len(p)).log()).nansum(),
            "own": p[query].log(),
            "lookback": of_key / (of_key + of_answer),
            "context": p[:context].sum(),
        }
        for name, value in wanted.items():
            assert found[name][place] == pytest.approx(float(value), rel=2e-4, abs=2e-5), (name, query)


def test_every_page_is_run() -> None:
    assert {path.stem for path in PAGES.glob("*.md") if not path.stem.endswith(".zh-CN")} == {*RUN, ADVICE}


def test_the_table_of_advice_cites_the_numbers_of_the_lab(experiment: Any) -> None:
    """Its numbers are those that ``attemper lab temperature`` prints, for the temperature of the row."""
    rows = experiment("temperature").table("temperatures that are advised, as starting points").rows
    cited = re.findall(r"\| ([\d.]+) \| (\d+)% \| (\d+)% \|", (PAGES / f"{ADVICE}.md").read_text("utf-8"))
    assert len(cited) >= 5
    for temperature, random_rows, shipped in cited:
        found = next(numbers for _, value, *numbers in rows if value == float(temperature))
        assert (f"{found[0]:.0f}", f"{found[2]:.0f}") == (random_rows, shipped)
