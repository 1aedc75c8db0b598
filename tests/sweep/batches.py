"""Inputs for a model by rule: by the names of its forward's parameters and the sizes that its configuration says.

Where none fits, the error is read: an input that it names is added, a size that it asks for is taken.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tests.sweep.shrink import FIRST_ID

ROWS, TOKENS, SIDE = 2, 96, 12
"""Rows of a batch, tokens of a text, and patches along the sides of an image that is given as patches."""
MOST = 24
"""So many combinations are tried at most, of each choice of inputs."""
Batch = dict[str, Any]
_MORE = (
    "pixel_values", "input_features", "input_values", "attention_mask", "encoder_hidden_states", "inputs_embeds",
    "decoder_input_ids", "encoder_outputs", "feature_attention_mask", "input_features_mask", "bbox", "image",
    "image_embeds", "image_embeds_position_mask", "query_embeds", "position_ids", "position_embeddings",
    "image_attention_mask", "target_sizes", "image_grid_thw", "grid_thw", "pixel_attention_mask", "feature_lens",
    "visual_feats", "visual_pos", "spatial_shapes", "context_input_ids", "actions", "rewards", "returns_to_go",
    "timesteps",
)  # fmt: skip
"""Inputs that may be needed though they have a default: added one after the other where a forward fails."""


def fitting(model: Any, forward: Callable[[Batch], Any]) -> Batch:
    """The first inputs with which ``forward`` goes through.

    Raises:
        LookupError: none does, or there is no rule for one.
    """
    parameters = inspect.signature(model.forward).parameters
    names = _wanted(model, parameters)
    errors: list[str] = []
    more = [
        name
        for name in _MORE
        if name in parameters and name not in names and any(True for _ in _candidates(model, name))
    ]
    while True:
        for batch in _combinations(model, names):
            for _ in range(3):
                try:
                    forward(batch)
                except (TimeoutError, MemoryError):
                    raise
                except Exception as error:
                    said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                    errors.append(said)
                    changed = _changed(model, batch, said, parameters)
                    if changed is None:
                        break
                    batch = changed
                else:
                    return batch
        named = [name for name in more if any(re.search(rf"\b{name}\b", error) for error in errors)]
        if not more or not any("None" in error or "specify" in error or "must be" in error for error in errors):
            raise LookupError(f"no inputs by rule fit: {errors[0] if errors else ''}")
        added = (named or more)[0]
        more.remove(added)
        names.append(added)


def _combinations(model: Any, names: list[str]) -> Iterator[Batch]:
    choices = [list(_candidates(model, name)) for name in names]
    lacking = [name for name, choice in zip(names, choices, strict=True) if not choice]
    if lacking:
        raise LookupError(f"no rule for its input {', '.join(lacking)}")
    # The sizes of several inputs go together: the first of each, the second of each, and then all combinations.
    longest = max(map(len, choices), default=1)
    together = [tuple(choice[min(number, len(choice) - 1)] for choice in choices) for number in range(longest)]
    every = itertools.islice(itertools.product(*choices), 200)
    for batch in itertools.islice((*together, *every), MOST):
        yield dict(zip(names, batch, strict=True))


def _wanted(model: Any, parameters: Any) -> list[str]:
    """What a forward must be given: parameters without a default, and the main input."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = [name for name, one in parameters.items() if one.default is one.empty and one.kind in kinds]
    main = [model.main_input_name] if isinstance(model.main_input_name, str) else []
    decoder = ["decoder_input_ids"] if getattr(model.config, "is_encoder_decoder", False) else []
    for name in (*main, "input_ids", *decoder, "bbox"):
        if name in parameters and name not in names:
            names.append(name)
    return names


def _with_placeholders(batch: Batch, model: Any, kind: str, count: int) -> Batch | None:
    """The batch with so many ids in its text that stand for features of images (or sound)."""
    token, ids = find(model.config, f"{kind}_token_id", f"{kind}_token_index"), batch.get("input_ids")
    if not isinstance(token, int) or not isinstance(ids, Tensor) or ids.dim() != 2 or count % len(ids):
        return None
    here = count // len(ids)
    text = ids[:, :8].repeat(1, 2)
    return batch | {"input_ids": torch.cat((text[:, :4], ids.new_full((len(ids), here), token), text[:, 4:]), 1)}


