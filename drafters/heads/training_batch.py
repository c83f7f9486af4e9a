"""Training data of a head: texts of the target with its hidden states and its distributions; and the loss, soft
cross-entropy against these, fused with the output matrix.

Logits over a vocabulary are by far the largest tensors in training a head, and one pass over them for each operation
costs more than the products that computed them. So rows are processed in chunks that stay in a CPU's cache, and
gradients are computed in the forward pass, as in Hsu et al., "Liger Kernel" (2024).

Legend: B texts, T tokens each, R rows of them, H the target's width, V its vocabulary, V' a draft vocabulary, N rows
that count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """tokens: int64[B, T], padded after each text's end. top_tokens: int64[B, T], the target's likeliest token in each
    row, if known. features: by name (``"layer.2"``), [B, T, H]; ``"final"`` is the input of the output matrix. output:
    fp32[V, H], that matrix, times the logit scale. loss_mask: bool[B, T], rows that predict tokens the target generated
    (row t predicts token t + 1); None for all. logit_cap: of logits.
    """

    tokens: Tensor
    features: dict[str, Tensor]
    output: Tensor
    loss_mask: Tensor | None = None
    top_tokens: Tensor | None = None
    logit_cap: float | None = None

    def cap_logits(self, logits: Tensor) -> Tensor:
        """Logits, capped as the target's."""
        return logits if self.logit_cap is None else self.logit_cap * (logits / self.logit_cap).tanh()

    def compute_top_tokens(self) -> Tensor:
        """int64[B, T]: the target's likeliest token in each row."""
        return torch.stack([(text.float() @ self.output.T).argmax(dim=-1) for text in self.features["final"]])

    @property
    def indices(self) -> Tensor:
        """int64[B, T]: the index of each row among all rows that count."""
        counted = torch.ones_like(self.tokens, dtype=torch.bool) if self.loss_mask is None else self.loss_mask
        return (counted.flatten().cumsum(0) - 1).view_as(counted)

    def select(self, states: Tensor, rows: slice) -> Tensor:
        """[N, ..]: those that count of states [B, R, ..] for the target's ``rows``."""
        return states.flatten(0, 1) if self.loss_mask is None else states[self.loss_mask[:, rows]]

    def row_indices(self, rows: slice) -> Tensor:
        """int64[N]: the indices of ``rows`` among all rows that count."""
        return self.select(self.indices[:, rows], rows)

    def target_logits(self, rows: slice) -> Tensor:
        """fp32[N, V]: the target's logits in those of ``rows`` that count."""
        return self.cap_logits(self.select(self.features["final"][:, rows], rows).float() @ self.output.T)

    def target_probs(self, rows: slice, ids: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """fp32[N, V']: the target's distribution over the tokens ``ids`` (None: all) in those of ``rows`` that count;
        and bool[N], whether the likeliest of all tokens is among ``ids``, unless these are all.
        """
        if ids is None or len(ids) == len(self.output):
            return self.target_logits(rows).softmax(dim=-1), None
        if self.top_tokens is None:
            logits = self.target_logits(rows)
            return logits[:, ids].softmax(dim=-1), torch.isin(logits.argmax(dim=-1), ids)
        states = self.select(self.features["final"][:, rows], rows).float()
        chances = self.cap_logits(states @ self.output[ids].T).softmax(dim=-1)
        return chances, torch.isin(self.select(self.top_tokens[:, rows], rows), ids)


@dataclass(frozen=True, slots=True)
class DepthMetrics:
    """The quality of a head at one depth, given that everything before was right.

    loss: soft cross-entropy against the target, in nats. greedy: how often its likeliest token is the target's.
    sampled: how often its sample at temperature 1 is the target's, both with the same noise.
    """

    loss: float
    greedy: float
    sampled: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The quality of a head at each depth, and the amount of held-out text: texts, and tokens of the target in them."""

    depths: list[DepthMetrics]
    texts: int
    tokens: int

    @property
    def acceptance(self) -> dict[str, list[float]]:
        """As stored in a head's configuration: ``ACCEPTANCE`` of :mod:`foresay.verifier.heads.layouts`."""
        return {name: [round(getattr(depth, name), 3) for depth in self.depths] for name in ("greedy", "sampled")}


def evaluate(logits: Tensor, target_logits: Tensor, generator: torch.Generator) -> DepthMetrics:
    """Compare guesses with the target's rows, both [..., V] over the target's vocabulary (-inf where not guessed).

    generator: for the noise, on their device.
    """
    if not len(target_logits):
        return DepthMetrics(0.0, 0.0, 0.0)
    logits, target_logits = logits.float(), target_logits.float()
    uniform = torch.rand(target_logits.shape, generator=generator, device=target_logits.device).clamp_(1e-9, 1 - 1e-7)
    noise = -(-uniform.log()).log()
    known = logits.isfinite()
    log_chances = logits.log_softmax(dim=-1).masked_fill(~known, -30.0)
    return DepthMetrics(
        loss=float(-(target_logits.softmax(dim=-1) * log_chances).sum(dim=-1).mean()),
        greedy=float((logits.argmax(dim=-1) == target_logits.argmax(dim=-1)).float().mean()),
        sampled=float(((logits + noise).argmax(dim=-1) == (target_logits + noise).argmax(dim=-1)).float().mean()),
    )


def scatter_logits(target_logits: Tensor, ids: Tensor, guessed: Tensor) -> Tensor:
    """Guesses for the tokens ``ids``, [N, V'], scattered to all: fp32 like ``target_logits`` [N, V], -inf where not
    guessed."""
    everything = torch.full_like(target_logits, -torch.inf)
    everything[:, ids] = guessed.float()
    return everything


def vocabulary(ids: Tensor, size: int) -> dict[str, Tensor]:
    """The tensors that define which of the target's ``size`` tokens are drafted, as EAGLE-3's authors store them."""
    own = ids.cpu()
    mask = torch.zeros(size, dtype=torch.bool).index_fill(0, own, True)
    return {"d2t": own - torch.arange(len(own)), "t2d": mask}


#: Rows in a chunk, by device: with 4,096 tokens their logits are 4 MB on a CPU; a GPU needs large chunks, not a cache.
_PIECES = {"cpu": 256, "cuda": 8192}


def soft_cross_entropy(
    hidden: Tensor, weight: Tensor, chances: Tensor, counts: Tensor | None = None, cap: float | None = None
) -> Tensor:
    """The mean cross-entropy in nats of ``softmax(hidden @ weight.T)`` against ``chances``.

    hidden: [N, H]. weight: [V', H]. chances: fp32[N, V']. counts: bool[N], which rows count; None for all. A
    loss over no rows is 0. Products are computed in autocast's dtype where it is on. cap: logits l become
    ``cap * tanh(l / cap)`` first.
    """
    loss: Tensor = _Fused.apply(hidden, weight, chances, counts, cap)  # type: ignore[no-untyped-call]
    return loss


class _Fused(torch.autograd.Function):
    """hidden: [N, H], chances: [N, V'], counts: bool[N] or None."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, chances: Tensor, counts: Tensor | None, cap: float | None
    ) -> Tensor:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        cast, rows = weight.to(dtype), hidden.to(dtype)
        share = 1.0 / max(1, len(hidden) if counts is None else int(counts.sum()))
        by_hidden, by_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        total, size = torch.zeros((), device=hidden.device), _PIECES[device]
        for start in range(0, len(hidden), size):
            piece = slice(start, start + size)
            logits = (rows[piece] @ cast.T).float()
            if cap is not None:
                bent = logits.div_(cap).tanh_()
                logits = bent * cap
            logs = logits.log_softmax(dim=-1)
            losses = -(chances[piece] * logs).sum(dim=-1)
            slope = logs.exp_().sub_(chances[piece]).mul_(share)
            if counts is not None:
                losses = losses * counts[piece]
                slope *= counts[piece, None]
            if cap is not None:
                slope *= 1 - bent.square()
            total += losses.sum() * share
            half = slope.to(dtype)
            by_hidden[piece] = half @ cast
            by_weight += half.T @ rows[piece]
        ctx.save_for_backward(by_hidden, by_weight)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        by_hidden, by_weight = ctx.saved_tensors
        return by_hidden * upstream, by_weight * upstream, None, None, None
