"""A pass of a scan ends behind its last attention where that is safe: readings are those of whole passes, to the bit.
Where it is not safe the pass runs whole.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import attemper
from attemper.monitor import forward as passes
from attemper.monitor.scan import ScanOptions, block_scan
from attemper.sites.observation import current
from tests.support.scans import hooks

tf = pytest.importorskip("transformers")

from tests.monitor.more_models import OTHERS  # noqa: E402
from tests.monitor.tiny_models import CACHE, GROUPED, TINY, Tiny, inputs, sharpened  # noqa: E402
from tests.sites.architectures import ARCHITECTURES, Architecture  # noqa: E402
from tests.sites.test_softmax_by_hand_transformers import MODELS as BY_HAND  # noqa: E402

MORE = pytest.mark.slow("more of what a few cases show by default")
ATTENDING = [one for one in ARCHITECTURES if one.title != "Mamba 2"]
QUICK = ("bert", "llama", "t5", "ALBERT")
MODELS: dict[str, Tiny] = TINY | OTHERS


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each pass that ended early."""
    found: list[int] = []

    class Counted(passes._PassEndError):
        def __init__(self) -> None:
            found.append(len(found))

    monkeypatch.setattr(passes, "_PassEndError", Counted)
    return found


@pytest.fixture
def llama() -> Any:
    return sharpened(TINY["llama"].build())


def texts(*lengths: int) -> list[dict[str, Tensor]]:
    return [inputs("decoder", "right", tokens=length) for length in lengths]


def shorter(kind: str, tokens: int) -> list[dict[str, Tensor]]:
    """Three batches, none longer than the first, padded in other ways."""
    parts = [inputs(kind, "right", tokens), inputs(kind, None, tokens), inputs(kind, "right", tokens)]
    cut = parts[2]
    if kind in ("decoder", "encoder"):
        cut = {name: part[:2, : tokens - 9] for name, part in cut.items()}
    return [*parts[:2], cut]


def bits(scan: attemper.Scan) -> list[tuple[Any, ...]]:
    assert scan._part is not None
    return [(site.key, site.queries, site.keys, site.sums.tobytes()) for site in scan._part.sites]


def check_same(model: nn.Module, batches: Iterable[Any], **options: Any) -> attemper.Scan:
    batches = list(batches)
    found, whole = (attemper.scan(model, batches, whole_passes=not early, **options) for early in (True, False))
    assert bits(found) == bits(whole)
    assert found.to_dict() | {"date": None} == whole.to_dict() | {"date": None}
    return found


WHOLE = {
    *("Bamba", "Falcon H1", "Granite 4", "Jamba", "Kimi Linear", "LFM2", "MiniMax", "Nemotron H", "OLMo Hybrid"),
    *("Phi-4 multimodal", "Qwen3-Next", "Qwen3.5", "Qwen3.5 MoE", "Qwen3.5, vision and text", "RecurrentGemma"),
}
"""Architectures whose passes run whole: they also mix tokens without attention, or have a tower that did not run."""


# --- the same readings ---


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else MORE) for name in MODELS])
def test_readings_are_those_of_whole_passes_to_the_bit(name: str, ended: list[int]) -> None:
    one = MODELS[name]
    model = sharpened(one.build())
    check_same(model, shorter(one.kind, one.tokens))
    assert len(ended) == 2
    assert hooks(model) == 0


@pytest.mark.parametrize(
    "one", [pytest.param(one, id=one.title, marks=() if one.title == "Qwen3.5" else MORE) for one in ATTENDING]
)
def test_readings_of_the_architectures_of_2026_are_those_of_whole_passes(one: Architecture, ended: list[int]) -> None:
    check_same(one.build(), [one.batch(None)] * 3)
    assert len(ended) == (0 if one.title in WHOLE else 2)


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "Bloom" else MORE) for name in BY_HAND])
def test_readings_of_attention_by_hand_are_those_of_whole_passes(name: str, ended: list[int]) -> None:
    check_same(BY_HAND[name][0]().eval(), shorter("decoder", 40))
    assert len(ended) == 2