def _changed(model: Any, batch: Batch, error: str, parameters: Any) -> Batch | None:
    """The batch with the size that an error asks for; None where it asks for none."""
    if found := re.search(r"shapes cannot be multiplied \(\d+x(\d+) and (\d+)x\d+\)", error):
        was, wanted = map(int, found.groups())
        return _resized(batch, -1, was, wanted)
    if found := re.search(r"to have (\d+) channels, but got (\d+) channels", error):
        wanted, was = map(int, found.groups())
        return _resized(batch, 1, was, wanted) or _resized(batch, -1, was, wanted)
    if found := re.search(r"Expected .*to be divisible by|not a multiple of (\d+)", error):
        wanted = int(found.group(1) or 0)
        return _resized(batch, -1, None, wanted * 4) if wanted else None
    if found := re.search(r"(?:mel|sequence|input features) .*length (\d+), but (?:found|got) (\d+)", error):
        wanted, was = map(int, found.groups())
        return _resized(batch, -1, was, wanted)
    if found := re.search(r"(\w+) tokens do not match.*?tokens: (\d+),? features:? (\d+)", error):
        return _with_placeholders(batch, model, found.group(1).lower(), int(found.group(3)))
    if "get_seq_length" in error and "use_cache" in parameters and "use_cache" not in batch:
        return batch | {"use_cache": False}
    return None


def _resized(batch: Batch, axis: int, was: int | None, wanted: int) -> Batch | None:
    for name, part in batch.items():
        if isinstance(part, Tensor) and part.is_floating_point() and part.dim() > 1 and was in (None, part.shape[axis]):
            shape = list(part.shape)
            shape[axis] = wanted
            return batch | {name: torch.randn(shape)}
    return None


def find(config: Any, *names: str) -> Any:
    """The first of these fields in a configuration or, breadth first, in its parts."""
    waiting = [config]
    while waiting:
        node = waiting.pop(0)
        for name in names:
            value = vars(node).get(getattr(node, "attribute_map", {}).get(name, name))
            if value is not None and not isinstance(value, str):
                return value
        waiting += [value for value in vars(node).values() if hasattr(value, "to_dict")]
    return None


def _int(value: Any, default: int) -> int:
    value = value[0] if isinstance(value, (list, tuple)) and value else value
    return value if isinstance(value, int) and value > 0 else default


def _lengths(config: Any) -> list[int]:
    most = _int(find(config, "max_position_embeddings", "n_positions", "max_seq_len"), 10**6)
    stated = [
        value
        for name, value in vars(config).items()
        if isinstance(value, int) and re.search("seq_len|context_length", name) and 1 < value <= 2048
    ]
    limit = min(TOKENS, most - 8 if most > 16 else most)
    return list(dict.fromkeys((*stated, limit, 16, 64, 128, 512)))


def _ids(config: Any, length: int, rows: int = ROWS) -> Tensor:
    vocabulary = _int(find(config, "vocab_size"), FIRST_ID)
    return torch.randint(min(4, vocabulary - 2), max(6, min(FIRST_ID, vocabulary)), (rows, length))


def _width(config: Any) -> int:
    return _int(find(config, "hidden_size", "d_model", "embed_dim", "dim", "n_embd"), 64)


def _candidates(model: Any, name: str) -> Iterator[Any]:
    config, parameters = model.config, inspect.signature(model.forward).parameters
    for pattern, rule in _RULES:
        if re.search(pattern, name):
            yield from rule(config, name, parameters)
            return


def _texts(config: Any, name: str, _: Any) -> Iterator[Tensor]:
    books = _int(find(config, "num_codebooks", "n_q", "num_quantizers", "n_mel_bins", "num_channels"), 0)
    for length in _lengths(config):
        yield _ids(config, length if "decoder" not in name else min(24, length))
    for length in (24, 96):
        if books > 1:
            yield torch.randint(4, 60, (ROWS, books, length))
            yield torch.randint(4, 60, (ROWS, length, books))
            yield torch.randint(4, 60, (ROWS, length, books + 1))
            yield _ids(config, length, ROWS * books)


