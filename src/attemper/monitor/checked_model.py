"""The model that is read: whether it can be, what it is called, where it came from, what kind of attention it has."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, is_dataclass
from functools import cache
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor, nn

from attemper import __version__
from attemper.backends.contract import UNBOUNDED, Problem
from attemper.errors import InputError
from attemper.readings.labels import by_reason
from attemper.readings.reading import SiteReading, Skipped
from attemper.sites.actions import modules_with_normalizer
from attemper.sites.declared import config_of_layer
from attemper.sites.mixers import UNREAD
from attemper.sites.names import SCRIPTED, class_name, is_script, unwrap
from attemper.text import call_of, clean, count, cut, first_of

ADVICE = (
    "Seen are transformers models, calls of F.scaled_dot_product_attention, nn.MultiheadAttention, FlexAttention, "
    "and softmax by hand, none of them inside code that torch.compile has compiled. Anywhere else, put "
    "attemper.tap(query, key, name=...) beside the attention, or measure it with "
    "attemper.attention_statistics(query, key)."
)
"""Where a model ran and no attention was seen."""
NOT_RUN = (
    "watch has sampled nothing yet: run the model inside `with attemper.watch(model)` first. If you run what "
    "torch.compile or a wrapper made of it, or another object, such as a deep copy, watch that; "
    "if torch.compile made one function of a whole training step, compile the model in it instead, or use attemper.tap."
)
NOT_TRAINED = "no forward pass ran in training mode, and no other is read: call model.train() before it."
MOST_LINES = 12
"""Of the reasons why parts of a model were not measured, in one message."""
_COMMIT = re.compile(r"[0-9a-f]{7,64}")


def check_model(where: str, model: Any) -> None:
    """Refuses what cannot be read."""
    if not isinstance(model, nn.Module):
        load = " Load it first, with AutoModel.from_pretrained of transformers." if isinstance(model, str) else ""
        raise InputError(f"{where}(model) must be a torch.nn.Module, got {type(model).__name__}.{load}")
    if is_script(model):
        raise InputError(f"{where}({type(model).__name__}): {SCRIPTED}.")


def check_batch(where: str, batch: Any) -> None:
    if not isinstance(batch, Mapping | tuple | list | Tensor):
        raise InputError(
            f"{where}(batch) must be a dict (model(**batch)), a tuple or list (model(*batch)) or a tensor "
            f"(model(batch)), got {type(batch).__name__}."
        )


def why_not_loaded(model: nn.Module) -> str | None:
    """What to say of a failed pass of a model with weights on the meta device; None where it has none, and where
    accelerate loads them layer by layer.
    """
    name = next((name for name, part in model.named_parameters() if part.is_meta), None)
    if name is None or any("_hf_hook" in vars(module) for module in model.modules()):
        return None
    return (
        f"{class_name(unwrap(model))} is not loaded: its weights are on the meta device and hold no numbers "
        f"({clean(name)}). Load it with from_pretrained, or with to_empty(device=...) and load_state_dict"
    )


@contextmanager
def explanation(where: str, model: nn.Module) -> Iterator[None]:
    """A block that runs a model, and says where it fails because the model is not loaded."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        if (why := why_not_loaded(model)) is None:
            raise
        raise InputError(f"{where}: {why}.") from error


def device_of(model: nn.Module) -> torch.device | None:
    parameter = next(model.parameters(), None)
    return None if parameter is None else parameter.device


def why_nothing(where: str, model: nn.Module, skipped: Iterable[Skipped], hint: str = "") -> str:
    """What to say of a model in which no attention was seen."""
    skipped = tuple(skipped)
    pairs = [(one.name, one.reason) for one in skipped]
    if skipped and all(one.kind not in (None, UNREAD) for one in skipped):
        return (
            f"{where} saw no attention in {class_name(unwrap(model))}, and there is none to measure: its layers mix "
            f"tokens without weights over keys.{_lines(by_reason(pairs))}"
        )
    unread = " that it can read" if pairs else ""
    return f"{where} saw no attention in {class_name(unwrap(model))}{unread}.{hint} {ADVICE}{_lines(pairs)}"


