"""What was answered before, to look things up in: for each salt apart, bounded, the oldest forgotten first.

A salt's answers lie one behind the other in a text. Once it has half of what the salt may keep, the next text is begun
and the one before it dropped. If all salts together keep too much, the one that was written to least recently loses its
older text. Nothing is ever looked up across salts, which are kept as hashes.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from hashlib import blake2b

from foresay.drafters.suffix.contexts import END, Contexts, of_contexts

#: Tokens of a salt's answers, and of all salts together, that are kept at most; and salts.
MOST_OF_SALT, MOST_IN_ALL, MOST_SALTS = 1 << 17, 1 << 19, 1024

#: By the hash of the salt, the quietest first: the texts it has, the oldest first.
Texts = list[tuple[bytes, list[list[int]]]]


class Answers:
    """What one salt has: its texts, the latest first, and how far they are to be trusted."""

    def __init__(self) -> None:
        self.texts: list[Contexts] = []
        self.trust = of_contexts()

    def __len__(self) -> int:
        """Tokens of all texts."""
        return sum(len(text.tokens) for text in self.texts)


class History:
    """The answers of all salts. of_salt, in_all: tokens kept at most. key: what salts are hashed under; random if None.

    changes: answers taken up so far. behind: texts that have tokens not taken in yet. dropped: texts whose memory is to
    be given back.
    """

    def __init__(self, of_salt: int = MOST_OF_SALT, in_all: int = MOST_IN_ALL, key: bytes | None = None) -> None:
        self.key = secrets.token_bytes(32) if key is None else key
        self._half, self._in_all, self._kept = min(of_salt, in_all) // 2, in_all, 0
        self._salts: OrderedDict[bytes, Answers] = OrderedDict()
        self.changes = 0
        self.behind: list[Contexts] = []
        self.dropped: list[Contexts] = []

    def __len__(self) -> int:
        """Tokens of all salts."""
        return self._kept

    def of(self, salt: str) -> Answers:
        """A salt's answers, perhaps none."""
        return self._of(self._hashed(salt))

    def _hashed(self, salt: str) -> bytes:
        return blake2b(salt.encode(), digest_size=16, key=self.key).digest()

    def _of(self, hashed: bytes) -> Answers:
        answers = self._salts.get(hashed)
        if answers is None:
            answers = self._salts[hashed] = Answers()
            if len(self._salts) > MOST_SALTS:
                self._forget(next(iter(self._salts)))
        return answers

    def add(self, salt: str, tokens: list[int]) -> None:
        """An answer more: as much of its end as may be kept."""
        tokens = [*tokens[-max(self._half - 1, 0) :], END]
        if len(tokens) > self._half:
            return
        hashed = self._hashed(salt)
        answers = self._of(hashed)
        self._salts.move_to_end(hashed)
        if not answers.texts or len(answers.texts[0].tokens) + len(tokens) > self._half:
            answers.texts.insert(0, Contexts([]))
            for text in answers.texts[2:]:
                self._drop(answers, text)
        text = answers.texts[0]
        text.tokens += tokens
        if text not in self.behind:
            self.behind.append(text)
        self._kept += len(tokens)
        self.changes += 1
        while self._kept > self._in_all:
            quiet = next(answers for answers in self._salts.values() if answers.texts)
            self._drop(quiet, quiet.texts[-1])

    def texts(self) -> Texts:
        """All there is. The texts go on to grow at their ends, and change nowhere else."""
        kept = [(hashed, answers.texts) for hashed, answers in self._salts.items() if answers.texts]
        return [(hashed, [text.tokens for text in reversed(texts)]) for hashed, texts in kept]

    def restore(self, hashed: bytes, texts: list[list[int]]) -> None:
        """Take in what :meth:`texts` gave of one salt, all of it at once."""
        answers = self._of(hashed)
        for tokens in texts:
            text = Contexts(tokens)
            text.take(len(tokens))
            answers.texts.insert(0, text)
            self._kept += len(tokens)

    def _forget(self, hashed: bytes) -> None:
        answers = self._salts.pop(hashed)
        for text in list(answers.texts):
            self._drop(answers, text)

    def _drop(self, answers: Answers, text: Contexts) -> None:
        answers.texts.remove(text)
        self._kept -= len(text.tokens)
        if text in self.behind:
            self.behind.remove(text)
        self.dropped.append(text)
