"""Why a model could not be loaded, in one sentence that says what to do: transformers and the hub raise many errors for
few causes, some of them pages long.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from attemper.checks import did_you_mean
from attemper.text import clean_name

LOAD_IT_YOURSELF = "load it from Python yourself and call attemper.scan(model, batches)"


def on_hub(source: str) -> bool:
    """Whether ``source`` can only mean a model of the hub: it is neither there as a file or folder nor a path."""
    return not os.path.exists(source) and not source.startswith((".", "/", "~")) and source.count("/") < 2


def asks_hub(source: str) -> bool:
    """Whether the hub is asked where ``source`` is loaded: not where its own variables forbid it."""
    offline = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return on_hub(source) and offline.upper() not in {"1", "ON", "YES", "TRUE"}


def refusal(source: str, error: BaseException) -> str:
    links = list(_chain(error))
    kinds = {kind.__name__ for link in links for kind in type(link).__mro__}
    text = " ".join(map(str, links))
    name = clean_name(source)
    if on_hub(source):
        reason = _of_hub(name, source, kinds, text)
        if reason is not None:
            return reason
    return _of_model(name, kinds, text) or f"{name} could not be loaded as a model: {first_line(error)}"


def _of_hub(name: str, source: str, kinds: set[str], text: str) -> str | None:
    if "GatedRepoError" in kinds or "gated repo" in text:
        return (
            f"{name} is a gated model: ask for access at https://huggingface.co/{name}, log in with `hf auth login` "
            "(or set HF_TOKEN), and call this again."
        )
    if "RepositoryNotFoundError" in kinds or "not a valid model identifier" in text:
        return (
            f"{name} is neither a folder here nor a model on the Hugging Face hub. Check the spelling; a private model "
            f"needs `hf auth login` (or HF_TOKEN).{near_folder(source)}"
        )
    if "HFValidationError" in kinds:
        return (
            f"{name} is not a folder here, and not a valid name of a model on the Hugging Face hub. Give a folder or "
            f"a name such as organisation/model.{near_folder(source)}"
        )
    if {"OfflineModeIsEnabled", "LocalEntryNotFoundError"} & kinds or "onnect" in text:
        return _offline(name, source)
    return None


def _offline(name: str, source: str) -> str:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return (
            f"{name} is not a folder here, HF_HUB_OFFLINE is set, and the cache has no complete copy of this "
            f"model: unset HF_HUB_OFFLINE, or fetch it first with `hf download {name}`.{near_folder(source)}"
        )
    return (
        f"{name} is not a folder here, and the Hugging Face hub could not be reached: check the network, or give the "
        f"folder of a model.{near_folder(source)}"
    )


def _of_model(name: str, kinds: set[str], text: str) -> str | None:
    if "trust_remote_code" in text or "custom code" in text:
        return (
            f"{name} needs custom code (auto_map in its config.json), and attemper runs no code that comes with "
            f"a model. If you trust it, load it from Python with trust_remote_code=True and call "
            f"attemper.scan(model, batches)."
        )
    if "does not recognize this architecture" in text or "Unrecognized model" in text:
        return (
            f"{name} is of an architecture that this version of transformers does not know: "
            f"pip install -U transformers, or {LOAD_IT_YOURSELF}."
        )
    if "does not appear to have a file named" in text and "config.json" in text.partition("file named")[2][:20]:
        return (
            f"{name} has no config.json, so it is not a transformers model: repositories of GGUF files, adapters and "
            "data sets have none. Give the model that it was made from."
        )
    if "does not appear to have a file named" in text and "safetensors" in text:
        return (
            f"{name} has no safetensors weights, and pickled ones can run code when they are opened. Convert them in "
            "an environment you trust: model.save_pretrained(folder) writes safetensors; then give that folder."
        )
    return None


def near_folder(source: str) -> str:
    """A folder beside it with a name much like it."""
    path = Path(source)
    try:
        names = [entry.name for entry in os.scandir(path.parent) if entry.is_dir()]
    except OSError:
        return ""
    return did_you_mean(path.name, names)


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def first_line(error: BaseException) -> str:
    """What an error says in its first line, or its kind if it says nothing."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """No progress bars, warnings and reports of retries inside the block; the settings are restored after it."""
    from huggingface_hub.utils import logging as hub_logging

    logging = transformers.utils.logging
    with ExitStack() as stack:
        for log in (logging, hub_logging):
            stack.callback(log.set_verbosity, log.get_verbosity())
            log.set_verbosity_error()
        if logging.is_progress_bar_enabled():
            stack.callback(logging.enable_progress_bar)
        logging.disable_progress_bar()
        yield
