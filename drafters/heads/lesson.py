"""What a head learns from: texts of the target with its hidden states and its distributions.

Legend: B texts, T tokens each, H the target's width, V its vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Lesson:
    """tokens: int64[B, T]. features: by name (``"final"``, ``"layer.2"``), [B, T, H]. logits: [B, T, V], row t about
    token t + 1."""

    tokens: Tensor
    features: dict[str, Tensor]
    logits: Tensor


@dataclass(frozen=True, slots=True)
class Depth:
    """How a head does at one depth, given that everything before was right.

    loss: soft cross-entropy against the target, in nats. greedy: how often its likeliest token is the target's.
    sampled: how often its sample at temperature 1 is the target's, both with the same noise.
    """

    loss: float
    greedy: float
    sampled: float


def judge(logits: Tensor, wanted: Tensor, generator: torch.Generator) -> Depth:
    """Compare guesses with the target's rows, both [..., V] over the target's vocabulary (-inf where not guessed)."""
    logits, wanted = logits.float(), wanted.float()
    uniform = torch.rand(wanted.shape, generator=generator).clamp_(1e-9, 1 - 1e-7).to(wanted.device)
    noise = -(-uniform.log()).log()
    known = logits.isfinite()
    log_chances = logits.log_softmax(dim=-1).masked_fill(~known, -30.0)
    return Depth(
        loss=float(-(wanted.softmax(dim=-1) * log_chances).sum(dim=-1).mean()),
        greedy=float((logits.argmax(dim=-1) == wanted.argmax(dim=-1)).float().mean()),
        sampled=float(((logits + noise).argmax(dim=-1) == (wanted + noise).argmax(dim=-1)).float().mean()),
    )
