"""What drafters share that look texts up: the state of each sequence, and drafts whose outcomes they learn from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from foresay.spec.budget.chance import Cells
from foresay.spec.protocols import FeatureRequest, or_roots
from foresay.spec.sequence import SequenceState
from foresay.spec.tree import DraftTree, TreeShape

State = TypeVar("State")


class LookupDrafter(ABC, Generic[State]):
    """Implements :class:`foresay.spec.protocols.Lookup`. It says what is known of a new sequence (``_begin``), and what
    is found for it in a step (``_tree``)."""

    name: str
    needs: FeatureRequest | None = None

    def __init__(self) -> None:
        self._running: dict[str, State] = {}

    @abstractmethod
    def _begin(self, sequence: SequenceState) -> State: ...

    @abstractmethod
    def _tree(self, sequence: SequenceState, shape: TreeShape) -> DraftTree | None: ...

    def _of(self, sequence: SequenceState) -> State:
        """The state of a sequence."""
        state = self._running.get(sequence.id)
        if state is None:
            state = self._running[sequence.id] = self._begin(sequence)
        return state

    def propose(self, sequences: Sequence[SequenceState], shapes: Sequence[TreeShape]) -> list[DraftTree]:
        """A draft per sequence of at most the shape's levels and nodes, empty where nothing is found."""
        return or_roots(self.find(sequences, shapes), sequences, self.name)

    def find(self, sequences: Sequence[SequenceState], shapes: Sequence[TreeShape]) -> list[DraftTree | None]:
        """Like ``propose``; None for an empty draft."""
        return list(map(self._tree, sequences, shapes))

    def extend(self, sequence: SequenceState) -> None:
        """Nothing to do."""

    def committed(self, sequence: SequenceState, path: list[int]) -> None:
        """Nothing to do: committed tokens are read when a draft is requested."""

    def finished(self, sequence: SequenceState) -> None:
        """Drop the sequence's state."""
        self._running.pop(sequence.id, None)


@dataclass(slots=True)
class DraftNodes:
    """A draft as host lists, the root first. length: of the text when it was made. cells: of each node's chance in the
    learnt table."""

    length: int
    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    chances: list[float] = field(default_factory=lambda: [1.0])
    cells: list[int] = field(default_factory=lambda: [0])

    @classmethod
    def below(cls, text: Sequence[int]) -> DraftNodes:
        """Only the root, the last token of a text."""
        return cls(len(text), [text[-1]])

    def add(self, token: int, parent: int, chance: float, cell: int) -> int:
        """Add a node; returns its number."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.chances.append(chance)
        self.cells.append(cell)
        return len(self.tokens) - 1

    def tree(self, drafter: str, nodes: int) -> DraftTree | None:
        """The first of these nodes; None if that is only the root."""
        if nodes == 1:
            return None
        return DraftTree.build(self.tokens[:nodes], self.parents[:nodes], drafter, tuple(self.chances[:nodes]))

    def teach(self, trust: Cells, text: Sequence[int]) -> None:
        """Learn from the outcome: the tokens that the text has got since."""
        below: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            below.setdefault(parent, []).append(node)
        node = 0
        for token in text[self.length :]:
            hit = None
            for child in below.get(node, ()):
                trust.saw(self.cells[child], self.tokens[child] == token)
                if self.tokens[child] == token:
                    hit = child
            if hit is None:
                return
            node = hit
