"""Whether drafts pay, measured: short windows of plain steps, now and then, beside what each drafter's steps brought.

::

    window     a few steps without choosing or drafting      what a plain step takes, by the number of sequences
    a use      a step with a drafter's drafts                tokens it brought, less plain steps that fit in its time
    pause      its uses lost, as measured                    it drafts nothing for a while, longer each time

Whatever the budget expects, this is what it came to: also what no estimate holds (host work, weights that a drafter's
own displace from the caches). Windows lose about 1 % of the time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from foresay.spec.names import NONE

#: Plain steps of a window. The first is not counted: a drafter has just displaced weights from the caches.
WINDOW = 3
#: The share of the time that windows may lose: half of what is promised.
_LOSS = 0.005
#: Steps that averages remember: of plain ones, whose pace changes with the machine's, and of others.
_PLAIN, _MEMORY = 16, 256
#: Uses after which a drafter may be paused: before, luck decides. As many are not counted at first, since code is
#: compiled and recorded in them.
_USES = 24
#: Deviations beyond which a loss is sure, and an interval is shown; and a time, something else's.
_DEVIATIONS, _OUTLIER = 2.0, 3.0
#: Steps of a pause, which are also the fewest between two windows; steps before the first window; and how often a pause
#: is doubled at most: to some 4,000 steps.
_PAUSE, _FIRST, _DOUBLED = 128, 16, 5


class Average:
    """A mean of the last values, and its deviation. memory: how many count. known: after how many one that is far above
    them, by half and three deviations, counts as no more: something else delayed it."""

    __slots__ = ("count", "known", "mean", "memory", "variance")

    def __init__(self, memory: int = _MEMORY, known: int = _USES) -> None:
        self.count, self.mean, self.variance, self.memory, self.known = 0, 0.0, 0.0, memory, known

    def add(self, value: float, times: int = 1) -> None:
        """Count a value, so many times."""
        if self.count >= self.known and value > (usual := self.mean + abs(self.mean) / 2):
            value = min(value, max(usual, self.mean + _OUTLIER * math.sqrt(self.variance)))
        self.count = min(self.count + times, self.memory)
        off, part = value - self.mean, times / self.count
        self.mean += part * off
        self.variance += part * (off * (value - self.mean) - self.variance)

    @property
    def error(self) -> float:
        """The deviation of the mean."""
        return math.sqrt(self.variance / self.count) if self.count > 1 else math.inf


class _Uses:
    """Of one drafter, per step with its drafts and per sequence. tokens: emitted. gained: these, less the plain steps
    that fit in its time. left: uses that are not counted. until: the step in which its pause ends; pauses: in a row."""

    def __init__(self, pauses: int = 0, left: int = 0, until: int = 0) -> None:
        self.tokens, self.gained, self.left = Average(), Average(), left
        self.pauses, self.until = pauses, until

    @property
    def loses(self) -> bool:
        """Whether it surely does."""
        return self.gained.count >= _USES and self.gained.mean + _DEVIATIONS * self.gained.error < 0.0


class Guard:
    """Measures plain steps beside those of each drafter, and pauses one that loses.

    now: whether the step planned last is one of a window. news: why a drafter was paused in the last step; mostly "".
    """

    def __init__(self) -> None:
        self.now, self.news = False, ""
        self._plain: dict[int, Average] = {}
        self._uses: dict[str, _Uses] = {}
        self._tokens, self._took, self._beside = Average(), Average(), Average()
        self._steps = self._left = self._since = 0
        self._every, self._again = _FIRST, False

    def due(self) -> bool:
        """Whether the step to be planned is one of a window."""
        if self._since >= self._every:
            self._left, self._since, self._every = WINDOW, 0, min(2 * self._every, self._longest)
        self.now = self._left > 0
        self._left -= self.now
        self._steps += 1
        return self.now

    def paused(self, drafter: str) -> bool:
        """Whether it is not to draft now."""
        uses = self._uses.get(drafter)
        return uses is not None and self._steps < uses.until

    def plain_seconds(self, sequences: int) -> float:
        """What a plain step of so many sequences takes, as measured last; 0 if unknown."""
        plain = self._plain.get(sequences)
        return 0.0 if plain is None or plain.count < WINDOW - 1 else plain.mean

    @property
    def speed_up(self) -> float:
        """Over plain decoding, as measured lately; 0 if unknown."""
        return self._tokens.mean / self._took.mean if self._tokens.count >= _USES else 0.0

    @property
    def spread(self) -> float:
        """How far that may be off, as a share of it; 0 if unknown."""
        measured = (self._tokens, self._took, self._beside)
        return _DEVIATIONS * math.hypot(*[one.error / one.mean for one in measured]) if self.speed_up else 0.0

    def saw(
        self, drafter: str, sequences: int, tokens: float, seconds: Mapping[str, float], tried: bool, steps: int = 1
    ) -> None:
        """Learn from a decoding step. drafter: whose drafts it had; "" for a lookup's, NONE for none. tokens: emitted,
        per sequence. seconds: by phase. tried: whether it was expected to lose. steps: that it stands for."""
        self.news = ""
        drafted, total = drafter != NONE, sum(seconds.values())
        if not drafted and self._again:
            plain = self._plain.get(sequences) or self._plain.setdefault(sequences, Average(_PLAIN, known=1))
            plain.add(total - seconds.get("plan", 0.0) - seconds.get("propose", 0.0))
            self._since = 0
        self._again = not drafted
        self._since += drafted
        if plain_seconds := not self.now and self.plain_seconds(sequences):
            took, self._beside = total / plain_seconds, self._plain[sequences]
            self._tokens.add(tokens, steps)
            self._took.add(took, steps)
            if drafter and drafted and not tried:
                self._used(drafter, self._uses.setdefault(drafter, _Uses(left=_USES)), tokens, took)

    def _used(self, drafter: str, uses: _Uses, tokens: float, took: float) -> None:
        uses.left -= 1
        if uses.left >= 0:
            return
        uses.tokens.add(tokens)
        uses.gained.add(tokens - took)
        if uses.loses:
            tokens, took = uses.tokens.mean, uses.tokens.mean - uses.gained.mean
            figures = f"{tokens:.2f} tokens a step, in {took:.2f} times the time of a plain one"
            steps = _PAUSE << uses.pauses
            self._uses[drafter] = _Uses(min(uses.pauses + 1, _DOUBLED), until=self._steps + steps)
            self.news = f"{drafter} is paused for {steps} steps, since it loses time: as measured, it brings {figures}"
        elif uses.gained.count == 4 * _USES:
            uses.pauses = 0

    @property
    def _longest(self) -> int:
        """Steps between windows for which these take the share of the time that they may."""
        if not self.speed_up:
            return _PAUSE
        return max(_PAUSE, round(WINDOW * (1.0 - 1.0 / self.speed_up) / (_LOSS * self._took.mean)))
