"""An oracle for "nothing is missed": which modules mix tokens, found by changing one token, and the weights of eager
attention by module.

It knows no classes and no names: whatever lets one token change another's output mixes tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

Call = tuple[tuple[Any, ...], dict[str, Any]]


def mixing_modules(model: nn.Module, batch: Mapping[str, Any]) -> set[str]:
    """Names of the innermost modules, layers of torch aside, in which a token changes the output of another."""
    calls: dict[str, Call] = {}

    def keep(name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.setdefault(name, (args, kwargs))

        return hook

    modules = {name: part for name, part in model.named_modules() if not _is_of_torch(part)}
    with ExitStack() as hooks, torch.no_grad():
        for name, part in modules.items():
            hooks.callback(part.register_forward_pre_hook(keep(name), with_kwargs=True).remove)
        model(**batch)
    with torch.no_grad():
        found = {name for name, call in calls.items() if _mixes(modules[name], call)}
    return {name for name in found if not any(holds(name, other) and name != other for other in found)}


def holds(outer: str, inner: str) -> bool:
    """Whether a module of one name is, or holds, that of the other."""
    return not outer or inner == outer or inner.startswith(f"{outer}.")


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.") and not isinstance(module, nn.MultiheadAttention)


def _mixes(module: nn.Module, call: Call) -> bool:
    args, kwargs = call
    name = next((key for key, value in kwargs.items() if _is_sequence(value)), None)
    place = next((number for number, value in enumerate(args) if _is_sequence(value)), None)
    if place is None and name is None:
        return False
    given = args[place] if place is not None else kwargs[name or ""]
    tokens = given.shape[-2]
    changed = given.clone()
    changed[..., tokens // 2, :] += torch.randn_like(changed[..., tokens // 2, :])

    def run(sequence: Tensor) -> Tensor | None:
        # One tensor may be given several times: as queries, keys and values of nn.MultiheadAttention.
        other = tuple(sequence if value is given else value for value in args)
        named = {key: sequence if value is given else value for key, value in kwargs.items()}
        return _first(module(*other, **named))

    one, two = run(given), run(changed)
    if one is None or two is None or one.shape != two.shape:
        return False
    lead = given.shape[:-1]
    if one.shape[:1] == (lead.numel(),):
        one, two = one.view(*lead, -1), two.view(*lead, -1)  # a router's
    if one.shape[: len(lead)] != lead:
        return one.shape[:-1] == lead[:-1] and not torch.equal(one, two)  # pooled
    others = [row for row in range(tokens) if row != tokens // 2]
    axis = given.dim() - 2
    before, after = (part.index_select(axis, torch.tensor(others)).double() for part in (one, two))
    return bool((before - after).abs().max() > 1e-6 * before.abs().max())


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() in (2, 3) and value.shape[-2] > 1


def _first(result: Any) -> Tensor | None:
    parts = result if isinstance(result, (tuple, list)) else list(result.values()) if isinstance(result, dict) else []
    return result if isinstance(result, Tensor) else next((part for part in parts if isinstance(part, Tensor)), None)


@contextmanager
def eager_weights(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Weights [B, H, Q, K] of every call, by the name of the module that attends, as eager attention returns them.

    Of nn.MultiheadAttention, what it returns where it is asked for them.
    """
    found: dict[str, list[Tensor]] = {}
    names = {module: name for name, module in model.named_modules()}

    def spy(plain: Any) -> Any:
        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            result = plain(module, *args, **kwargs)
            found.setdefault(names[module], []).append(result[1])
            return result

        return forward

    def ask(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> None:
            given = kwargs | {"need_weights": True, "average_attn_weights": False}
            found.setdefault(name, []).append(type(module).forward(module, *args, **given)[1])

        return hook

    files = {sys.modules[type(module).__module__] for module in names}
    with ExitStack() as stack:
        for file in files:
            for name in ("eager_attention_forward", "simple_eager_attention_forward"):
                if (plain := getattr(file, name, None)) is not None:
                    stack.callback(setattr, file, name, plain)
                    setattr(file, name, spy(plain))
        for module, name in names.items():
            if isinstance(module, nn.MultiheadAttention):
                handle = module.register_forward_hook(ask(name), with_kwargs=True)
                stack.callback(handle.remove)
        yield found
