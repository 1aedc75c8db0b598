"""A module that runs several times in a pass: each call is a site with its own layer, as long as their number stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import attemper
from attemper.monitor.calls import MOST_CALLS, CallNumber, CallSites
from attemper.monitor.scan import ScanOptions, block_scan
from tests.support.scans import entropies, names

HEADS, SIZE, HIDDEN = 2, 4, 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.qkv.weight.data *= 4

    def split(self, x: Tensor) -> list[Tensor]:
        return [part.unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return F.layer_norm(x + mixed, (HIDDEN,))

    def entropies(self, x: Tensor) -> Tensor:
        """[H], by hand in float64."""
        q, k, _ = (part.double() for part in self.split(x))
        weights = (q @ k.transpose(-2, -1) / SIZE**0.5).softmax(-1)
        return torch.special.entr(weights).sum(-1).mean((0, 2))


class Looped(nn.Module):
    """Blocks that run ``times`` times, one after another."""

    def __init__(self, blocks: int = 2, times: int = 3) -> None:
        super().__init__()
        self.blocks, self.times = nn.ModuleList([Attention() for _ in range(blocks)]), times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            for block in self.blocks:
                x = block(x)
        return x


class Early(Looped):
    """As many loops as tokens."""

    def forward(self, x: Tensor) -> Tensor:
        self.times = x.shape[1]
        return super().forward(x)


def batch(tokens: int = 6) -> Tensor:
    return torch.randn(2, tokens, HIDDEN)


def told(scan: attemper.Scan) -> dict[str, str]:
    return {skip.name: skip.reason for skip in scan.skipped}


def by_call(model: Looped, x: Tensor) -> Tensor:
    """[calls, H] in the order of the pass."""
    found = []
    for _ in range(model.times):
        for block in model.blocks:
            assert isinstance(block, Attention)
            found.append(block.entropies(x))
            x = block(x)
    return torch.stack(found).detach()


def watched(model: nn.Module, *batches: Tensor, **options: Any) -> attemper.Scan:
    with attemper.watch(model, **options) as watch:
        watch.step()
        for x in batches:
            model(x)
    assert watch.failures == 0
    return watch.table()


READ: dict[str, Callable[..., attemper.Scan]] = {
    "scan": lambda model, *batches: attemper.scan(model, batches),
    "watch": watched,
}


# --- every call is a site ---


@pytest.fixture(scope="module")
def albert() -> Any:
    tf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = tf.AlbertModel(
        tf.AlbertConfig(
            vocab_size=50, embedding_size=16, hidden_size=64, num_hidden_layers=12, num_attention_heads=8,
            intermediate_size=64, max_position_embeddings=64,
        )
    )  # fmt: skip
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    return model.double().eval()


def eager_weights(model: Any, ids: Tensor) -> Tensor:
    """[layers, B, H, Q, K] float64, from the model's own code."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            return torch.stack(model(ids, output_attentions=True).attentions)
    finally:
        model.set_attn_implementation(before)


def test_albert_has_a_site_for_each_layer_with_the_entropies_of_its_eager_weights(albert: Any) -> None:
    ids = torch.randint(0, 50, (2, 12))
    weights = eager_weights(albert, ids)
    expected = torch.special.entr(weights).sum(-1).mean((1, 3))
    scan = attemper.scan(albert, [ids])
    assert [site.layer for site in scan.sites] == list(range(12))
    assert [(len(site.heads), site.heads[0].rows) for site in scan.sites] == [(8, 24)] * 12
    assert float((entropies(scan) - expected).abs().max()) < 1e-6
    assert float(expected.min()) < 1.0 < 2.0 < float(expected.max())
    with attemper.watch(albert) as watch:
        albert(ids)
    assert names(watch.table()) == names(scan)
    assert [site.layer for site in watch.table().sites] == list(range(12))
    assert float((entropies(watch.table()) - expected).abs().max()) < 1e-6
    lines = str(scan).splitlines()
    assert sum("attention  self attention" in line for line in lines) == 1
    assert [line.split()[0] for line in lines if line[:5].strip().isdecimal()] == [str(layer) for layer in range(12)]


