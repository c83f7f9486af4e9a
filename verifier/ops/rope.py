"""Rotary position embedding of queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(heads: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotate every head by its row's position (half-rotation layout).

    heads: [R, N, D]; cos, signed_sin: [R, 1, D] of the same dtype, the first half of ``signed_sin`` negated.
    With (a, b) the halves of a head: ``(a cos - b sin, b cos + a sin)``.
    """
    half = heads.shape[-1] // 2
    swapped = torch.cat((heads[..., half:], heads[..., :half]), dim=-1)
    return swapped.mul_(signed_sin).addcmul_(heads, cos)