def test_other_statistics_spans_and_rows_are_those_of_whole_passes(llama: Any, ended: list[int]) -> None:
    batches, options = texts(40, 40, 30), {"stats": ["gini", "support_size"], "keep_rows": "last", "spans": [(0, 3)]}
    found, whole = (attemper.scan(llama, batches, whole_passes=not early, **options) for early in (True, False))
    assert len(ended) == 2
    assert bits(found) == bits(whole)
    for one, two in zip(found.rows().sites, whole.rows().sites, strict=True):
        assert one.texts.tolist() == two.texts.tolist() == list(range(9))
        assert all((one.values[name] == two.values[name]).all() for name in two.values)
    rows = [scan.row_statistics("model.layers.1.self_attn").entropy for scan in (found, whole)]
    assert torch.equal(*rows)


def test_the_head_of_a_language_model_runs_for_the_first_batch_alone(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, linear = [], F.linear

    def counting(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        calls.extend([1] * (weight is llama.lm_head.weight))
        return linear(input, weight, bias)

    monkeypatch.setattr(F, "linear", counting)
    attemper.scan(llama, texts(40, 40, 40))
    assert len(calls) == 1
    attemper.scan(llama, texts(40, 40, 40), whole_passes=True)
    assert len(calls) == 4


def test_blocks_of_one_scan_share_what_was_learned(llama: Any, ended: list[int]) -> None:
    for whole in (False, True):
        with block_scan(llama, ScanOptions(whole_passes=whole)) as reader:
            reader.read(texts(40, 40), 2)
            reader.read(texts(40), 1)
            assert not reader._collector.context.running
        assert len(ended) == 2


# --- what is learned ---


def kinds_of_batches() -> list[Any]:
    (batch,) = texts(40)
    return [
        batch,
        batch | {"use_cache": False},
        {"input_ids": batch["input_ids"]},
        batch | {"attention_mask": batch["attention_mask"].bool()},
        batch | {"labels": None},
        (batch["input_ids"], batch["attention_mask"]),
        batch["input_ids"],
        {"input_ids": batch["input_ids"], "indices": torch.zeros(1)},  # a keyword that the model does not know
    ]


def ids(*shape: int) -> Tensor:
    return torch.randint(3, 99, shape)


def with_caches() -> list[Any]:
    return [batch | {CACHE: tf.DynamicCache()} for batch in texts(20, 20)]


LEARNED: dict[str, tuple[Callable[[], list[Any]], int]] = {
    "longer than those before": (lambda: texts(20, 30, 25, 30, 40, 12), 3),
    "more rows, fewer tokens": (lambda: [ids(6, 10), ids(2, 30)] * 2 + [ids(6, 30), ids(6, 10)], 3),
    "other arguments": (lambda: kinds_of_batches() * 2, 8),
    "a cache": (with_caches, 2),
    "too many numbers": (lambda: [{"input_ids": ids(1, 12), "logits_to_keep": n} for n in (1, 2, 3, 3, 2, 1)], 4),
}
"""Batches, and how many of them run whole."""


@pytest.mark.parametrize("name", LEARNED)
def test_a_batch_that_nothing_is_known_of_runs_whole(
    name: str, llama: Any, ended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "too many numbers":
        monkeypatch.setattr(passes, "_MOST", 2)
    made, whole = LEARNED[name]
    batches = made()
    attemper.scan(llama, batches)
    assert len(batches) - len(ended) == whole
    if name == "a cache":
        assert [batch[CACHE].get_seq_length() for batch in batches] == [20, 20]


# --- passes that run whole ---


class _Head(nn.Linear):
    """A part of the user's own."""


class _Llama(tf.LlamaForCausalLM):
    """A model of the user's own."""


CHANGES: dict[str, Callable[[Any], object]] = {
    "a hook": lambda model: model.model.norm.register_forward_hook(lambda *_: None),
    "a hook before": lambda model: model.register_forward_pre_hook(lambda *_: None),
    "a part in train mode": lambda model: model.model.norm.train(),
    "train mode": lambda model: model.train(),
    "a forward of its own": lambda model: vars(model.lm_head).update(forward=partial(nn.Linear.forward, model.lm_head)),
    "offloaded": lambda model: setattr(model.model, "_hf_hook", object()),
    "compiled": lambda model: model.lm_head.compile(backend="eager"),
    "a part of another class": lambda model: setattr(model, "lm_head", _Head(48, 101, bias=False).eval()),
    "another class": lambda model: setattr(model, "__class__", _Llama),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.turns(2)
def test_what_may_wait_for_the_end_of_a_pass_gets_it(change: str, llama: Any, ended: list[int]) -> None:
    attemper.scan(llama, texts(12, 12))
    assert len(ended) == 1
    CHANGES[change](llama)
    attemper.scan(llama, texts(12, 12))
    assert len(ended) == 1


@contextlib.contextmanager
def _hook_on_every_module() -> Iterator[None]:
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    yield
    handle.remove()


class _FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _decorated() -> Iterator[None]:
    """The forward of a class of transformers as a package wraps it."""
    forward = tf.LlamaForCausalLM.forward

    @functools.wraps(forward)
    def timed(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    tf.LlamaForCausalLM.forward = timed
    yield
    tf.LlamaForCausalLM.forward = forward


@pytest.mark.parametrize("around", [_hook_on_every_module, _FunctionMode, _DispatchMode, _decorated])
def test_what_follows_a_scan_from_outside_sees_whole_passes(around: Any, llama: Any, ended: list[int]) -> None:
    with around():
        attemper.scan(llama, texts(12, 12))
    assert not ended
    with torch.device("cpu"):
        attemper.scan(llama, texts(12, 12))
    assert len(ended) == 1


def test_a_hook_that_comes_between_two_batches_gets_whole_passes(llama: Any, ended: list[int]) -> None:
    seen: list[int] = []

    def batches() -> Iterator[Any]:
        yield from texts(12, 12)
        handle = llama.register_forward_hook(lambda *_: seen.append(1))
        yield from texts(12, 12)
        handle.remove()
        yield from texts(12)

    attemper.scan(llama, batches())
    assert (len(seen), len(ended)) == (2, 2)


class Mine(nn.Sequential):
    def forward(self, *args: Tensor, **batch: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self[0](*args, **batch)


@pytest.mark.parametrize("container", [Mine, nn.Sequential])
def test_a_model_inside_of_another_module_runs_whole(container: Any, llama: Any, ended: list[int]) -> None:
    check_same(container(llama).eval(), [ids(2, 12)] * 2)
    assert not ended


def test_a_model_with_attention_that_did_not_run_runs_whole(ended: list[int]) -> None:
    config = tf.GPT2Config(vocab_size=101, n_embd=48, n_layer=1, n_head=4, add_cross_attention=True)
    model = tf.GPT2Model._from_config(config, attn_implementation="eager").eval()
    check_same(model, [torch.randint(3, 99, (2, 12))] * 2)
    assert not ended


# --- code that attends in odd ways ---


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        mixed = F.scaled_dot_product_attention(x, x, x)
        if bool(mixed.isnan().any()):
            raise OverflowError("too large")
        return self.projection(mixed)


class Mixing(SelfAttention):
    """Told by its code alone, not by its name."""


class HandAttention(SelfAttention):
    """Told by its name alone."""

    def forward(self, x: Tensor) -> Tensor:
        return self.projection((x @ x.mT).softmax(-1) @ x)


class Odd(nn.Module):
    """A model that attends as its ``way`` says."""

    def __init__(self, way: Callable[..., Tensor], kind: type[SelfAttention], layers: int) -> None:
        super().__init__()
        self.config, self.way = SimpleNamespace(num_hidden_layers=layers), way
        self.layers = nn.ModuleList(kind() for _ in range(layers))

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        return self.way(self, x, **given)


@pytest.fixture
def odd(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Odd]:
    """Makes a model that passes for one of transformers'."""
    monkeypatch.setattr(passes, "_MODELS", __name__)
    monkeypatch.setattr(passes, "_PARTS", (*passes._PARTS, __name__))
    return lambda way, kind=SelfAttention, layers=2: Odd(way, kind, layers).eval()


def x(*sizes: int, fill: float | None = None) -> Tensor:
    shape = (2, 2, *(sizes or (6,)), 8)
    return torch.randn(shape) if fill is None else torch.full(shape, fill)


def _in_turn(model: Odd, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x)
    return x * 2


def _exits_early(model: Odd, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x) * 0 + x
        if float(x.mean()) > 0.5:
            break
    return x


def _in_another_order(model: Odd, x: Tensor) -> Tensor:
    places = (0, 1) if float(x.mean()) < 0.5 else (0, 0, 1)
    return torch.stack([model.layers[place](x) for place in places])


def _in_chunks(model: Odd, x: Tensor) -> Tensor:
    return torch.cat([_in_turn(model, part) for part in x.split(6, 2)], 2)


def _in_cycles(model: Odd, x: Tensor) -> Tensor:
    for _ in range(int(x.abs().max() * 0) + 3):
        x = _in_turn(model, x)
    return x


def _beside_all_modules(model: Odd, x: Tensor) -> Tensor:
    x = _in_turn(model, x)
    return F.scaled_dot_product_attention(x, x, x)


def _with_a_tap(model: Odd, x: Tensor) -> Tensor:
    attemper.tap(x.cos(), x.sin(), name="mine")
    return _in_turn(model, x)


def _caught(again: bool, model: Odd, x: Tensor) -> Tensor:
    try:
        return _in_turn(model, x)
    except BaseException:
        return _in_turn(model, x) if again else x


LOW, HIGH = x(fill=0.0), x(fill=1.0)
ODD: dict[str, tuple[Callable[..., Tensor], list[Tensor], int, int]] = {
    "one layer after another": (_in_turn, [x(), x(), x(4)], 2, 2),
    "an early exit": (_exits_early, [HIGH, LOW, LOW], 0, 2),
    "an order that changes": (_exits_early, [LOW, LOW, HIGH, LOW, LOW], 1, 2),
    "another order": (_in_another_order, [LOW, LOW, HIGH], 1, 2),
    "longer inputs in chunks": (_in_chunks, [x(6), x(12), x(18), x(6), x(12), x(3)], 0, 2),
    "more often than the configuration says": (_in_cycles, [x(), x()], 0, 2),
    "beside all modules": (_beside_all_modules, [x(), x(), x()], 0, 3),
    "with a tap": (_with_a_tap, [x(), x()], 0, 3),
    "catches everything": (partial(_caught, False), [x(), x(), x()], 1, 2),
    "catches everything and tries again": (partial(_caught, True), [x(), x(), x()], 1, 2),
}
"""A way of a model, its batches, how many passes end early, and how many sites there are."""


@pytest.mark.parametrize("kind", [SelfAttention, Mixing, HandAttention])
@pytest.mark.parametrize("name", ODD)
@pytest.mark.turns(2)
def test_attention_in_odd_ways_is_read_as_in_whole_passes(
    name: str, kind: Any, odd: Callable[..., Odd], ended: list[int]
) -> None:
    way, batches, early, sites = ODD[name]
    scan = check_same(odd(way, kind), batches)
    assert (len(ended), len({site.name.partition("#")[0] for site in scan.sites})) == (early, sites)


def test_several_calls_of_one_forward_are_all_read(odd: Callable[..., Odd], ended: list[int]) -> None:
    class Windows(SelfAttention):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([F.scaled_dot_product_attention(part, part, part) for part in x.split(3, 2)], 2)

    model = odd(_in_turn)
    model.layers[1] = Windows().eval()
    check_same(model, [x(9), x(9), x(6), x(9)])
    assert len(ended) == 1


def test_a_model_that_draws_random_numbers_draws_them_all(odd: Callable[..., Odd], ended: list[int]) -> None:
    def noisy(model: Odd, x: Tensor) -> Tensor:
        return _in_turn(model, x + torch.randn_like(x)) + torch.randn_like(x)

    found = []
    for whole in (False, True):
        torch.manual_seed(1)
        found.append(bits(attemper.scan(odd(noisy), [x(), x(), x()], whole_passes=whole)))
    assert found[0] == found[1]
    assert not ended


# --- nothing is left behind ---


def test_a_module_that_raises_behind_its_attention_raises(odd: Callable[..., Odd]) -> None:
    model = odd(_in_turn)
    with pytest.raises(OverflowError):
        attemper.scan(model, [x(), x(), x(fill=torch.inf)])
    assert hooks(model) == 0
    assert current() == ()


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_everything_is_put_back_when_a_later_pass_is_interrupted(
    error: type[BaseException], llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (batch,) = texts(12)
    before, linear, calls = llama(**batch).logits, F.linear, []

    def interrupted(*args: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 20:  # in the second pass
            raise error
        return linear(*args)

    with monkeypatch.context() as patch:
        patch.setattr(F, "linear", interrupted)
        with pytest.raises(error):
            attemper.scan(llama, [batch] * 3)
    assert hooks(llama) == 0
    assert current() == ()
    assert torch.equal(llama(**batch).logits, before)


@pytest.mark.parametrize("name", ["bert", pytest.param("llama", marks=MORE), pytest.param("t5", marks=MORE)])
def test_a_model_is_as_it_was_and_still_gives_hidden_states_and_attentions(name: str, ended: list[int]) -> None:
    tiny = TINY[name]
    model, batch = sharpened(tiny.build()), inputs(tiny.kind, "right") | {"return_dict": False}
    if name != "bert":
        batch["use_cache"] = False
    wanted = {"output_hidden_states": True, "output_attentions": True}
    before, config = model(**batch, **wanted), model.config.to_dict()
    attributes = [dict(vars(module)) for module in model.modules()]
    for given in ({}, wanted):
        attemper.scan(model, [batch | given] * 2)
    # In spite of the hooks with which transformers collects. Releases without output_capturing leave other forwards on
    # the modules once they have collected: no pass ends early then.
    collects_by_hooks = importlib.util.find_spec("transformers.utils.output_capturing") is not None
    assert len(ended) == (2 if collects_by_hooks else 0)
    assert [dict(vars(module)) for module in model.modules()] == attributes
    assert model.config.to_dict() == config
    after = model(**batch, **wanted)
    assert len(before) > len(model(**batch))
    for one, two in zip(before, after, strict=True):
        assert all(map(torch.equal, one, two)) if isinstance(one, tuple) else torch.equal(one, two)


def test_another_thread_that_runs_the_model_meanwhile_gets_its_output(
    llama: Any, ended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    (batch,) = texts(12)
    linear, found, last = F.linear, [], llama.model.layers[1].self_attn.o_proj.weight

    def beside(*args: Any) -> Tensor:
        if args[1] is last and threading.current_thread() is threading.main_thread():
            with torch.no_grad():
                thread = threading.Thread(target=lambda: found.append(llama(**batch).logits))
                thread.start()
                thread.join()
        return linear(*args)

    monkeypatch.setattr(F, "linear", beside)
    attemper.scan(llama, [batch] * 3)
    assert len(ended) == 2
    assert [logits.shape for logits in found] == [(3, 12, 101)] * 3


def test_a_model_of_one_layer_ends_early(ended: list[int]) -> None:
    config = tf.LlamaConfig(**(GROUPED | {"num_hidden_layers": 1}))
    check_same(tf.LlamaForCausalLM._from_config(config).eval(), texts(12, 12))
    assert len(ended) == 1
