"""A scan, a pattern and a watch against the weights of the implementation that runs in the model, for every mask."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attemper
from attemper.errors import InputError

tf = pytest.importorskip("transformers")

import transformers.integrations.flash_attention as flash  # noqa: E402
import transformers.modeling_flash_attention_utils as flash_utils  # noqa: E402
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402

from attemper.sites.transformers_arguments import as_eager, reader_of  # noqa: E402
from tests.monitor.tiny_models import from_config  # noqa: E402
from tests.sites import flash_stand_in  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:flex_attention called without", "ignore:`torch.jit.script_method`", "ignore:_compile flag on"
)

TOKENS, HEADS, SECOND = 12, 4, 5
"""Tokens of a text, heads, and where its second document begins."""
ADDS = "adds as 0 and 1, so that it hides nothing: pass torch.where"
LOWEST = torch.finfo(torch.float32).min
ROUNDING = 4e-7
"""Of float32, in which most eager functions softmax whatever their queries are: some ulp of a weight of at most 1."""


def opaque(module: nn.Module, query: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    return query.transpose(1, 2).contiguous(), None


def own_sdpa(*args: Any, **given: Any) -> tuple[Tensor, None]:
    return sdpa_attention_forward(*args, **given)


OWN = {"mine": own_sdpa, "mine_unmasked": own_sdpa, "opaque": opaque}
IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention", "flash_attention_2", "attemper", *OWN)


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Functions of somebody's own, and flash_attn by a stand-in."""
    import attemper.integrations.transformers  # noqa: F401

    monkeypatch.setattr(flash_utils, "lazy_import_flash_attention", flash_stand_in.lazy_import(flash_utils))
    monkeypatch.setattr(flash, "get_target_dtype", lambda *_: None)
    masks = tf.AttentionMaskInterface._global_mapping
    monkeypatch.setattr(tf.AttentionInterface, "_global_mapping", dict(tf.AttentionInterface._global_mapping) | OWN)
    monkeypatch.setattr(tf.AttentionMaskInterface, "_global_mapping", dict(masks) | {"mine": masks["sdpa"]})
    with torch.compiler.set_stance("force_eager"):
        yield


class Own:
    """A model of one layer whose values can be the identity: what its attention gives is its weights then."""

    def __init__(self, name: str, implementation: str) -> None:
        size = {"hidden_size": HEADS * TOKENS, "num_hidden_layers": 1, "num_attention_heads": HEADS}
        common = {"vocab_size": 101, "intermediate_size": 16, "max_position_embeddings": 64, "pad_token_id": 0, **size}
        if name == "llama":
            config = tf.LlamaConfig(**common, num_key_value_heads=2, head_dim=TOKENS, use_cache=False)
            self.model = from_config(tf.LlamaModel, config, attn_implementation="eager").double().eval()
            attention = self.model.layers[0].self_attn
            self.query, self.value, self.out = attention.q_proj, attention.v_proj, attention.o_proj
        else:
            config = tf.BertConfig(**common)
            self.model = from_config(tf.BertModel, config, attn_implementation="eager").double().eval()
            attention = self.model.encoder.layer[0].attention
            self.query, self.value, self.out = attention.self.query, attention.self.value, attention.output.dense
        self.query.weight.data.mul_(20.0)
        for part in self.model.modules():
            if hasattr(part, "config"):
                vars(part.config)["_attn_implementation_internal"] = implementation

    @torch.no_grad()
    def weights(self, batch: dict[str, Any]) -> Tensor:
        """[B, H, Q, K], by the model's own code."""
        found: list[Tensor] = []

        def identity(_: nn.Module, __: Any, output: Tensor) -> Tensor:
            groups = output.shape[-1] // TOKENS
            return torch.eye(TOKENS, dtype=output.dtype).repeat(1, groups).expand_as(output)

        hooks = [
            self.value.register_forward_hook(identity),
            self.out.register_forward_pre_hook(lambda _, args: found.append(args[0])),
        ]
        try:
            self.model(**batch)
        finally:
            for hook in hooks:
                hook.remove()
        (output,) = found
        return output.unflatten(-1, (HEADS, TOKENS)).transpose(1, 2)


