"""The part of a tree that is fixed before it is drafted: how many nodes a level keeps. Imports no torch.

A template also fixes which ranks are drafted below which, whatever the chances are: it is a set of rank paths, as
Medusa and EAGLE publish them: ``[0, 2]`` is the third best candidate below the best one of the root. Nodes are numbered
breadth-first::

    [[0], [0, 0], [0, 1], [1]]         0 ─┬─ 1 (rank 0) ─┬─ 3 (rank 0)
                                          │              └─ 4 (rank 1)
                                          └─ 2 (rank 1)
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from foresay.spec.errors import ConfigurationError
from foresay.spec.price import Price

#: The most drafted nodes: an ancestor word has 64 bits, one of them for the root.
MOST_PATHS = 63
_FORM = 'a list of rank paths such as [[0], [0, 0], [1]], alone or under "choices"'

RankPath = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Template:
    """Node 0 is the root, its parent -1. ranks: of each node among its parent's candidates; the root's is 0.

    starts: the first node of each depth, and the number of nodes at the end.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    starts: tuple[int, ...]
    inner: frozenset[int]

    @classmethod
    def of(cls, paths: Iterable[Sequence[int]], where: str = "a template") -> Template:
        """The template of these paths, in any order.

        Raises :class:`ConfigurationError`, which begins with ``where``, unless each path's prefixes are there too, and
        for more than 63 paths.
        """
        known = sorted((tuple(path) for path in paths), key=lambda path: (len(path), path))
        numbers: dict[RankPath, int] = {(): 0}
        for path in known:
            if path in numbers:
                raise ConfigurationError(f"{where}: the path {list(path)} appears twice")
            if path[:-1] not in numbers:
                raise ConfigurationError(f"{where}: the path {list(path)} is there, but not {list(path[:-1])} above it")
            numbers[path] = len(numbers)
        if not 1 <= len(known) <= MOST_PATHS:
            raise ConfigurationError(f"{where}: a tree has 1 to {MOST_PATHS} drafted nodes, got {len(known)} paths")
        parents = (-1, *(numbers[path[:-1]] for path in known))
        depths = [len(path) for path in numbers]
        starts = [depths.index(depth) for depth in range(depths[-1] + 1)] + [len(depths)]
        return cls(parents, (0, *(path[-1] for path in known)), tuple(starts), frozenset(parents[1:]))

    @classmethod
    def read(cls, file: str | Path) -> Template:
        """The template in a JSON file. Raises :class:`ConfigurationError`, which names the file and what is wrong in
        it."""
        try:
            found = json.loads(Path(file).read_text("utf-8"))
        except OSError as error:
            raise ConfigurationError(f"--draft-tree {file}: cannot be read ({error.strerror})") from None
        except ValueError as error:
            raise ConfigurationError(f"--draft-tree {file}: is not JSON ({error})") from None
        paths = found.get("choices") if isinstance(found, dict) else found
        if not isinstance(paths, list):
            raise ConfigurationError(f"--draft-tree {file}: must hold {_FORM}")
        for number, path in enumerate(paths, 1):
            if not (isinstance(path, list) and path and all(type(rank) is int and rank >= 0 for rank in path)):
                raise ConfigurationError(
                    f"--draft-tree {file}: path number {number} is {json.dumps(path)[:60]}, "
                    "but a path is a list of ranks, counted from 0"
                )
        return cls.of(paths, f"--draft-tree {file}")

    @property
    def levels(self) -> int:
        """The greatest depth."""
        return len(self.starts) - 2

    @property
    def widths(self) -> tuple[int, ...]:
        """How many nodes each level has."""
        return tuple(self.starts[depth + 1] - self.starts[depth] for depth in range(1, self.levels + 1))

    @property
    def paths(self) -> list[RankPath]:
        """The rank path of each node, the root's (which is empty) first."""
        paths: list[RankPath] = [()]
        for node in range(1, len(self.parents)):
            paths.append((*paths[self.parents[node]], self.ranks[node]))
        return paths

    def level(self, depth: int) -> range:
        """The nodes at a depth."""
        return range(self.starts[depth], self.starts[depth + 1])

    def reach(self, depth: int) -> int:
        """How many candidates have to be computed below the nodes of a depth."""
        return 1 + max(self.ranks[node] for node in self.level(depth + 1))

    def limited(self, levels: int) -> Template:
        """The template cut to at most ``levels`` (at least 1) levels."""
        return Template.of(path for path in self.paths[1:] if len(path) <= levels)


#: One ancestor word holds this many nodes, the root among them.
MAX_NODES = 64
#: Rows of prompts in one step, at most.
MAX_CHUNK = 256
#: A CPU records the steps of one text that drafts a chain of up to so many tokens; longer ones are rare.
WHOLE_CHAIN = 4


@dataclass(frozen=True, slots=True)
class TreeShape:
    """What is fixed before a tree is drafted: how many nodes each level keeps.

    ``widths[d]`` nodes are kept at depth ``d + 1``. The drafter chooses their parents, unless there is a template.
    price: the price of levels and rows for a draft that grows by its chances; None for one that does not. It is ignored
    when shapes are compared.
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
        """The number of nodes, including the root."""
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
        """The shape of a template; one of only first choices is a chain."""
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
        """A shape with room for this one and for a chain of ``levels``: as many levels and nodes as the larger of them
        has."""
        if levels <= self.levels:
            return self
        return TreeShape((1 + max(self.nodes - 1 - levels, 0),) + (1,) * (levels - 1))


@lru_cache(maxsize=MAX_NODES)
def _cut(template: Template, levels: int) -> TreeShape:
    return TreeShape.of(template.limited(levels))


ROOT_ONLY = TreeShape()
