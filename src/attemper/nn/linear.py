"""Linear attention as a module that holds its options."""

from __future__ import annotations

from torch import Tensor, nn

from attemper.functional.linear import LinearOutput, linear_attention
from attemper.functional.linear_state import FeatureMap, LinearState, check_feature_map


class LinearAttention(nn.Module):
    """:func:`attemper.functional.linear_attention` with its options held; no projections.

    Args:
        feature_map: "elu", "relu", "exp", or a function or module that gives no negative number; a module's parameters
            are this module's too.
        is_causal: row i sees the keys up to i.
        enable_gqa: query heads share key heads.
        chunk_size: keys of a chunk of the causal form; None for a good size.

    Raises:
        InputError: the feature map is neither a name nor callable.

    Example:
        >>> import torch
        >>> layer = LinearAttention("relu", is_causal=True)
        >>> x = torch.rand(1, 2, 5, 4)
        >>> layer(x, x, x).output.shape
        torch.Size([1, 2, 5, 4])
    """

    def __init__(
        self,
        feature_map: FeatureMap = "elu",
        *,
        is_causal: bool = False,
        enable_gqa: bool = False,
        chunk_size: int | None = None,
    ) -> None:
        super().__init__()
        self.feature_map = check_feature_map("LinearAttention", feature_map)
        self.is_causal, self.enable_gqa, self.chunk_size = is_causal, enable_gqa, chunk_size

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, state: LinearState | None = None
    ) -> LinearOutput:
        """Arguments, result and errors as of the function: q [B, H, Q, D], k [B, G, K, D], v [B, G, K, E]."""
        return linear_attention(
            q,
            k,
            v,
            mask=mask,
            state=state,
            feature_map=self.feature_map,
            is_causal=self.is_causal,
            enable_gqa=self.enable_gqa,
            chunk_size=self.chunk_size,
        )

    def extra_repr(self) -> str:
        name = self.feature_map if isinstance(self.feature_map, str) else "..."
        return f"feature_map={name!r}, is_causal={self.is_causal}"
