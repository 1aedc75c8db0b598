"""A random call of ``attention``, ``attention_statistics``, ``varlen_attention`` or ``dense_weights``, from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from attemper import nn as ours
from attemper.backends.table import BACKENDS
from attemper.call.normalizer import Normalization
from attemper.statistics import NAMES, OF_SOFTMAX
from tests.fuzz.oracle import INTEGERS
from tests.support.calls import had

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
FUNCTIONS = ("attention", "attention_statistics", "varlen_attention", "dense_weights")
STATISTICS = tuple(name for name in NAMES if name not in ("self_weight", "span_mass"))
"""What calls ask for, in the order in which a seed chooses; the two that need more than tensors come last."""
ROWWISE = ("sparsemax", "entmax15", "entmax", "topk", "threshold", "sigmoid")
LAYOUTS = ("plain", "tokens first", "sliced", "broadcast", "negated", "every other", "subclass")
TRANSFORMS = ("", "grad", "vmap", "vmap grad", "jvp", "jacrev")


class Plain(Tensor):
    """A subclass that means what it holds."""


@dataclass
class Draw:
    """What a seed stands for."""

    seed: int
    function: str = "attention"
    backend: str = "auto"
    dtype: torch.dtype = torch.float32
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Differentiable arguments by name, as they are passed."""
    options: dict[str, Any] = field(default_factory=dict)
    """The rest of the arguments."""
    normalizer: str = "softmax"
    number: Any = None
    """A number, or the name of the tensor among ``tensors``."""
    mask: str = "none"
    layouts: dict[str, str] = field(default_factory=dict)
    autocast: bool = False
    wanted: tuple[str, ...] = ()
    """Results that gradients come from; none for a call without gradients."""
    transform: str = ""
    stats: tuple[str, ...] = ()

    def __str__(self) -> str:
        shapes = {name: f"{list(t.shape)} {str(t.dtype)[6:]}" for name, t in self.tensors.items()}
        given = {name: value for name, value in self.options.items() if not isinstance(value, Tensor)}
        return (
            f"seed {self.seed}: {self.function} on {self.backend}, {shapes}, layouts {self.layouts}, mask {self.mask}, "
            f"{self.normalizer} {self.number}, {given}, gradients of {self.wanted}, "
            f"{self.transform or 'no'} transform{', autocast' if self.autocast else ''}"
        )


def draw(seed: int, backends: tuple[str, ...]) -> Draw:
    """The call of a seed. ``backends``: those of this machine, "triton" only if it is interpreted."""
    rng, made = random.Random(seed), Draw(seed)
    generator = torch.Generator().manual_seed(seed)
    made.backend = rng.choices(backends, [0.02 if name == "triton" else 1.0 for name in backends])[0]
    made.function = rng.choices(FUNCTIONS, (6, 2, 2, 1))[0]
    names = _dtypes(made.backend)
    made.dtype = DTYPES[rng.choices(names, [3.0 if name == "float32" else 1.0 for name in names])[0]]
    shape = _shape(rng, made)
    _tensors(rng, generator, made, shape)
    _rules(rng, made)
    _map(rng, generator, made, shape)
    _mask(rng, generator, made, shape)
    _results(rng, made)
    _kinds(rng, made)
    _own_key_and_spans(rng, generator, made, shape)
    return made


def _dtypes(backend: str) -> tuple[str, ...]:
    found = {other.name: other.dtypes for other in BACKENDS}
    return tuple(found.get(backend, tuple(DTYPES)))


