"""A user-written drafter, isolated: it gets copies of the sequences' tokens, and what it returns is checked, node by
node, and rebuilt. What it raises stops at the wall that all drafters have (:mod:`foresay.spec.wall`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from operator import index

from foresay.spec.protocols import Drafter, FeatureRequest, Features, reader_of
from foresay.spec.sequence import SequenceState
from foresay.spec.tree import DraftTree, TreeShape
from foresay.spec.wall import BadProposal

_LISTS = "a tree's tokens and parents must both be whole numbers, as many of each"


class CustomDrafter:
    """Implements :class:`foresay.spec.protocols.Drafter` around a user-written one. vocab_size: the target's."""

    def __init__(self, own: Drafter, vocab_size: int) -> None:
        self.name: str = own.name
        self.needs: FeatureRequest | None = own.needs
        self._own, self._vocab_size = own, vocab_size
        self._tokens: dict[str, list[int]] = {}
        self._known: dict[str, int] = {}

    def propose(self, sequences: Sequence[SequenceState], shapes: Sequence[TreeShape]) -> list[DraftTree]:
        """Its proposals. Raises BadProposal if they are not valid."""
        trees = self._own.propose([self._shown(sequence) for sequence in sequences], list(shapes))
        return self._checked(trees, sequences, shapes)

    def extend(self, sequence: SequenceState) -> None:
        """Passed on."""
        self._own.extend(self._shown(sequence))

    def observe(self, sequence: SequenceState, features: Features) -> None:
        """Passed on, if it requests features."""
        reader = reader_of(self._own)
        if self.needs is not None and reader is not None:
            reader.observe(self._shown(sequence), features)

    def committed(self, sequence: SequenceState, path: list[int]) -> None:
        """Passed on."""
        self._own.committed(self._shown(sequence), list(path))

    def finished(self, sequence: SequenceState) -> None:
        """Passed on; then the copies are dropped."""
        try:
            self._own.finished(self._shown(sequence))
        finally:
            self._tokens.pop(sequence.id, None)
            self._known.pop(sequence.id, None)

    def _shown(self, sequence: SequenceState) -> SequenceState:
        """A copy, so that changes it makes to the tokens do not affect the text."""
        tokens = self._tokens.setdefault(sequence.id, [])
        if not self._known.get(sequence.id, 0) == len(tokens) <= len(sequence.tokens):
            tokens.clear()
        tokens += sequence.tokens[len(tokens) :]
        self._known[sequence.id] = len(tokens)
        shown = copy(sequence)
        shown.tokens = tokens
        return shown

    def _checked(
        self, trees: object, sequences: Sequence[SequenceState], shapes: Sequence[TreeShape]
    ) -> list[DraftTree]:
        if not isinstance(trees, list | tuple) or len(trees) != len(sequences):
            count = len(trees) if isinstance(trees, list | tuple) else f"a {type(trees).__name__}"
            raise BadProposal(f"propose was asked for a list of {len(sequences)} trees and returned {count}")
        parts = zip(trees, sequences, shapes, strict=True)
        return [checked(tree, one.tokens[-1], shape, self._vocab_size, self.name) for tree, one, shape in parts]


def checked(tree: object, root: int, shape: TreeShape, vocab_size: int, name: str) -> DraftTree:
    """The proposed tree, rebuilt from only its tokens, parents and chances. root: the last token.

    Raises BadProposal for anything but a tree below the root, of tokens of the vocabulary, within the shape.
    """
    if not isinstance(tree, DraftTree):
        raise BadProposal(f"propose returned a {type(tree).__name__} instead of a DraftTree")
    tokens, parents, chances = _whole(tree.tokens), _whole(tree.parents), tree.chances
    if not len(tokens) == len(parents) > 0:
        raise BadProposal(_LISTS)
    if tokens[0] != root or parents[0] != -1:
        found = f"token {tokens[0]}, parent {parents[0]}"
        raise BadProposal(
            f"node 0 must be the root, the last token of the text, and no child ({root}, -1), not {found}"
        )
    if not all(0 <= token < vocab_size for token in tokens):
        raise BadProposal(f"it proposed a token outside the target's vocabulary of {vocab_size}")
    if len(tokens) > shape.nodes or _depth(parents) > shape.levels:
        size = f"{len(tokens)} nodes on {_depth(parents)} levels"
        raise BadProposal(f"it was asked for at most {shape.nodes} nodes on {shape.levels} levels and proposed {size}")
    if len(set(zip(parents, tokens, strict=True))) < len(tokens):
        raise BadProposal("siblings must be distinct: it proposed a token twice under one node")
    if chances and not _are_chances(chances, parents):
        raise BadProposal("chances must be one for each node, from 0 to 1, none above its parent's, or none at all")
    return DraftTree.build(tokens, parents, name, tuple(map(float, chances)))


def _whole(numbers: Iterable[object]) -> list[int]:
    """Integers of any library, as Python ints. Raises BadProposal if they are not integers."""
    try:
        return [index(number) for number in numbers]  # type: ignore[arg-type]  # this is what is checked
    except TypeError:
        raise BadProposal(_LISTS) from None


def _depth(parents: list[int]) -> int:
    """The largest depth. Raises BadProposal if it is not a tree."""
    depths = [0]
    for node, parent in enumerate(parents[1:], start=1):
        if not 0 <= parent < node:
            raise BadProposal(f"a parent must come before its children: node {node} has parent {parent}")
        depths.append(depths[parent] + 1)
    return max(depths)


def _are_chances(chances: tuple[float, ...], parents: list[int]) -> bool:
    if len(chances) != len(parents) or not all(0.0 <= chance <= 1.0 for chance in chances):  # NaN fails too
        return False
    return all(chances[node] <= chances[parent] for node, parent in enumerate(parents) if node)
