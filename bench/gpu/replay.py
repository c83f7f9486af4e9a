"""A replayed acceptance: which drafts are accepted is written down beforehand, everything else is really computed.

Random heads guess nothing, and what trained ones would accept is their own affair, not the engine's. So the samples of
a captured step are made as ever and then replaced, in the graph: the first so many drafts of the chain are sampled, the
one behind them is not. Figures made this way are labelled synthetic.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from torch import Tensor

from foresay.verifier.graphs.proposer import DeviceTree
from foresay.verifier.ops.sample import RowSampling, sample_rows

#: Tokens that take the place of a sample that must not be the draft's.
KNOWN_TOKENS = 4096
#: Tokens per step of published EAGLE-3 heads (code and chat at temperature 0), which a chain as long as that can give.
PUBLISHED = (4.65, 6.13)


def highest_tau(levels: int) -> float:
    """The highest published number of tokens per step that a chain of so many drafts gives; all of them, if none."""
    return max((tau for tau in PUBLISHED if tau <= levels + 1), default=float(levels + 1))


def tokens_per_step(alpha: float, levels: int) -> float:
    """Expected tokens of a step, the bonus among them, if each draft is accepted with this chance given its parent."""
    return sum(alpha**depth for depth in range(levels + 1))


def alpha_of(tau: float, levels: int) -> float:
    """The chance that gives so many tokens a step. Raises ValueError where a chain of ``levels`` cannot."""
    if not 1 <= tau <= levels + 1:
        raise ValueError(f"a chain of {levels} gives 1 to {levels + 1} tokens a step, not {tau}")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens_per_step(middle, levels) < tau else (low, middle)
    return (low + high) / 2


def trace(tau: float, levels: int, steps: int, seed: int = 0) -> list[int]:
    """Accepted drafts of each step, geometric and cut at ``levels``, their mean as near to ``tau - 1`` as whole
    numbers allow: single steps are moved by one until it is."""
    rng, alpha = random.Random(seed), alpha_of(tau, levels)
    found = [next(_failures(rng, alpha, levels)) for _ in range(steps)]
    lacking = round((tau - 1) * steps) - sum(found)
    order = rng.sample(range(steps), steps)
    while lacking:
        for step in order:
            change = 1 if lacking > 0 else -1
            if lacking and 0 <= found[step] + change <= levels:
                found[step] += change
                lacking -= change
    return found


def _failures(rng: random.Random, alpha: float, levels: int) -> Iterator[int]:
    yield next((depth for depth in range(levels) if rng.random() >= alpha), levels)


class Replayed:
    """Implements :class:`foresay.verifier.graphs.step.Drawing` for chains of one sequence, step after step along a
    trace."""

    def __init__(self, accepted: list[int], device: torch.device) -> None:
        self._accepted = torch.tensor(accepted, device=device)
        self._at = torch.zeros(1, dtype=torch.int64, device=device)

    def rewind(self) -> None:
        """Begin again."""
        self._at.zero_()

    def __call__(self, logits: Tensor, sampling: RowSampling, tree: DeviceTree) -> Tensor:
        """int64[1, N]: the drafts as far as the trace says, the target's own samples behind."""
        sampled = sample_rows(logits, sampling).view_as(tree.tokens)
        count = self._accepted.index_select(0, self._at % len(self._accepted))
        self._at.add_(1)
        drafts = tree.tokens[:, 1:]
        depth = torch.arange(drafts.shape[1], device=drafts.device)
        own = sampled[:, :-1]
        other = torch.where(own == drafts, (own + 1) % KNOWN_TOKENS, own)
        return torch.cat((torch.where(depth < count, drafts, other), sampled[:, -1:]), dim=1)
