"""Passes that do not go through, models that are compiled in part, and other people's taps: nothing of them is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode  # pyright: ignore[reportAttributeAccessIssue]

import attemper
from attemper import InputError
from tests.sites.own_models import Own, Tapped, entropies, is_close

tf = pytest.importorskip("transformers")

import attemper.integrations.transformers  # noqa: E402
from tests.monitor.tiny_models import TINY, sharpened  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh_compiler")
NO_JIT_WARNING = pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")
X = torch.linspace(-1, 1, 2 * 10 * 32).view(2, 10, 32)


class Failing(Own):
    """Raises ``error`` once, after its attention."""

    error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return result


def rows(watch: attemper.types.Watch) -> dict[str, int]:
    return {site.name: site.heads[0].rows for site in watch.table().sites}


def test_a_pass_that_raised_and_was_tried_again_counts_once() -> None:
    model = Failing()
    with attemper.watch(model) as watch:
        model(X)
        watch.step()
        model.error = RuntimeError("out of memory")
        try:
            model(X)
        except RuntimeError:
            model(X)  # inside the handler: an error that is being handled is no failure of this pass
        watch.step()
    assert rows(watch) == {"Failing": 20}


def test_an_interrupted_pass_leaves_no_mode_behind_and_is_not_read() -> None:
    model = Failing()
    watch = attemper.watch(model)
    model(X)
    watch.step()
    model.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        model(X)
    model(X)
    assert _get_current_function_mode() is None
    watch.step()
    assert rows(watch) == {"Failing": 20}
    model.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        model(X)
    watch.step()
    assert _get_current_function_mode() is None
    watch.close()


def test_a_model_that_calls_itself_is_one_pass() -> None:
    class Recursive(Own):
        def forward(self, x: Tensor, again: bool = True) -> Tensor:
            return super().forward(self(x, False).transpose(1, 2).flatten(2) if again else x)

    model = Recursive()
    with attemper.watch(model) as watch:
        model(X)
    assert rows(watch) == {"Recursive": 20, "Recursive#2": 20}


def test_the_tap_of_another_model_is_not_read() -> None:
    model, teacher = Tapped("blocks.0"), Tapped("blocks.0")
    with attemper.watch(model) as watch:
        for _ in range(2):
            model(X)
            teacher(X)
            watch.step()
    assert rows(watch) == {"blocks.0": 20}


def test_a_registry_model_beside_the_watched_one_is_not_read() -> None:
    models: list[Any] = [sharpened(TINY["llama"].build()) for _ in range(2)]
    for model in models:
        model.set_attn_implementation("attemper")
    ids = torch.randint(3, 101, (2, 20))
    with attemper.watch(models[0]) as watch:
        for _ in range(2):
            for model in models:
                model(input_ids=ids)
            watch.step()
    assert rows(watch) == {f"model.layers.{layer}.self_attn": 40 for layer in range(2)}


@pytest.mark.parametrize("name", ["llama", "gemma2", "bert", "gpt2"])
def test_a_model_set_to_attemper_has_each_site_once(name: str) -> None:
    model: Any = sharpened(TINY[name].build())
    ids = torch.randint(3, 101, (2, 20))
    with attemper.watch(model) as watch:
        model(input_ids=ids)
    expected = rows(watch)
    model.set_attn_implementation("attemper")
    with attemper.watch(model) as watch:
        model(input_ids=ids)
    assert rows(watch) == expected


@pytest.mark.slow("takes many seconds")
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_padding_is_left_out_of_a_compiled_model(name: str) -> None:
    model: Any = sharpened(TINY[name].build())
    model.set_attn_implementation("attemper")
    mask = torch.ones(2, 20, dtype=torch.int64)
    mask[1, 7:] = 0
    batch = {"input_ids": torch.randint(3, 101, (2, 20)), "attention_mask": mask}
    with attemper.watch(model) as watch:
        model(**batch)
    eager = watch.table()
    compiled: Any = torch.compile(model, backend="aot_eager")
    with attemper.watch(compiled) as watch, torch.no_grad():
        compiled(**batch)
    found = watch.table()
    assert found.tokens == eager.tokens == 27
    for one, two in zip(found.sites, eager.sites, strict=True):
        assert (one.name, one.heads[0].rows) == (two.name, 27)
        for a, b in zip(one.heads, two.heads, strict=True):
            assert a.entropy_nats == pytest.approx(b.entropy_nats, abs=1e-6)


@pytest.mark.slow("takes many seconds")
def test_padding_that_a_compiled_encoder_decoder_does_not_tell_makes_its_sites_skipped() -> None:
    model: Any = sharpened(TINY["t5"].build())
    model.set_attn_implementation("attemper")
    mask = torch.ones(2, 20, dtype=torch.int64)
    ids = torch.randint(3, 101, (2, 20))
    compiled: Any = torch.compile(model, backend="aot_eager")
    with attemper.watch(compiled) as watch, torch.no_grad():
        compiled(input_ids=ids, attention_mask=mask, decoder_input_ids=ids)
    assert len(watch.table().sites) == 6
    mask[1, 7:] = 0
    with attemper.watch(compiled) as watch, torch.no_grad():
        compiled(input_ids=ids, attention_mask=mask, decoder_input_ids=ids)
    with pytest.raises(InputError, match="padding of its queries is unknown"):
        watch.table()


def test_beside_alone_a_part_that_is_compiled_is_skipped_by_name() -> None:
    model = nn.Sequential(torch.compile(Own(), backend="aot_eager"), nn.Flatten(1))  # type: ignore[arg-type]
    with attemper.watch(model, observe="beside") as watch, torch.no_grad():
        model(X)
    with pytest.raises(InputError, match=r"only taps are seen inside.*\n  0: it is compiled by torch\.compile"):
        watch.table()


@NO_JIT_WARNING
def test_a_part_that_is_torchscript_is_skipped_by_name() -> None:
    traced: Any = torch.jit.trace(nn.Linear(32, 32), X, check_trace=False)
    model = nn.Sequential(traced, Own())
    with attemper.watch(model) as watch:
        model(X)
    assert [(skip.name, "TorchScript" in skip.reason) for skip in watch.table().skipped] == [("0", True)]
    assert rows(watch) == {"1": 20}


def test_a_compiled_model_is_scanned_as_it_was_written() -> None:
    model = Own().eval()
    compiled: Any = torch.compile(model, backend="aot_eager")
    scan = attemper.scan(compiled, [X])
    assert is_close(scan, entropies(model, (X,))[0])
    assert scan.skipped == ()


def test_another_number_of_heads_makes_the_site_skipped_and_training_goes_on() -> None:
    class HeadsFirst(Own):
        def forward(self, x: Tensor) -> Tensor:
            query, key, value = (part.transpose(0, 1) for part in self.split(x))
            return F.scaled_dot_product_attention(query, key, value)

    model = HeadsFirst()
    with attemper.watch(model) as watch:
        model(X)
        model(X[:1])
        with pytest.warns(
            UserWarning, match="nothing was measured in the first step.*\n.*its number of heads changed from 2 to 1"
        ):
            watch.step()
        model(X)
        model(X[:1])
        with pytest.raises(InputError, match="its number of heads changed from 2 to 1"):
            watch.table()
    assert watch.failures == 0


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_transform_of_torch_func_makes_the_site_skipped() -> None:
    model = Own().eval()
    with attemper.watch(model) as watch:
        torch.func.vmap(lambda x: model(x[None]))(X)
    with pytest.raises(InputError, match=r"inside a transform of torch\.func"):
        watch.table()
    assert watch.failures == 0


@pytest.mark.parametrize(
    ("sites", "message"),
    [(3, "must be a list of module or tap names, got 3"), ([], "at least one name"), ([3], "at least one name")],
)
def test_sites_that_are_no_list_of_names_are_an_error(sites: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        attemper.watch(Own(), sites=sites)


@NO_JIT_WARNING
@pytest.mark.parametrize("call", [attemper.watch, lambda model: attemper.scan(model, [X])])
def test_what_is_no_module_is_an_error(call: Any) -> None:
    with pytest.raises(InputError, match=r"must be a torch\.nn\.Module, got int"):
        call(3)
    with pytest.raises(InputError, match="TorchScript, into which nothing can look"):
        call(torch.jit.trace(nn.Linear(32, 32), X, check_trace=False))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"causal_alignment": "botom"}, r"tap\(causal_alignment=\.\.\.\) must be one of 'top-left', 'bottom-right'"),
        ({"temperature": -1.0}, r"tap\(temperature=\.\.\.\) must be above 0, got -1.0"),
        ({"temperature": 0}, r"tap\(temperature=\.\.\.\) must be above 0, got 0"),
        ({"window_size": (1,)}, r"tap\(window_size=\.\.\.\) must be \(left, right\)"),
    ],
)
def test_options_of_a_tap_without_meaning_are_errors(options: dict[str, Any], message: str) -> None:
    query = torch.randn(1, 2, 5, 8)
    with pytest.raises(InputError, match=message):
        attemper.tap(query, query, name="here", **options)