def _masks(config: Any, name: str, _: Any) -> Iterator[Tensor]:
    for length in _lengths(config) if "features" not in name else (64, 100, 3000):
        yield torch.ones(ROWS, length, dtype=torch.int64)
    yield torch.ones(ROWS, 24, dtype=torch.int64)


def _boxes(config: Any, *_: Any) -> Iterator[Tensor]:
    for length in _lengths(config):
        yield torch.randint(0, 50, (ROWS, length, 4)).sort(-1).values


def _grids(config: Any, name: str, _: Any) -> Iterator[Tensor]:
    yield torch.tensor([[1, SIDE, SIDE]] if "thw" in name else [[SIDE, SIDE]])


_GRIDS = ("image_grid_thw", "grid_thw", "spatial_shapes", "target_sizes", "merge_sizes", "pixel_position_ids")
"""Inputs that tell how patches lie in images: then images are given as patches."""


def _places(*_: Any) -> Iterator[Tensor]:
    yield torch.cartesian_prod(torch.arange(SIDE), torch.arange(SIDE))[None]


def _one(*_: Any) -> Iterator[Any]:
    yield torch.ones(1, dtype=torch.int64)


def _count(*_: Any) -> Iterator[Any]:
    yield SIDE**2


def _frames(*_: Any) -> Iterator[Tensor]:
    yield torch.tensor([200])


def _packed(config: Any) -> Iterator[Tensor]:
    """The patches of an image, as models of images of any size take them."""
    patch, times = _int(find(config, "patch_size"), 16), _int(find(config, "temporal_patch_size"), 1)
    channels, many = _int(find(config, "num_channels", "in_channels", "in_chans"), 3), SIDE**2
    flat = channels * times * patch**2
    for shape in ((many, flat), (1, many, flat), (1, many, channels, patch, patch), (many, channels, patch, patch)):
        yield torch.randn(shape)
    for high, wide in ((patch, many * patch), (SIDE * patch, SIDE * patch)):
        yield torch.randn(1, channels, high, wide)


def _features(config: Any, name: str, parameters: Any) -> Iterator[Tensor]:
    width = _width(config)
    if "grid_thw" in parameters and name == "hidden_states":
        patch, frames = _int(find(config, "patch_size"), 14), _int(find(config, "temporal_patch_size"), 1)
        channels = _int(find(config, "in_channels", "in_chans", "num_channels"), 3)
        yield torch.randn(64, channels * frames * patch**2)
    for shape in ((ROWS, 24, width), (ROWS, width, 24), (24, width), (ROWS, width), (ROWS, width, 8, 8)):
        yield torch.randn(shape)


def _codes(config: Any, *_: Any) -> Iterator[Tensor]:
    for shape in ((ROWS, 24), (ROWS, _int(find(config, "num_codebooks", "num_quantizers"), 4), 24), (24,)):
        yield torch.randint(4, 60, shape)


def _times(*_: Any) -> Iterator[Tensor]:
    yield torch.zeros(ROWS, dtype=torch.int64)
    yield torch.randint(0, 40, (ROWS, 24))


def _images(config: Any, _: str, parameters: Any) -> Iterator[Tensor]:
    if any(name in parameters for name in _GRIDS):
        yield from _packed(config)
    size = find(config, "image_size", "img_size", "crop_size", "input_size")
    size = list(size.values()) if isinstance(size, dict) else size
    sizes = (size[-2], size[-1]) if isinstance(size, (list, tuple)) and len(size) > 1 else (_int(size, 64),) * 2
    channels = _int(find(config, "num_channels", "in_channels", "in_chans", "num_image_channels"), 3)
    frames, tiles = _int(find(config, "num_frames", "frames_per_clip"), 4), _int(find(config, "max_num_tiles"), 2)
    patch = _int(find(config, "patch_size"), 16)
    for high, wide in dict.fromkeys((sizes, (64, 64), (128, 128), (224, 224))):
        yield torch.randn(ROWS, channels, high, wide)
        yield torch.randn(1, frames, channels, high, wide)
        yield torch.randn(1, channels, frames, high, wide)
        yield torch.randn(1, 2, channels, high, wide)
        yield torch.randn(1, 1, tiles, channels, high, wide)
    for patches in (64, _int(find(config, "num_patches", "max_num_patches"), 16)):
        yield torch.randn(1, patches, channels * patch**2)
        yield torch.randn(patches, channels * patch**2)
        yield torch.randn(1, patches, channels, patch, patch)
        yield torch.randn(patches, channels, patch, patch)


