"""``attemper.load``: a tempered model from the folder that its ``save_pretrained`` wrote."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn

from attemper.control.temper import restored
from attemper.errors import InputError
from attemper.integrations import pretrained


def load(folder: str | os.PathLike[str], cls: Any = None) -> Any:
    """The model of a folder with its temperatures and normalizers, in evaluation mode.

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
    model = pretrained.model_of(str(path)) if cls is None else _by_class(path, cls)
    restored(model, path)
    return model


def _by_class(folder: Path, cls: Any) -> nn.Module:
    make = getattr(cls, "from_pretrained", None)
    if not callable(make):
        raise InputError(f"attemper.load(cls=...) must be a class with from_pretrained, got {cls!r:.80}.")
    module = str(getattr(cls, "__module__", ""))
    if module.split(".")[0] == "transformers":
        return pretrained.model_of(str(folder), cls)
    model = make(str(folder))
    if not isinstance(model, nn.Module):
        raise InputError(f"attemper.load(cls=...): {cls.__name__}.from_pretrained gave a {type(model).__name__}.")
    return model.eval()
