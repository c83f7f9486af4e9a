"""The part of a tree that is fixed before it is drafted: how many nodes a level keeps. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from foresay.spec.errors import ConfigurationError
from foresay.spec.price import Price

#: One ancestor word holds this many nodes, the root among them.
MAX_NODES = 64
#: Rows of prompts in one step, at most.
MAX_CHUNK = 256
#: A CPU records the steps of one text that drafts a chain of up to so many tokens; longer ones are rare. Start-up times
#: one of so many.
WHOLE_CHAIN = 8


@dataclass(frozen=True, slots=True)
class TreeShape:
    """What is fixed before a tree is drafted: how many nodes each level keeps.

    ``widths[d]`` nodes at depth ``d + 1``; drafters with logits may spread as many nodes otherwise over the levels.
    price: the price of levels and rows for a draft that grows by its chances; None for one that does not. It is ignored
    when shapes are compared.
    """

    widths: tuple[int, ...] = ()
    price: Price | None = field(default=None, compare=False)

    @property
    def likely_levels(self) -> int:
        """Levels that are expected to be drafted."""
        return self.levels if self.price is None else min(self.levels, self.price.levels)

    @property
    def levels(self) -> int:
        """The greatest depth: at most this many drafted tokens can be accepted in a step."""
        return len(self.widths)

    @property
    def nodes(self) -> int:
        """The number of nodes, including the root."""
        return 1 + sum(self.widths)

    @property
    def is_chain(self) -> bool:
        """Whether each level has one node, the likeliest."""
        return self.nodes == self.levels + 1

    @classmethod
    def chain(cls, length: int) -> TreeShape:
        """A chain of ``length`` drafted tokens; 0 is plain decoding."""
        return cls((1,) * length)

    @classmethod
    def parse(cls, text: str) -> TreeShape:
        """Read ``"3,2,1"``: three nodes at depth 1, two at depth 2, one at depth 3.

        Raises :class:`ConfigurationError` for anything else, or for more than 63 drafted nodes.
        """
        try:
            widths = tuple(int(part) for part in text.split(","))
        except ValueError:
            widths = (0,)
        if min(widths) < 1:
            raise ConfigurationError(f'draft_tree must be numbers of nodes per level, such as "3,2,1", got "{text}"')
        if sum(widths) >= MAX_NODES:
            raise ConfigurationError(f"draft_tree may hold at most {MAX_NODES - 1} drafted nodes, got {sum(widths)}")
        return cls(widths)

    def limited(self, levels: int) -> TreeShape:
        """The shape cut to at most ``levels`` levels."""
        if levels >= self.levels:
            return self
        return TreeShape(self.widths[: max(levels, 0)], price=self.price)

    def deepened(self, levels: int) -> TreeShape:
        """A shape with room for this one and for a chain of ``levels``: as many levels and nodes as the larger of them
        has."""
        if levels <= self.levels:
            return self
        return TreeShape((1 + max(self.nodes - 1 - levels, 0),) + (1,) * (levels - 1))


ROOT_ONLY = TreeShape()
