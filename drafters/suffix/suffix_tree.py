"""Where in a text the same context occurred before: a suffix tree of the reversed text, at most 16 tokens deep.

A position's context is the tokens before it, and what followed there is the token at it and those after it. The tree's
edges are labelled from the last token of the context to the first; a node is all positions whose contexts have the same
end::

    a b c a b d a b        below "b" is "b, before it a", which is all three: positions 2 and 5 (what follows 8 is not
                           known yet)

Paths without a branch are one edge, and a context seen only once is a number in its parent's table, not a node. So each
indexed token adds one entry, sometimes two and a node, however often the text repeats itself.

How reliable earlier continuations are is learnt while drafting. A candidate's chance to come next, given that all
before it was right, is looked up in a table: by how many tokens of context match (including those drafted so far), and
by how many of the positions with that context it followed. The table starts with roughly what was measured on two
texts, and is updated with the outcome of every draft.

Earlier answers are looked up too: separately for each salt, bounded, the oldest dropped first. A salt's answers are
concatenated to a text. Once that has half of the salt's limit, the next text is begun and the one before it dropped. If
all salts together exceed their limit, the one that was written to least recently loses its older text. Nothing is ever
looked up across salts, which are kept as hashes.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from hashlib import blake2b

from foresay.spec.budget.chance import Cells

#: The longest context, in tokens.
MAX_CONTEXT = 16
#: How many of the latest positions a node keeps.
MAX_POSITIONS = 16
#: How many tables hold the tree's edges. A single one would take milliseconds whenever it is resized.
_TABLES = 64
#: Separates answers in a text; no token has this id.
END = (1 << 31) - 1

#: How many tokens match, and the positions where they occurred before, the latest last.
Match = tuple[int, tuple[int, ...]]


class SuffixTree:
    """The positions of a growing text by their contexts. tokens: the text, to which the caller may append. longest: the
    longest context, in tokens.

    indexed: positions below this one are indexed.
    """

    def __init__(self, tokens: list[int], longest: int = MAX_CONTEXT) -> None:
        self.tokens, self.indexed, self._longest = tokens, 1, longest
        # By node << 32 | token, in table (node ^ token) % 64: the child node, or ~position if it is a single position.
        self._below: list[dict[int, int]] = [{} for _ in range(_TABLES)]
        # Tuples, since the garbage collector traverses lists again and again.
        self._depths: list[int] = [0]
        self._positions: list[tuple[int, ...]] = [(0,)]

    @property
    def pending(self) -> int:
        """How many tokens are not indexed yet."""
        return len(self.tokens) - self.indexed

    def index(self, count: int) -> None:
        """Index the next ``count`` tokens, or as many as there are."""
        tokens, end = self.tokens, min(self.indexed + count, len(self.tokens))
        for position in range(self.indexed, end):
            if tokens[position] != END:
                self._add(position)
        self.indexed = max(end, self.indexed)

    def matches(self, text: list[int]) -> list[Match]:
        """Suffixes of ``text`` that occurred before, from short to long, each at fewer positions than the last."""
        found: list[Match] = []
        node = depth = 0
        limit = min(len(text), self._longest)
        while depth < limit:
            token = text[-1 - depth]
            child = self._below[(node ^ token) % _TABLES].get(node << 32 | token)
            if child is None:
                break
            positions, deepest = ((~child,), ~child) if child < 0 else (self._positions[child], self._depths[child])
            depth = self._common(text, len(text), positions[-1], depth + 1, min(deepest, limit))
            found.append((depth, positions))
            if child < 0 or depth < deepest:
                break
            node = child
        return found

    def dispose(self, count: int) -> None:
        """Free the memory of ``count`` entries, since all at once would take long. The index is unusable afterwards."""
        if self._below:
            table = self._below[-1]
            for _ in range(min(count, len(table))):
                table.popitem()
            if not table:
                self._below.pop()
        del self._positions[-count:], self._depths[-count:]

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left."""
        return not (self._below or self._positions)

    def _add(self, position: int) -> None:
        tables, tokens = self._below, self.tokens
        limit = min(position, self._longest)
        node = depth = 0
        while depth < limit:
            token = tokens[position - 1 - depth]
            below, key = tables[(node ^ token) % _TABLES], node << 32 | token
            child = below.get(key)
            if child is None:
                below[key] = ~position
                return
            if child < 0:
                known: tuple[int, ...] = (~child,)
                deepest = min(~child, self._longest)
            else:
                known, deepest = self._positions[child], self._depths[child]
            depth = self._common(tokens, position, known[-1], depth + 1, min(deepest, limit))
            if child < 0 or depth < deepest:
                below[key] = self._branch(child, depth, known, position)
                return
            self._positions[child] = (*known[1 - MAX_POSITIONS :], position)
            node = child

    def _branch(self, child: int, depth: int, known: tuple[int, ...], position: int) -> int:
        """Insert a node of this depth between a child and its parent, where another position branches off."""
        node = len(self._positions)
        self._depths.append(depth)
        self._positions.append((*known[1 - MAX_POSITIONS :], position))
        for at, below in ((known[-1], child), (position, ~position)):
            if depth < min(at, self._longest):
                token = self.tokens[at - 1 - depth]
                self._below[(node ^ token) % _TABLES][node << 32 | token] = below
        return node

    def _common(self, text: list[int], end: int, position: int, known: int, most: int) -> int:
        """How many tokens before ``end`` of a text equal those before one: at least ``known``, at most ``most``."""
        tokens = self.tokens
        if text[end - most : end - known] == tokens[position - most : position - known]:
            return most
        while text[end - 1 - known] == tokens[position - 1 - known]:
            known += 1
        return known