def _shape(rng: random.Random, made: Draw) -> dict[str, int]:
    small = made.backend == "triton"
    tokens = (0, 1, 1, 2, 3, 5, 8) if small else (0, 1, 1, 2, 3, 7, 16, 17, 33, 40, 65, 130)
    sizes = (1, 3, 8) if small else (1, 2, 3, 8, 16, 20, 33, 64)
    groups = rng.choice((1, 1, 2))
    shape = {
        "batch": 1 if made.function == "varlen_attention" or small else rng.choice((1, 1, 2, 3)), "groups": groups,
        "heads": groups * rng.choice((1, 1, 2, 3)), "queries": rng.choice(tokens), "keys": rng.choice(tokens),
        "size": rng.choice(sizes), "width": rng.choice(sizes),
    }  # fmt: skip
    if rng.random() < 0.03:
        shape[rng.choice(("batch", "size", "width", "queries", "keys"))] = 0
        if made.function == "varlen_attention":
            shape["batch"] = 1
    if rng.random() < 0.3:
        shape["keys"] = shape["queries"]
    return shape


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _tensors(rng: random.Random, generator: torch.Generator, made: Draw, n: dict[str, int]) -> None:
    """Queries, keys and values; scores spread from nothing to one-hot."""
    spread = rng.choice((0.0, 0.1, 1.0, 1.0, 1.0, 3.0, 10.0)) ** 0.5
    query = _normal(generator, n["batch"], n["heads"], n["queries"], n["size"]) * spread
    key = _normal(generator, n["batch"], n["groups"], n["keys"], n["size"]) * spread
    value = _normal(generator, n["batch"], n["groups"], n["keys"], n["width"])
    if rng.random() < 0.15:
        # The maximum of a row moves with every block of keys.
        key = key + torch.linspace(0, 3, max(n["keys"], 1), dtype=torch.float64)[: n["keys"], None]
        query = query.abs()
    if rng.random() < 0.05:
        key = key[:, :, :1].expand_as(key).clone()  # equal keys
    made.tensors = {"query": query, "key": key, "value": value}
    if made.function in ("attention_statistics", "dense_weights"):
        del made.tensors["value"]
    if made.function == "varlen_attention":
        made.options |= {"cu_seqlens_q": _offsets(rng, n["queries"]), "cu_seqlens_k": None}
        documents = len(made.options["cu_seqlens_q"]) - 1
        made.options["cu_seqlens_k"] = _offsets(rng, n["keys"], documents)
    made.tensors = {name: tensor.to(made.dtype) for name, tensor in made.tensors.items()}
    if rng.random() < 0.4:
        made.tensors["temperature"] = _temperature(rng, generator, made, n)
    elif rng.random() < 0.4:
        made.options["temperature"] = rng.choice((0.3, 0.7, 1.5, 4.0, 1e3))
    made.options["enable_gqa"] = n["heads"] != n["groups"] or rng.random() < 0.3


def _offsets(rng: random.Random, total: int, documents: int | None = None) -> Tensor:
    count = rng.choice((1, 2, 3, 5)) if documents is None else documents
    cuts = sorted(rng.randint(0, total) for _ in range(count - 1))
    return torch.tensor([0, *cuts, total], dtype=rng.choice((torch.int32, torch.int64)))


def _temperature(rng: random.Random, generator: torch.Generator, made: Draw, n: dict[str, int]) -> Tensor:
    full = (n["batch"], n["heads"], n["queries"])
    shape = rng.choice(((), (n["heads"], 1), (1, 1, n["queries"]), (n["batch"], 1, 1), full, (1, 1, 1)))
    wide = torch.float64 if made.dtype == torch.float64 else rng.choice((torch.float32, made.dtype))
    return (_normal(generator, *shape) * 0.5).exp().to(wide)


def _rules(rng: random.Random, made: Draw) -> None:
    options = made.options
    if rng.random() < 0.5:
        options["is_causal"] = rng.random() < 0.7
        options["causal_alignment"] = rng.choice(("top-left", "bottom-right"))
    if rng.random() < 0.25:
        options["window_size"] = rng.choice(((-1, -1), (0, 0), (2, 0), (3, 5), (-1, 4), (7, -1), (40, 1)))
    if rng.random() < 0.2:
        options["softcap"] = rng.choice((1.0, 5.0, 30.0))
    if rng.random() < 0.3:
        options["scale"] = rng.choice((0.0, 0.05, 0.5, 1.0, -0.3))
    if rng.random() < 0.3:
        options["first_tokens"] = rng.choice((1, 2, 4))


