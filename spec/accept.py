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

from collections.abc import Sequence

from foresay.spec.tree import DraftTree


def accept(tree: DraftTree, sampled: Sequence[int]) -> list[int]:
    """The path that the samples take through the tree: node ids from the root down.

    The tokens to append are the samples along it: the accepted drafts, then the bonus token.

    sampled: the target's sample at every node.
    """
    tokens, parents = tree.tokens, tree.parents
    match = 1
    for node in range(1, len(tokens)):
        match |= (tokens[node] == sampled[parents[node]]) << node
    path_word = _deepest_accepted(tree.ancestors, match)
    return [node for node in range(len(tokens)) if path_word >> node & 1]


def _deepest_accepted(words: list[int], match: int) -> int:
    """The ancestor word with the most nodes among those whose nodes all matched: the whole accepted path."""
    return max((word for word in words if word & ~match == 0), key=int.bit_count)
