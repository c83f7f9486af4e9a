"""The settings that determine the result of a training run."""

from __future__ import annotations

from dataclasses import dataclass

#: One text in this many is held out for evaluation.
HELD_OUT = 20


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings that determine the result of a run. samples: texts; length: tokens in one; batch: texts in a step.

    temperatures: of the target's texts, alternating by batch. layers: of a draft model or a DFlash head. width: of a
    draft model. vocabulary: the most tokens in a head's vocabulary. together: texts that are generated in one batch; a
    run that is stopped loses the unfinished batch.
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