def masks(causal: bool) -> dict[str, Tensor | None]:
    """Two documents in a text, as people write it; padding as [B, tokens]."""
    document = torch.arange(TOKENS) >= SECOND
    visible = document[:, None] == document[None, :]
    visible = (visible.tril() if causal else visible)[None, None].expand(2, 1, -1, -1)
    by_head = torch.rand(2, HEADS, TOKENS, TOKENS) > 0.5
    by_head |= torch.eye(TOKENS, dtype=torch.bool)

    def hidden(number: float, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.zeros((), dtype=dtype).where(visible, torch.tensor(number, dtype=dtype))

    padding = torch.ones(2, TOKENS, dtype=torch.int64)
    padding[0, :4] = 0
    return {
        "none": None,
        "ones": torch.ones(2, TOKENS),
        "padding": padding,
        "bool": visible,
        "bool of heads": by_head,
        "0 and 1": visible.double(),
        "whole 0 and 1": visible.long(),
        "whole numbers": hidden(-10000, torch.int64),
        "lowest": hidden(torch.finfo(torch.float64).min),
        "lowest float32": hidden(torch.finfo(torch.float32).min, torch.float32),
        "lowest float16": hidden(torch.finfo(torch.float16).min, torch.float16),
        "-inf": hidden(-torch.inf),
        "-10000": hidden(-1e4),
        "numbers of heads": torch.zeros((), dtype=torch.float64).where(by_head, -torch.inf),
    }


REASONS: dict[tuple[str, str], str] = {
    ("eager", "bool"): ADDS,
    ("eager", "bool of heads"): ADDS,
    **{("opaque", kind): "how 'opaque' masks is not known here" for kind in masks(False)},
}
"""What is refused although the model takes it, and how that is said."""


def batch_of(mask: Tensor | None) -> dict[str, Any]:
    return {"input_ids": torch.randint(3, 101, (2, TOKENS)), "attention_mask": mask}


def entropies(weights: Tensor, rows: Tensor) -> Tensor:
    """[H], means over the rows that are tokens."""
    found = torch.special.entr(weights).sum(-1).transpose(0, 1)
    return found[:, rows].mean(1)


@pytest.mark.quick(
    "llama-eager-bool",
    "bert-eager-whole 0",
    "bert-sdpa-bool",
    "mine_unmasked-padding",
    "llama-opaque-none",
    "llama-mine-bool",
)
@pytest.mark.parametrize("kind", masks(False))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["llama", "bert"])
@pytest.mark.turns(2)
def test_what_is_read_is_what_the_implementation_that_runs_does_with_its_mask(
    name: str, implementation: str, kind: str
) -> None:
    own = Own(name, implementation)
    mask = masks(causal=name == "llama")[kind]
    batch = batch_of(mask)
    readers: dict[str, Callable[[], Any]] = {
        "scan": lambda: attemper.scan(own.model, [batch]),
        "pattern": lambda: attemper.pattern(own.model, batch, head=2, sequence=0),
        "watch": lambda: watched(own.model, batch),
    }
    try:
        weights = own.weights(batch)
    except Exception as error:
        for read in readers.values():
            with pytest.raises(type(error), match=re.escape(str(error)[:40])):
                read()
        return
    if (implementation, kind) in REASONS:
        for where, read in readers.items():
            with pytest.raises(InputError, match=f"(?s){where} saw no attention.*{REASONS[implementation, kind]}"):
                read()
        return
    rows = torch.ones(2, TOKENS, dtype=torch.bool) if kind != "padding" or mask is None else mask.bool()
    expected = entropies(weights, rows)
    for where in ("scan", "watch"):
        (site,) = readers[where]().sites
        found = torch.tensor([head.entropy_nats for head in site.heads], dtype=torch.float64)
        torch.testing.assert_close(found, expected, rtol=0, atol=5 * ROUNDING)
    real = weights[0, 2][rows[0]]
    shown = readers["pattern"]().weights.double()
    torch.testing.assert_close(shown, real[:, rows[0] | (real > 0).any(0)], rtol=0, atol=ROUNDING)


