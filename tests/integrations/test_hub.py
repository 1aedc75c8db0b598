"""Why a model cannot be loaded: each cause has one sentence of its own that says what to do. No network is asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from attemper import InputError
from attemper.integrations import pretrained
from attemper.integrations.hub import on_hub, refusal

tf = pytest.importorskip("transformers")
errors = pytest.importorskip("huggingface_hub.errors")


def raised(kind: str, message: str, outer: str | None = None) -> Exception:
    """An error as huggingface_hub raises it, and as transformers wraps it in its own."""
    inner_type = getattr(errors, kind)
    inner = inner_type.__new__(inner_type, message)
    Exception.__init__(inner, message)
    if outer is None:
        return inner
    wrapped = OSError(outer)
    wrapped.__cause__ = inner
    return wrapped


NAME = "someone/some-model"
CAUSES: dict[str, tuple[Exception, tuple[str, ...]]] = {
    "gated": (
        raised("GatedRepoError", "401", "You are trying to access a gated repo.\nMake sure to have access to it"),
        ("is a gated model", f"https://huggingface.co/{NAME}", "hf auth login"),
    ),
    "missing": (
        raised("RepositoryNotFoundError", "404", f"{NAME} is not a local folder and is not a valid model identifier"),
        ("neither a folder here nor a model on the Hugging Face hub", "Check the spelling", "HF_TOKEN"),
    ),
    "impossible name": (
        raised("HFValidationError", "Repo id must use alphanumeric chars"),
        ("not a valid name of a model on the Hugging Face hub", "organisation/model"),
    ),
    "no network": (
        raised("LocalEntryNotFoundError", "cannot find", "We couldn't connect to 'https://huggingface.co'"),
        ("the Hugging Face hub could not be reached", "check the network"),
    ),
    "no config": (
        OSError(f"{NAME} does not appear to have a file named config.json. Checkout 'https://huggingface.co/"),
        ("has no config.json", "GGUF files", "the model that it was made from"),
    ),
    "no safetensors": (
        OSError(f"{NAME} does not appear to have a file named model.safetensors or model.safetensors.index.json"),
        ("has no safetensors weights", "model.save_pretrained(folder)"),
    ),
    "code of its own": (
        ValueError("The repository contains custom code which must be executed. Please pass trust_remote_code=True"),
        ("needs custom code (auto_map", "trust_remote_code=True", "attemper.scan(model, batches)"),
    ),
    "unknown architecture": (
        ValueError("model type `new` but Transformers does not recognize this architecture."),
        ("this version of transformers does not know", "pip install -U transformers", "attemper.scan(model, batches)"),
    ),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_each_cause_has_a_sentence_of_its_own(monkeypatch: pytest.MonkeyPatch, cause: str):
    error, wanted = CAUSES[cause]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)

    def from_pretrained(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(tf.AutoModel, "from_pretrained", from_pretrained)
    with pytest.raises(InputError) as told:
        pretrained.load(NAME)
    message = str(told.value)
    assert message.startswith(NAME)
    assert all(part in message for part in wanted), message
    assert "\n" not in message


def test_offline_by_choice_says_how_to_fetch_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    told = refusal(NAME, CAUSES["no network"][0])
    assert "HF_HUB_OFFLINE is set" in told
    assert f"`hf download {NAME}`" in told


def test_an_error_of_another_kind_is_told_in_its_first_line():
    told = refusal(NAME, RuntimeError("the first line\nand a page more"))
    assert told == f"{NAME} could not be loaded as a model: the first line"


def test_a_folder_with_a_name_much_like_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "tiny-gpt2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert refusal("tiny-gtp2", CAUSES["missing"][0]).endswith("Did you mean 'tiny-gpt2'?")
    with pytest.raises(InputError, match=r"there is no folder .*tiny-gtp2\. Did you mean 'tiny-gpt2'\?"):
        pretrained.load(str(tmp_path / "tiny-gtp2"))


@pytest.mark.parametrize(("source", "is_id"), [("gpt2", True), ("a/b", True), ("a/b/c", False), ("./a", False)])
def test_what_is_no_path_can_only_be_of_the_hub(source: str, is_id: bool):
    assert on_hub(source) is is_id


FOLDERS: dict[str, tuple[tuple[str, ...], str | None, str]] = {
    "GGUF": (
        ("weights.Q4_K_M.gguf",), "llama",
        r"is a GGUF file, quantised for llama\.cpp.*from_pretrained\('.*model', "
        r"gguf_file='weights\.Q4_K_M\.gguf'\)\.save_pretrained\(folder\)",
    ),
    "a run": (
        ("checkpoint-10/config.json", "checkpoint-20/config.json"), None,
        r"there is no config\.json in it\. Did you mean '.*model/checkpoint-20'\?",
    ),
    "an adapter": (
        ("adapter_config.json", "adapter_model.safetensors"), None, "It holds an adapter: merge it into its model",
    ),
    "pickles": (
        ("pytorch_model.bin",), "gpt2", r"pickled weights \(pytorch_model\.bin\).*it writes safetensors",
    ),
    "another architecture": (
        ("model.safetensors",), "of-next-year",
        r"this version of transformers does not know.*pip install -U transformers",
    ),
}  # fmt: skip
"""Files of a folder, the type of model in its config, if it has one, and what is said of it."""


def folder_of(path: Path, *names: str, config: dict[str, Any] | None = None) -> str:
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).touch()
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    return str(path)


@pytest.mark.parametrize("what", FOLDERS)
def test_a_folder_that_holds_no_model_to_load_is_told_with_what_to_do(what: str, tmp_path: Path):
    names, kind, message = FOLDERS[what]
    folder = folder_of(tmp_path / "model", *names, config=None if kind is None else {"model_type": kind})
    for source in (folder, *(f"{folder}/{name}" for name in names if what == "GGUF")):
        with pytest.raises(InputError, match=message):
            pretrained.load(source)


def test_a_folder_with_code_of_its_own_is_refused_and_not_run(tmp_path: Path):
    config = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModel": "own.Model"}}
    folder = folder_of(tmp_path / "own", "model.safetensors", config=config)
    (tmp_path / "own" / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(InputError, match=r"needs custom code \(auto_map in its config\.json\)"):
        pretrained.load(folder)
    assert not (tmp_path / "ran").exists()
