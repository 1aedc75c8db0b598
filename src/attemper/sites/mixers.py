"""Layers that mix tokens without attention weights, and modules whose name says attention where none was seen.

A hybrid model attends in some of its layers only. The others are told by what their code uses, by their parameters and
by the layers inside them, never by the name of a model.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache

from torch import nn

from attemper.sites.find import entry_of, used_names
from attemper.sites.names import Names, is_within, own_class

UNREAD = "no softmax"
"""The kind of a module whose name says attention and in which no call was seen."""


@dataclass(frozen=True)
class Mixing:
    """One way of mixing tokens."""

    kind: str
    names: str = "(?!)"
    """A pattern in the names that the code of a module uses."""
    classes: str = "(?!)"
    """A pattern in the name of its class."""
    parameters: frozenset[str] = frozenset()
    """Names of parameters of its own, all of which it has."""
    layers: tuple[type[nn.Module], ...] = ()
    """Layers of torch, one of which it holds."""
    depthwise: bool = False
    """Whether it holds a convolution over tokens, channel by channel."""

    def is_in_code(self, kind: type[nn.Module]) -> bool:
        """Whether the name of a class, or a name in its code, tells this mixing."""
        names = used_names(kind)
        return bool(re.search(self.classes, kind.__name__)) or any(re.search(self.names, name) for name in names)

    def is_held_by(self, module: nn.Module) -> bool:
        """Whether a module's own parameters, or the layers inside it, tell this mixing."""
        return bool(
            (self.parameters and self.parameters <= module._parameters.keys())
            or (self.layers and any(isinstance(child, self.layers) for child in module.children()))
            or (self.depthwise and any(map(_is_depthwise, module.children())))
        )


MIXINGS = (
    Mixing("delta rule", names="delta_(rule|attention)"),
    Mixing(
        "state space",
        names="selective_scan|selective_state|chunk_scan|ssm_state",
        parameters=frozenset(("A_log", "D")),
    ),
    Mixing("linear attention", names="linear_attention", classes="Lightning|LinearAttention$"),
    Mixing("recurrence", names="rnn_scan|[ms]lstm", layers=(nn.RNNBase,)),
    Mixing("Fourier transform", names="fourier_transform|^fftn?$"),
    Mixing("convolution", names="causal_conv1d", depthwise=True),
)
"""The first that holds counts: layers of the first kinds have a convolution inside."""

_NAMED_ATTENTION = re.compile(r"(attention|attn)_?([1-9n]d|v?\d+)?$", re.IGNORECASE)
_KINDS = tuple(mixing.kind for mixing in MIXINGS)


@lru_cache(maxsize=4096)
def _kinds_in_code(kind: type[nn.Module]) -> frozenset[str]:
    return frozenset(mixing.kind for mixing in MIXINGS if mixing.is_in_code(kind))


def _kind_of(module: nn.Module) -> str | None:
    """How a module mixes tokens; None if it does not, or in a way that is not known here."""
    in_code = _kinds_in_code(own_class(module))
    return next((mixing.kind for mixing in MIXINGS if mixing.kind in in_code or mixing.is_held_by(module)), None)


def _is_depthwise(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv1d) and 1 < module.groups == module.in_channels and module.kernel_size[0] > 1


class Mixers:
    """The modules of a model that mix tokens without attention weights, and those whose name says attention."""

    def __init__(self, names: Names) -> None:
        own = {module: name for module, name in names.items() if not own_class(module).__module__.startswith("torch.")}
        attends = [name for module, name in own.items() if entry_of(module) is not None]
        self._kinds: dict[nn.Module, str] = {}
        for module, name in own.items():
            if not any(is_within(other, name) or is_within(name, other) for other in attends):
                kind = _kind_of(module)
                if kind is not None:
                    self._kinds[module] = kind
        self._names = own
        self._outermost()
        root = next(iter(names.values()), "")
        self._named = {
            module: "" if name == root else name  # the model itself holds every call, whatever it is called
            for module, name in own.items()
            if _NAMED_ATTENTION.search(own_class(module).__name__)
        }

    def _outermost(self) -> None:
        """Keeps the outermost of those that lie in one another, as the first kind of all."""
        found = dict(self._kinds)
        self._kinds = {}
        for module in found:
            name = self._names[module]
            if any(is_within(name, self._names[outer]) for outer in self._kinds):
                continue
            inside = [kind for inner, kind in found.items() if is_within(self._names[inner], name)]
            self._kinds[module] = min(inside, key=_KINDS.index)

    def unread(self, ran: Collection[nn.Module], called: Collection[str]) -> Mapping[str, str]:
        """Name -> kind of the modules that ran in a pass and have no weights to read, in the order of the model.

        Args:
            ran: modules whose forward ran.
            called: names of modules in which an attention call was seen, measured or not.
        """
        found = dict(self._kinds)
        mixers = [self._names[module] for module in found]
        silent = {module: name for module, name in self._named.items() if not any(is_within(c, name) for c in called)}
        for module, name in silent.items():
            inner = any(other is not module and is_within(below, name) for other, below in silent.items())
            if not inner and not any(is_within(name, mixer) or is_within(mixer, name) for mixer in mixers):
                found[module] = UNREAD
        return {name: found[module] for module, name in self._names.items() if module in found and module in ran}

    def all_attend(self, ran: Collection[nn.Module], called: Collection[str]) -> bool:
        """Whether every module whose name says attention ran and was seen to attend, and no other mixes tokens."""
        return not self._kinds and all(module in ran for module in self._named) and not self.unread(ran, called)