def watched(model: Any, batch: dict[str, Any]) -> attemper.Scan:
    with torch.no_grad(), attemper.watch(model) as watch:
        model(**batch)
    return watch.table()


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_what_replaces_an_eager_attention_refuses_a_bool_mask_as_a_scan_does(name: str) -> None:
    own = Own(name, "eager")
    batch = batch_of(masks(causal=True)["bool"])
    with pytest.raises(InputError, match=f"(?s)fingerprint saw no attention.*{ADDS}"):
        attemper.fingerprint(own.model, [batch])
    with attemper.temper(own.model, normalizer="sparsemax"), pytest.raises(InputError, match=ADDS):
        own.model(**batch)
    with attemper.watch(own.model, observe="replace") as watch:
        own.model(**batch)
    with pytest.raises(InputError, match=f"(?s)watch saw no attention.*{ADDS}"):
        watch.table()


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_scan_under_autocast_reads_what_a_watch_reads(implementation: str) -> None:
    own = Own("llama", implementation)
    model, batch = own.model.float(), batch_of(None)
    with torch.autocast("cpu", torch.bfloat16):
        scanned, seen = attemper.scan(model, [batch]), watched(model, batch)
    pairs = zip(scanned.sites[0].heads, seen.sites[0].heads, strict=True)
    for one, other in pairs:
        assert one.entropy_nats == pytest.approx(other.entropy_nats, abs=1e-6)
    assert scanned.sites[0].heads[0].entropy_nats != attemper.scan(model, [batch]).sites[0].heads[0].entropy_nats


def test_documents_that_flash_attention_keeps_apart_are_apart_in_a_scan_and_others_are_not() -> None:
    """With a cache, transformers makes no mask of positions that start anew; flash attention reads them itself."""
    positions = torch.cat([torch.arange(SECOND), torch.arange(TOKENS - SECOND)])[None]
    batch = {"input_ids": torch.randint(3, 101, (1, TOKENS)), "position_ids": positions, "use_cache": True}
    across = {}
    for implementation in ("flash_attention_2", "sdpa"):
        own = Own("llama", implementation)
        weights = own.weights(batch)
        (site,) = attemper.scan(own.model, [batch]).sites
        expected = entropies(weights, torch.ones(1, TOKENS, dtype=torch.bool))
        found = torch.tensor([head.entropy_nats for head in site.heads], dtype=torch.float64)
        torch.testing.assert_close(found, expected, rtol=0, atol=5 * ROUNDING)
        shown = attemper.pattern(own.model, batch, head=1).weights
        torch.testing.assert_close(shown.double(), weights[0, 1], rtol=0, atol=ROUNDING)
        across[implementation] = float(weights[:, :, SECOND:, :SECOND].max())
    assert across["flash_attention_2"] == 0.0 < 0.1 < across["sdpa"]


def test_sinks_that_sdpa_ignores_are_not_read_under_sdpa() -> None:
    query = torch.randn(1, 2, 5, 8)
    module = nn.Module()
    read = reader_of(sdpa_attention_forward, "sdpa")
    assert read(module, query, query, None, s_aux=torch.zeros(2)).options.sink_logits is None
    with pytest.raises(InputError, match="SDPA attention takes no softcap"):
        read(module, query, query, None, softcap=2.0)
    with pytest.raises(InputError, match=r"mask is torch.float16, and SDPA takes bool, float32 or torch.float32"):
        read(module, query, query, torch.zeros(1, 1, 5, 5).half())


class Attention(nn.Module):
    """What eager functions read of their module."""

    num_key_value_groups, head_dim = 2, 8

    def __init__(self, sinks: bool) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.randn(4).double()) if sinks else None
        self.eval()


def repeat_kv(hidden: Tensor, groups: int) -> Tensor:
    return hidden.repeat_interleave(groups, 1)


def eager_functions(folder: Path, files: str) -> dict[str, tuple[str, list[str]]]:
    """Source without types -> its name, and the files that it stands in."""
    found: dict[str, tuple[str, list[str]]] = {}
    for path in sorted(folder.glob(files)):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.FunctionDef) or not node.name.endswith("eager_attention_forward"):
                continue
            node.returns, node.decorator_list = None, []
            for argument in ast.walk(node):
                if isinstance(argument, ast.arg):
                    argument.annotation = None
            found.setdefault(ast.unparse(node), (node.name, []))[1].append(path.stem)
    return found


NO_MASK = {"modeling_vjepa2"}
"""Files whose eager attention takes no notice of a mask, and whose models give it none."""


