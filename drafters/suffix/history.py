"""What was answered before, to look things up in: for each salt apart, bounded, the oldest forgotten first.

A salt's answers lie one behind the other in a text. Once it has half of what the salt may keep, the next text is begun
and the one before it dropped. If all salts together keep too much, the one that was written to least recently loses its
older text. Nothing is ever looked up across salts.
"""

from __future__ import annotations

from collections import OrderedDict

from drafters.suffix.contexts import END, Contexts
from drafters.suffix.trust import Trust

#: Tokens of a salt's answers, and of all salts together, that are kept at most; and salts.
MOST_OF_SALT, MOST_IN_ALL, MOST_SALTS = 1 << 17, 1 << 19, 1024


class Answers:
    """What one salt has: its texts, the latest first, and how far they are to be trusted."""

    def __init__(self) -> None:
        self.texts: list[Contexts] = []
        self.trust = Trust()

    def __len__(self) -> int:
        """Tokens of all texts."""
        return sum(len(text.tokens) for text in self.texts)


class History:
    """The answers of all salts. of_salt, in_all: tokens kept at most. changes: answers taken up so far.

    behind: texts that have tokens not taken in yet. dropped: texts whose memory is to be given back.
    """

    def __init__(self, of_salt: int = MOST_OF_SALT, in_all: int = MOST_IN_ALL) -> None:
        self._half, self._in_all, self._kept = min(of_salt, in_all) // 2, in_all, 0
        self._salts: OrderedDict[str, Answers] = OrderedDict()
        self.changes = 0
        self.behind: list[Contexts] = []
        self.dropped: list[Contexts] = []

    def __len__(self) -> int:
        """Tokens of all salts."""
        return self._kept

    def of(self, salt: str) -> Answers:
        """A salt's answers, perhaps none."""
        answers = self._salts.get(salt)
        if answers is None:
            answers = self._salts[salt] = Answers()
            if len(self._salts) > MOST_SALTS:
                self._forget(next(iter(self._salts)))
        return answers

    def add(self, salt: str, tokens: list[int]) -> None:
        """An answer more: as much of its end as may be kept."""
        tokens = [*tokens[-max(self._half - 1, 0) :], END]
        if len(tokens) > self._half:
            return
        answers = self.of(salt)
        self._salts.move_to_end(salt)
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

    def _forget(self, salt: str) -> None:
        answers = self._salts.pop(salt)
        for text in list(answers.texts):
            self._drop(answers, text)

    def _drop(self, answers: Answers, text: Contexts) -> None:
        answers.texts.remove(text)
        self._kept -= len(text.tokens)
        if text in self.behind:
            self.behind.remove(text)
        self.dropped.append(text)
