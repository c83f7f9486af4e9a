"""The wall around a drafter of the user's own: what is let through, what is reported, and what it is shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from foresay.drafters.custom import CustomDrafter, checked
from foresay.spec.tree import DraftTree, TreeShape
from foresay.spec.wall import BadProposal
from tests.drafters.texts import sequence
from tests.same_tokens.customs import Good, rubbish

ROOT, VOCAB, CHAIN = 5, 20, TreeShape.chain(3)


def let_through(tree: object, shape: TreeShape = CHAIN) -> DraftTree:
    return checked(tree, ROOT, shape, VOCAB, "own")


@pytest.mark.parametrize("piece", range(20))
def test_no_piece_of_rubbish_is_let_through(piece: int) -> None:
    pieces = rubbish(sequence([1, ROOT]), CHAIN)
    assert len(pieces) == 20
    with pytest.raises((BadProposal, AttributeError, TypeError)):
        let_through(pieces[piece])


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (DraftTree.chain([4, 1]), r"\(5, -1\), not token 4, parent -1"),
        (DraftTree.chain([5, 20]), "outside the target's vocabulary of 20"),
        (DraftTree.chain([5, 1, 2, 3, 4]), "at most 4 nodes on 3 levels and proposed 5 nodes on 4 levels"),
        (DraftTree.build([5, 1, 2, 3, 4], [-1, 0, 0, 0, 0]), "proposed 5 nodes on 1 levels"),
        (DraftTree.build([5, 1, 1], [-1, 0, 0]), "siblings must be distinct"),
        (None, "a NoneType instead of a DraftTree"),
    ],
)
def test_what_is_wrong_is_named(tree: object, message: str) -> None:
    with pytest.raises(BadProposal, match=message):
        let_through(tree)


def test_what_is_let_through_is_as_it_was_proposed() -> None:
    alone = let_through(DraftTree.chain([5]))
    assert (len(alone), alone.drafter) == (1, "")
    chain = let_through(DraftTree.chain([5, 1, 1], "x", (1.0, 0.5, 0.5)))
    assert (chain.tokens, chain.is_chain, chain.drafter, chain.chances) == ([5, 1, 1], True, "own", (1, 0.5, 0.5))
    tree = DraftTree.build([5, 1, 2, 1], [-1, 0, 0, 2])
    found = let_through(tree, TreeShape((3, 2)))
    for column in ("tokens", "parents", "depths", "ancestors"):
        assert getattr(found, column) == getattr(tree, column)


class Noting(Good):
    """Notes what it was shown."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[int]] = []

    def tree(self, sequence: Any, shape: TreeShape) -> DraftTree:
        self.seen.append(list(sequence.tokens))
        return super().tree(sequence, shape)


def meddled(change: Callable[[list[int]], object]) -> tuple[list[int], list[list[int]]]:
    """The text, and what is shown of it, after somebody changed what it was shown."""
    own, running = Noting(), sequence([1, 2, ROOT])
    wall = CustomDrafter(own, VOCAB)
    wall.propose([running], [CHAIN])
    change(wall._shown(running).tokens)
    running.tokens += [6, 7]
    wall.propose([running], [CHAIN])
    wall.finished(running)
    assert not wall._tokens
    return running.tokens, own.seen


def test_the_text_goes_on_whatever_it_does_to_what_it_was_shown() -> None:
    for change in (list.clear, list.pop, lambda tokens: tokens.extend([9, 9, 9, 9])):
        text, seen = meddled(change)
        assert text == [1, 2, ROOT, 6, 7]
        assert seen == [[1, 2, ROOT], [1, 2, ROOT, 6, 7]]
    assert meddled(lambda tokens: tokens.reverse())[0] == [1, 2, ROOT, 6, 7]
