"""Trees of one fixed form: which ranks are drafted below which, whatever the chances are.

A template is a set of rank paths, as Medusa and EAGLE publish them: ``[0, 2]`` is the third best candidate below the
best one of the root. Nodes are numbered breadth first::

    [[0], [0, 0], [0, 1], [1]]         0 ─┬─ 1 (rank 0) ─┬─ 3 (rank 0)
                                          │              └─ 4 (rank 1)
                                          └─ 2 (rank 1)
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from foresay.spec.errors import ConfigurationError

#: Drafted nodes: one ancestor word has 64 bits, one of them for the root.
MOST_PATHS = 63
_FORM = 'a list of rank paths such as [[0], [0, 0], [1]], alone or under "choices"'

RankPath = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Template:
    """Node 0 is the root, its parent -1. ranks: of each node among what its parent's candidates are; the root's is 0.

    starts: the first node of each depth, and the number of nodes at the end.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    starts: tuple[int, ...]
    inner: frozenset[int]

    @classmethod
    def of(cls, paths: Iterable[Sequence[int]], where: str = "a template") -> Template:
        """The template of these paths, in any order.

        Raises :class:`ConfigurationError`, which begins with ``where``, unless each path's beginnings are there too,
        and for more than 63 paths.
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
        """The template in a JSON file. Raises :class:`ConfigurationError` naming the file and what is wrong in it."""
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
        """How many candidates have to be looked at below the nodes of a depth."""
        return 1 + max(self.ranks[node] for node in self.level(depth + 1))

    def limited(self, levels: int) -> Template:
        """The template cut to at most ``levels`` levels, of which there is at least one."""
        return Template.of(path for path in self.paths[1:] if len(path) <= levels)


def best_template(accuracy: Sequence[Sequence[float]], nodes: int) -> Template:
    """The template of at most ``nodes`` drafted nodes that is expected to have most of them accepted (Medusa).

    accuracy[d][r]: how often the candidate of rank r is right at depth d + 1, given that its parent was; taken to be
    the same below every node. What was never right is not drafted. Raises :class:`ConfigurationError` if nothing was.
    """
    ranked = [sorted(((-share, rank) for rank, share in enumerate(row) if share > 0)) for row in accuracy]
    paths: list[RankPath] = []
    # (minus the value of the path, path, its place among its siblings, minus the value of its parent)
    heap: list[tuple[float, RankPath, int, float]] = [(row[0][0], (row[0][1],), 0, -1.0) for row in ranked[:1] if row]
    while heap and len(paths) < nodes:
        value, path, place, above = heapq.heappop(heap)
        paths.append(path)
        depth = len(path)
        if depth < len(ranked) and ranked[depth]:
            share, rank = ranked[depth][0]
            heapq.heappush(heap, (-value * share, (*path, rank), 0, value))
        if place + 1 < len(ranked[depth - 1]):
            share, rank = ranked[depth - 1][place + 1]
            heapq.heappush(heap, (-above * share, (*path[:-1], rank), place + 1, above))
    return Template.of(paths, "measured accuracies")