def _patches(config: Any, *_: Any) -> Iterator[Tensor]:
    size = 2 + _int(find(config, "patch_embed_hidden_size"), 768)
    yield torch.rand(ROWS, 64, size)


def _sounds(config: Any, _: str, parameters: Any) -> Iterator[Tensor]:
    fields = (
        "num_mel_bins", "feature_size", "input_dim", "mel_dim", "input_feat_per_channel", "input_size", "feat_dim",
        "n_mels", "input_feat_size",
    )  # fmt: skip
    bins = _int(find(config, *fields), 0)
    longest = min(3000, _int(find(config, "max_source_positions", "max_length", "n_ctx"), 100))
    if bins > 1 and "feature_lens" in parameters:
        yield torch.randn(bins, 200)
    if bins > 1:
        for frames in dict.fromkeys((2 * longest, 64, longest)):
            yield torch.randn(ROWS, bins, frames)
            yield torch.randn(ROWS, frames, bins)
            yield torch.randn(ROWS, 1, frames, bins)
    for samples in (7680, 32000):
        yield torch.randn(ROWS, samples)
        yield torch.randn(ROWS, 1, samples)
    for size in (80, 128, 160, _width(config)):
        yield torch.randn(ROWS, 64, size)


def _series(config: Any, name: str, _: Any) -> Iterator[Tensor]:
    lags = max(vars(config).get("lags_sequence") or [0])
    length = _int(vars(config).get("context_length"), 32) + (lags if name.startswith("past") else 0)
    length = _int(vars(config).get("prediction_length"), 8) if name.startswith("future") else length
    channels = _int(find(config, "num_input_channels", "input_size"), 1)
    many = vars(config).get("num_time_features") or 0
    fill = torch.ones if "mask" in name else torch.randn
    yield fill(ROWS, length, many if "time_features" in name else channels)
    yield fill(ROWS, length)


def _flags(*_: Any) -> Iterator[Tensor]:
    for shape in ((ROWS, 24), (ROWS, 1, 24, 24)):
        yield torch.ones(shape, dtype=torch.int64)


_RULES: tuple[tuple[str, Callable[..., Iterator[Any]]], ...] = (
    (r"^(decoder_)?input_ids$|^inputs$", _texts),
    (r"^(pixel_attention_mask|padding_positions)$", lambda *_: iter((torch.ones(1, SIDE**2, dtype=torch.int64),))),
    (r"attention_mask$|features_mask$", _masks),
    (r"^pixel_position_ids$", _places),
    (r"^merge_sizes$", _one),
    (r"^num_patches$", _count),
    (r"feature_lens$", _frames),
    (r"^bbox$", _boxes),
    (r"pixel_values|^images?$", _images),
    (r"flattened_patches", _patches),
    (
        r"^(input_values|input_features|audio_values|input_audio|features|waveform|spectrogram|audio_mel|audio)$",
        _sounds,
    ),
    (r"grid_(thw|hw)|grid_hws|^spatial_shapes$|^target_sizes$", _grids),
    (r"^(past|future)_(values|observed_mask|time_features)$", _series),
    (
        r"hidden_states?$|embeds?$|embeddings?$|features?$|latents?$|query|context$|states$|queries$|encodings?$"
        r"|vector$|_feats$|^actions$",
        _features,
    ),
    (r"time_?steps?$", _times),
    (r"ids?$|codes?$|tokens?$|indices$", _codes),
    (r"mask", _flags),
)
"""A pattern of a parameter's name, and what may fit it, likely shapes first."""