def _map(rng: random.Random, generator: torch.Generator, made: Draw, n: dict[str, int]) -> None:
    wide = torch.float64 if made.dtype == torch.float64 else torch.float32
    kinds = ("softmax", "softmax_plus_one", "scalable_softmax", "sink", *ROWWISE)
    made.normalizer = rng.choices(kinds, (14, 1, 1, 1, 1, 1, 2, 1, 1, 1))[0]
    learned = (_normal(generator, n["heads"]) * 0.5).to(wide)
    if made.normalizer not in ROWWISE and rng.random() < 0.2:
        made.tensors["sink_logits"] = _normal(generator, n["heads"]).to(wide)
    if made.normalizer == "topk":
        made.number = rng.choice((1, 2, 5, 50))
    elif made.normalizer == "threshold":
        made.number = rng.choice((0.0, 0.01, 0.2, 0.7))
    elif made.normalizer in ("sink", "scalable_softmax", "entmax", "sigmoid") and rng.random() < 0.6:
        made.number = "learned"
        made.tensors["learned"] = {"entmax": learned.abs() + 1.05}.get(made.normalizer, learned)
    else:
        numbers = {"sink": 0.0, "entmax": rng.choice((1.2, 1.5, 1.9, 2.0)), "sigmoid": 0.0, "scalable_softmax": 1.0}
        made.number = numbers.get(made.normalizer)


MASKS = (
    "none", "bool", "bool per head", "keys", "rows", "one column", "added", "added per head", "lowest", "-inf", "-1e4",
    "added to keys", "causal bias", "parameter",
)  # fmt: skip


def _mask(rng: random.Random, generator: torch.Generator, made: Draw, n: dict[str, int]) -> None:
    """A mask of every kind; packed documents take none."""
    if made.function == "varlen_attention" or rng.random() < 0.4:
        return
    made.mask = kind = rng.choice(MASKS[1:])
    batch, heads, queries, keys = (n[name] for name in ("batch", "heads", "queries", "keys"))
    if kind == "causal bias":
        make = causal_upper_left if queries > keys or rng.random() < 0.5 else causal_lower_right
        made.options["attn_mask"] = make(queries, keys)
        made.options.pop("is_causal", None)  # refused beside it
        return
    shapes = {
        "bool per head": (batch, heads, queries, keys), "keys": (batch, 1, 1, keys), "rows": (1, 1, queries, 1),
        "one column": (batch, heads, queries, 1), "added per head": (1, heads, queries, keys),
        "added to keys": (batch, 1, 1, keys), "-1e4": (batch, 1, queries, keys),
    }  # fmt: skip
    shape = shapes.get(kind, (queries, keys))
    seen = torch.rand(shape, generator=generator) < rng.choice((0.2, 0.7, 0.95))
    if kind in ("bool", "bool per head", "keys", "rows"):
        made.options["attn_mask"] = seen
        return
    dtype = rng.choice((made.dtype, torch.float32, torch.bfloat16)) if made.dtype != torch.float64 else made.dtype
    mask = _normal(generator, *shape).to(dtype)
    least = {"lowest": torch.finfo(dtype).min, "-inf": -torch.inf, "-1e4": -1e4}.get(kind)
    mask = mask if least is None else mask.masked_fill(~seen, least)
    made.tensors["attn_mask"] = nn.Parameter(mask) if kind == "parameter" else mask


def _results(rng: random.Random, made: Draw) -> None:
    """Which statistics are asked for, and what is differentiated."""
    if made.function == "dense_weights":
        made.wanted = ("output",) if rng.random() < 0.3 else ()
        return
    known = STATISTICS if made.backend == "auto" else had(made.backend, STATISTICS)
    known = [name for name in known if made.normalizer not in ROWWISE or name not in OF_SOFTMAX]
    amount = rng.choice((0, 0, 1, 2, len(known), len(known)))
    if made.function == "attention_statistics":
        amount = max(amount, 1)
    made.stats = tuple(rng.sample(known, amount))
    floating = [name for name in made.stats if name not in INTEGERS]
    results = [*(["output"] if "value" in made.tensors else []), *floating]
    if rng.random() < 0.6 and results:
        made.wanted = tuple(rng.sample(results, rng.randint(1, len(results))))
        if "output" in results and rng.random() < 0.5:
            made.wanted = ("output",)


