"""Prompt lookup: propose what followed the last occurrence of the sequence's last few tokens.

Needs no model. It uses the longest n-gram that ends the sequence and was seen before, at its most recent earlier
occurrence (reference: algorithms, 3.9), found in an index as the suffix drafter's, of only the committed tokens.
"""

from __future__ import annotations

from foresay.drafters.lookup import LookupDrafter
from foresay.drafters.suffix.suffix_tree import SuffixTree
from foresay.spec.names import NGRAM
from foresay.spec.sequence import SequenceState
from foresay.spec.tree import DraftTree, TreeShape

#: Tokens that are indexed at once, so that no step waits long: about a millisecond.
_MOST_READ = 256


class NgramDrafter(LookupDrafter[SuffixTree]):
    """Chains by n-gram lookup in the sequence's own text, as deep as their shapes have levels."""

    name = NGRAM

    def __init__(self, shortest: int = 2, longest: int = 4) -> None:
        super().__init__()
        self._shortest, self._longest = shortest, longest

    def extend(self, sequence: SequenceState) -> None:
        """Index some of the prompt."""
        self._of(sequence).index(_MOST_READ)

    def _begin(self, sequence: SequenceState) -> SuffixTree:
        return SuffixTree(sequence.tokens, self._longest)

    def _tree(self, sequence: SequenceState, shape: TreeShape) -> DraftTree | None:
        tokens, text = sequence.tokens, self._of(sequence)
        text.index(_MOST_READ)
        found = text.matches(tokens)
        if not found or found[-1][0] < self._shortest or not shape.levels:
            return None
        after = found[-1][1][-1]
        return DraftTree.chain([tokens[-1], *tokens[after : after + shape.levels]], self.name)
