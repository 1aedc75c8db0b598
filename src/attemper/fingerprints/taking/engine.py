"""A fingerprint from queries and keys that any engine saved: one safetensors file a layer.

docs/fingerprints.md has the format.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attemper.backends.contract import Problem
from attemper.call.attention import measurement
from attemper.call.partial_call import part_of
from attemper.call.request import Options
from attemper.errors import InputError
from attemper.file_schema import read_safetensors
from attemper.fingerprints.record import Fingerprint
from attemper.fingerprints.site import ROWS, SiteFingerprint, chosen_sequences
from attemper.fingerprints.taking.fingerprint import check_heads
from attemper.fingerprints.taking.rows import SeenAttention
from attemper.fingerprints.taking.scale import fit_output, fit_scores
from attemper.fingerprints.taking.site import CallRows, SiteRows
from attemper.monitor.checked_model import versions
from attemper.monitor.token_ids import hash_of_tokens
from attemper.statistics import ONE_PASS
from attemper.text import clean_name, count

KNOWN = ("q", "k", "v", "out", "scores", "mask", "sink", "inv_freq", "real", "token_ids", "input", "residual")
"""Tensors of a file."""
WIDE = (torch.float32, torch.float64)
"""Types whose roundings no fit takes for a scale."""
FACTS = ("scale", "softcap", "causal", "window")
"""Its metadata."""


def fingerprint_of_folder(folder: Path, *, rows: int = ROWS, heads: Iterable[int] | None = None) -> Fingerprint:
    """A fingerprint of the layers in a folder, a safetensors file each, in the order of their names (numbers count)."""
    chosen = check_heads("fingerprint", heads)
    files = sorted(folder.glob("*.safetensors"), key=_natural)
    if not files:
        raise InputError(f"there is no .safetensors file in {clean_name(folder.name)}: expected one per layer.")
    sites, hashes, lengths = [], set(), ()
    for order, path in enumerate(files):
        tensors, facts = _read(path)
        site, own = _site(path, order, tensors, facts, rows, chosen)
        lengths = lengths or own
        if own != lengths:
            raise InputError(
                f"{clean_name(path.name)} has sequences of as many tokens as {own}, the files before it as {lengths}."
            )
        sites.append(site)
        if "token_ids" in tensors:
            hashes.add(_token_hash(path, tensors))
    if len(hashes) > 1:
        raise InputError(f"the files in {clean_name(folder.name)} are of different token_ids.")
    hashed = next(iter(hashes), None)
    return Fingerprint(folder.name, hashed, lengths, tuple(sites), {}, {"versions": versions()})


def _natural(path: Path) -> list[tuple[int, int | str]]:
    """Layer 10 stands behind layer 9."""
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"(\d+)", path.stem)]


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    name = clean_name(path.name)
    facts, tensors = read_safetensors(path, "pt", what="safetensors file", again="Save it again")
    unknown = [key for key in tensors if key not in KNOWN] + [key for key in facts if key not in (*FACTS, "format")]
    if unknown:
        known = f"{', '.join(KNOWN)} and in its metadata {', '.join(FACTS)}"
        raise InputError(f"{name} has {clean_name(unknown[0])!r}, which is not known. A file may have {known}.")
    if not {"q", "k"} <= tensors.keys():
        raise InputError(f"{name} must have the tensors q and k, it has {', '.join(tensors) or 'none'}.")
    told = [key for key in ("mask", "causal", "window") if key in tensors or key in facts]
    if "scores" not in tensors and not {"mask", "causal"} & {*told}:
        raise InputError(
            f"{name} does not say what is masked: give the tensor mask, or causal = true or false in its metadata."
        )
    if "scores" in tensors and told:
        raise InputError(f"{name} has scores and {told[0]}: hidden scores are -inf, so leave {told[0]} out.")
    return {key: _with_sequences(name, key, part) for key, part in tensors.items()}, facts


_DIMENSIONS = {
    **dict.fromkeys(("q", "k", "v", "out", "scores", "mask"), 4),
    **dict.fromkeys(("input", "residual"), 3),
    **dict.fromkeys(("real", "token_ids"), 2),
}


def _with_sequences(name: str, key: str, tensor: Tensor) -> Tensor:
    """With an axis of sequences, where it was left out for one."""
    wanted = _DIMENSIONS.get(key, 1)
    if tensor.dim() == wanted - 1 and wanted > 1:
        return tensor[None]
    if tensor.dim() != wanted:
        raise InputError(f"{name}: {key} is {list(tensor.shape)}, expected {count(wanted, 'dimension')}.")
    return tensor


def _site(
    path: Path,
    order: int,
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, str],
    rows: int,
    heads: tuple[int, ...] | None,
) -> tuple[SiteFingerprint, tuple[int, ...]]:
    query, key = tensors["q"], tensors["k"]
    options = Options(
        scale=_number(path, facts, "scale"),
        softcap=_number(path, facts, "softcap"),
        is_causal=_flag(path, facts),
        causal_alignment="bottom-right",
        window_size=_window(path, facts),
        sink_logits=tensors.get("sink"),
        enable_gqa=query.shape[1] != key.shape[1],
        stats=ONE_PASS,
        backend="reference",
    )
    name = clean_name(path.name)
    try:
        problem = _problem(query, key, tensors, options)
    except InputError as error:
        raise InputError(f"{name}: {error}") from error
    real = tensors.get("real")
    if real is not None and real.shape != (query.shape[0], query.shape[2]):
        raise InputError(f"{name}: real is {list(real.shape)}, expected [sequences, tokens] of q.")
    real = None if real is None else real.bool()
    kind = "self" if query.shape[2] == key.shape[2] else "cross"
    states = [tensors.get(part) for part in ("v", "out", "input", "residual")]
    seen = SeenAttention(problem, kind, real, real if kind == "self" else None, *states)
    angles = tensors.get("inv_freq")
    told = None if angles is None else tuple(angles.double().tolist())
    kept = CallRows.of(seen, 0, chosen_sequences(query.shape[0], rows))
    site = SiteRows.of(path.stem, order, kept, heads, inv_freq=told, matmul_precision="highest")
    site.add(kept)
    return site.fingerprint(), tuple(site.lengths)


def _problem(query: Tensor, key: Tensor, tensors: Mapping[str, Tensor], options: Options) -> Problem:
    """The call, with the scale that the engine told, or that its scores or outputs tell."""
    if "scores" in tensors:
        return _problem_of_scores(query, key, tensors["scores"], options)
    problem = measurement(query, key, tensors.get("mask"), options).problem
    value, output = tensors.get("v"), tensors.get("out")
    if options.scale is None and value is not None and output is not None and output.dtype in WIDE:
        # Roundings of a low precision would be read as a scale.
        times = fit_output(part_of(problem, slice(1)), value[0], output[0])
        problem = problem if times is None else replace(problem, multiplier=problem.multiplier * times)
    return problem


def _problem_of_scores(query: Tensor, key: Tensor, scores: Tensor, options: Options) -> Problem:
    heads, keys = query.shape[1], key.shape[2]
    shape = (query.shape[0], heads, query.shape[2], keys)
    if scores.shape != shape or scores.dtype not in WIDE:
        raise InputError(
            f"scores are {list(scores.shape)} {str(scores.dtype).removeprefix('torch.')}, expected the final scores "
            f"{list(shape)} (sequences, heads of q, tokens, tokens of k) in float32."
        )
    plain = measurement(query, key, None, replace(options, scale=1.0, softcap=None, sink_logits=None)).problem
    raw = query.double() @ key.double().repeat_interleave(plain.repeats, 1).transpose(2, 3)
    rows, mask = fit_scores(raw, scores.double(), options.softcap, options.scale, query.shape[3] ** -0.5)
    mask = mask if mask.dtype == torch.bool else mask.float()
    problem = measurement(query, key, mask, replace(options, scale=1.0)).problem
    return replace(problem, multiplier=rows.to(problem.multiplier.dtype))


def _number(path: Path, facts: Mapping[str, str], name: str) -> float | None:
    if name not in facts:
        return None
    try:
        return float(facts[name])
    except ValueError:
        raise InputError(
            f"{clean_name(path.name)}: {name} is {clean_name(facts[name])!r}, expected a number."
        ) from None


def _flag(path: Path, facts: Mapping[str, str]) -> bool:
    told = facts.get("causal", "false").lower()
    if told not in ("true", "false"):
        raise InputError(f"{clean_name(path.name)}: causal is {clean_name(told)!r}, expected true or false.")
    return told == "true"


def _window(path: Path, facts: Mapping[str, str]) -> tuple[int, int]:
    """A window of so many keys, the row's own among them."""
    size = _number(path, facts, "window")
    return (-1, -1) if size is None else (int(size) - 1, -1)


def _token_hash(path: Path, tensors: Mapping[str, Any]) -> str:
    ids, real = tensors["token_ids"], tensors.get("real")
    if real is not None and real.shape != ids.shape:
        raise InputError(f"{clean_name(path.name)}: token_ids are {list(ids.shape)}, and real is {list(real.shape)}.")
    return hash_of_tokens(row if real is None else row[real[number].bool()] for number, row in enumerate(ids))