#: How often a candidate followed its context: the only time, each of several times, mostly, sometimes, seldom; or it
#: followed a shorter one.
ONCE, ALWAYS, MOSTLY, SOMETIMES, SELDOM, SHORTER = range(6)
KINDS = 6
#: The initial chances by kind: after one token of context and after very many.
_FIRST = ((0.30, 0.90), (0.55, 0.97), (0.30, 0.55), (0.20, 0.35), (0.05, 0.10), (0.10, 0.25))
#: The factor by which the distance to the second one shrinks with each token of context.
_LEFT = 0.75


def kind_of(votes: int, voters: int) -> int:
    """The kind of a candidate that followed ``votes`` times of ``voters``."""
    if votes == voters:
        return ONCE if votes == 1 else ALWAYS
    return MOSTLY if 2 * votes >= voters else SOMETIMES if 5 * votes >= voters else SELDOM


def cell_of(length: int, kind: int) -> int:
    """The cell of the chance of such a candidate after this many tokens of context."""
    return min(length, MAX_CONTEXT) * KINDS + kind


def initial_chances() -> Cells:
    """The table of one salt, by :func:`cell_of`."""
    lengths = range(MAX_CONTEXT + 1)
    return Cells(most - (most - least) * _LEFT ** (length - 1) for length in lengths for least, most in _FIRST)


#: The most tokens kept of a salt's answers, and of all salts together; and the most salts.
MAX_PER_SALT, MAX_TOKENS, MAX_SALTS = 1 << 17, 1 << 19, 1024


class Answers:
    """One salt's texts, the latest first, and the learnt chances of their continuations."""

    def __init__(self) -> None:
        self.texts: list[SuffixTree] = []
        self.calibration = initial_chances()

    def __len__(self) -> int:
        """Tokens of all texts."""
        return sum(len(text.tokens) for text in self.texts)


class History:
    """The answers of all salts. of_salt, in_all: the most tokens kept.

    pending: texts with tokens that are not indexed yet. dropped: texts whose memory is to be freed.
    """

    def __init__(self, per_salt: int = MAX_PER_SALT, total: int = MAX_TOKENS) -> None:
        self._key = secrets.token_bytes(32)
        self._half, self._total, self._kept = min(per_salt, total) // 2, total, 0
        self._salts: OrderedDict[bytes, Answers] = OrderedDict()
        self.pending: list[SuffixTree] = []
        self.dropped: list[SuffixTree] = []

    def __len__(self) -> int:
        """Tokens of all salts."""
        return self._kept

    def answers(self, salt: str) -> Answers:
        """A salt's answers, perhaps none."""
        return self._answers(self._hashed(salt))

    def _hashed(self, salt: str) -> bytes:
        return blake2b(salt.encode(), digest_size=16, key=self._key).digest()

    def _answers(self, hashed: bytes) -> Answers:
        answers = self._salts.get(hashed)
        if answers is None:
            answers = self._salts[hashed] = Answers()
            if len(self._salts) > MAX_SALTS:
                self._forget(next(iter(self._salts)))
        return answers

    def add(self, salt: str, tokens: list[int]) -> None:
        """Add an answer: as much of its end as may be kept."""
        tokens = [*tokens[-max(self._half - 1, 0) :], END]
        if len(tokens) > self._half:
            return
        hashed = self._hashed(salt)
        answers = self._answers(hashed)
        self._salts.move_to_end(hashed)
        if not answers.texts or len(answers.texts[0].tokens) + len(tokens) > self._half:
            answers.texts.insert(0, SuffixTree([]))
            for text in answers.texts[2:]:
                self._drop(answers, text)
        text = answers.texts[0]
        text.tokens += tokens
        if text not in self.pending:
            self.pending.append(text)
        self._kept += len(tokens)
        while self._kept > self._total:
            quiet = next(answers for answers in self._salts.values() if answers.texts)
            self._drop(quiet, quiet.texts[-1])

    def _forget(self, hashed: bytes) -> None:
        answers = self._salts.pop(hashed)
        for text in list(answers.texts):
            self._drop(answers, text)

    def _drop(self, answers: Answers, text: SuffixTree) -> None:
        answers.texts.remove(text)
        self._kept -= len(text.tokens)
        if text in self.pending:
            self.pending.remove(text)
        self.dropped.append(text)
