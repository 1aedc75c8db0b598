"""Pieces of source with the package that they are from: what the encoder of the benchmark learns to tell apart."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from attemper import InputError
from attemper.lab.corpus import LEFT_OUT
from attemper.lab.model import windows
from research.early_warning.encoder import folder

PACKAGES = ("asyncio", "email", "http", "importlib", "logging", "multiprocessing", "unittest", "xml")
"""Of Python's standard library: the classes, in this order."""
HELD_OUT = 5
"""Of each file, one in so many pieces is held out: the last ones."""


@dataclass(frozen=True)
class Pieces:
    """Tokens [n, length] of each class, marks of beginning and end included."""

    training: tuple[Tensor, ...]
    held_out: tuple[Tensor, ...]


def drawn_pieces(parts: tuple[Tensor, ...], count: int, seed: int) -> Tensor:
    """``count`` pieces drawn by ``seed``, classes alike: [count, 1 + length], the class first, int64."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(len(parts), (count,), generator=generator)
    places = torch.rand(count, generator=generator)
    drawn = [parts[name][int(place * len(parts[name]))] for name, place in zip(classes.tolist(), places, strict=True)]
    return torch.cat((classes[:, None], torch.stack(drawn)), 1)


@cache
def pieces(length: int, root: Path | None = None) -> Pieces:
    """The ``*.py`` files of these packages of this interpreter's library, cut into pieces of ``length`` tokens.

    Raises:
        InputError: the encoder's packages are not installed, or this Python came without the sources of its library.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder() / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    begin, end = (tokenizer.token_to_id(mark) for mark in ("[CLS]", "[SEP]"))
    root = root or Path(sysconfig.get_paths()["stdlib"])
    training, held_out = [], []
    for name in PACKAGES:
        parts: tuple[list[Tensor], list[Tensor]] = ([], [])
        for path in sorted((root / name).rglob("*.py")):
            if LEFT_OUT & set(path.relative_to(root).parts):
                continue
            ids = tokenizer.encode(path.read_text("utf-8"), add_special_tokens=False).ids
            cut = windows(torch.tensor(ids, dtype=torch.int64), length - 2)
            cut = F.pad(F.pad(cut, (1, 0), value=begin), (0, 1), value=end)
            last = len(cut) // HELD_OUT
            parts[0].append(cut[: len(cut) - last])
            parts[1].append(cut[len(cut) - last :])
        if not parts[0] or not sum(map(len, parts[1])):
            raise InputError(f"lab early-warning: {str(root)!r} has no source of {name!r}. Use a Python that has it.")
        training.append(torch.cat(parts[0]))
        held_out.append(torch.cat(parts[1]))
    return Pieces(tuple(training), tuple(held_out))
