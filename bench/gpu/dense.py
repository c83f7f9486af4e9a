"""What the kernels have to compute, written out plainly in float64 over tensors of any device.

Independent of the ops: no paging tricks, no order of sums. Legend as in :mod:`foresay.verifier.ops.tree_attention`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from foresay.verifier.ops.tree_attention import PagedRows


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension."""
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu of the first half times the second."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return functional.silu(gate) * up


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """The product; a large weight is widened piece by piece."""
    return torch.cat([functional.linear(x.double(), part.double()) for part in weight.split(16384)], dim=-1)


def rotate(heads: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Half-rotation of every head."""
    first, second = heads.double().chunk(2, dim=-1)
    return torch.cat((first, second), -1) * cos.double() + torch.cat((second, first), -1) * signed_sin.double()


def attention(query: Tensor, keys: Tensor, values: Tensor, rows: PagedRows, scale: float) -> Tensor:
    """[R, H, D] of one sequence's rows: softmax over the committed keys and each row's own path."""
    length, size, heads = int(rows.lengths[0]), rows.page_size, query.shape[1]
    places = torch.arange(length + len(query), device=query.device)
    slots = rows.tables[0, places // size].long() * size + places % size
    group = heads // keys.shape[1]
    own_keys, own_values = (part[slots].double().repeat_interleave(group, 1) for part in (keys, values))
    scores = torch.einsum("rhd,nhd->hrn", query.double(), own_keys) * scale
    scores = scores.masked_fill(~_seen(rows, length, len(query), query.device)[None], -torch.inf)
    return torch.einsum("hrn,nhd->rhd", scores.softmax(-1), own_values)


def _seen(rows: PagedRows, length: int, count: int, device: torch.device) -> Tensor:
    """bool[R, length + R]: which places each row sees."""
    if rows.words is None:
        own = torch.ones(count, count, dtype=torch.bool, device=device).tril()
    else:
        own = (rows.words[:, None] >> torch.arange(count, device=device) & 1).bool()
    return torch.cat((torch.ones(count, length, dtype=torch.bool, device=device), own), dim=1)
