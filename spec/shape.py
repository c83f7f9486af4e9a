"""What is fixed of a tree before it is drafted: how many nodes a level keeps. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from foresay.spec.errors import ConfigurationError
from foresay.spec.price import Price
from foresay.spec.template import Template

#: One ancestor word holds this many nodes, the root among them.
MAX_NODES = 64
#: Rows of prompts in one step, at most.
MAX_CHUNK = 256


@dataclass(frozen=True, slots=True)
class TreeShape:
    """What the host fixes before a tree is drafted: how many nodes each level keeps.

    ``widths[d]`` nodes are kept at depth ``d + 1``. Which parents they hang on is the drafter's choice, unless a
    template says it. price: what levels and rows are worth to a draft that grows by its chances; None for one that does
    not. It takes no part in comparing shapes.
    """

    widths: tuple[int, ...] = ()
    template: Template | None = None
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
        """All nodes, the root among them."""
        return 1 + sum(self.widths)

    @property
    def is_chain(self) -> bool:
        """Whether each level has one node, the likeliest."""
        return self.template is None and self.nodes == self.levels + 1

    @classmethod
    def chain(cls, length: int) -> TreeShape:
        """A chain of ``length`` drafted tokens; 0 is plain decoding."""
        return cls((1,) * length)

    @classmethod
    def parse(cls, text: str) -> TreeShape:
        """Read ``"3,2,1"``: three nodes at depth 1, two at depth 2, one at depth 3; or the template in ``"FILE.json"``.

        Raises :class:`ConfigurationError` for anything else, or for more than 63 drafted nodes.
        """
        if text.endswith(".json"):
            return cls.of(Template.read(text))
        try:
            widths = tuple(int(part) for part in text.split(","))
        except ValueError:
            widths = (0,)
        if min(widths) < 1:
            raise ConfigurationError(f'draft_tree must be numbers of nodes per level, such as "3,2,1", got "{text}"')
        if sum(widths) >= MAX_NODES:
            raise ConfigurationError(f"draft_tree may hold at most {MAX_NODES - 1} drafted nodes, got {sum(widths)}")
        return cls(widths)

    @classmethod
    def of(cls, template: Template) -> TreeShape:
        """The shape that a template has; one of first choices alone is a chain."""
        chain = len(template.ranks) == template.levels + 1 and not any(template.ranks)
        return cls(template.widths, None if chain else template)

    def limited(self, levels: int) -> TreeShape:
        """The shape cut to at most ``levels`` levels."""
        if levels >= self.levels:
            return self
        if self.template is None or levels <= 0:
            return TreeShape(self.widths[: max(levels, 0)], price=self.price)
        return _cut(self.template, levels)

    def deepened(self, levels: int) -> TreeShape:
        """Room for this shape and for a chain of ``levels``: as many levels and nodes as the larger of them has."""
        if levels <= self.levels:
            return self
        return TreeShape((1 + max(self.nodes - 1 - levels, 0),) + (1,) * (levels - 1))


@lru_cache(maxsize=MAX_NODES)
def _cut(template: Template, levels: int) -> TreeShape:
    return TreeShape.of(template.limited(levels))


ROOT_ONLY = TreeShape()
