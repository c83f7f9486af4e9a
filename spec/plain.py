"""What a step would take without drafts, now; and when one should go without, so that this stays known.

It was measured at start-up, and shows in every step that drafts nothing. But such steps may be seldom, and a machine's
pace changes between them. So each is kept as a share of the steps around it that drafted::

    pace      of a step that drafts: its pass, over one of as many rows at start-up. The median of the last few
    sample    of a plain step: its seconds, over start-up's, over the pace around it
    instead   of a step that drafted: start-up's seconds, times the median of the last samples, times its own pace; so
              what held the step up would have held up the other one, and a mean of many is no less than it was

A pace that is another one than that of the samples may be so for chains and trees alone, what is long ago may not be so
any more, and of samples far apart the median says little: then the estimate is told with a doubt, and a plain step is
wanted soon.

What they cost: with a speed-up of S and t tokens per step one plain step in N takes (S - 1) / (N t) of the speed, which
is 0.2 % of 2.7 times at one in 257. One that is wanted soon has to be earned by 128 steps with drafts, so at worst it
is 0.4 %, and one in two minutes beside; what does not pay (S of 1 or less) loses nothing at all.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

from foresay.spec.budget.cost import CostModel

#: After so many steps with drafts one goes without.
PLAIN_EVERY = 256
#: One that is wanted soon: after so many steps, earned by so many; so many at most may be earned ahead.
_SOON, _EARNED, _SAVED = 16, 128, 3
#: Steps with drafts that tell the pace: the last so many, not longer ago (seconds), and not fewer for a sample.
_AROUND, _RECENT, _FEWEST = 15, 10.0, 8
#: Samples that count, fewer of which are doubted; how old the newest may be (seconds), and when another one is wanted.
_KEPT, _TRUSTED, _OLD, _AGEING = 15, 3, 300.0, 120.0
#: A pace so many times faster or slower than that of the samples is another one.
_ANOTHER = 1.5

FEW = "too few steps without drafts were timed"
OLD = "no step without drafts was timed lately"
CHANGED = "the pace of this machine has changed since steps without drafts were timed"
WANDERS = "steps of the same kind take times too far apart; something else may keep this machine busy"


@dataclass(frozen=True, slots=True)
class _Sample:
    """A plain step. share, pace: see above. at: when."""

    share: float
    pace: float
    at: float


class PlainPace:
    """Seconds of steps without drafts. cost: of a pass by its rows, at start-up; root_seconds: of a whole step of one
    sequence without drafts, 0 if nobody measured: then none is wanted soon. every: see :data:`PLAIN_EVERY`; 0 never
    asks for one."""

    def __init__(
        self,
        cost: CostModel,
        root_seconds: float = 0.0,
        every: int = PLAIN_EVERY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.every = every
        self._cost, self._root, self._clock = cost, root_seconds, clock
        self._measured = root_seconds > 0
        self._paces: deque[float] = deque(maxlen=_AROUND)
        self._drafted_at = self._plain_at = clock()
        self._samples: deque[_Sample] = deque(maxlen=_KEPT)
        if root_seconds:
            self._samples.append(_Sample(1.0, 1.0, self._plain_at))
        self._since, self._earned = 0, _SAVED * _EARNED

    def saw(self, rows: int, sequences: int, drafted: int, seconds: Mapping[str, float]) -> float:
        """Learn from a step that read no prompt; returns what it would have taken without drafts, 0 if nobody knows.

        rows: computed by the target. seconds: by phase.
        """
        now = self._clock()
        if not drafted:
            # Looking for drafts in vain is not plain decoding's time.
            own = sum(seconds.values()) - seconds.get("propose", 0.0)
            self._saw_plain(own, sequences, now)
            return own
        if now - self._drafted_at > _RECENT:
            self._paces.clear()
        self._drafted_at, self._since = now, self._since + 1
        self._earned = min(self._earned + 1, _SAVED * _EARNED)
        own = seconds.get("forward", 0.0) / self._cost.seconds(rows)
        self._paces.append(own)
        return self._at_start(sequences) * self._share() * own

    def _share(self) -> float:
        """Of the samples, those of a pace like this one's if there are some; 0 without any."""
        if not self._samples:
            return 0.0
        pace = self._pace()
        alike = [one.share for one in self._samples if not _differ(one.pace, pace)]
        return median(alike if len(alike) > 1 else [one.share for one in self._samples])

    @property
    def doubt(self) -> str:
        """Why that may be wrong; "" if there is no reason to think so."""
        last = list(self._samples)[-_TRUSTED:]
        if len(last) < _TRUSTED:
            return FEW
        if self._clock() - last[-1].at > _OLD:
            return OLD
        if _differ(median(one.pace for one in last), self._pace()):
            return CHANGED
        shares = sorted(one.share for one in self._samples)
        outer = len(shares) // 3  # those that something held up are no reason for doubt
        return WANDERS if _differ(shares[outer], shares[-1 - outer]) else ""

    def due(self) -> bool:
        """Whether the next step should go without drafts, if nothing speaks against it."""
        if self._since >= self.every > 0:
            return True
        now = self._clock()
        if not self.every or not self._measured or self._since < _SOON or not self._knows_pace(now):
            return False
        return now - self._plain_at > _AGEING or (self._earned >= _EARNED and bool(self.doubt))

    def _saw_plain(self, own: float, sequences: int, now: float) -> None:
        if self._since and now - self._plain_at <= _AGEING:
            self._earned = max(0, self._earned - _EARNED)
        self._since, self._plain_at = 0, now
        if not self._root:
            self._root = own
        expected = self._at_start(sequences) * self._pace()
        if expected and self._knows_pace(now):
            self._samples.append(_Sample(own / expected, self._pace(), now))

    def _at_start(self, sequences: int) -> float:
        """Of a step of so many sequences, as measured at start-up."""
        return self._root + self._cost.seconds(sequences) - self._cost.seconds(1)

    def _knows_pace(self, now: float) -> bool:
        """Whether a plain step now would be a sample."""
        return len(self._paces) >= _FEWEST and now - self._drafted_at <= _RECENT

    def _pace(self) -> float:
        """As it was lately; before anything was drafted, as at start-up."""
        return median(self._paces) if self._paces else 1.0


def _differ(one: float, other: float) -> bool:
    return max(one, other) > _ANOTHER * min(one, other)
