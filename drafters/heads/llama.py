"""What the models that learn here have of a Llama: a shape, heads, and rows turned by their positions.

Legend: B texts, T rows, N heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """A shape in config.json's words."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int

    @property
    def group(self) -> int:
        """Query heads that read the same keys."""
        return self.num_attention_heads // self.num_key_value_heads

    def heads(self, x: Tensor) -> Tensor:
        """[B, T, N * D] -> [B, N, T, D]."""
        parts: Tensor = x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return parts

    def turned(self, x: Tensor, first: int = 0) -> Tensor:
        """[B, N, T, D], row t turned by the angles of position ``first`` + t (half-rotation layout)."""
        half = self.head_dim // 2
        steps = torch.arange(half, device=x.device, dtype=torch.float32)
        positions = torch.arange(first, first + x.shape[2], device=x.device)[:, None]
        angles = positions * self.rope_theta ** (-steps / half)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
