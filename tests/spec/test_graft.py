"""Drafts under a grammar: what is not legal goes, and what is forced comes."""

from __future__ import annotations

import random
from collections.abc import Sequence

from foresay.spec.constrain import Guarded, graft
from foresay.spec.tree import DraftTree
from tests.spec.grammars import Odd
from tests.spec.trees import paths, random_tree


def _graft(tree: DraftTree, forced: Sequence[int] = (), most: int = 64) -> DraftTree:
    return graft(Guarded(Odd(), 32), forced, tree, most)


def _shown(tree: DraftTree) -> tuple[list[int], list[int]]:
    return tree.tokens, tree.parents


def test_a_legal_tree_is_left_as_it_is() -> None:
    tree = DraftTree.build([2, 1, 3, 5], [-1, 0, 0, 1])
    assert _graft(tree) is tree


def test_illegal_nodes_go_with_all_below_them() -> None:
    draft = _graft(DraftTree.build([2, 4, 3, 5, 7, 9], [-1, 0, 0, 1, 2, 4]))
    assert _shown(draft) == ([2, 3, 7, 9], [-1, 0, 1, 2])
    assert draft.is_chain


def test_forced_tokens_join_what_was_proposed() -> None:
    """Of 1-3-5, which is forced, 1 and 3 were proposed, the 3 with a child of its own."""
    draft = _graft(DraftTree.build([2, 7, 1, 3, 9, 6], [-1, 0, 0, 2, 3, 3]), [1, 3, 5])
    assert _shown(draft) == ([2, 1, 3, 5, 7, 9], [-1, 0, 1, 2, 0, 2])
    assert draft.forced == 3


def test_a_full_tree_takes_no_more() -> None:
    draft = _graft(DraftTree.build([2, 7, 1, 9, 3, 5], [-1, 0, 0, 1, 2, 3]), [1, 3], most=4)
    assert _shown(draft) == ([2, 1, 3, 7], [-1, 0, 1, 0])


def test_equal_siblings_become_one() -> None:
    draft = _graft(DraftTree.build([2, 1, 1, 3, 5], [-1, 0, 0, 2, 1]), [7])
    assert _shown(draft) == ([2, 7, 1, 3, 5], [-1, 0, 0, 2, 2])


def test_random_grafts_hold_what_is_legal() -> None:
    rng = random.Random(1)
    for _ in range(100):
        tree, forced = (
            random_tree(rng, rng.randint(1, 40), 12),
            [rng.randrange(1, 12, 2) for _ in range(rng.randint(0, 9))],
        )
        draft = _graft(tree, forced)
        wanted = {path for path in paths(tree) if all(token % 2 for token in path)}
        wanted |= {tuple(forced[:length]) for length in range(len(forced) + 1)}
        assert set(paths(draft)) == wanted
        assert len(draft) == len(wanted)
