"""Taps in code that CUDA graphs replay: kernels always launched, a flag on the device, sums that a watch takes out.

Without a GPU a stand-in replays a graph: the compiled function with Python's part of the taps left out, that is, their
operator alone, which asks nobody.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import attemper
from attemper import InputError
from attemper.call.request import Options
from attemper.sites import tap, tap_buffers
from attemper.sites.observation import AttentionCall, operands_of
from tests.sites.own_models import Checkpointed, Own, Tapped, entropies, is_close
from tests.sites.test_tap import are_entropies, bert_set_to_attemper

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("interpreted", "device")


class Device:
    """A stand-in for a GPU: whether what runs is being captured, and how many kernels were launched."""

    def __init__(self) -> None:
        self.capturing = False
        self.launched = 0


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """The CPU is a device of graphs from here to the end of the test."""
    torch._dynamo.reset()
    stand_in, add = Device(), tap_buffers.add

    def counted(*arguments: Any, **options: Any) -> None:
        stand_in.launched += 1
        add(*arguments, **options)

    monkeypatch.setattr(tap_buffers, "has_graphs", lambda device: True)
    monkeypatch.setattr(tap_buffers, "is_capturing", lambda device=None: stand_in.capturing)
    monkeypatch.setattr(tap_buffers, "add", counted)
    yield stand_in
    tap_buffers._buffers.clear()
    tap_buffers._switches.clear()
    tap_buffers._rows.clear()
    torch._dynamo.reset()


def expected(model: nn.Module, x: Tensor) -> Tensor:
    twin = Own()
    twin.load_state_dict(model.state_dict())
    return entropies(twin, (x.detach(),))[0]


def compiled(model: nn.Module, backend: Any = "eager") -> Any:
    return torch.compile(model, fullgraph=True, backend=backend)


@pytest.mark.parametrize("kind", [Tapped, Checkpointed])
@pytest.mark.quick("Tapped")
def test_a_compiled_model_is_one_graph_that_only_the_flag_rules(kind: type[nn.Module], device: Device) -> None:
    model, x = kind(), torch.randn(2, 12, 32, requires_grad=True)
    counter = CompileCounterWithBackend("aot_eager")
    run, rows = compiled(model, counter), []
    with attemper.watch(run, every=3) as watch:
        for _ in range(4):
            for _ in range(2):  # two passes a step: gradients accumulate
                run(x).sum().backward()
            watch.step()
            rows.append(watch.table().sites[0].heads[0].rows)
        # Sampled are both passes of the first step, which are held back until its end, and both of step 3.
        assert device.launched == 4
        assert watch.sampled == 2
    assert rows == [48] * 4
    scan = watch.table()
    assert counter.frame_count == 1
    assert [site.name for site in scan.sites] == ["first"]
    assert (scan.sites[0].heads[0].rows, scan.tokens, scan.backend) == (2 * 24, 2 * 24, "triton")
    assert (scan.sites[0].queries, scan.sites[0].keys) == (12, 12)
    assert is_close(scan, expected(model.block if isinstance(model, Checkpointed) else model, x))
    with pytest.raises(InputError, match=r"row_statistics\('first'\): its rows were summed on the device"):
        scan.row_statistics("first")


def test_the_graph_has_the_operator_without_the_tag() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    run = compiled(Tapped(), backend)
    run(torch.randn(2, 12, 32))
    targets = {str(node.target) for node in graphs[0].graph.nodes}
    assert targets & {"attemper.tap", "attemper.tap_into"} == {"attemper.tap_into"}
    assert torch.Tag.cudagraph_unsafe not in torch.ops.attemper.tap_into.default.tags
    assert torch.Tag.cudagraph_unsafe in torch.ops.attemper.tap.default.tags


@pytest.mark.slow("takes many seconds")
def test_passes_of_a_compiled_model_that_is_never_stepped_are_those_that_every_names(device: Device) -> None:
    model, sizes = Tapped(), (12, 11, 10, 9)
    run = compiled(model)
    run(torch.randn(2, 12, 32))
    with attemper.watch(run, every=2) as watch:
        for size in sizes:
            run(torch.randn(2, size, 32))
        assert watch.table().tokens == 20
    assert watch.history("rows", site="first", head=0).values.tolist() == [24, 20]
    assert watch.sampled == 2


@pytest.mark.slow("takes many seconds")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_inductor_keeps_the_taps_and_the_buffer_stays_where_it_is(device: Device) -> None:
    model, x = Tapped(), torch.randn(2, 12, 32)
    run = compiled(model, "inductor")
    with attemper.watch(run) as watch:
        run(x)
        (place,) = (buffer.sums.data_ptr() for buffer in tap_buffers._buffers.values())
        run(x)
        watch.step()
    assert [buffer.sums.data_ptr() for buffer in tap_buffers._buffers.values()] == [place]
    assert device.launched == 2
    assert is_close(watch.table(), expected(model, x))


def captured(model: nn.Module, x: Tensor, device: Device) -> Callable[[], None]:
    """What a CUDA graph of ``model(x)`` would replay: the tap's kernels, as Python launched them at the capture."""
    launches: list[Callable[[], None]] = []
    add, positions = tap_buffers.add, tap_buffers.sampled_positions

    def recorded_positions(*arguments: Any) -> Tensor:
        chosen = positions(*arguments)

        def again() -> None:
            chosen.copy_(positions(*arguments))

        launches.append(again)
        return chosen

    def recorded(*arguments: Any, **options: Any) -> None:
        launches.append(lambda: add(*arguments, **options))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tap_buffers, "add", recorded)
        patch.setattr(tap_buffers, "sampled_positions", recorded_positions)
        device.capturing = True
        model(x)
        device.capturing = False

    def replay() -> None:
        for launch in launches:
            launch()

    return replay