@pytest.mark.parametrize(
    "files",
    [
        pytest.param("*/modeling_*.py", marks=pytest.mark.slow("reads every model file of transformers")),
        *(f"{name}/modeling_*.py" for name in ("llama", "gpt_oss", "gemma2", "t5", "granite_swa", "mimo_v2_flash")),
    ],
)
def test_every_eager_function_of_transformers_adds_its_mask(files: str) -> None:
    """And reads sinks, scale, softcap and position bias as ``as_eager`` does; a bool mask is 0 and 1 to each."""
    models = Path(tf.__file__).parent / "models"
    found = eager_functions(models, files)
    if not found:
        assert not any("eager_attention_forward" in path.read_text("utf-8") for path in models.glob(files))
        pytest.skip(f"this transformers has no eager attention in {files}")
    for source, (name, places) in found.items():
        scope: dict[str, Any] = {"torch": torch, "nn": nn, "F": nn.functional, "repeat_kv": repeat_kv}
        scope |= {"maybe_autocast": lambda **_: nullcontext()}
        exec(source, scope)  # its file would import the whole model
        function, takes = scope[name], source.splitlines()[0]
        shared = "repeat_kv(" in source
        module = Attention("sinks" in source and "sinks=None" not in takes)
        query, key = torch.randn(2, 4, 6, 8).double(), torch.randn(2, 2 if shared else 4, 6, 8).double()
        value = torch.eye(6).double().expand(2, key.shape[1], 6, 6)
        given: dict[str, Any] = {"scaling": 8**-0.5 if "module.head_dim ** (-0.5)" in source else 0.7}
        given |= {"softcap": 1.5} if "softcap=" in takes else {}
        given |= {"position_bias": torch.randn(2, 4, 6, 6).double()} if "position_bias=" in takes else {}
        visible = torch.rand(2, 1, 6, 6) > 0.4
        visible[..., 0] = True
        for mask in (torch.where(visible, 0.0, torch.finfo(torch.float32).min).double(), visible.double()):
            made = function(module, query, key, value, mask, **given)[0].transpose(1, 2)
            read = as_eager(module, query, key, mask, **given)
            if set(places) <= NO_MASK:
                read = replace(read, mask=None)
            options = {name: getattr(read.options, name) for name in ("scale", "softcap", "sink_logits", "enable_gqa")}
            weights = attemper.functional.dense_weights(read.query, read.key, attn_mask=read.mask, **options)
            torch.testing.assert_close(made, weights, rtol=0, atol=ROUNDING, msg=lambda m, p=places: f"{p}: {m}")
        as_numbers = function(module, query, key, value, visible.float(), **given)[0]
        assert torch.equal(function(module, query, key, value, visible, **given)[0], as_numbers), places


@pytest.mark.parametrize(
    ("implementation", "number"),
    [("eager", LOWEST), ("sdpa", LOWEST), ("sdpa", -torch.inf)],  # in eager attention the last is NaN
)
def test_a_scan_gives_later_layers_what_the_model_makes_of_a_row_that_sees_nothing(
    implementation: str, number: float
) -> None:
    config = tf.LlamaConfig(vocab_size=101, hidden_size=32, intermediate_size=16, num_hidden_layers=2,
                            num_attention_heads=4, num_key_value_heads=2, use_cache=False)  # fmt: skip
    model = from_config(tf.LlamaModel, config, attn_implementation=implementation).eval()
    for layer in model.layers:
        for part in (layer.self_attn.q_proj, layer.self_attn.v_proj, layer.self_attn.o_proj):
            part.weight.data.mul_(20.0)
    mask = torch.full((2, 1, TOKENS, TOKENS), number).triu(1)
    mask[:, :, SECOND] = number  # a query that sees nothing, and is a key of those behind it
    batch = {"input_ids": torch.randint(1, 101, (2, TOKENS)), "attention_mask": mask}
    with attemper.watch(model) as watch, torch.no_grad():
        model(**batch)
    scan = attemper.scan(model, [batch])
    for seen, scanned in zip(watch.table().sites, scan.sites, strict=True):
        assert [head.entropy_nats for head in scanned.heads] == pytest.approx(
            [head.entropy_nats for head in seen.heads], abs=1e-5
        )
