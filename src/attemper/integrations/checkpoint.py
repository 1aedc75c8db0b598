"""A model's folder, checked before anything opens its files: no pickles, no links out of it, no half of a model."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from attemper.errors import InputError
from attemper.file_schema import read_foreign
from attemper.integrations.hub import near_folder, on_hub
from attemper.text import clean_name

PLACES: dict[str, Any] = {"auto": "auto", "disk": {"": "disk"}}
"""Devices that are none of torch: where accelerate puts the parts of a model, as transformers' ``device_map``."""
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")


def check_folder(source: str) -> None:
    """A folder must hold a config and safetensors. What is no folder is left to transformers, as a hub id."""
    if on_hub(source):
        return
    path = Path(source)
    if not os.path.exists(source):
        raise InputError(f"there is no folder {clean_name(source)}.{near_folder(source)}")
    if path.suffix.lower() == ".gguf" or (path.is_dir() and not any(path.glob("*.safetensors"))):
        _refuse_gguf(path)
    if not path.is_dir():
        raise InputError(f"{source} is a file; give the folder that holds config.json and the safetensors weights.")
    if not (path / "config.json").is_file():
        from attemper.store.folder import is_run

        if is_run(path):
            name = clean_name(source)
            raise InputError(f"{name} holds no model. This is a stored run: attemper show {name}")
        raise InputError(f"{source} holds no model: there is no config.json in it.{_inner_models(path)}")
    if not any(path.glob("*.safetensors")):
        pickled = sorted(file.name for file in path.iterdir() if file.suffix in _PICKLED)
        if pickled:
            raise InputError(
                f"{source} holds pickled weights ({pickled[0]}), which can run code when they are opened. Convert them "
                "with model.save_pretrained(folder) in an environment you trust; it writes safetensors."
            )
        raise InputError(f"{source} holds no weights: there is no .safetensors file in it.")
    _check_shards(path)


def _refuse_gguf(path: Path) -> None:
    """Weights for llama.cpp are no safetensors; transformers can read them and write those."""
    folder = path if path.is_dir() else path.parent
    files = sorted(folder.glob("*.gguf")) if path.is_dir() else [path]
    if files:
        raise InputError(
            f"{clean_name(files[0])} is a GGUF file, quantised for llama.cpp; attemper reads safetensors. Give the "
            f"model it was made from, or convert it: AutoModelForCausalLM.from_pretrained({str(folder)!r}, "
            f"gguf_file={files[0].name!r}).save_pretrained(folder), and AutoTokenizer alike; then give that folder."
        )


def _inner_models(path: Path) -> str:
    """A training run keeps its checkpoints in folders of its own: they are named."""
    if (path / "adapter_config.json").is_file():
        return " It holds an adapter: merge it into its model (peft: merge_and_unload()) and save that."
    inner = sorted(entry.parent.name for entry in path.glob("*/config.json"))
    return f" Did you mean {str(path / inner[-1])!r}?" if inner else ""


def _check_shards(folder: Path) -> None:
    """Refuses an index of ``folder`` that names what is no safetensors file inside the folder.

    By name: a file of the folder that is a link, as in the hub's cache, was put there by whoever owns the machine.
    """
    for path in sorted(folder.glob("*.safetensors.index*.json")):
        for shard in sorted(_shards(path)):
            if not shard.endswith(".safetensors") or not _is_inside(shard):
                raise InputError(
                    f"{path} names the shard {shard!r}, which is not a safetensors file inside {folder}. Nothing of it "
                    "was read: do not use this folder unless you know who made it."
                )


def _shards(path: Path) -> set[str]:
    try:
        return set(read_foreign(path, {"weight_map": {str: str}})["weight_map"].values())
    except InputError as error:
        raise InputError(f"{path} is not a checkpoint index (parameters to files): {error}") from error


def _is_inside(name: str) -> bool:
    """Whether a name stays in its folder, read as any system may read it."""
    ways = PurePosixPath(name), PureWindowsPath(name)
    return not any(way.is_absolute() or way.drive or way.root or ".." in way.parts for way in ways)
