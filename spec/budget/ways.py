"""Ways of drafting: what could be drafted for each sequence, and what a way takes of that and is expected to bring."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol


class Grove(NamedTuple):
    """What is expected of a tree: accepted nodes, verified ones once their chances are known, levels drafted, and how
    often it branches."""

    tokens: float = 0.0
    nodes: float = 0.0
    levels: float = 0.0
    branches: float = 1.0


@dataclass(frozen=True, slots=True)
class Offer:
    """What could be drafted for one sequence.

    found: the chances of nodes that were looked up, likeliest first. first: that one of them at depth 1 comes; a model
    is of no use then. models: by name, the chance of each level's node of a chain, alone. beside: the same where what
    was looked up is wrong at depth 1, as chances of the model alone. trees: by name, of those that can be asked
    for one.
    """

    found: Many[float] = ()
    first: float = 0.0
    models: Mapping[str, Many[float]] = field(default_factory=dict)
    beside: Mapping[str, Many[float]] = field(default_factory=dict)
    trees: Mapping[str, Grove] = field(default_factory=dict)

    def chain(self, model: str, looked: bool) -> Many[float]:
        """The chances of a model's chain; looked: beside what was found."""
        if not (looked and self.found):
            return self.models.get(model, ())
        missed = 1.0 - self.first
        return [missed * chance for chance in self.beside.get(model, ())]

    def tree(self, model: str, looked: bool) -> Grove:
        """What is expected of a model's tree; looked: beside what was found."""
        grove = self.trees.get(model, Grove())
        if not (looked and self.found and grove.tokens):
            return grove
        alone, beside = self.models.get(model), self.beside.get(model)
        missed = (1.0 - self.first) * (beside[0] / alone[0] if alone and beside else 1.0)
        return grove._replace(tokens=missed * grove.tokens, branches=1.0)


@dataclass(frozen=True, slots=True)
class Taken:
    """One way of drafting at its best size. model: "" for what was found alone. found, levels: of each sequence, how
    many found nodes and how many of the model's levels. tokens, seconds: expected of the step. grown: what is expected
    of each of the model's trees, if these grow by their chances; it is asked for no chains of a given length then."""

    model: str
    found: tuple[int, ...]
    levels: tuple[int, ...]
    tokens: float
    seconds: float
    grown: tuple[Grove, ...] = ()

    @property
    def pace(self) -> float:
        """Tokens in a second."""
        return self.tokens / self.seconds

    def value(self, pace: float) -> float:
        """Tokens beyond those that would come in the same time at a pace."""
        return self.tokens - pace * self.seconds

    @property
    def nodes(self) -> int:
        """Drafted ones, of all sequences."""
        drafted = round(sum(grove.nodes for grove in self.grown)) if self.grown else sum(self.levels)
        return sum(self.found) + drafted

    @property
    def kind(self) -> tuple[str, bool]:
        """Which drafters take part: the model, and whether anything found does."""
        return self.model, any(self.found)


class DraftSeconds(Protocol):
    """Seconds of a draft."""

    def __call__(self, name: str, levels: float, nodes: float, grown: bool = False) -> float:
        """By the model's name. grown: whether its chances decide what it becomes."""
        ...


def of_rows(seconds: Many[float], rows: int) -> float:
    """Seconds of a step by its rows; beyond those that are known, of the most."""
    return seconds[min(rows, len(seconds) - 1)]
