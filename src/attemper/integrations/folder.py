"""``attemper.load``: a tempered model from the folder that its ``save_pretrained`` wrote."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn

from attemper.control.saved_model import FIELD, is_tempered, parts_in
from attemper.control.temper import Tempered
from attemper.errors import InputError, needs
from attemper.file_schema import read_foreign
from attemper.integrations.checkpoint import check_folder
from attemper.integrations.hub import quiet, refusal
from attemper.nn.normalizers import Normalizer
from attemper.nn.temperature import Temperature
from attemper.sites.find import Site, call_site, chosen_sites
from attemper.sites.names import class_name


def load(folder: str | os.PathLike[str], cls: Any = None) -> Any:
    """Loads the model in a folder with its temperatures and normalizers, in evaluation mode.

    While :func:`attemper.temper` (or a ``Thermostat``) stands on a model, its ``save_pretrained`` writes
    ``attemper.json`` and ``attemper.safetensors`` beside the weights, in checkpoints of ``Trainer`` too, and a field
    ``attemper`` into config.json. transformers' own ``from_pretrained`` reads such a folder without them, and gives
    softmax at temperature 1 back.

    ::

        handle = attemper.temper(model, temperature=attemper.nn.LearnedTemperature(8))
        ...
        model.save_pretrained("tempered")
        model = attemper.load("tempered")

    Args:
        folder: on this machine; weights in safetensors. No code of it runs.
        cls: a class with ``from_pretrained``, such as ``AutoModelForSequenceClassification``; None for the one that
            config.json names, of those of transformers.

    Returns:
        The model. What is learned is among its parameters. A model that was not tempered comes as it is.

    Raises:
        InputError: there is no model in the folder, its files are damaged or contradict each other, they name what is
            not attemper's or not transformers', or the class has not the sites that the folder names.
        MissingExtraError: ``cls`` is None and transformers is not installed.
    """
    path = Path(folder)
    if not path.is_dir():
        raise InputError(f"attemper.load(folder): there is no folder {str(folder)!r}.")
    model = model_of(str(path)) if cls is None else _by_class(path, cls)
    restore(model, path)
    return model


def _by_class(folder: Path, cls: Any) -> nn.Module:
    make = getattr(cls, "from_pretrained", None)
    if not callable(make):
        raise InputError(f"attemper.load(cls=...) must be a class with from_pretrained, got {cls!r:.80}.")
    module = str(getattr(cls, "__module__", ""))
    if module.split(".")[0] == "transformers":
        return model_of(str(folder), cls)
    model = make(str(folder))
    if not isinstance(model, nn.Module):
        raise InputError(f"attemper.load(cls=...): {cls.__name__}.from_pretrained gave a {type(model).__name__}.")
    return model.eval()


def model_of(folder: str, cls: Any = None) -> Any:
    """The model in a folder, in evaluation mode, by a class of transformers; None for the one that its config names."""
    check_folder(folder)
    with needs("Loading a pretrained model", "transformers", "transformers"):
        import transformers
    with quiet(transformers):
        kind = _class_of_config(transformers, folder)
        own = cls or kind
        if own is None:
            raise InputError(f"{folder}: config.json names no class of transformers. Pass cls=.")
        # Never what a config names: it could name a kernel of the hub.
        implementation = "sdpa" if getattr(kind, "_supports_sdpa", False) else "eager"
        model, info = read_model(own, folder, attn_implementation=implementation)
    missing = sorted(info["missing_keys"])
    if missing:
        raise InputError(f"{folder} is a broken checkpoint: it lacks {missing[0]}, the first of {len(missing)} in all.")
    if hasattr(model.config, FIELD):
        delattr(model.config, FIELD)
    return model.eval()


def read_model(cls: Any, source: str, **options: Any) -> tuple[Any, dict[str, Any]]:
    """A model by a class of transformers, and what it says of its loading. No pickle is opened, no code of a folder
    runs, and none is completed from the network.
    """
    try:
        return cls.from_pretrained(
            source,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=os.path.isdir(source),
            output_loading_info=True,
            **options,
        )
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, SafetensorError, ... for one cause
        raise InputError(refusal(source, error)) from error


def _class_of_config(transformers: Any, folder: str) -> Any:
    """The class of transformers that a config names as its first; None if it is none of theirs."""
    names = read_foreign(Path(folder) / "config.json").get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    found = getattr(transformers, name, None) if isinstance(name, str) and name.isidentifier() else None
    return found if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel) else None


def restore(model: nn.Module, folder: str | Path) -> tuple[Tempered, ...]:
    """Gives a model what ``save_pretrained`` wrote of its temperatures and normalizers; one handle for all of them, or
    more where a site has several temperatures. Nothing where the folder holds no tempered model.
    """
    folder = Path(folder)
    if not is_tempered(folder):
        return ()
    sites = {site.name: site for site in chosen_sites("attemper.load", model, None)}
    here = {_own_name(model, name, sites): parts for name, parts in parts_in(folder).items()}
    normalizers = {name: parts[-1] for name, parts in here.items() if isinstance(parts[-1], Normalizer)}
    each = {name: [part for part in parts if isinstance(part, Temperature)] for name, parts in here.items()}
    handles = []
    for level in range(max([1, *(len(parts) for parts in each.values())])):
        those = {name: parts[level] for name, parts in each.items() if len(parts) > level}
        handles.append(Tempered(model, list(sites.values()), those, normalizers if level == 0 else None))
    return tuple(handles)


def _own_name(model: nn.Module, name: str, sites: dict[str, Site]) -> str:
    """A site's name in this model, which may be the body of the one that was saved, or have it as its body. A single
    call is added to ``sites``.
    """
    prefix = f"{getattr(model, 'base_model_prefix', '') or ''}."
    for own in (name, f"{prefix}{name}", name.removeprefix(prefix)):
        if own not in sites and (call := call_site(own, sites.values())) is not None:
            sites[own] = call
        if own in sites:
            return own
    raise InputError(
        f"attemper.load: {class_name(model)} has no attention {name!r:.120}, which the folder names. Its own: "
        f"{', '.join(list(sites)[:8])}. Pass cls=, the class that was saved."
    )
