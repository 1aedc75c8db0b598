"""Pretrained transformers models and text for them, loaded without ever running code or pickles that a folder brings.

Weights come from safetensors only; ``trust_remote_code`` stays off; a folder is never completed from the network.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attemper.checks import one_of
from attemper.control.saved_model import FIELD, FILE, TENSORS
from attemper.control.temper import Tempered
from attemper.errors import InputError, needs
from attemper.file_schema import read_foreign
from attemper.integrations.checkpoint import PLACES, check_folder
from attemper.integrations.device import to_device
from attemper.integrations.folder import read_model, restore
from attemper.integrations.hub import first_line, quiet
from attemper.text import count

_LOG = logging.getLogger(__name__)
DTYPES = ("float32", "float16", "bfloat16", "float64")
SCAN = "attemper.scan(model, batches)"
_LONGEST = 1 << 20
"""Tokenizers without a limit of their own say 1e30."""
_TABLES = ("wpe", "embed_positions", "position_embeddings")
"""Names of modules that hold a learned vector for each position."""
_SAMPLE = "Naïve don't, CamelCase  and 3.14\n\tover-long: zürich Straße 東京 🙂 <s> [CLS] self.head(x)[0]"
"""What tokenizers cut in different ways: case, accents, spaces, digits, words that few of them have."""
_HEADS_OF_THEIR_OWN = ("pooler", "lm_head", "classifier", "cls.", "qa_outputs", "score")
"""Parameters that a checkpoint may leave out because no attention depends on them."""


@dataclass(frozen=True)
class PretrainedModel:
    """A model in evaluation mode, its tokenizer, and the longest sequence it reads."""

    model: nn.Module
    tokenizer: Any
    longest: int
    tempered: tuple[Tempered, ...] = ()
    """Handles of what ``temper`` had given the model when it was saved; it has it again."""


def load(
    source: str, *, device: str = "cpu", dtype: str = "float32", predicts: bool = False, call: str = SCAN
) -> PretrainedModel:
    """The model and tokenizer in a folder or of a hub id, by transformers' auto classes.

    Args:
        device: one of torch; "auto" for GPUs first, then memory, then disk, as far as each has room; or "disk" for all
            weights on disk, each read from the checkpoint when the forward pass comes to it. Both need accelerate.
        call: the line of Python that does the same with token ids, for messages.
        predicts: load it with its head as a causal language model, which gives logits of the next token.

    Raises:
        InputError: there is no model, its weights are pickled, damaged or incomplete, it needs code of its own, it
            reads no text, it has no tokenizer, it is no causal language model where one is asked for, or accelerate is
            not installed where it is to place the weights.
        MissingExtraError: transformers is not installed.
    """
    one_of("dtype", dtype, DTYPES)
    check_folder(source)
    if device in PLACES and find_spec("accelerate") is None:
        raise InputError(f"device {device!r} needs accelerate, which places the weights: pip install accelerate")
    with needs("Loading a pretrained model", "transformers", "transformers"):
        import transformers
    with quiet(transformers):
        model = _model(transformers, source, getattr(torch, dtype), predicts, PLACES.get(device), call)
        tempered = _restore(transformers, model, source)
        tokenizer = _tokenizer(transformers, source, call)
    model = model if device in PLACES else to_device(model, device)
    return PretrainedModel(model.eval(), tokenizer, min([*_limits(model, tokenizer).values(), _LONGEST]), tempered)


def import_ahead(source: str) -> None:
    """Imports the modules that :func:`load` will need for the model in a folder, for a caller that wants to have all
    imports behind it. Of what is wrong with the folder, or with a package, nothing is said: ``load`` says it.
    """
    with suppress(Exception):
        check_folder(source)
        kind = read_foreign(Path(source) / "config.json").get("model_type")
        import transformers

        with quiet(transformers):
            if isinstance(kind, str) and kind in transformers.CONFIG_MAPPING:
                import_module("transformers.modeling_utils")


def _restore(transformers: Any, model: Any, source: str) -> tuple[Tempered, ...]:
    """What ``attemper.json`` says of the model, on the model; of a hub id too, if its config has the field."""
    folder = Path(source)
    if not folder.is_dir():
        if not hasattr(model.config, FIELD):
            return ()
        for name in (FILE, TENSORS):
            folder = Path(transformers.utils.cached_file(source, name)).parent
    handles = restore(model, folder)
    if handles:
        _LOG.warning("%s was tempered (%s): restored at %s", source, FILE, _summary(handles))
        delattr(model.config, FIELD)
    return handles


def _summary(handles: tuple[Tempered, ...]) -> str:
    sites = {site for handle in handles for site in handle.sites}
    used = {type(part).__name__ for handle in handles for part in handle.normalizers.values()}
    return ", ".join([count(len(sites), "site"), *sorted(used)])


def windows(
    pretrained: PretrainedModel, text: str, *, max_length: int | None = None, batch_size: int = 8
) -> list[dict[str, Tensor]]:
    """``text`` as batches of consecutive windows, each as long as the model (or ``max_length``) allows; every
    token counts.

    An encoder-decoder reads each window on both sides.
    """
    longest = window_length(pretrained, max_length)
    if batch_size < 1:
        raise InputError(f"batch_size must be at least 1, got {batch_size}.")
    if not text.strip():
        raise InputError(
            "the text is empty: there is nothing to scan. Pass a file with text, or leave --text out for the one "
            "that ships."
        )
    rows, special = _rows(pretrained.tokenizer, [text], longest)
    if not any(len(row) > special for row in rows):
        raise InputError("the tokenizer made no token of the text: there is nothing to scan.")
    return list(_batches(pretrained, rows, batch_size))


def text_batches(
    pretrained: PretrainedModel, texts: Sequence[str], *, longest: int, batch_size: int
) -> Iterator[dict[str, Tensor]]:
    """Several texts as batches of windows of at most ``longest`` tokens, short ones first, so that few are padded. A
    text of which the tokenizer makes no token is left out.
    """
    rows, special = _rows(pretrained.tokenizer, list(texts), longest)
    return _batches(pretrained, sorted((row for row in rows if len(row) > special), key=len), batch_size)


def digest_of(tokenizer: Any) -> str:
    """Tells a tokenizer from others: over its vocabulary, the side on which it pads, and what it makes of a sample."""
    made = _rows(tokenizer, [_SAMPLE], _LONGEST)
    known = (sorted(tokenizer.get_vocab().items()), getattr(tokenizer, "padding_side", None), made)
    return hashlib.blake2b(repr(known).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def window_length(pretrained: PretrainedModel, max_length: int | None) -> int:
    longest = pretrained.longest
    if max_length is None:
        return longest
    if not max_length >= 1:
        raise InputError(f"max_length must be at least 1, got {max_length}.")
    if max_length > longest and longest < _LONGEST:
        raise InputError(
            f"max_length is {max_length} but the model reads at most {count(longest, 'token')}. "
            f"{_how_to_read(max_length, pretrained)}"
        )
    return min(longest, max_length)


def _batches(pretrained: PretrainedModel, rows: list[list[int]], batch_size: int) -> Iterator[dict[str, Tensor]]:
    device = _input_device(pretrained.model)
    pad = _pad_token(pretrained.tokenizer)
    left = getattr(pretrained.tokenizer, "padding_side", "right") == "left"
    both_sides = getattr(getattr(pretrained.model, "config", None), "is_encoder_decoder", False)
    for start in range(0, len(rows), batch_size):
        batch = _batch(rows[start : start + batch_size], pad, left, device)
        if both_sides:
            batch["decoder_input_ids"], batch["decoder_attention_mask"] = batch["input_ids"], batch["attention_mask"]
        yield batch


def _model(transformers: Any, source: str, dtype: torch.dtype, predicts: bool, device_map: Any, call: str) -> Any:
    auto = transformers.AutoModelForCausalLM if predicts else transformers.AutoModel
    placed = {} if device_map is None else {"device_map": device_map}
    # eager: every architecture has it, and no hub kernel is fetched because a config names one.
    model, info = read_model(auto, source, dtype=dtype, attn_implementation="eager", **placed)
    if predicts:
        _refuse_other_heads(model, source)
    own = () if predicts else _HEADS_OF_THEIR_OWN
    missing = sorted(key for key in info["missing_keys"] if not any(part in key for part in own))
    wrong = [*missing, *(str(key) for key in info.get("mismatched_keys", ()))]
    if wrong:
        raise InputError(
            f"{source} is a broken checkpoint: {wrong[0]} is missing or of another shape, the first of {len(wrong)}. "
            "Their random values would be measured."
        )
    if getattr(model, "main_input_name", "input_ids") != "input_ids":
        raise InputError(
            f"{type(model).__name__} takes {model.main_input_name}, not text. From Python it takes data of your own: "
            f"{call}."
        )
    return model


def _refuse_other_heads(model: Any, source: str) -> None:
    """An encoder loads as a causal model, too, and would be judged by tokens that it was never trained to predict."""
    named = getattr(model.config, "architectures", None) or []
    if not any(name.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")) for name in named):
        raise InputError(
            f"{source} is not a causal language model: its config names {', '.join(named) or 'no architecture'}. Give "
            "one that predicts the next token."
        )


def _tokenizer(transformers: Any, source: str, call: str) -> Any:
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            source, trust_remote_code=False, local_files_only=os.path.isdir(source)
        )
    except Exception as error:  # as above
        raise InputError(_no_tokenizer(source, first_line(error), call)) from error
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        # Where its files are missing, transformers builds a tokenizer that knows no word.
        raise InputError(_no_tokenizer(source, "its vocabulary is empty", call))
    return tokenizer


def _no_tokenizer(source: str, reason: str, call: str) -> str:
    told = "" if reason.rstrip().endswith(":") else f" ({reason})"  # of a list, its first line says nothing
    return f"{source} has no tokenizer that can be loaded{told}. From Python the model takes token ids: {call}."


def _rows(tokenizer: Any, texts: list[str], longest: int) -> tuple[list[list[int]], int]:
    """Token ids of consecutive windows, each with the special tokens that the model expects around a sequence, and how
    many those are in each of them.
    """
    special = tokenizer.num_special_tokens_to_add(pair=False)
    if longest <= special:
        raise InputError(
            f"max_length is {longest}, and each window has {count(special, 'special token')}: nothing is left for text."
        )
    if tokenizer.is_fast:
        encoded = tokenizer(texts, truncation=True, max_length=longest, return_overflowing_tokens=True, verbose=False)
        return encoded["input_ids"], special
    # Tokenizers written in Python cannot be asked for windows: these go without the special tokens.
    known = [tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in texts]
    return [ids[start : start + longest] for ids in known for start in range(0, len(ids), longest)], 0


def _pad_token(tokenizer: Any) -> int:
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    return 0


def _batch(rows: list[list[int]], pad: int, left: bool, device: torch.device) -> dict[str, Tensor]:
    """One batch; padding is masked, so which token fills it does not matter."""
    width = max(len(row) for row in rows)
    ids, mask = torch.full((len(rows), width), pad), torch.zeros((len(rows), width), dtype=torch.int64)
    for number, row in enumerate(rows):
        place = slice(width - len(row), width) if left else slice(0, len(row))
        ids[number, place], mask[number, place] = torch.tensor(row), 1
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def _input_device(model: nn.Module) -> torch.device:
    """Where token ids go. To a layer whose weights are on disk accelerate moves them itself."""
    devices = (parameter.device for parameter in model.parameters())
    return next((device for device in devices if device.type != "meta"), torch.device("cpu"))


def _limits(model: Any, tokenizer: Any) -> dict[str, int]:
    """What holds a sequence's length, by where it stands."""
    config = getattr(model, "config", None)
    limits = {"model_max_length in tokenizer_config.json": getattr(tokenizer, "model_max_length", None)}
    for name in ("max_position_embeddings", "n_positions"):
        limits[f"{name} in config.json"] = getattr(config, name, None)
    # RoBERTa and its kin count positions from padding_idx + 1: the table is that much longer than what it can read.
    for name, table in model.named_modules():
        if name.endswith("position_embeddings") and getattr(table, "padding_idx", None):
            limits[f"the table {name}"] = table.num_embeddings - table.padding_idx - 1
    return {
        name: int(limit)
        for name, limit in limits.items()
        if isinstance(limit, int | float) and math.isfinite(limit) and 0 < limit < 1e9
    }


def _how_to_read(length: int, pretrained: PretrainedModel) -> str:
    """What to change so that a model reads as many tokens."""
    limits = _limits(pretrained.model, pretrained.tokenizer)
    short = ", ".join(f"{name} ({limit})" for name, limit in limits.items() if limit < length)
    learned = [
        name
        for name, part in pretrained.model.named_modules()
        if isinstance(part, nn.Embedding) and part.num_embeddings < length and name.split(".")[-1] in _TABLES
    ]
    if learned:
        return f"Its positions are learned ({learned[0]}): it cannot read more without training. Take a shorter length."
    factor = math.ceil(length / pretrained.longest)
    return (
        f"To read more, change {short}, and with them rope_parameters in config.json, for instance "
        f'{{"rope_type": "yarn", "factor": {factor}.0}} beside what stands there.'
    )