@pytest.mark.parametrize("rows", [None, 5])
@pytest.mark.quick("None")
def test_a_graph_that_is_captured_by_hand_counts_on_sampled_steps_only(rows: int | None, device: Device) -> None:
    model, x = Tapped(), torch.randn(2, 12, 32)
    with attemper.watch(model, every=2, rows=rows) as watch:
        model(x)
        watch.step()
        watch.step()
        replay = captured(model, x, device)
        steps = []
        for _ in range(4):
            replay()
            replay()
            watch.step()
            steps.append(watch.sampled)
        scan = watch.table()
    # The model ran as Python on step 0; steps 2 and 4 were replayed while the flag was up.
    assert steps == [2, 2, 3, 3]
    head = scan.sites[0].heads[0]
    assert head.rows == 2 * 2 * (rows or 12)
    assert scan.tokens == 2 * 2 * 12
    if rows is None:
        assert is_close(scan, expected(model, x))
    else:
        assert scan.reading.sampled_rows == rows


@pytest.mark.slow("compiles for seconds")
def test_outside_of_a_capture_nothing_is_launched_when_no_watch_samples(device: Device) -> None:
    model, x = Tapped(), torch.randn(2, 12, 32)
    model(x)
    assert not tap_buffers._buffers
    with attemper.watch(model, every=1000) as watch:
        watch.step()
        model(x)  # a watch is there: the kernels are loaded, once, with the flag down
        device.launched = 0
        for _ in range(3):
            model(x)
            watch.step()
    assert device.launched == 0
    run = compiled(model)
    run(x)
    device.launched = 0
    run(x)
    assert device.launched == 0


@pytest.mark.slow("compiles for seconds")
def test_a_graph_that_was_captured_before_any_watch_is_seen_by_a_later_one(device: Device) -> None:
    model, x = Tapped(), torch.randn(2, 12, 32)
    with attemper.watch(model, every=1000) as first:
        first.step()
        model(x)
        replay = captured(model, x, device)
    replay()
    with attemper.watch(model) as watch:
        replay()
        assert watch.table().sites[0].heads[0].rows == 24
        replay()
        scan = watch.table()
    assert scan.sites[0].heads[0].rows == 48
    replay()
    assert watch.table().sites[0].heads[0].rows == 48
    assert is_close(scan, expected(model, x))


def test_a_capture_that_nothing_prepared_is_told(device: Device) -> None:
    device.capturing = True
    with pytest.warns(
        UserWarning, match="tap 'first' is not in the CUDA graph .* open the watch and run the model once"
    ):
        Tapped()(torch.randn(2, 12, 32))


