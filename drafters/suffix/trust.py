"""How far what followed a context before is to be trusted, learnt while drafting.

A candidate's chance to come next, given that all before it was right, is read off a table: by how many tokens of
context match (those drafted so far among them), and by how many of the places with that context it followed. The table
begins with about what two texts were measured to have, and every draft whose outcome is known is counted in it.
"""

from __future__ import annotations

from foresay.drafters.suffix.contexts import MOST_CONTEXT
from foresay.spec.budget.chance import Cells

#: A candidate followed its context: the one time, each of several times, mostly, now and then, seldom; or it followed
#: a shorter one.
ONCE, ALWAYS, MOSTLY, SOMETIMES, SELDOM, SHORTER = range(6)
KINDS = 6
#: What is believed in the beginning, by kind: after one token of context and after very many.
_FIRST = ((0.30, 0.90), (0.55, 0.97), (0.30, 0.55), (0.20, 0.35), (0.05, 0.10), (0.10, 0.25))
#: How much of the way from the one to the other is left after each token of context.
_LEFT = 0.75


def kind_of(votes: int, voters: int) -> int:
    """Which kind of candidate this is: it came ``votes`` times of ``voters``."""
    if votes == voters:
        return ONCE if votes == 1 else ALWAYS
    return MOSTLY if 2 * votes >= voters else SOMETIMES if 5 * votes >= voters else SELDOM


def cell_of(length: int, kind: int) -> int:
    """Where the chance of such a candidate stands behind so many tokens of context."""
    return min(length, MOST_CONTEXT) * KINDS + kind


def of_contexts() -> Cells:
    """The table of one salt, by :func:`cell_of`."""
    return Cells(_beginning(cell // KINDS, cell % KINDS) for cell in range((MOST_CONTEXT + 1) * KINDS))


def _beginning(length: int, kind: int) -> float:
    least, most = _FIRST[kind]
    return most - (most - least) * _LEFT ** (length - 1)
