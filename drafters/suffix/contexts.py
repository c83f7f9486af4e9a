"""Where in a text the same context stood before: a suffix tree of the text read backwards, at most 16 tokens deep.

A *place* is a position of the text; its context are the tokens before it, what followed there is the token at it and
those behind. The tree's edges are labelled from the last token of the context to the first; a node stands for all
places whose contexts end alike::

    a b c a b d a b        below "b" hangs "b, before it a", which is all three: places 2 and 5 (what follows place 8 is
                           not known yet)

Paths without a branch are one edge, and a context that was seen once is a number in its parent's table, no node. So a
token taken in makes one entry, now and then two and a node, however often the text repeats itself.
"""

from __future__ import annotations

#: Tokens of context that are told apart.
MOST_CONTEXT = 16
#: The latest places that a node remembers, at least; twice as many at most.
MOST_PLACES = 16
#: Parts texts that are kept one after the other; no token has this id.
END = (1 << 31) - 1

#: How many tokens match, and where they stood before, the latest place last.
Match = tuple[int, list[int]]


class Contexts:
    """The places of a growing text by their contexts. tokens: the text; whoever holds it may append to it.

    taken: places below this one are taken in.
    """

    def __init__(self, tokens: list[int]) -> None:
        self.tokens, self.taken = tokens, 1
        # By node << 32 | token: the node below, or ~place where one place alone goes on like this.
        self._below: dict[int, int] = {}
        self._depths, self._places = [0], [[0]]

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
            child = self._below.get(node << 32 | text[-1 - depth])
            if child is None:
                break
            places, deepest = ([~child], ~child) if child < 0 else (self._places[child], self._depths[child])
            depth = self._common(text, len(text), places[-1], depth + 1, min(deepest, limit))
            found.append((depth, places))
            if child < 0 or depth < deepest:
                break
            node = child
        return found

    def dispose(self, most: int) -> None:
        """Give back the memory of ``most`` entries: all at once would take long. Of no use for anything else then."""
        for _ in range(min(most, len(self._below))):
            self._below.popitem()
        del self._places[-most:], self._depths[-most:]

    @property
    def disposed(self) -> bool:
        """Whether nothing is left."""
        return not (self._below or self._places)

    def _add(self, place: int) -> None:
        below, tokens = self._below, self.tokens
        limit = min(place, MOST_CONTEXT)
        node = depth = 0
        while depth < limit:
            key = node << 32 | tokens[place - 1 - depth]
            child = below.get(key)
            if child is None:
                below[key] = ~place
                return
            if child < 0:
                known = [~child]
                deepest = min(~child, MOST_CONTEXT)
            else:
                known, deepest = self._places[child], self._depths[child]
            depth = self._common(tokens, place, known[-1], depth + 1, min(deepest, limit))
            if child < 0 or depth < deepest:
                self._branch(key, child, depth, known, place)
                return
            known.append(place)
            if len(known) > 2 * MOST_PLACES:
                del known[:MOST_PLACES]
            node = child

    def _branch(self, key: int, child: int, depth: int, known: list[int], place: int) -> None:
        """Put a node of this depth between a child and its parent, where another place goes another way."""
        node, tokens, other = len(self._places), self.tokens, known[-1]
        self._depths.append(depth)
        self._places.append([*known, place])
        self._below[key] = node
        if depth < min(other, MOST_CONTEXT):
            self._below[node << 32 | tokens[other - 1 - depth]] = child
        if depth < min(place, MOST_CONTEXT):
            self._below[node << 32 | tokens[place - 1 - depth]] = ~place

    def _common(self, text: list[int], end: int, place: int, known: int, most: int) -> int:
        """How many tokens before ``end`` of a text are those before a place: at least ``known``, ``most`` at most."""
        tokens = self.tokens
        if text[end - most : end - known] == tokens[place - most : place - known]:
            return most
        while text[end - 1 - known] == tokens[place - 1 - known]:
            known += 1
        return known
