"""What DSpark adds to a block's marginals: a bias of low rank by the token before each, and how far it is from there.

::

    vanilla   logits(x) = U h + W2 W1[before]
    gated     logits(x) = U h + W2 (g W1[before]),        g = sigmoid(G [h; W1[before]] + b)
    rnn       logits(x) = U h + W2 tanh(o),               (g, c, o) = J [s; W1[before]; h] + b
                                                          s' = g s + (1 - g) tanh(c), with the sigmoid of g

Legend: N nodes, H hidden width, r rank, V' draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foresay.verifier.heads.reader import HeadReader
from foresay.verifier.model.linear import Linear
from foresay.verifier.ops.take import take_rows

KINDS = ("vanilla", "gated", "rnn")


@dataclass(frozen=True, slots=True)
class MarkovConfig:
    """kind: of :data:`KINDS`. rank: r."""

    kind: str
    rank: int


class MarkovHead:
    """Owns its weights. before: [V, r]."""

    def __init__(self, config: MarkovConfig, before: Tensor, after: Linear, joint: Linear | None) -> None:
        self.config, self._before, self._after, self._joint = config, before, after, joint

    @classmethod
    def read(cls, config: MarkovConfig, reader: HeadReader) -> MarkovHead:
        """From a head's file."""
        rank, hidden, vocab = config.rank, reader.layer.hidden_size, reader.target.config.vocab_size
        read: dict[str, tuple[str, int, int]] = {
            "gated": ("gate_proj", rank, hidden + rank),
            "rnn": ("joint_proj", 3 * rank, hidden + 2 * rank),
        }
        joint = None
        if config.kind in read:
            name, *shape = read[config.kind]
            bias = reader.take(f"markov_head.{name}.bias", shape[0])
            joint = Linear(reader.take(f"markov_head.{name}.weight", *shape), bias)
        before = reader.take("markov_head.markov_w1.weight", vocab, rank)
        return cls(config, before, Linear(reader.take("markov_head.markov_w2.weight", reader.vocab, rank)), joint)

    def begin(self, hidden: Tensor) -> Tensor | None:
        """[N, r]: the state at the roots. hidden: [N, H]."""
        return hidden.new_zeros(len(hidden), self.config.rank) if self.config.kind == "rnn" else None

    def bias(self, tokens: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """fp32[N, V'] below nodes of these tokens, int64[N], and the states below. hidden: [N, H], of the rows that
        guess."""
        before = take_rows(self._before, tokens)
        if self._joint is None:
            return self._after.wide(before), None
        if state is None:
            return self._after.wide(self._joint(torch.cat((hidden, before), dim=-1)).sigmoid() * before), None
        gate, candidate, out = self._joint(torch.cat((state, before, hidden), dim=-1)).chunk(3, dim=-1)
        gate = gate.sigmoid()
        return self._after.wide(out.tanh()), gate * state + (1 - gate) * candidate.tanh()
