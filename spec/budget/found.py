"""What looking things up brought for one sequence in one step: nodes with the chances they have had so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spec.budget.claims import LEAST, Claims, claimed
from spec.budget.merge import merge
from spec.tree import MAX_NODES, DraftTree


@dataclass(frozen=True, slots=True)
class Found:
    """The chains of all who look things up. proposed: each as it was, and what is known of whose it is. tree: the
    likely nodes of all, with the chances they are believed to have; None for none. names: of those who have any.
    """

    proposed: Sequence[tuple[Claims, DraftTree]] = ()
    tree: DraftTree | None = None
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, proposed: Sequence[tuple[Claims, DraftTree]]) -> Found:
        """Of what was proposed."""
        likely = [chain for one in proposed if len(chain := _believed(*one)) > 1]
        tree = merge(likely, MAX_NODES).tree if likely else None
        return cls(proposed, tree, tuple(chain.drafter for chain in likely))

    @property
    def chances(self) -> list[float]:
        """Of the nodes, likeliest first."""
        return [] if self.tree is None else sorted(self.tree.chances[1:], reverse=True)

    @property
    def first(self) -> float:
        """The chance that a node at depth 1 comes."""
        if self.tree is None:
            return 0.0
        return min(1.0, sum(c for c, p in zip(self.tree.chances, self.tree.parents.tolist(), strict=True) if p == 0))

    def best(self, nodes: int) -> DraftTree:
        """So many of them, the likeliest."""
        assert self.tree is not None, "whoever takes of it has found something"
        return merge([self.tree], nodes + 1).tree

    def learn(self, emitted: Sequence[int]) -> None:
        """What came says what was right."""
        for claims, chain in self.proposed:
            for claim, token, came in zip(claimed(chain), chain.tokens.tolist()[1:], emitted, strict=False):
                claims.saw(claim, token == came)
                if token != came:
                    break


#: Of a step in which nobody found anything.
NOTHING = Found()


def _believed(claims: Claims, chain: DraftTree) -> DraftTree:
    """The nodes of a proposal that are likely enough, with their chances."""
    likely = [chance for chance in claims.chances(claimed(chain)) if chance >= LEAST]
    return DraftTree.chain(chain.tokens[: 1 + len(likely)].tolist(), chain.drafter, (1.0, *likely))
