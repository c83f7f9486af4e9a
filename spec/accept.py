"""The accept rule: how many of the sampled tokens of one forward pass are emitted.

At every node the target sampled a token (:mod:`foresay.spec.sample`). Walk from the root: while the sampled token is a
child, step into it; the first sample that is no child is the bonus token. The emitted tokens are, position by position,
those of plain sampling with the same noise: the tree only decides how many of these samples are computed at once. Hence
the same tokens with any drafter, any tree and none (Daliri, Musco and Suresh, 2024, arXiv 2408.07978).

The walk needs no loop. Let bit *i* of ``match`` say "token *i* equals the sample at its parent" (set for the root).
Node *i* is accepted if and only if ``ancestors[i] & ~match == 0``; siblings carry different tokens, so the accepted
nodes form one path, and the deepest one's ancestor word is that path.

The metrics, each defined here once. Tokens per step: a text's output tokens over the target's passes that emitted any
of them, whatever the drafter, including the pass that computed the end of the prompt. Plain decoding has 1.

Accepted by depth, of drafts, which are trees with at least one drafted token::

    drafts  10        accepted at depth 1, 2, 3        6    3    3
                      cumulative                      0.6  0.3  0.3     of all drafts: at least so far
                      conditional                     0.6  0.5  1.0     of those accepted at the depth before

A speed-up is how many times faster than plain decoding a text is generated, once its prompt is computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

import msgspec

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


#: Depths that are reported; the last one includes all deeper ones.
SHOWN = 9
#: A speed-up within this factor of plain decoding counts as none: texts differ by as much. compare.js has both numbers
#: too.
GAIN = 1.03
#: Measurements of one quantity that differ by more than this factor are unusable; on a quiet machine they never do.
SCATTERED = 3.0


def tokens_per_step(tokens: int, steps: int) -> float | None:
    """Tokens of texts over the steps of single requests that emitted them; None without steps."""
    return tokens / steps if steps else None


def summed(counts: Iterable[Sequence[int]]) -> list[int]:
    """Elementwise sums of lists of different lengths."""
    return [sum(column) for column in zip_longest(*counts, fillvalue=0)]


class ByDepth(msgspec.Struct, frozen=True):
    """Acceptance by depth, from 1 on, as shares of drafts. cumulative: of all drafts, those accepted at least to this
    depth; conditional: of those accepted at the previous depth, those accepted at this one too. Both end after the
    first 0."""

    drafts: int = 0
    cumulative: list[float] = []
    conditional: list[float] = []

    @classmethod
    def of(cls, accepted_per_depth: Sequence[int], drafts: int) -> ByDepth:
        """From the number of drafts accepted at each depth."""
        counts = [count for count in accepted_per_depth if count] if drafts else []
        if len(counts) < len(accepted_per_depth) and drafts:
            counts.append(0)
        above = [drafts, *counts]
        return cls(
            drafts,
            [count / drafts for count in counts],
            [count / before for before, count in zip(above, counts, strict=False)],
        )

    def __str__(self) -> str:
        """Both, for display: each share with two digits, up to depth nine."""
        named = {"cumulative": self.cumulative, "conditional": self.conditional}
        return ", ".join(f"{name} {' '.join(f'{share:.2f}' for share in own[:SHOWN])}" for name, own in named.items())
