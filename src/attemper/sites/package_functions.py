"""Attention that no function mode sees: FlexAttention and varlen attention, kernels of other packages, and ours.

While a pass is read, every Python module that holds such a function under a name holds a wrapper instead, which calls
the function and reports the call to the observers. All functions are restored afterwards. A reference that is kept
elsewhere (a closure, a class attribute, a compiled function) is not seen.

Arguments are told apart by the names that the function itself gives them, since versions differ in their order. An
argument that is not known here and is not left at its default might mean masking: the call is refused by name.
"""

from __future__ import annotations

import inspect
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import Any

import torch
from torch import Tensor, nn

from attemper.call.attn_mask import without_causal_bias
from attemper.call.packing import Packing
from attemper.call.request import Options
from attemper.sites.observation import AttentionCall, UnsupportedCallError, as_autocast_rounds, beside, report
from attemper.sites.transformers_arguments import block_mask_of

TAP = "put attemper.tap beside it"

_WITHOUT_EFFECT = frozenset(
    (
        *("v", "value", "dropout_p", "p", "out", "output_dtype", "zero_tensors", "op", "kernel_options"),
        *("return_attn_probs", "return_softmax_lse", "return_lse", "return_aux"),
        *("max_seqlen", "max_seqlen_q", "max_seqlen_k", "max_q", "max_k"),
        *("deterministic", "num_splits", "pack_gqa", "sm_margin"),
    )
)
"""Arguments that change nothing about which key gets which weight."""


@lru_cache(maxsize=64)
def _signature(function: Callable[..., Any]) -> tuple[inspect.Signature, dict[str, Any]]:
    """The signature of a function, and the defaults of its arguments."""
    signature = inspect.signature(function)
    return signature, {name: parameter.default for name, parameter in signature.parameters.items()}


