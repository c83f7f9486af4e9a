"""The accept rule: how many of the sampled tokens one forward pass was worth.

At every node the target sampled a token (:mod:`foresay.spec.sample`). Walk from the root: while the sampled token is a
child, step into it; the first sample that is no child is the bonus token. What comes out is, position by position, what
plain sampling with the same noise samples: the tree only decides how many of those samples were computed at once. Hence
the same tokens for any drafter, any tree and none (Daliri, Musco and Suresh, 2024, arXiv 2408.07978).

The walk needs no loop. Let bit *i* of ``match`` say "token *i* equals the sample at its parent" (set for the root).
Node *i* is accepted if and only if ``ancestors[i] & ~match == 0``; siblings carry different tokens, so the accepted
nodes form one path, and the deepest one's ancestor word is that path.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from foresay.spec.tree import DraftTree

_WORD = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The accepted path of one tree.

    path: node ids from the root down. emitted: the tokens to append, one per path node: the accepted drafts,
    then the bonus token, which is the sample at the last node of the path.
    """

    path: list[int]
    emitted: list[int]

    @property
    def accepted(self) -> int:
        """How many drafted tokens were accepted."""
        return len(self.path) - 1


def accept(tree: DraftTree, sampled: Tensor) -> Acceptance:
    """The path that the samples take through the tree.

    sampled: int64[N], the target's sample at every node.
    """
    samples, tokens, parents = sampled.tolist(), tree.tokens.tolist(), tree.parents.tolist()
    match = 1
    for node in range(1, len(tokens)):
        match |= (tokens[node] == samples[parents[node]]) << node
    path_word = _deepest_accepted(tree.ancestors.tolist(), match)
    path = [node for node in range(len(tokens)) if path_word >> node & 1]
    return Acceptance(path, [samples[node] for node in path])


def _deepest_accepted(ancestors: list[int], match: int) -> int:
    """The ancestor word with the most nodes among those whose nodes all matched: the whole accepted path."""
    words = [word & _WORD for word in ancestors]
    return max((word for word in words if word & ~match == 0), key=int.bit_count)