def test_a_pattern_of_albert_is_of_the_layer_that_is_asked_for(albert: Any) -> None:
    ids = torch.randint(0, 50, (1, 12))
    found = attemper.pattern(albert, ids, layer=10, head=5)
    assert float((found.weights - eager_weights(albert, ids)[10, 0, 5]).abs().max()) < 1e-6
    site = "encoder.albert_layer_groups.0.albert_layers.0.attention"
    assert (found.site, found.layer) == (f"{site}#11", 10)
    for name, call in ((f"{site}#11", None), (site, 10)):
        assert torch.equal(attemper.pattern(albert, ids, site=name, call=call, head=5).weights, found.weights)
    first = attemper.pattern(albert, ids, site=site, head=5)
    assert torch.equal(first.weights, attemper.pattern(albert, ids, layer=0, head=5).weights)


@pytest.mark.parametrize("way", READ)
def test_looped_blocks_are_layers_in_the_order_of_their_calls(way: str) -> None:
    model, x = Looped().eval(), batch()
    scan = READ[way](model, x, x)
    assert names(scan) == [f"blocks.{block}{call}" for call in ("", "#2", "#3") for block in (0, 1)]
    assert [site.layer for site in scan.sites] == list(range(6))
    assert scan.skipped == ()
    assert float((entropies(scan) - by_call(model, x)).abs().max()) < 2e-6


def test_an_attention_that_two_blocks_share_is_a_layer_for_each() -> None:
    model, x = Looped(4, 1).eval(), batch()
    model.blocks[2] = model.blocks[1]
    scan = attemper.scan(model, [x])
    assert names(scan) == ["blocks.0", "blocks.1", "blocks.1#2", "blocks.3"]
    assert [site.layer for site in scan.sites] == [0, 1, 2, 3]
    assert float((entropies(scan) - by_call(model, x)).abs().max()) < 2e-6


def test_modes_may_run_another_number_of_times() -> None:
    model, x = Looped(1, 2), batch()
    with attemper.watch(model) as watch:
        watch.step()
        model.train()(x)
        model.times = 3
        model.eval()(x)
    found = {mode: [site.name for site in watch.table().sites if site.mode == mode] for mode in ("train", "eval")}
    assert found == {"train": ["blocks.0", "blocks.0#2"], "eval": ["blocks.0", "blocks.0#2", "blocks.0#3"]}


def test_a_module_whose_name_a_call_would_take_keeps_it() -> None:
    model = nn.Module()
    model.add_module("x", Attention())
    model.add_module("x#2", Attention())
    model.forward = lambda x: model.x(model.x(getattr(model, "x#2")(model.x(x))))  # type: ignore[method-assign,operator]
    scan, x = attemper.scan(model.eval(), [given := batch()]), model.x
    assert {site.name for site in scan.sites} == {"x", "x#2", "x#3", "x#4"}
    assert isinstance(x, Attention)
    other = getattr(model, "x#2")
    expected = [x.entropies(given), other.entropies(x(given)), x.entropies(other(x(given)))]
    for site, numbers in zip(("x", "x#2", "x#3"), expected, strict=True):
        assert float((entropies(scan, site)[0] - numbers.detach()).abs().max()) < 2e-6


def test_recomputation_in_the_backward_pass_is_no_call() -> None:
    class Checkpointed(Looped):
        def forward(self, x: Tensor) -> Any:
            for _ in range(self.times):
                x = checkpoint(self.blocks[0], x, use_reentrant=False)
            return x

    model, x = Checkpointed(1).train(), batch().requires_grad_()
    with attemper.watch(model) as watch:
        model(x).sum().backward()
        watch.step()
    assert names(watch.table()) == ["blocks.0", "blocks.0#2", "blocks.0#3"]
    assert {site.heads[0].rows for site in watch.table().sites} == {12}


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (["blocks.0"], ["blocks.0", "blocks.0#2", "blocks.0#3"]),
        ("blocks.0", ["blocks.0", "blocks.0#2", "blocks.0#3"]),
        (["blocks.0#2", "blocks.1#3"], ["blocks.0#2", "blocks.1#3"]),
        (["blocks.1#1"], ["blocks.1"]),
    ],
)
def test_sites_names_all_calls_of_a_module_or_one(wanted: Any, found: list[str]) -> None:
    assert names(watched(Looped(), batch(), sites=wanted)) == found


