"""Where in a text the same context stood before: a suffix tree of the text read backwards, at most 16 tokens deep.

A *place* is a position of the text; its context are the tokens before it, what followed there is the token at it and
those behind. The tree's edges are labelled from the last token of the context to the first; a node stands for all
places whose contexts end alike::

    a b c a b d a b        below "b" hangs "b, before it a", which is all three: places 2 and 5 (what follows place 8 is
                           not known yet)

Paths without a branch are one edge, and a context that was seen once is a number in its parent's table, no node. So a
token taken in makes one entry, now and then two and a node, however often the text repeats itself.

How far what followed a context before is to be trusted is learnt while drafting. A candidate's chance to come next,
given that all before it was right, is read off a table: by how many tokens of context match (those drafted so far among
them), and by how many of the places with that context it followed. The table begins with about what two texts were
measured to have, and every draft whose outcome is known is counted in it.
"""

from __future__ import annotations

from foresay.spec.budget.chance import Cells

#: Tokens of context that are told apart.
MOST_CONTEXT = 16
#: The latest places that a node remembers.
MOST_PLACES = 16
#: Tables that the tree's edges are spread over. A table of them all would take milliseconds whenever it outgrew itself.
_TABLES = 64
#: Parts texts that are kept one after the other; no token has this id.
END = (1 << 31) - 1

#: How many tokens match, and where they stood before, the latest place last.
Match = tuple[int, tuple[int, ...]]


class Contexts:
    """The places of a growing text by their contexts. tokens: the text; whoever holds it may append to it.

    taken: places below this one are taken in.
    """

    def __init__(self, tokens: list[int]) -> None:
        self.tokens, self.taken = tokens, 1
        # By node << 32 | token, in table (node ^ token) % 64: the node below, or ~place if it is one place alone.
        self._below: list[dict[int, int]] = [{} for _ in range(_TABLES)]
        # Tuples, since the collector of cycles looks at lists again and again.
        self._depths: list[int] = [0]
        self._places: list[tuple[int, ...]] = [(0,)]

    @property
    def behind(self) -> int:
        """How many tokens are there and not taken in."""
        return len(self.tokens) - self.taken

    def take(self, most: int) -> None:
        """Take in the next ``most`` tokens, or as many as there are."""
        tokens, end = self.tokens, min(self.taken + most, len(self.tokens))
        for place in range(self.taken, end):
            if tokens[place] != END:
                self._add(place)
        self.taken = max(end, self.taken)

    def matches(self, text: list[int]) -> list[Match]:
        """Ever longer contexts that end ``text`` and were seen before, each at fewer places than the one before."""
        found: list[Match] = []
        node = depth = 0
        limit = min(len(text), MOST_CONTEXT)
        while depth < limit:
            token = text[-1 - depth]
            child = self._below[(node ^ token) % _TABLES].get(node << 32 | token)
            if child is None:
                break
            places, deepest = ((~child,), ~child) if child < 0 else (self._places[child], self._depths[child])
            depth = self._common(text, len(text), places[-1], depth + 1, min(deepest, limit))
            found.append((depth, places))
            if child < 0 or depth < deepest:
                break
            node = child
        return found

    def dispose(self, most: int) -> None:
        """Give back the memory of ``most`` entries: all at once would take long. Of no use for anything else then."""
        if self._below:
            table = self._below[-1]
            for _ in range(min(most, len(table))):
                table.popitem()
            if not table:
                self._below.pop()
        del self._places[-most:], self._depths[-most:]

    @property
    def disposed(self) -> bool:
        """Whether nothing is left."""
        return not (self._below or self._places)

    def _add(self, place: int) -> None:
        tables, tokens = self._below, self.tokens
        limit = min(place, MOST_CONTEXT)
        node = depth = 0
        while depth < limit:
            token = tokens[place - 1 - depth]
            below, key = tables[(node ^ token) % _TABLES], node << 32 | token
            child = below.get(key)
            if child is None:
                below[key] = ~place
                return
            if child < 0:
                known: tuple[int, ...] = (~child,)
                deepest = min(~child, MOST_CONTEXT)
            else:
                known, deepest = self._places[child], self._depths[child]
            depth = self._common(tokens, place, known[-1], depth + 1, min(deepest, limit))
            if child < 0 or depth < deepest:
                below[key] = self._branch(child, depth, known, place)
                return
            self._places[child] = (*known[1 - MOST_PLACES :], place)
            node = child

    def _branch(self, child: int, depth: int, known: tuple[int, ...], place: int) -> int:
        """A node of this depth, to stand between a child and its parent where another place goes another way."""
        node = len(self._places)
        self._depths.append(depth)
        self._places.append((*known[1 - MOST_PLACES :], place))
        for at, below in ((known[-1], child), (place, ~place)):
            if depth < min(at, MOST_CONTEXT):
                token = self.tokens[at - 1 - depth]
                self._below[(node ^ token) % _TABLES][node << 32 | token] = below
        return node

    def _common(self, text: list[int], end: int, place: int, known: int, most: int) -> int:
        """How many tokens before ``end`` of a text are those before a place: at least ``known``, ``most`` at most."""
        tokens = self.tokens
        if text[end - most : end - known] == tokens[place - most : place - known]:
            return most
        while text[end - 1 - known] == tokens[place - 1 - known]:
            known += 1
        return known


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