class NamedArguments:
    """The arguments of one call by name, without those that are at their defaults."""

    def __init__(self, module: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.module, self._function = module, getattr(function, "__name__", "attention")
        try:
            signature, defaults = _signature(function)
            bound = signature.bind(*args, **kwargs).arguments
        except (TypeError, ValueError) as error:
            raise UnsupportedCallError(module, f"arguments of its {self._function} do not fit its signature") from error
        self._given = {name: value for name, value in bound.items() if not _same(value, defaults.get(name))}

    def take(self, *names: str, default: Any = None) -> Any:
        """The argument that goes by one of these names."""
        found = [self._given.pop(name) for name in names if name in self._given]
        return found[0] if found else default

    def tensor(self, *names: str) -> Tensor:
        """An argument without which there is nothing to measure."""
        found = self.take(*names)
        if not isinstance(found, Tensor):
            raise self.unreadable(f"its {self._function} has no tensor {names[0]}")
        return found

    def refuse_rest(self) -> None:
        """Raises where an argument is left that could mean masking."""
        rest = sorted(set(self._given) - _WITHOUT_EFFECT)
        if rest:
            raise self.unreadable(f"its {self._function} is called with {', '.join(rest)}=, which is not known here")

    def unreadable(self, reason: str) -> UnsupportedCallError:
        said = f"{reason}; {TAP}"
        return UnsupportedCallError(self.module, said)


Read = Callable[[NamedArguments], AttentionCall]
"""From the arguments of a function to the call that they mean."""


def _same(value: Any, default: Any) -> bool:
    if value is None or value is default:
        return True
    plain = (bool, int, float, str, tuple, list)
    return isinstance(value, plain) and isinstance(default, plain) and value == default


def flash(given: NamedArguments) -> AttentionCall:
    """flash_attn_func, its qkvpacked and varlen forms: [B, tokens, heads, size] or [total, heads, size]."""
    query, key = _parts(given)
    if query.dim() == 4:
        options = _flash_options(given, query, key)
        return AttentionCall(query.transpose(1, 2), key.transpose(1, 2), None, options)
    starts = given.take("cu_seqlens")
    starts_q, starts_k = given.take("cu_seqlens_q", default=starts), given.take("cu_seqlens_k", default=starts)
    if starts_q is None or starts_k is None or query.dim() != 3:
        raise given.unreadable("its flash attention does not say where documents start")
    return documents(query, key, starts_q, starts_k, _flash_options(given, query, key))


def _parts(given: NamedArguments) -> tuple[Tensor, Tensor]:
    """Queries and keys, which may come stacked before the heads: qkv [..., 3, H, D], kv [..., 2, H, D]."""
    qkv, kv = given.take("qkv"), given.take("kv")
    if qkv is not None:
        if qkv.dim() not in (4, 5) or qkv.shape[-3] != 3:
            raise given.unreadable(f"its qkv is {list(qkv.shape)}")
        query, key, _ = qkv.unbind(-3)
        return query, key
    query = given.tensor("q")
    return (query, kv.unbind(-3)[0]) if kv is not None else (query, given.tensor("k"))


def _flash_options(given: NamedArguments, query: Tensor, key: Tensor) -> Options:
    if given.take("alibi_slopes") is not None:
        raise given.unreadable("its flash attention adds ALiBi slopes")
    if given.take("block_table", "page_table") is not None:
        raise given.unreadable("its flash attention reads a paged cache")
    window = given.take("window_size", default=(-1, -1))
    left, right = (-1 if side is None else side for side in window)
    options = Options(
        scale=given.take("softmax_scale"),
        is_causal=bool(given.take("causal", default=False)),
        causal_alignment="bottom-right",
        window_size=(left, right),
        softcap=given.take("softcap") or None,
        sink_logits=given.take("learnable_sink", "s_aux"),
        enable_gqa=query.shape[-2] != key.shape[-2],
    )
    given.refuse_rest()
    return options


def documents(query: Tensor, key: Tensor, starts_q: Tensor, starts_k: Tensor, options: Options) -> AttentionCall:
    """The call of packed documents [total, heads, size]: one sequence in which each starts where ``starts`` say."""
    views = [part.transpose(0, 1)[None] for part in (query, key)]
    return AttentionCall(views[0], views[1], None, options, Packing(starts_q, starts_k))


def xformers(given: NamedArguments) -> AttentionCall:
    """memory_efficient_attention: [B, tokens, heads, size], or [B, tokens, size] for one head."""
    query, key = given.tensor("query"), given.tensor("key")
    parts = [part[:, :, None] if part.dim() == 3 else part for part in (query, key)]
    if any(part.dim() != 4 for part in parts):
        raise given.unreadable("its xformers attention has grouped heads")
    mask, causal = _bias(given)
    options = Options(scale=given.take("scale"), **causal)
    given.refuse_rest()
    return AttentionCall(parts[0].transpose(1, 2), parts[1].transpose(1, 2), mask, options)


_TRIANGLES: Mapping[str, str] = {
    "LowerTriangularMask": "top-left",
    "LowerTriangularFromBottomRightMask": "bottom-right",
}
"""Masks of xformers that are causality and nothing else. Classes that derive from them add something."""


def _bias(given: NamedArguments) -> tuple[Tensor | None, dict[str, Any]]:
    """An attn_bias as a mask that is added, and as options."""
    bias = given.take("attn_bias")
    if bias is None:
        return None, {}
    if isinstance(bias, Tensor) and bias.dim() in (3, 4) and bias.dtype != torch.bool:
        return bias if bias.dim() == 4 else bias[:, None], {}
    kind = type(bias)
    if kind.__module__.partition(".")[0] == "xformers" and kind.__name__ in _TRIANGLES:
        return None, {"is_causal": True, "causal_alignment": _TRIANGLES[kind.__name__]}
    raise given.unreadable(f"its xformers mask is a {kind.__name__}")


def flex(given: NamedArguments) -> AttentionCall:
    """``flex_attention``: its mask is a BlockMask."""
    query, key, block_mask = given.tensor("query"), given.tensor("key"), given.take("block_mask")
    if given.take("score_mod") is not None:
        raise UnsupportedCallError(given.module, "its FlexAttention changes scores by a custom score_mod")
    options = Options(scale=given.take("scale"), enable_gqa=given.take("enable_gqa", default=False))
    given.refuse_rest()
    mask = None if block_mask is None else block_mask_of(given.module, block_mask, query, key)
    return AttentionCall(*as_autocast_rounds(query, key), mask, options)


def torch_varlen(given: NamedArguments) -> AttentionCall:
    """``torch.nn.attention.varlen``: packed documents, aligned at the bottom right."""
    query, key = given.tensor("query"), given.tensor("key")
    starts_q, starts_k = given.tensor("cu_seq_q"), given.take("cu_seq_k")
    if starts_k is None or given.take("seqused_k", "block_table") is not None:
        raise given.unreadable("its varlen attention reads an internal cache")
    options = Options(
        scale=given.take("scale"),
        causal_alignment="bottom-right",
        window_size=given.take("window_size", default=(-1, -1)),
        enable_gqa=given.take("enable_gqa", default=query.shape[1] != key.shape[1]),
    )
    given.refuse_rest()
    return documents(query, key, starts_q, starts_k, options)


_OWN = [name for name in Options.__dataclass_fields__ if name not in ("dropout_p", "stats", "spans")]
"""Options of ours that are read; dropout and statistics change no score and no weight."""


def own_attention(given: NamedArguments) -> AttentionCall:
    query, key, mask = given.tensor("query"), given.tensor("key"), given.take("attn_mask")
    return AttentionCall(query, key, *without_causal_bias("attention", mask, _own(given), query, key.shape[2]))


def own_varlen_attention(given: NamedArguments) -> AttentionCall:
    query, key = given.tensor("query"), given.tensor("key")
    return documents(query, key, given.tensor("cu_seqlens_q"), given.tensor("cu_seqlens_k"), _own(given))


def _own(given: NamedArguments) -> Options:
    return Options(**{name: value for name in _OWN if (value := given.take(name)) is not None})


def refusing(reason: str) -> Read:
    """Reads no call: what it attends to is decided inside."""

    def read(given: NamedArguments) -> AttentionCall:
        raise given.unreadable(reason)

    return read


_FUNCTIONS: tuple[tuple[str, str, Read], ...] = (
    ("attemper.functional.attention", "attention", own_attention),
    ("attemper.functional.attention", "varlen_attention", own_varlen_attention),
    ("torch.nn.attention.flex_attention", "flex_attention", flex),
    ("torch.nn.attention.varlen", "varlen_attn", torch_varlen),
    ("torch.nn.attention.varlen", "varlen_attn_out", torch_varlen),
    ("xformers.ops.fmha", "memory_efficient_attention", xformers),
    ("xformers.ops.fmha", "memory_efficient_attention_forward", xformers),
    ("xformers.ops.fmha", "memory_efficient_attention_forward_requires_grad", xformers),
    (
        "xformers.ops.fmha",
        "memory_efficient_attention_partial",
        refusing("its xformers attention is over a part of the keys"),
    ),
)
_FLASH = (
    ("flash_attn_func", flash),
    ("flash_attn_qkvpacked_func", flash),
    ("flash_attn_kvpacked_func", flash),
    ("flash_attn_varlen_func", flash),
    ("flash_attn_varlen_qkvpacked_func", flash),
    ("flash_attn_varlen_kvpacked_func", flash),
    ("flash_attn_with_kvcache", refusing("its flash attention reads and writes an internal cache")),
)
_TRANSFORMER_ENGINE = refusing("TransformerEngine chooses layout, mask and kernel inside")
_MODULES = (("transformer_engine.pytorch", "DotProductAttention"),)
"""Modules whose forward attends in kernels that nothing else shows."""

_COMPILES = "transformers.integrations.flex_attention"
"""Compiles the function that it holds and keeps the result: it must hold no wrapper. The registry reads its calls."""

_lock = threading.RLock()
_depth = 0
_replaced: list[tuple[Any, str, Any]] = []


@contextmanager
def reading(_: nn.Module) -> Iterator[None]:
    """Reports calls of these functions to the current observers; nested and concurrent blocks share one replacement."""
    global _depth
    with _lock:
        _depth += 1
    try:
        with _lock:
            if _depth == 1:
                _replace()
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                _restore()


def _restore() -> None:
    while _replaced:
        holder, name, function = _replaced.pop()
        setattr(holder, name, function)


def _replace() -> None:
    homes = _homes(_modules_now())
    wrappers = {}
    for home, name, read in homes:
        function = getattr(sys.modules.get(home), name, None)
        if callable(function):
            wrappers[id(function)] = _reporting(function, read)
    for holder, name in _holders(frozenset(wrappers)):
        function = vars(holder).get(name)
        if id(function) in wrappers and holder.__name__ != _COMPILES:
            _place(holder, name, wrappers[id(function)])
    for home, name in _MODULES:
        kind = getattr(sys.modules.get(home), name, None)
        if isinstance(kind, type) and "forward" in vars(kind):
            _place(kind, "forward", _reporting(vars(kind)["forward"], _TRANSFORMER_ENGINE))


def _place(holder: Any, name: str, wrapper: Callable[..., Any]) -> None:
    _replaced.append((holder, name, vars(holder)[name]))
    setattr(holder, name, wrapper)


@lru_cache(maxsize=1)
def _homes(loaded: tuple[int, str]) -> tuple[tuple[str, str, Read], ...]:
    """(module, name, how its arguments are read) of every function that may be there.

    Kernels from the Hub bring flash_attn's interface along under a name of their own. Of a function of the same name
    anywhere else nothing is known. ``loaded``: what ``_loaded`` says of them.
    """
    del loaded
    found = list(_FUNCTIONS)
    for module in list(sys.modules):
        if module.rpartition(".")[2] == "flash_attn_interface" or module == "flash_attn.cute.interface":
            found += [(module, name, read) for name, read in _FLASH]
    return tuple(found)


def _modules_now() -> tuple[int, str]:
    """How many Python modules are loaded, and which one last: another where one was added or taken away."""
    return len(sys.modules), next(reversed(sys.modules), "")


_SETTLED = frozenset((*sys.stdlib_module_names, *re.findall(r"\w+", "torch numpy sympy mpmath triton")))
"""Packages with thousands of modules, which are given no names after they are loaded."""


class _Holders:
    """Which Python modules hold these functions, under which names.

    A module is searched again when it is another object, or holds more or fewer names than before: those of
    ``_SETTLED`` only when other modules are loaded. The module ``__main__``, of a notebook say, is always searched:
    there, names are given to other things all the time.
    """

    def __init__(self) -> None:
        self._functions: frozenset[int] = frozenset()
        self._loaded = (0, "")
        self._known: dict[str, tuple[Any, dict[str, Any], int, tuple[str, ...]]] = {}
        """Name of a module -> itself, its names, how many they were, and those of the functions."""
        self._changing: list[tuple[str, Any, dict[str, Any], int]] = []
        """The same of modules that may be given names."""
        self._found: list[tuple[Any, str]] = []

    def __call__(self, functions: frozenset[int]) -> list[tuple[Any, str]]:
        if functions != self._functions or not self._is_unchanged():
            self._search_all(functions)
        main = sys.modules.get("__main__")
        return [*self._found, *((main, name) for name in self._names_in(getattr(main, "__dict__", {})))]

    def _is_unchanged(self) -> bool:
        """Whether these are the modules of the last search, with as many names. A sampled step asks it."""
        modules = sys.modules
        return _modules_now() == self._loaded and all(
            modules.get(module) is holder and len(names) == size for module, holder, names, size in self._changing
        )

    def _search_all(self, functions: frozenset[int]) -> None:
        before = self._known if functions == self._functions else {}
        self._functions, self._known, self._loaded = functions, {}, _modules_now()
        for module, holder in list(sys.modules.items()):
            names = getattr(holder, "__dict__", None)
            if isinstance(names, dict) and module != "__main__":
                known = before.get(module)
                if known is None or known[0] is not holder or known[2] != len(names):
                    known = (holder, names, len(names), self._names_in(names))
                self._known[module] = known
        self._changing = [
            (module, *known[:3]) for module, known in self._known.items() if module.partition(".")[0] not in _SETTLED
        ]
        self._found = [(holder, name) for holder, _, _, held in self._known.values() for name in held]

    def _names_in(self, names: dict[str, Any]) -> tuple[str, ...]:
        return tuple(name for name, value in list(names.items()) if id(value) in self._functions)


_holders = _Holders()


@lru_cache(maxsize=64)
def _reporting(function: Callable[..., Any], read: Read) -> Callable[..., Any]:
    def reader(module: nn.Module, *args: Any, **kwargs: Any) -> AttentionCall:
        return read(NamedArguments(module, function, args, kwargs))

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        return beside(function, args, kwargs, lambda _: report(reader, args, kwargs))

    return wrapper
