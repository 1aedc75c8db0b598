"""Forward passes of a whole model that a collector sees all attention of, with everything put back afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from attemper.errors import InputError
from attemper.monitor.attention_order import AttentionOrder
from attemper.monitor.collector import Collector
from attemper.sites import package_functions
from attemper.sites import transformers as registry
from attemper.sites.names import COMPILED, SCRIPTED, compiled_parts, names_of
from attemper.sites.observation import observing
from attemper.sites.padding import tracking
from attemper.sites.ways import reading


@contextmanager
def observation(model: nn.Module, collector: Collector) -> Iterator[None]:
    """Masks and cross attention are followed, compiled code runs as it was written."""
    with ExitStack() as stack:
        stack.enter_context(tracking(collector.context, model, registry.pretrained_models(model)))
        # Python modules are searched for attention functions once, not for each batch.
        stack.enter_context(package_functions.reading(model))
        unseen = compiled_parts(names_of(model))
        if COMPILED in unseen.values():
            # Nothing can look into compiled code; run as it was written it computes the same.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        collector.refuse({name: reason for name, reason in unseen.items() if reason == SCRIPTED})
        collector.refuse(registry.outside_registry(model))
        yield


def run(where: str, model: nn.Module, batch: Any, collector: Collector, order: AttentionOrder | None = None) -> None:
    """One batch.

    Args:
        order: ends the pass behind its last attention where that is safe; None: it runs whole.

    Raises:
        InputError: the batch is no dict, tuple, list or tensor; ``where`` stands before the message.
    """
    while True:
        collector.begin()
        ending = nullcontext() if order is None else order.one_pass(batch)
        with torch.no_grad(), observing(collector), ending, reading(model):
            _call(where, model, batch)
        if order is None or order.intact:
            collector.commit()
            return


def _call(where: str, model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple | list):
        return model(*batch)
    if isinstance(batch, Tensor):
        return model(batch)
    read = " Text is tokenized first: tokenizer([text], return_tensors='pt')." if isinstance(batch, str) else ""
    raise InputError(
        f"{where} is {type(batch).__name__}; expected a dict (model(**batch)), a tuple or list (model(*batch)) or a "
        f"tensor (model(batch)).{read}"
    )
