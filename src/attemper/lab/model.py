"""The model that ships: a small byte-level causal Transformer, and what reads text into it and scores it.

Plain PyTorch, for experiments and for ``attemper scan`` without arguments. ``examples/train_bytes.py`` trains it.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attemper.checks import one_of
from attemper.errors import InputError
from attemper.file_schema import parse_json
from attemper.files import replacement

WEIGHTS = Path(__file__).parent / "weights" / "bytes.safetensors"
"""Float16 weights of the shipped model, with its ``ByteConfig`` as JSON in the metadata."""

VOCABULARY = 256


@dataclass(frozen=True)
class ByteConfig:
    """Sizes of a :class:`ByteModel`. The default has 885,888 parameters."""

    layers: int = 4
    heads: int = 4
    width: int = 128
    context: int = 256
    """Bytes it is trained on at once. No limit: a longer text is read as one, at positions that it never saw."""
    positions: str = "rope"
    """"rope", or "none": then order is known from the causal mask only."""
    qk_norm: bool = False
    """Whether queries and keys are normalised per head before the rotation, each with a learned gain."""
    dropout: float = 0.0
    """Of attention weights and of what each block adds, in training mode."""
    mlp_ratio: float = 3.0
    """Hidden size of the MLP as a multiple of the width."""

    def __post_init__(self) -> None:
        one_of("ByteConfig(positions=...)", self.positions, ("rope", "none"))
        if self.width % self.heads or (self.positions == "rope" and self.width // self.heads % 2):
            raise InputError(
                f"ByteConfig(width={self.width}, heads={self.heads}): heads must divide the width, into an even size "
                "where positions are rotated. Take a width that is a multiple of 2 x heads."
            )


class Attention(nn.Module):
    r"""Causal self-attention: :math:`\mathrm{softmax}(q k^T / \sqrt{D})\, v` for each of ``heads`` heads of size D."""

    def __init__(self, config: ByteConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        size = config.width // config.heads
        self.q_proj = nn.Linear(config.width, config.width, bias=False)
        self.k_proj = nn.Linear(config.width, config.width, bias=False)
        self.v_proj = nn.Linear(config.width, config.width, bias=False)
        self.o_proj = nn.Linear(config.width, config.width, bias=False)
        self.q_norm = nn.RMSNorm(size, eps=1e-6) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(size, eps=1e-6) if config.qk_norm else nn.Identity()

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        """``x`` [B, N, width] -> [B, N, width]; ``rotation`` as :func:`rotary` gives it, None without positions."""
        query = self.q_norm(self._split(self.q_proj(x)))
        key = self.k_norm(self._split(self.k_proj(x)))
        value = self._split(self.v_proj(x))
        if rotation is not None:
            query, key = rotate(query, *rotation), rotate(key, *rotation)
        return self.o_proj(self.attend(query, key, value).transpose(1, 2).flatten(2))

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[B, heads, N, D] each -> the mixed values [B, heads, N, D]. An experiment may have its own."""
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)

    def _split(self, x: Tensor) -> Tensor:
        """[B, N, width] -> [B, heads, N, D]."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class MLP(nn.Module):
    """SwiGLU, ``down(silu(gate(x)) * up(x))``. Source: Shazeer 2020, "GLU Variants Improve Transformer"."""

    def __init__(self, config: ByteConfig) -> None:
        super().__init__()
        hidden = round(config.mlp_ratio * config.width)
        self.gate_proj = nn.Linear(config.width, hidden, bias=False)
        self.up_proj = nn.Linear(config.width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """``x += attention(norm(x)); x += mlp(norm(x))``."""

    def __init__(self, config: ByteConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), rotation))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class ByteModel(nn.Module):
    """A decoder over bytes; the embedding is the output layer, too.

    Weights start from a normal distribution of standard deviation 1/sqrt(inputs); the embedding of 0.02; those that
    write into the residual stream divided by sqrt(2 layers) more, so that its variance does not grow with depth
    (Radford et al. 2019, section 2.3).

    Example:
        >>> ByteModel(ByteConfig(layers=1, width=16))(encode("as bytes")[None]).shape
        torch.Size([1, 8, 256])
    """

    def __init__(self, config: ByteConfig | None = None) -> None:
        super().__init__()
        self.config = config or ByteConfig()
        self.embedding = nn.Embedding(VOCABULARY, self.config.width)
        self.blocks = nn.ModuleList(Block(self.config) for _ in range(self.config.layers))
        self.norm = nn.RMSNorm(self.config.width, eps=1e-6)
        nn.init.normal_(self.embedding.weight, std=0.02)
        for name, layer in self.named_modules():
            if isinstance(layer, nn.Linear):
                writes = name.endswith(("o_proj", "down_proj"))
                depth = 2 * self.config.layers if writes else 1
                nn.init.normal_(layer.weight, std=(depth * layer.in_features) ** -0.5)

    def get_input_embeddings(self) -> nn.Embedding:
        """As in transformers: how many tokens there are."""
        return self.embedding

    def forward(self, ids: Tensor) -> Tensor:
        """``ids`` [B, N], bytes as int64 -> logits of the next byte [B, N, 256]."""
        rotation = None
        if self.config.positions == "rope":
            rotation = rotary(ids.shape[1], self.config.width // self.config.heads, ids.device)
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, rotation)
        return F.linear(self.norm(x), self.embedding.weight)

    def loss(self, ids: Tensor) -> Tensor:
        """Mean cross-entropy in nats of bytes 2 to N of ``ids`` [B, N], each given those before it."""
        return F.cross_entropy(self(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())


def rotary(length: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    r"""Cosines and sines, each [length, size / 2], of the angles :math:`n \cdot 10000^{-2i / size}`.

    Source: Su et al. 2021, "RoFormer", equation 15.
    """
    frequency = 10_000.0 ** (-torch.arange(0, size, 2, device=device, dtype=torch.float32) / size)
    angle = torch.arange(length, device=device, dtype=torch.float32)[:, None] * frequency
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x`` [B, H, N, D] with each pair (i, i + D/2) turned by the angle of its position; the dtype of ``x``."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def encode(text: str) -> Tensor:
    """The UTF-8 bytes of ``text``: int64 [n], 0 to 255."""
    return torch.tensor(list(text.encode()), dtype=torch.int64)


@cache
def shipped_text() -> Tensor:
    """The bytes of the text that ships, which the model was not trained on."""
    return encode(Path(__file__).with_name("text.txt").read_text(encoding="utf-8"))


def windows(ids: Tensor, length: int, *, stride: int | None = None) -> Tensor:
    """Windows [w, length] of ``ids`` [n], ``stride`` bytes apart (None: side by side); a shorter rest is left out."""
    if len(ids) < length:
        return ids.new_empty((0, length))
    return ids.unfold(0, length, stride or length)


@torch.no_grad()
def bits_per_byte(model: ByteModel, ids: Tensor) -> float:
    """Mean cross-entropy of ``ids`` [n] in bits a byte, in windows of the model's context.

    Every byte but the first is predicted once; the first of each window from one byte, the last from ``context``.
    """
    if len(ids) < 2:
        raise InputError(
            f"bits_per_byte(ids=...) needs 2 bytes at least, of which it predicts the second; got {len(ids)}."
        )
    context = model.config.context
    full = windows(ids, context + 1, stride=context)
    rest = ids[len(full) * context :][None]
    batches = [*full.split(64), rest] if len(full) else [rest]
    nats = sum(model.loss(batch).item() * batch[:, 1:].numel() for batch in batches if batch.shape[1] > 1)
    return nats / (len(ids) - 1) / math.log(2)


def save(model: ByteModel, path: Path) -> None:
    """Writes the weights to ``path`` as float16 safetensors, with the sizes in the metadata."""
    tensors = {name: tensor.half().contiguous() for name, tensor in model.state_dict().items()}
    with replacement(path) as part:
        save_file(tensors, part, metadata={"config": json.dumps(asdict(model.config))})


def load(path: Path = WEIGHTS) -> ByteModel:
    """The model of a file that :func:`save` wrote, by default the one that ships: float32, on the CPU, in eval mode.

    Raises:
        InputError: the file is missing or damaged, or its tensors are not those of its sizes.

    Example:
        >>> load().config.layers
        4
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if "config" not in metadata:
                raise InputError("no 'config' in its metadata")
            config = ByteConfig(**parse_json(metadata["config"], "its config"))
            tensors = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
        for name, tensor in tensors.items():
            if not tensor.isfinite().all():
                raise InputError(f"{name} holds NaN or infinity")
        # The tensors take the place of drawn ones, and the generator is as it was. (On the meta device nothing would be
        # drawn, but its first use loads the compiler: seconds, and random numbers of its own.)
        with torch.random.fork_rng(devices=[]):
            model = ByteModel(config)
        model.load_state_dict(tensors, assign=True)
    except (OSError, SafetensorError, TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"load({str(path)!r}): these are not the weights of a byte model: {error}. Install attemper again, "
            "or write the file with attemper.lab.model.save."
        ) from error
    return model.eval()


class SeenCalls(TorchFunctionMode):
    """Keeps query, key and value of every attention that runs inside."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Tensor, Tensor, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self.calls.append(args[:3])
        return func(*args, **(kwargs or {}))