def _kinds(rng: random.Random, made: Draw) -> None:
    """How tensors lie in memory, what is around the call, and what transforms it."""
    chance = rng.random()
    for name in made.tensors:
        made.layouts[name] = rng.choice(LAYOUTS) if chance < 0.5 and made.mask != "parameter" else "plain"
        if made.layouts[name] == "subclass" and name not in ("query", "key", "value"):
            made.layouts[name] = "plain"
    if rng.random() < 0.12:
        made.autocast = True
        if made.dtype == torch.float32 and "value" in made.tensors and rng.random() < 0.6:
            made.tensors["value"] = made.tensors["value"].bfloat16()
    # torch.func has no Jacobian of nothing.
    full = all(tensor.numel() for tensor in made.tensors.values())
    simple = (
        full and made.function == "attention" and "subclass" not in made.layouts.values() and made.mask != "parameter"
    )
    if simple and not made.autocast and made.wanted and rng.random() < 0.12 and made.backend != "triton":
        made.transform = rng.choice(TRANSFORMS[1:])
        if made.transform == "jvp":
            made.layouts["query"] = "plain"  # torch itself copies a tangent into the layout of its tensor


def _own_key_and_spans(rng: random.Random, generator: torch.Generator, made: Draw, n: dict[str, int]) -> None:
    """The two statistics that a call must say more for: which key is a query's own, and which keys are marked."""
    if made.function == "dense_weights" or rng.random() < 0.6:
        return
    known = ("self_weight", "span_mass")
    known = known if made.backend == "auto" else had(made.backend, known)
    names = [name for name in known if (name != "self_weight" or _has_own_keys(made, n)) and rng.random() < 0.7]
    if "span_mass" in names:
        batch = rng.choice((None, 1, n["batch"]))
        shape = (n["keys"],) if batch is None else (batch, n["keys"])
        marks = torch.rand(shape, generator=generator) < rng.choice((0.0, 0.2, 0.5, 1.0))
        made.options["spans"] = _pairs(marks) if batch is None and rng.random() < 0.5 and bool(marks.any()) else marks
    made.stats += tuple(names)
    made.wanted += tuple(name for name in names if made.wanted and rng.random() < 0.7)


def _has_own_keys(made: Draw, n: dict[str, int]) -> bool:
    options = made.options
    ruled = options.get("is_causal") or options.get("causal_alignment") == "bottom-right" or made.mask == "causal bias"
    return bool(ruled) or options.get("window_size", (-1, -1)) != (-1, -1) or n["queries"] == n["keys"]


def _pairs(marks: Tensor) -> list[tuple[int, int]]:
    """The marked keys as pairs, each key a pair of its own but for the first two, which make one where they touch."""
    keys = marks.nonzero()[:, 0].tolist()
    joined = [(keys[0], keys[1])] if len(keys) > 1 and keys[1] == keys[0] + 1 else []
    return joined + [(key, key) for key in keys]


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The same numbers in another layout, of memory or of class."""
    if layout == "tokens first" and tensor.dim() == 4:
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "sliced" and tensor.dim():
        wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 3), torch.nan, dtype=tensor.dtype)
        wide[..., 1:-2] = tensor
        return wide[..., 1:-2]
    if layout == "broadcast" and tensor.dim() == 4 and tensor.shape[0] > 1:
        return tensor[:1].expand_as(tensor)
    if layout == "negated":
        return torch._neg_view(-tensor)  # pyright: ignore[reportPrivateImportUsage]
    if layout == "every other" and tensor.dtype in (torch.float32, torch.float64):
        return torch.complex(torch.zeros_like(tensor), -tensor).conj().imag
    if layout == "subclass":
        return tensor.as_subclass(Plain)
    return tensor


def normalizer(made: Draw, tensors: dict[str, Tensor]) -> Any:
    """``normalizer=`` of the call: a name, an object of ``attemper.nn``, or what one says of a learned tensor."""
    if "learned" in tensors:
        return Normalization(made.normalizer, per_head=tensors["learned"])
    given = {"sink": ours.Sink, "topk": ours.TopK, "threshold": ours.Threshold, "entmax": ours.Entmax}
    if made.normalizer == "sink":
        return ours.Sink(1)
    return given[made.normalizer](made.number) if made.normalizer in given else made.normalizer