@pytest.mark.slow("takes many seconds")
def test_two_watches_share_a_buffer_and_each_gets_its_own_steps(device: Device) -> None:
    model, x = Tapped(), torch.randn(2, 12, 32)
    run = compiled(model)
    with attemper.watch(run, every=1) as one, attemper.watch(run, every=2) as two:
        for _ in range(2):
            run(x)
            one.step()
            two.step()
        assert one.table().sites[0].heads[0].rows == two.table().sites[0].heads[0].rows == 24
        assert (one.sampled, two.sampled) == (2, 1)
        run(x)
        assert one.table().sites[0].heads[0].rows == two.table().sites[0].heads[0].rows == 24
    assert device.launched == 3


@pytest.mark.slow("takes many seconds")
def test_a_tap_runs_its_kernels_for_its_own_watch_alone_and_no_other_gets_its_sums(device: Device) -> None:
    runs, x = [compiled(Tapped("first")), compiled(Tapped("second"))], torch.randn(2, 12, 32)
    with attemper.watch(runs[0]) as always, attemper.watch(runs[1], every=100) as seldom:
        for _ in range(3):
            for run, watch in zip(runs, (always, seldom), strict=True):
                run(x)
                watch.step()
    assert device.launched == 3 + 1
    assert [[site.name for site in watch.table().sites] for watch in (always, seldom)] == [["first"], ["second"]]
    assert [len(buffer.models) for buffer in tap_buffers._buffers.values()] == [1, 1]


@pytest.mark.slow("compiles for seconds")
def test_two_watched_models_whose_taps_have_one_name_are_not_mixed() -> None:
    models, x = [Tapped(), Tapped()], torch.randn(2, 12, 32)
    runs = [compiled(model) for model in models]
    with attemper.watch(runs[0]) as one, attemper.watch(runs[1]) as two:
        runs[0](x)
        one.step()
        with pytest.warns(UserWarning, match="'first' is not measured any more: two models have a tap"):
            runs[1](x)
        with pytest.warns(UserWarning, match="first: two models have a tap of this name"):
            two.step()
        with pytest.raises(InputError, match="first: two models have a tap of this name: give each model"):
            two.table()
        runs[0](x + 1)
        one.step()
        with pytest.raises(InputError, match="first: two models have a tap of this name"):
            one.table()
        assert is_close(one.run.at(0), expected(models[0], x))  # of the step before


@pytest.mark.slow("compiles for seconds")
def test_a_model_that_is_not_watched_adds_nothing_to_a_tap_of_the_same_name(device: Device) -> None:
    model, x = Tapped(), torch.randn(2, 12, 32)
    run, other = compiled(model), compiled(Tapped())
    with attemper.watch(run) as watch:
        run(x)
        watch.step()
        run(x)
        device.launched = 0
        other(x + 1)
        watch.step()
        scan = watch.table()
    assert device.launched == 0
    assert scan.sites[0].heads[0].rows == 24
    assert is_close(scan, expected(model, x))


@pytest.mark.slow("takes many seconds")
def test_a_model_that_takes_the_place_of_another_has_its_own_rows(device: Device) -> None:
    """As one trains one model after the other in a notebook, both there."""
    models, x, scans = [Tapped(), Tapped()], torch.randn(2, 12, 32), []
    for model, rows in zip(models, (5, None), strict=True):
        run = compiled(model)
        with attemper.watch(run, rows=rows) as watch:
            run(x)
            watch.step()
            scans.append(watch.table())
    assert [scan.sites[0].heads[0].rows for scan in scans] == [2 * 5, 2 * 12]
    assert is_close(scans[1], expected(models[1], x))


@pytest.mark.slow("takes many seconds")
def test_a_transformers_model_set_to_attemper_fills_a_buffer_for_each_layer(device: Device) -> None:
    model, batch, expected = bert_set_to_attemper(None, batch=1, tokens=12)
    run = compiled(model)
    with attemper.watch(run) as watch:
        run(input_ids=batch["input_ids"])
        assert are_entropies(watch.table(), expected)
    assert device.launched == 2


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"backend": "blocked"}, "measured by triton, not by backend='blocked'"),
    ({"stats": "gini"}, "has no gini, which needs whole rows"),
    ({"stats": ["support_size", "mean_distance"]}, "a tap has no support_size and no mean_distance: leave"),
    ({"fewest_keys": 20}, "and fewest_keys=20 is not one: take 16 or 32"),
)


