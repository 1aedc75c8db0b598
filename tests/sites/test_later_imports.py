"""Functions that modules come to hold after an earlier watch, in a later cell of a notebook say, are seen."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as flex
import torch.nn.functional as F
from torch import Tensor, nn

import attemper
from attemper.sites import package_functions
from tests.sites.own_models import Own
from tests.sites.test_package_functions import close, entropies, expected, installed


class Notebook(nn.Module):
    """Calls flex_attention under the name that a module holds, or that a module comes to hold later."""

    def __init__(self, module: ModuleType) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Any:
        # Eager FlexAttention on a CPU has no gradient.
        with torch.no_grad():
            return getattr(self.module, "flex_attention", F.scaled_dot_product_attention)(x, x, x)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize(("home", "rebound"), [("__main__", False), ("__main__", True), ("a_module_of_mine", False)])
def test_what_is_imported_after_an_earlier_watch_is_seen(
    home: str, rebound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules["__main__"] if home == "__main__" else installed(monkeypatch, home)
    if rebound:
        monkeypatch.setattr(module, "flex_attention", F.scaled_dot_product_attention, raising=False)
    x = torch.randn(2, 4, 9, 8)
    for _ in range(2):  # the first pass may still import something, after which everything is looked through anyway
        with attemper.watch(Own()) as watch:
            watch.model(torch.randn(1, 3, 32))
    monkeypatch.setattr(module, "flex_attention", flex.flex_attention, raising=False)
    close(entropies(Notebook(module), x), expected(x.transpose(1, 2), x.transpose(1, 2)))
    assert module.flex_attention is flex.flex_attention


def test_modules_that_hold_what_they_held_are_not_looked_through_again() -> None:
    class Counted(dict[str, Any]):
        looked = 0

        def items(self) -> Any:
            Counted.looked += 1
            return super().items()

    class Holder:
        def __init__(self) -> None:
            self.__dict__ = Counted(flex_attention=flex.flex_attention)

    holder, holders = Holder(), package_functions._Holders()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "a_module_of_mine", holder)
        for _ in range(3):
            assert (holder, "flex_attention") in holders(frozenset((id(flex.flex_attention),)))
        assert Counted.looked == 1
        holder.__dict__["another"] = flex.flex_attention
        assert (holder, "another") in holders(frozenset((id(flex.flex_attention),)))
        assert Counted.looked == 2
    assert holder not in [found for found, _ in holders(frozenset((id(flex.flex_attention),)))]