def why_not_all(model: nn.Module, skipped: Mapping[str, str]) -> str:
    """What to say of a model of which some parts, by name, were not measured, and why."""
    lines = [f"{clean(name)}: {cut(clean(reason), 200)}" for name, reason in by_reason(skipped.items())]
    told = first_of(lines, MOST_LINES, "\n  ")
    parts, were = count(len(skipped), "part"), "was" if len(skipped) == 1 else "were"
    return f"{parts} of {class_name(unwrap(model))} {were} not measured:\n  {told}"


def _lines(pairs: Iterable[tuple[str, str]]) -> str:
    return "".join(f"\n  {name}: {reason}" for name, reason in pairs)


def unseen_normalizers(model: nn.Module, sites: Iterable[SiteReading]) -> tuple[Skipped, ...]:
    """What no tap shows inside compiled code, where only taps are seen, and a tap measures softmax."""
    seen = {call_of(site.name)[0] for site in sites}
    reason = "temper gave it another normalizer than softmax, and no tap measures that inside compiled code"
    return tuple(Skipped(name, reason) for name in modules_with_normalizer(model) if name not in seen)


def provenance(model: nn.Module, date: str | None, queries: Iterable[torch.dtype] = ()) -> dict[str, Any]:
    """Fields of ``Reading``, without text or paths: ``date``, ``dtype``, ``revision`` and ``versions``. ``queries``:
    types of queries that were seen.
    """
    commit = getattr(getattr(unwrap(model), "config", None), "_commit_hash", None)
    weights = (part.dtype for part in model.parameters() if part.dtype.is_floating_point)
    dtypes = dict.fromkeys((*weights, *queries))
    return {
        "date": date,
        "dtype": ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes) or None,
        "revision": commit if isinstance(commit, str) and _COMMIT.fullmatch(commit) else None,
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Of attemper, Python, torch, and of transformers where it is loaded."""
    loaded = {"transformers": sys.modules["transformers"].__version__} if "transformers" in sys.modules else {}
    own = {"attemper": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    return own | loaded


@cache
def processor() -> str:
    """Its name, and the family and model by which Linux tells apart what shares a name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    name = fields.get("model name", platform.machine())
    parts = [f"{part} {fields[key]}" for part, key in (("family", "cpu family"), ("model", "model")) if key in fields]
    return f"{name} ({', '.join(parts)})" if parts else name


def computed_on(device: torch.device | None) -> str:
    """What the last bits of a reading depend on: the processor, the threads and the version of torch."""
    if device is not None and device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    threads = torch.get_num_threads()
    kind = "" if device is None or device.type == "cpu" else f"{device.type} of "
    set_up = torch.backends.cpu.get_cpu_capability(), count(threads, "thread"), f"torch {torch.__version__}"
    return f"{kind}{processor()}, {', '.join(set_up)}"


_SAMPLED = 1024
"""Elements of a tensor that ``hash_of`` reads at most."""


def hash_of(model: nn.Module, *, buffers: bool = True) -> str:
    """A digest that tells a model from another one, or from itself retrained, in milliseconds.

    It is over the name, shape and type of every parameter and buffer, and over at most 1,024 of its elements, evenly
    spaced. A change of a few single weights may go unnoticed. Of a tensor without values here (on the meta device, say
    offloaded to disk) only name, shape and type count. Without ``buffers`` it is over parameters alone, which ranks of
    data-parallel training share.
    """
    digest = hashlib.blake2b(digest_size=16)
    samples = []
    for name, tensor in (*model.named_parameters(), *(model.named_buffers() if buffers else ())):
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype};".encode("utf-8", "surrogatepass"))
        # Of a DTensor, the values of this process.
        local = getattr(tensor, "_local_tensor", tensor)
        if not local.is_meta and local.numel():
            samples.append(_sample(local))
    for name, part in model.named_modules():
        if type(part).__module__.startswith("attemper.nn."):
            digest.update(f"{name} {part!r};".encode("utf-8", "surrogatepass"))
    for sample in _to_host(samples):
        digest.update(bytes(sample.numpy()))
    return digest.hexdigest()