def test_a_call_that_does_not_exist_is_refused_with_those_that_do() -> None:
    said = r"\['blocks.0#4'\]\) matches none of .*: blocks.0, blocks.0#2, blocks.0#3"
    with pytest.raises(attemper.InputError, match=said):
        watched(Looped(1), batch(), sites=["blocks.0#4"])


# --- calls of another number from pass to pass ---


@pytest.mark.parametrize("way", READ)
def test_calls_of_another_number_in_another_pass_are_one_site_of_all_rows(way: str) -> None:
    model, parts = Early(1).eval(), [batch(3), batch(2), batch(4)]
    scan = READ[way](model, *parts)
    assert names(scan) == ["blocks.0"]
    rows, sums = 0, torch.zeros(HEADS, dtype=torch.float64)
    for x in parts:
        model.times = x.shape[1]
        calls = by_call(model, x)
        rows, sums = rows + calls.shape[0] * 2 * x.shape[1], sums + calls.sum(0) * 2 * x.shape[1]
    assert scan.sites[0].heads[0].rows == rows
    assert float((entropies(scan)[0] - sums / rows).abs().max()) < 2e-6
    assert told(scan) == {
        "blocks.0#*": "it attended 3 times in one pass and 2 times in another: the site blocks.0 is the mean over its "
        "calls"
    }


def test_parts_of_a_scan_that_ran_another_number_of_times_merge_into_one_site(tmp_path: Any) -> None:
    model, texts = Early(1).eval(), [batch(3), batch(2)]
    whole = attemper.scan(model, texts)
    parts = [attemper.scan(model, [text]) for text in texts]
    assert [len(part.sites) for part in parts] == [3, 2]
    for place, part in enumerate(parts):
        part.save(tmp_path / str(place))
    loaded = [attemper.open(tmp_path / str(place)) for place in (0, 1)]
    merged = loaded[0].merge(loaded[1])
    assert float((entropies(merged) - entropies(whole)).abs().max()) < 1e-12
    assert merged.sites[0].heads[0].rows == whole.sites[0].heads[0].rows
    reason = "it attended another number of times in other texts: the site blocks.0 is the mean over its calls"
    assert told(merged) == {"blocks.0#*": reason}
    assert names(merged.merge(attemper.scan(model, [batch(3)]))) == ["blocks.0"]


def test_blocks_of_a_scan_that_ran_another_number_of_times_are_one_site() -> None:
    model, texts = Early(1).eval(), [batch(3), batch(2), batch(3), batch(4)]
    whole = attemper.scan(model, texts)
    with block_scan(model, ScanOptions()) as reader:
        reader.read(texts[:1], texts=1)
        assert [len(segment.sites) for segment in reader.part({"block": 1}, None).segments] == [3]
        begun = reader.part({"block": 1}, None)
    with block_scan(model, ScanOptions()) as reader:
        reader.go_on(begun)
        for text in texts[1:]:
            reader.read([text], texts=1)
        found = reader.part({"block": 1}, None).reading()
    assert [(site.name, site.heads[0].rows) for site in found.sites] == [("blocks.0", 2 * (9 + 4 + 9 + 16))]
    assert found.sites[0].heads[0].entropy_nats == pytest.approx(whole.sites[0].heads[0].entropy_nats, abs=1e-12)
    assert [skip.name for skip in found.skipped] == ["blocks.0#*"]