def test_what_a_buffer_cannot_give_is_told(full_size: bool) -> None:
    run = compiled(Tapped())
    for options, reason in REFUSED if full_size else REFUSED[:2]:
        with attemper.watch(run, **options) as watch:
            run(torch.randn(2, 12, 32))
            with pytest.raises(InputError, match=reason):
                watch.table()


@pytest.mark.slow("compiles for seconds")
def test_a_graph_keeps_the_number_of_rows_it_was_captured_for(device: Device) -> None:
    model, x = Tapped(), torch.randn(2, 12, 32)
    with attemper.watch(model, rows=5) as first:
        model(x)
        replay = captured(model, x, device)
    assert first.rows == 5
    with attemper.watch(model) as watch:
        replay()
        with pytest.raises(InputError, match="captured for rows=5, and this watch has rows=None: open"):
            watch.table()


@pytest.mark.slow("takes many seconds")
def test_padding_that_a_buffer_cannot_tell_is_told() -> None:
    run, x, mask = compiled(Tapped()), torch.randn(2, 12, 32), torch.ones(2, 12, dtype=torch.long)
    with attemper.watch(run) as watch:
        run(x, attention_mask=mask)
        assert watch.table().sites[0].heads[0].rows == 24
    padded = mask.clone()
    padded[1, 7:] = 0
    for masks in ((padded,), (padded, mask)):  # a pass of the first step, or one of two
        with attemper.watch(run) as watch:
            for one in masks:
                run(x, attention_mask=one)
            watch.step()
            with pytest.raises(InputError, match="first: a batch was padded, which a tap in compiled code"):
                watch.table()


@pytest.mark.slow("takes many seconds")
def test_buffers_made_in_inference_mode_are_written_outside_of_it() -> None:
    model, x = Tapped(), torch.randn(2, 12, 32)
    run = compiled(model)
    with attemper.watch(run) as watch:
        watch.step()
        with torch.inference_mode():
            run(x)
        assert watch.table().sites[0].heads[0].rows == 24
        run(x)
        assert watch.table().sites[0].heads[0].rows == 48


@pytest.mark.slow("compiles for seconds")
def test_float64_stays_with_the_tap_that_asks_python() -> None:
    model, x = Tapped().double(), torch.randn(2, 12, 32, dtype=torch.float64)
    run = compiled(model)
    with attemper.watch(run) as watch:
        run(x)
    scan = watch.table()
    assert not tap_buffers._buffers
    assert scan.backend == "blocked"
    assert is_close(scan, expected(model, x))


def test_a_buffer_of_a_module_that_is_gone_is_nobodys() -> None:
    site = nn.Identity()
    tap.remember(site)
    buffer = tap_buffers.buffer_of("", id(site), "cpu", 2)
    assert tap.site_of(buffer) is site
    del site
    gc.collect()
    assert tap.site_of(buffer) is None


@pytest.mark.slow("compiles for seconds")
def test_the_flag_of_a_watch_that_is_dropped_unclosed_goes_down_with_the_next_one(device: Device) -> None:
    model, x = Tapped(), torch.randn(2, 12, 32)
    run = compiled(model)
    watch = attemper.watch(run)
    run(x)
    (flag,) = {id(flag): flag for flag, _ in tap_buffers._switches.values()}.values()
    assert int(flag) == 1
    del watch, run, model
    torch._dynamo.reset()
    gc.collect()
    other = Tapped("second")
    with attemper.watch(other):
        pass
    assert int(flag) == 0


@pytest.mark.slow("takes many seconds")
def test_a_sampled_tap_leaves_no_tensor_behind(device: Device) -> None:
    """CUDA graph trees run a graph once before they capture it, in the memory of the graph, and count what is left."""
    run = compiled(Tapped())
    with attemper.watch(run, rows=4) as watch, torch.no_grad():
        run(torch.randn(2, 12, 32))
        watch.step()
        heads = len(watch.table().sites[0].heads)
        kept = {id(one) for one in gc.get_objects() if type(one) is Tensor}
        for queries in (9, 11):
            query, key = torch.randn(2, 2, heads, queries, 16)
            call = AttentionCall(query, key, None, Options())
            torch.ops.attemper.tap_into(tap.token("cpu"), "first", 0, *operands_of(call))
            del query, key, call
        gc.collect()
        assert device.launched == 3
        left = [one for one in gc.get_objects() if type(one) is Tensor and id(one) not in kept and one.numel()]
        assert not left