def _to_host(samples: list[Tensor]) -> list[Tensor]:
    """The bytes of each, by one copy for each type on each device."""
    kinds = [(sample.device, sample.dtype) for sample in samples]
    alike = {kind: [sample for sample, own in zip(samples, kinds, strict=True) if own == kind] for kind in set(kinds)}
    copies = {}
    for kind, several in alike.items():
        together = torch.cat(several).cpu().view(torch.uint8)
        copies[kind] = iter(together.split([sample.numel() * sample.element_size() for sample in several]))
    return [next(copies[kind]) for kind in kinds]


def _sample(tensor: Tensor) -> Tensor:
    """At most ``_SAMPLED`` elements of a tensor, evenly spaced."""
    flat = tensor.detach()
    flat = flat.view(-1) if flat.is_contiguous() else flat.flatten()
    return flat if len(flat) <= _SAMPLED else flat[:: -(-len(flat) // _SAMPLED)]


def configuration(model: nn.Module) -> dict[str, Any] | None:
    """The configuration of a model, without the paths that it was loaded from; None where it has none."""
    config = getattr(unwrap(model), "config", None)
    found: Any = None
    with suppress(Exception):  # code of the model
        if hasattr(config, "to_dict"):
            found = config.to_dict()  # type: ignore[union-attr]
        elif is_dataclass(config) and not isinstance(config, type):
            found = asdict(config)
        elif isinstance(config, Mapping):
            found = dict(config)
    if not isinstance(found, dict):
        return None
    return {str(name): value for name, value in found.items() if not str(name).endswith("path")}


def title(model: nn.Module) -> str:
    """The class of a model and where it was loaded from: a hub id, or the last two names of a folder."""
    model = unwrap(model)
    source = str(getattr(getattr(model, "config", None), "_name_or_path", None) or "")
    if os.path.isabs(source) or source.startswith("~"):
        source = "/".join(part for part in PurePath(source).parts[-2:] if part != PurePath(source).anchor)
    return f"{class_name(model)} {source}".strip()


_LATENT = ("kv_a_proj_with_mqa", "kv_b_proj", "kv_lora_rank")
"""Parts of multi-head latent attention, by the names that DeepSeek gave them."""
_LOCAL = ("sliding_attention", "chunked_attention", "local_attention")
"""Entries of ``config.layer_types``."""


def attention_type(module: nn.Module, kind: str, problem: Problem) -> str:
    """One of ``ATTENTIONS``, the first that holds: cross, sparse, mla, window, sink, full."""
    if kind == "cross":
        return "cross"
    if _has(module, "indexer"):  # it chooses the keys that the others see
        return "sparse"
    if any(_has(module, name) for name in _LATENT):
        return "mla"
    if problem.left < UNBOUNDED or 0 < problem.right < UNBOUNDED or _is_local(module):
        return "window"
    return "full" if problem.sink is None else "sink"


def _has(module: nn.Module, name: str) -> bool:
    return getattr(module, name, None) is not None


def _is_local(module: nn.Module) -> bool:
    """Whether a layer of transformers attends within a window, as itself or its configuration says: it is in the mask
    of a call, where nobody sees it.
    """
    if hasattr(module, "sliding_window"):
        return bool(module.sliding_window)
    config = config_of_layer(module)
    layer, layers = getattr(module, "layer_idx", None), getattr(config, "layer_types", None)
    if isinstance(layer, int) and isinstance(layers, list | tuple) and 0 <= layer < len(layers):
        return layers[layer] in _LOCAL
    return bool(getattr(config, "sliding_window", None)) and bool(getattr(config, "use_sliding_window", True))
