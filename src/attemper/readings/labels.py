"""What the name of a site says: the stack of like sites that it is one of, the block that it is in, its own numbers."""

from __future__ import annotations

import re

_BLOCKS = re.compile(r"(?:.*(?:layer|block|group|stage)s?|h)")
"""Names of lists that hold the blocks of a model: ``layers``, ``resblocks``, GPT-2's ``h``."""
_INDEX = re.compile(r"[0-9]{1,9}")
_SUBLAYER = re.compile(r"(?:^|\.)block\.([0-9]{1,9})\.layer\.[0-9]{1,9}(?:\.|$)")
"""T5 numbers the parts of a block as well."""


def layer_of(name: str) -> int | None:
    """The number of the block that a site is in, from its name. None where there is none, or several might be meant.

    A lone number is that of the block. Of several it is the one after a list of blocks (``layers``, ``blocks``, ``h``),
    if there is one such list; T5's ``block.3.layer.0`` is block 3. Towers of one model keep their own numbers.

    Example:
        >>> [layer_of(name) for name in ("model.layers.7.self_attn", "blocks.2.attn.0#2", "stages.1.blocks.0.attn")]
        [7, 2, None]
    """
    name = name.partition("#")[0]
    if sublayer := _SUBLAYER.search(name):
        name = name[: sublayer.end(1)]
    parts = name.split(".")
    numbered = [place for place, part in enumerate(parts) if _INDEX.fullmatch(part)]
    in_lists = [place for place in numbered if place and _BLOCKS.fullmatch(parts[place - 1])]
    meant = numbered if len(numbered) == 1 else in_lists
    return int(parts[meant[0]]) if len(meant) == 1 else None


def pattern_of(name: str) -> str:
    """A site's name with its numbers starred: what the sites of a stack share."""
    return re.sub(r"\d+", "*", name)


def label_of(name: str) -> str:
    """The numbers that tell a site from the others of its stack; a dash if its name has none.

    Example:
        >>> label_of("encoder.block.3.layer.0.SelfAttention")
        '3.0'
        >>> label_of("attention"), label_of("attention#2"), label_of("blocks.1.attention#2")
        ('–', '#2', '1#2')
    """
    name, call, number = name.partition("#")
    numbers = ".".join(re.findall(r"\d+", name))
    return f"{numbers}{call}{number}" or "–"
