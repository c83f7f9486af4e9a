"""What a head learns from: texts of the target with its hidden states and its distributions.

Legend: B texts, T tokens each, R rows of them, H the target's width, V its vocabulary, V' a draft vocabulary, N rows
that count.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Lesson:
    """tokens: int64[B, T], filled up behind each text's end. likeliest: int64[B, T], the target's likeliest token in
    each row, where that is known. features: by name (``"layer.2"``), [B, T, H]; ``"final"``
    is what the output matrix reads. output: fp32[V, H], that matrix, times what logits are multiplied by. counted:
    bool[B, T], rows about tokens that the target wrote (row t is about token t + 1); None for all. cap: of logits.
    """

    tokens: Tensor
    features: dict[str, Tensor]
    output: Tensor
    counted: Tensor | None = None
    likeliest: Tensor | None = None
    cap: float | None = None

    def capped(self, logits: Tensor) -> Tensor:
        """As the target caps its own."""
        return logits if self.cap is None else self.cap * (logits / self.cap).tanh()

    @property
    def logits(self) -> Tensor:
        """fp32[B, T, V]: of all rows."""
        return self.capped(self.features["final"].float() @ self.output.T)

    def likeliest_tokens(self) -> Tensor:
        """int64[B, T]: the target's likeliest token in each row."""
        return torch.stack([(text.float() @ self.output.T).argmax(dim=-1) for text in self.features["final"]])

    @property
    def places(self) -> Tensor:
        """int64[B, T]: which of all rows that count each one is."""
        counted = torch.ones_like(self.tokens, dtype=torch.bool) if self.counted is None else self.counted
        return (counted.flatten().cumsum(0) - 1).view_as(counted)

    def taken(self, states: Tensor, rows: slice) -> Tensor:
        """[N, ..]: of states [B, R, ..] about the target's ``rows`` those that count."""
        return states.flatten(0, 1) if self.counted is None else states[self.counted[:, rows]]

    def about(self, rows: slice) -> Tensor:
        """int64[N]: which of all rows that count those of ``rows`` are."""
        return self.taken(self.places[:, rows], rows)

    def wanted(self, rows: slice) -> Tensor:
        """fp32[N, V]: the target's logits in ``rows`` that count."""
        return self.capped(self.taken(self.features["final"][:, rows], rows).float() @ self.output.T)

    def chances(self, rows: slice, ids: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """fp32[N, V']: the target's distribution over the tokens ``ids`` (None: all) in ``rows`` that count; and
        whether the likeliest token of all is among them, bool[N], if not all are meant.
        """
        if ids is None or len(ids) == len(self.output):
            return self.wanted(rows).softmax(dim=-1), None
        if self.likeliest is None:
            logits = self.wanted(rows)
            return logits[:, ids].softmax(dim=-1), torch.isin(logits.argmax(dim=-1), ids)
        states = self.taken(self.features["final"][:, rows], rows).float()
        chances = self.capped(states @ self.output[ids].T).softmax(dim=-1)
        return chances, torch.isin(self.taken(self.likeliest[:, rows], rows), ids)


@dataclass(frozen=True, slots=True)
class Depth:
    """How a head does at one depth, given that everything before was right.

    loss: soft cross-entropy against the target, in nats. greedy: how often its likeliest token is the target's.
    sampled: how often its sample at temperature 1 is the target's, both with the same noise.
    """

    loss: float
    greedy: float
    sampled: float


@dataclass(frozen=True, slots=True)
class Judged:
    """How a head does at each depth, and on how much text that it did not learn from: texts, and tokens of the target
    in them."""

    depths: list[Depth]
    texts: int
    tokens: int

    @property
    def acceptance(self) -> dict[str, list[float]]:
        """As a head's configuration keeps it: ``ACCEPTANCE`` of :mod:`foresay.verifier.heads.layouts`."""
        return {name: [round(getattr(depth, name), 3) for depth in self.depths] for name in ("greedy", "sampled")}


def judge(logits: Tensor, wanted: Tensor, generator: torch.Generator) -> Depth:
    """Compare guesses with the target's rows, both [..., V] over the target's vocabulary (-inf where not guessed).

    generator: of the noise, on their device.
    """
    if not len(wanted):
        return Depth(0.0, 0.0, 0.0)
    logits, wanted = logits.float(), wanted.float()
    uniform = torch.rand(wanted.shape, generator=generator, device=wanted.device).clamp_(1e-9, 1 - 1e-7)
    noise = -(-uniform.log()).log()
    known = logits.isfinite()
    log_chances = logits.log_softmax(dim=-1).masked_fill(~known, -30.0)
    return Depth(
        loss=float(-(wanted.softmax(dim=-1) * log_chances).sum(dim=-1).mean()),
        greedy=float((logits.argmax(dim=-1) == wanted.argmax(dim=-1)).float().mean()),
        sampled=float(((logits + noise).argmax(dim=-1) == (wanted + noise).argmax(dim=-1)).float().mean()),
    )


def spread(wanted: Tensor, ids: Tensor, guessed: Tensor) -> Tensor:
    """Guesses about the tokens ``ids``, [N, V'], among all: fp32 as ``wanted`` [N, V], -inf where not guessed."""
    everything = torch.full_like(wanted, -torch.inf)
    everything[:, ids] = guessed.float()
    return everything


def vocabulary(ids: Tensor, size: int) -> dict[str, Tensor]:
    """The tensors that say which of the target's ``size`` tokens are drafted, as EAGLE-3's authors store them."""
    own = ids.cpu()
    mask = torch.zeros(size, dtype=torch.bool).index_fill(0, own, True)
    return {"d2t": own - torch.arange(len(own)), "t2d": mask}
