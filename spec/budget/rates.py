"""How often drafts were right, of each sequence and of all together, in cells that whoever counts tells apart.

What is long ago counts less. A sequence that has shown little is taken to be like the others; one that has shown much
is taken as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many

#: As many trials as the first guess counts, and as many as what all sequences showed counts for one of them.
_GUESSED, _HELD = 4.0, 12.0
#: What is left of earlier trials after one more: of one sequence, of all.
_KEPT, _KEPT_OF_ALL = 0.95, 0.995


class Rates:
    """Of all sequences. guesses: the chance of each cell before anything was seen.

    chained: what a cell shows is the guess of the next one (depth by depth, say). hope: by how much of how unsure they
    are chances are read too high, for what shows nothing unless it is tried. guessed: as many trials as a guess counts.
    """

    def __init__(
        self, guesses: Many[float], chained: bool = False, hope: float = 0.0, guessed: float = _GUESSED
    ) -> None:
        self._guesses, self._chained, self._hope, self._guessed = list(guesses), chained, hope, guessed
        self.hits = [0.0] * len(guesses)
        self.trials = [0.0] * len(guesses)
        self._chances = list(guesses)
        self._stale = len(guesses)

    @property
    def chances(self) -> list[float]:
        """Of each cell, as it was seen."""
        # Worked out when it is asked for: a cell may move all behind it, and much is seen that nobody asks about.
        for cell in range(self._stale, len(self._chances)):
            self._chances[cell] = self._seen(cell, self._guess(cell))
        self._stale = len(self._chances)
        return self._chances

    def saw(self, cell: int, hit: bool) -> None:
        """A draft of this cell was right, or not."""
        self.hits[cell] = self.hits[cell] * _KEPT_OF_ALL + hit
        self.trials[cell] = self.trials[cell] * _KEPT_OF_ALL + 1.0
        if self._chained:
            self._stale = min(cell, self._stale)
        else:
            self._chances[cell] = self._seen(cell, self._guesses[cell])

    def _seen(self, cell: int, guess: float) -> float:
        return (self.hits[cell] + self._guessed * guess) / (self.trials[cell] + self._guessed)

    def chance(self, cell: int) -> float:
        """The chance of a cell, read hopefully."""
        return self._hopefully(cell, self.chances[cell])

    def held(self, cell: int, guess: float) -> float:
        """The same of a cell whose guess is better known elsewhere."""
        return self._hopefully(cell, self._seen(cell, guess))

    def _hopefully(self, cell: int, chance: float) -> float:
        unsure = math.sqrt(chance * (1.0 - chance) / (self.trials[cell] + self._guessed))
        return min(1.0, chance + self._hope * unsure)

    def _guess(self, cell: int) -> float:
        if not cell:
            return self._guesses[cell]
        # What the cell before was found to be off, this one is taken to be off too.
        return self._guesses[cell] * min(1.0, self._chances[cell - 1] / self._guesses[cell - 1])


class OwnRates:
    """Of one sequence, held near those of ``all``."""

    def __init__(self, all: Rates) -> None:
        self._all = all
        self._hits: dict[int, float] = {}
        self._trials: dict[int, float] = {}

    def chance(self, cell: int) -> float:
        """The chance that the next draft of this cell is right."""
        return self._near(cell, self._all.chance(cell))

    def held(self, cell: int, guess: float) -> float:
        """The same where the guess is better known elsewhere."""
        return self._near(cell, self._all.held(cell, guess))

    def _near(self, cell: int, of_all: float) -> float:
        trials = self._trials.get(cell)
        return of_all if trials is None else (self._hits[cell] + _HELD * of_all) / (trials + _HELD)

    def saw(self, cell: int, hit: bool) -> None:
        """A draft of this cell was right, or not."""
        self._hits[cell] = self._hits.get(cell, 0.0) * _KEPT + hit
        self._trials[cell] = self._trials.get(cell, 0.0) * _KEPT + 1.0
        self._all.saw(cell, hit)
