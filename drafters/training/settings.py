"""What decides the result of a training run."""

from __future__ import annotations

from dataclasses import dataclass

#: One text in so many is held out to judge what was learned.
HELD_OUT = 20


@dataclass(frozen=True, slots=True)
class Settings:
    """What decides the result of a run. Counts are of texts, of tokens in one, of steps and of texts in a step.

    temperatures: what the target writes at, batch by batch in turn. layers: of a draft model or a
    DFlash head. width: of a draft model. vocabulary: tokens that a head guesses among, at most. together: texts that
    are written side by side; a run that is stopped loses those it has begun.
    """

    kind: str
    target: str
    prompts: str
    samples: int
    length: int
    steps: int
    batch: int
    rate: float
    depth: int
    seed: int
    temperatures: tuple[float, ...] = (1.0, 0.0)
    layers: int | None = None
    width: int | None = None
    vocabulary: int = 32_000
    together: int = 128
