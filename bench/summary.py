"""Samples of interleaved runs, and what they come to per way of decoding and temperature."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np

from bench.drive import Run
from bench.stats import Ratio, distinct_trigrams, paired_ratio, spread
from foresay.spec.acceptance import ByDepth, by_place

PHASES = ("plan", "propose", "forward", "draw", "commit")  # of a step; queue and prefill are none of a step's


class TokensDiffer(AssertionError):
    """Two ways of decoding wrote different tokens for the same prompt, temperature and seed."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One run: which way, at which temperature, for which prompt, in which round."""

    mode: str
    temperature: float
    prompt: str
    round: int
    run: Run

    @property
    def key(self) -> tuple[float, str, int]:
        """What the ways of decoding have in common."""
        return self.temperature, self.prompt, self.round


def check_same(samples: Iterable[Sample]) -> None:
    """Raise TokensDiffer, naming the first place, unless all ways wrote the same tokens for the same key."""
    first: dict[tuple[float, str, int], Sample] = {}
    for sample in samples:
        other = first.setdefault(sample.key, sample)
        if sample.run.tokens != other.run.tokens:
            pairs = zip_longest(other.run.tokens, sample.run.tokens)
            at = next(i for i, (a, b) in enumerate(pairs) if a != b)
            runs = f"{sample.run.tokens[at : at + 4]} and {other.run.tokens[at : at + 4]}"
            raise TokensDiffer(
                f"{sample.prompt}, temperature {sample.temperature}, round {sample.round}: {sample.mode} parts from "
                f"{other.mode} at output token {at}: {runs}"
            )


def ratio(samples: Sequence[Sample], mode: str, base: str, measure: Callable[[Run], float]) -> Ratio:
    """``mode`` over ``base``, paired by prompt and round."""
    of = {(s.mode, s.key): s for s in samples}
    pairs: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for sample in samples:
        if sample.mode == mode:
            pairs[sample.prompt].append((measure(sample.run), measure(of[base, sample.key].run)))
    return paired_ratio(pairs)


def summarise(samples: Sequence[Sample]) -> dict[str, Any]:
    """One way at one temperature. Times per step in milliseconds; acceptance lists start at depth 1.

    Decode figures leave the prompt and the first token out; ``wall`` ones are whole requests.
    """
    runs = [s.run for s in samples]
    phases = {phase: 1e3 * per_step(runs, phase) for phase in PHASES}
    drafted = by_place(r.statistics.drafted_per_depth for r in runs)
    accepted = by_place(r.statistics.accepted_per_depth for r in runs)
    return {
        "tokens_per_second": spread([r.tokens_per_second for r in runs]),
        "wall_tokens_per_second": spread([len(r.tokens) / r.seconds for r in runs]),
        "tokens_per_step": sum(len(r.tokens) for r in runs) / sum(r.statistics.steps for r in runs),
        "ms_per_step": spread([1e3 * step_seconds(r) for r in runs]),
        "ms_between_deltas_p99": 1e3 * float(np.percentile([gap for r in runs for gap in r.gaps] or [0.0], 99)),
        "phases_ms": phases,
        "draft_share": phases["propose"] / (sum(phases.values()) or 1.0),
        "drafted_per_depth": drafted,
        "accepted_per_depth": accepted,
        "acceptance_per_depth": [a / d if d else 0.0 for a, d in zip(accepted, drafted, strict=True)],
        "reached_per_depth": accepted_by_depth(runs).cumulative,
        "distinct_trigrams": float(np.mean([distinct_trigrams(r.tokens) for r in runs])),
    }


def step_seconds(run: Run) -> float:
    """Mean time of a decode step; the pass that drew the first token belongs to the prompt."""
    return run.statistics.decode_seconds / max(1, run.statistics.steps - 1)


def per_step(runs: Sequence[Run], phase: str) -> float:
    """Seconds of one phase per decode step, over all runs."""
    spent = sum(run.statistics.seconds.get(phase, 0.0) for run in runs)
    return spent / max(1, sum(run.statistics.steps - 1 for run in runs))


def accepted_by_depth(runs: Sequence[Run]) -> ByDepth:
    """Of all drafts of these runs."""
    accepted = by_place(run.statistics.accepted_per_depth for run in runs)
    return ByDepth.of(accepted, sum(run.statistics.drafts for run in runs))