class Step(nn.Module):
    """One step of decoding: attends to all that it was given in this pass, and to a memory."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.cross = Cached(), Cached()

    def forward(self, x: Tensor, past: Tensor, memory: Tensor) -> Tensor:
        return self.cross(self.own(x, torch.cat((past, x), 1)), encoder_hidden_states=memory)


class Cached(Attention):
    def forward(self, x: Tensor, states: Tensor | None = None, encoder_hidden_states: Tensor | None = None) -> Tensor:
        states = encoder_hidden_states if states is None else states
        assert states is not None
        query, (_, key, value) = self.split(x)[0], self.split(states)
        return F.layer_norm(x + F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2), (HIDDEN,))


class Generating(nn.Module):
    """A prompt, and ``steps`` tokens behind it, in one pass."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.step, self.steps = Step(), steps

    def forward(self, x: Tensor) -> Tensor:
        memory, past = x[:, :3], x[:, :0]
        for _ in range(self.steps + 1):
            out = self.step(x, past, memory)
            past, x = torch.cat((past, x), 1), out[:, -1:]
        return past


@pytest.mark.parametrize("way", READ)
def test_steps_of_decoding_inside_one_pass_are_one_site(way: str) -> None:
    scan = READ[way](Generating(4).eval(), batch(), batch())
    assert [(site.name, site.kind, site.heads[0].rows) for site in scan.sites] == [
        ("step.own", "self", 2 * 2 * 10), ("step.cross", "cross", 2 * 2 * 10),
    ]  # fmt: skip
    reason = "its calls are steps of decoding: the site step.own is the mean over its calls"
    assert told(scan)["step.own#*"] == reason


def test_a_loop_of_hundreds_of_calls_holds_no_more_than_the_first_ones() -> None:
    class Counted(Looped):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            calls = watch._collector.calls
            assert (len(calls), sum(one.contribution is not None for one in calls)) == (self.times, MOST_CALLS)
            return x

    model, x = Counted(1, MOST_CALLS + 60).eval(), batch()
    with attemper.watch(model) as watch:
        model(x)
        assert len(watch._collector.sites) == 1
    (site,) = watch.table().sites
    assert (site.name, site.heads[0].rows) == ("blocks.0", 12 * model.times)
    assert float((entropies(watch.table())[0] - by_call(model, x).mean(0)).abs().max()) < 2e-6
    assert told(watch.table())["blocks.0#*"].startswith("it attends more than 64 times in a pass: the site blocks.0 is")


# --- histories ---


def steps(model: nn.Module, many: int, store: Any, last: int = 0) -> None:
    """So many steps after the ``last`` one."""
    with attemper.watch(model, store=store) as watch:
        watch.step(last)
        for _ in range(many):
            model(batch())
            watch.step()
    assert watch.failures == 0


@pytest.fixture
def before(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], Any]:
    """Does something as attemper did when all calls of a module were one site."""

    def one_site(self: CallSites, name: str, place: nn.Module, context: Any) -> CallNumber:
        return CallNumber(name, name, 1, 1, 1, 0, context.passes)

    def run(action: Callable[[], Any]) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(CallSites, "number", one_site)
            return action()

    return run


