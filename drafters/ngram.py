"""Prompt lookup: propose what followed the last occurrence of the sequence's last few tokens.

Needs no model. It uses the longest n-gram that ends the sequence and was seen before, at its most recent earlier
occurrence (reference: algorithms, 3.9). The index is a dictionary of only the committed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from foresay.spec.names import NGRAM
from foresay.spec.protocols import FeatureRequest, or_roots
from foresay.spec.sequence import SequenceState
from foresay.spec.tree import DraftTree, TreeShape

#: Tokens that are indexed at once, so that no step waits long: about a millisecond.
_MOST_READ = 256


class _Index:
    """The last occurrence of each n-gram that has a follower: n-gram -> position after it."""

    def __init__(self, sizes: range) -> None:
        self._sizes = sizes
        self._after: dict[tuple[int, ...], int] = {}
        self._read = 0

    def read(self, tokens: list[int]) -> None:
        """Index the tokens since the last call; the last one has no follower yet, so its n-grams wait.

        At most ``_MOST_READ`` of them: a long prompt is indexed over several steps.
        """
        stop = min(len(tokens), self._read + _MOST_READ)
        for end in range(self._read, stop):
            for size in self._sizes:
                if size <= end:
                    self._after[tuple(tokens[end - size : end])] = end
        self._read = stop

    def continuation(self, tokens: list[int], length: int) -> list[int]:
        """Up to ``length`` tokens that followed the longest known n-gram at the end of ``tokens``."""
        for size in reversed(self._sizes):
            after = self._after.get(tuple(tokens[-size:])) if size <= len(tokens) else None
            if after is not None:
                return tokens[after : after + length]
        return []


class NgramDrafter:
    """Chains by n-gram lookup in the sequence's own text; implements :class:`foresay.spec.protocols.Drafter`."""

    name = NGRAM
    needs: FeatureRequest | None = None

    def __init__(self, shortest: int = 2, longest: int = 4) -> None:
        self._sizes = range(shortest, longest + 1)
        self._indices: dict[str, _Index] = {}

    def propose(self, sequences: Sequence[SequenceState], shapes: Sequence[TreeShape]) -> list[DraftTree]:
        """A chain per sequence, empty where nothing matches; as deep as its shape has levels."""
        return or_roots(self.find(sequences, shapes), sequences, self.name)

    def find(self, sequences: Sequence[SequenceState], shapes: Sequence[TreeShape]) -> list[DraftTree | None]:
        """Like ``propose``; None where nothing matches."""
        return [self._chain(sequence, shape.levels) for sequence, shape in zip(sequences, shapes, strict=True)]

    def _chain(self, sequence: SequenceState, levels: int) -> DraftTree | None:
        found = self._read(sequence).continuation(sequence.tokens, levels)
        return DraftTree.chain([sequence.tokens[-1], *found], self.name) if found else None

    def extend(self, sequence: SequenceState) -> None:
        """Index some of the prompt."""
        self._read(sequence)

    def _read(self, sequence: SequenceState) -> _Index:
        index = self._indices.setdefault(sequence.id, _Index(self._sizes))
        index.read(sequence.tokens)
        return index

    def committed(self, sequence: SequenceState, path: list[int]) -> None:
        """Nothing to do: committed tokens are indexed by ``find``."""

    def finished(self, sequence: SequenceState) -> None:
        """Drop the sequence's index."""
        self._indices.pop(sequence.id, None)
