"""Predictions of texts that are known: as they are, edited in places, or wrong."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tests.same_tokens.witness import Job, Text

#: Of each token, to be replaced, left out, or followed by one that is not in the text.
EDITED = 0.12


def edited(tokens: Sequence[int], rng: random.Random, rate: float = EDITED) -> list[int]:
    """A text with some tokens replaced, some left out and some more; the new ones are from the text."""
    out: list[int] = []
    for token in tokens:
        lot = rng.random() / rate
        if lot >= 3:
            out.append(token)
        elif lot < 1:
            out.append(rng.choice(tokens))
        elif lot < 2:
            out += [token, rng.choice(tokens)]
    return out


def predicted(jobs: Sequence[Job], texts: Mapping[str, Text]) -> list[Job]:
    """The jobs with predictions of their texts: edited ones, every sixth the text itself, another's text, or none."""
    made = []
    for number, job in enumerate(jobs):
        text = texts[job.id].tokens
        rng = random.Random(number)
        others = [texts[other.id].tokens for other in jobs if other.id != job.id]
        prediction = {0: text, 2: rng.choice(others or [[1]]), 4: None}.get(number % 6, edited(text, rng))
        made.append(replace(job, prediction=prediction))
    return made