def test_a_run_goes_on_after_its_site_was_the_mean_of_calls_and_says_so(
    tmp_path: Any, before: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = Looped().train()
    before(lambda: steps(model, 3, tmp_path / "run"))
    assert caplog.messages == []
    steps(model, 3, tmp_path / "run", last=3)
    (said,) = caplog.messages
    assert "up to step 3 blocks.0 (and 1 more site) is the mean over all calls of its module. From step 4 on it" in said
    with attemper.open(tmp_path / "run") as run:
        assert {site.name for site in run.sites} == {f"blocks.{block}{n}" for block in (0, 1) for n in ("", "#2", "#3")}
        assert run.history("rows", "blocks.0", head=0).values.tolist() == [36] * 3 + [12] * 3
        third = run.history("rows", "blocks.1#3", head=0)
        assert [row for row in third.values.tolist() if row == row] == [12] * 3
    caplog.clear()
    steps(model, 1, tmp_path / "run", last=6)
    assert caplog.messages == []


def test_a_run_in_which_calls_became_one_site_goes_on_with_it(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = Early(1).train()
    with attemper.watch(model, store=tmp_path / "run") as watch:
        watch.step()
        for tokens in (3, 3, 2):
            model(batch(tokens))
            watch.step()
    with attemper.watch(model, store=tmp_path / "run") as watch:
        watch.step(3)
        model(batch(3))
        watch.step()
        assert names(watch.table()) == ["blocks.0"]
    assert caplog.messages == []
    with attemper.open(tmp_path / "run") as run:
        assert run.history("rows", "blocks.0", head=0).values.tolist() == [6, 6, 8, 18]
        (skipped,) = run.coverage.skipped
        assert (skipped.name, skipped.mode) == ("blocks.0#*", "train")
        assert skipped.reason.startswith("it attended 3 times in one pass and 2 times in another")


def test_passes_before_the_first_step_that_differ_are_one_site_of_that_step() -> None:
    model = Early(1).train()
    with attemper.watch(model) as watch:
        for tokens in (3, 2, 3):
            model(batch(tokens))
        watch.step()
    assert [(site.name, site.heads[0].rows) for site in watch.table().sites] == [("blocks.0", 2 * (9 + 4 + 9))]


# --- beside what was read before ---


def test_a_scan_whose_site_was_the_mean_of_calls_is_not_compared_with_the_first_call(
    before: Any, tmp_path: Any
) -> None:
    model, x = nn.ModuleDict({"loop": Looped(1), "plain": Attention()}).eval(), batch()
    model.forward = lambda x: model["plain"](model["loop"](x))  # type: ignore[method-assign]
    old, new = before(lambda: attemper.scan(model, [x])), attemper.scan(model, [x])
    for pair in ((old, new), (new, old)):
        found = attemper.compare(*pair)
        assert (found.means, found.only_before, found.only_after) == (("loop.blocks.0",), (), ())
        assert {head.site for head in found.heads} == {"plain"}
        said = "not compared, since they are means over all calls of a module on one side alone: loop.blocks.0"
        assert said in found.summary()
        assert found.to_dict()["means"] == ["loop.blocks.0"]
        page = found.to_html(tmp_path / "page.html").read_text()
        assert said in page
    assert attemper.compare(new, new).means == ()
    looped = model["loop"]
    found = attemper.compare(before(lambda: attemper.scan(looped, [x])), attemper.scan(looped, [x]))
    assert (found.heads, found.means) == ((), ("blocks.0",))
    assert "means over all calls of a module on one side alone: blocks.0" in found.summary()
    found.to_html(tmp_path / "page.html")


def test_a_fingerprint_has_a_site_for_each_call_and_explains_the_layer_that_differs() -> None:
    model = Looped(2, 2).eval()
    x = batch(tokens=9)
    one = attemper.fingerprint(model, [x])
    assert [site.name for site in one.sites] == ["blocks.0", "blocks.1", "blocks.0#2", "blocks.1#2"]
    assert attemper.explain(one, attemper.fingerprint(model, [x])).kind == "none"
    block: Any = model.blocks[1]
    with torch.no_grad():
        block.qkv.weight[:HIDDEN] *= 1.5
        block.qkv.bias[:HIDDEN] *= 1.5
    found = attemper.explain(one, attemper.fingerprint(model, [x]))
    assert (found.kind, found.site) == ("scale", "blocks.1")


def test_fingerprints_of_earlier_versions_are_explained_among_themselves_alone(before: Any, tmp_path: Any) -> None:
    model, x = Looped(1, 3).eval(), batch(tokens=9)
    before(lambda: attemper.fingerprint(model, [x])).save(tmp_path / "old")
    old, new = attemper.open(tmp_path / "old"), attemper.fingerprint(model, [x])
    assert attemper.explain(old, old).kind == "none"
    for pair, run in (((old, new), "a"), ((new, old), "b")):
        message = f"explain: blocks.0 of {run} is all calls of a module as one site, as earlier versions kept them"
        with pytest.raises(attemper.InputError, match=message):
            attemper.explain(*pair)


@pytest.mark.slow("takes many seconds")
def test_a_fingerprint_of_a_long_loop_has_its_first_calls() -> None:
    found = attemper.fingerprint(Looped(1, MOST_CALLS + 5).eval(), [batch()])
    assert len(found.sites) == MOST_CALLS
    assert found.skipped == {
        "blocks.0#*": "it attends more than 64 times in a pass: a fingerprint has the first of them"
    }
