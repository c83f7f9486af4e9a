"""What DSpark adds to a block's marginals: a low-rank bias that depends on the token before each, and on the depth.

::

    vanilla   logits(x) = U h + W2 W1[before]
    gated     logits(x) = U h + W2 (g W1[before]),        g = sigmoid(G [h; W1[before]] + b)
    rnn       logits(x) = U h + W2 tanh(o),               (g, c, o) = J [s; W1[before]; h] + b
                                                          s' = g s + (1 - g) tanh(c), with the sigmoid of g

Legend: N nodes, r rank, V the target's vocabulary, V' the draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from foresay.verifier.model.linear import Linear
from foresay.verifier.model.products import Product
from foresay.verifier.model.weights import LayerWeights
from foresay.verifier.ops.rows import take_rows

#: The kinds, with their own matrix: its name, how many times r its output is, and how many times r it reads of states.
_JOINT = {"vanilla": ("", 0, 0), "gated": ("markov_head.gate_proj", 1, 0), "rnn": ("markov_head.joint_proj", 3, 1)}
KINDS = tuple(_JOINT)
_BEFORE, _AFTER = "markov_head.markov_w1", "markov_head.markov_w2"


@dataclass(frozen=True, slots=True)
class MarkovConfig:
    """kind: of :data:`KINDS`. rank: r."""

    kind: str
    rank: int

    def products(self, vocab: int, drafts: int, hidden: int) -> Iterator[Product]:
        """W1, W2 and G or J. vocab, drafts: V and V'."""
        (joint, outer, states), rank = _JOINT[self.kind], self.rank
        yield Product(_BEFORE, {_BEFORE: vocab}, rank)
        yield Product(_AFTER, {_AFTER: drafts}, rank)
        if joint:
            yield Product(joint, {joint: outer * rank}, hidden + (1 + states) * rank, bias=True)


class MarkovHead:
    """Owns its weights, the outside ones of a head."""

    def __init__(self, config: MarkovConfig, outside: LayerWeights) -> None:
        before, joint = outside.matrices[_BEFORE], _JOINT[config.kind][0]
        assert isinstance(before, Tensor), "a table of floats"
        self.config, self._before, self._after = config, before, Linear(outside.matrices[_AFTER], None, before.dtype)
        self._joint = Linear(outside.matrices[joint], outside.biases[joint], before.dtype) if joint else None

    def begin(self, hidden: Tensor) -> Tensor | None:
        """[N, r]: the state at the roots. hidden: [N, H]."""
        return hidden.new_zeros(len(hidden), self.config.rank) if self.config.kind == "rnn" else None

    def bias(self, tokens: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """fp32[N, V'], the bias below nodes with these tokens, int64[N], and the states there. hidden: [N, H], of the
        rows that guess."""
        before = take_rows(self._before, tokens)
        if self._joint is None:
            return self._after.wide(before), None
        if state is None:
            return self._after.wide(self._joint(torch.cat((hidden, before), dim=-1)).sigmoid() * before), None
        gate, candidate, out = self._joint(torch.cat((state, before, hidden), dim=-1)).chunk(3, dim=-1)
        gate = gate.sigmoid()
        return self._after.wide(out.tanh()), gate * state + (1 - gate) * candidate.tanh()
