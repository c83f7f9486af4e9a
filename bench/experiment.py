"""What an experiment is, and its one runner: it measures variants in turns, compares them, shows progress and tables.

::

    Experiment   the variants to compare, and the cases of each round
    Variant      one way of doing it: makes a Sample for a case and a round, at once or step by step
    Case         what all variants have in common: a prompt, a number of rows
    Sample       figures, and the text, which must be the same for all variants
    Groups       by group and variant: medians with quartiles, and ratios with 95 % intervals

Whatever else the machine does affects all variants alike: they run in random order within each case; a variant that
yields does so step by step, and the one with the least progress takes the next step, since a machine that others use is
faster or slower for seconds at a time, which is as long as a text takes.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from math import inf
from typing import Any, NamedTuple

from bench import record
from bench.stats import Ratio, paired_ratio, spread
from foresay.drafters.training.progress import ProgressBar

#: By group and variant: the figures' spreads, ratios to the bases, and what an experiment adds.
Groups = dict[str, dict[str, dict[str, Any]]]


class TextsDiffer(AssertionError):
    """Two variants emitted different texts for the same case."""


@dataclass(frozen=True, slots=True)
class Case:
    """What all variants have in common. group: cases that go into one table. name: ratios are paired by it, and
    intervals are over it. input: what a variant needs."""

    group: str
    name: str
    input: Any = None


@dataclass(frozen=True, slots=True)
class Sample:
    """The result of one measurement. figures: by name; an invalid one is left out. text: the emitted one, None if it is
    not to be compared. detail: what the experiment adds up itself."""

    figures: Mapping[str, float]
    text: Any = None
    detail: Any = None


#: Made at once, or by a generator that yields its progress.
Measured = Sample | Generator[float, None, Sample]


@dataclass(frozen=True, slots=True)
class Variant:
    """One of the things that are compared. measure: a case, in a round."""

    name: str
    measure: Callable[[Case, int], Measured]


class Taken(NamedTuple):
    """A sample, with its variant, case and round."""

    variant: str
    case: Case
    round: int
    sample: Sample


def show(groups: Groups) -> None:
    """Print a table for each group; figures in parts (such as the phases of a step) in a table of their own."""
    for group, variants in groups.items():
        whole = {name: {k: v for k, v in row.items() if not isinstance(v, dict)} for name, row in variants.items()}
        _table(group, whole)
        for part in dict.fromkeys(k for row in variants.values() for k, v in row.items() if isinstance(v, dict)):
            _table(f"{group}: {part}", {name: row[part] for name, row in variants.items() if part in row})


def _table(title: str, variants: Mapping[str, Mapping[str, Any]]) -> None:
    columns = list(dict.fromkeys(name for row in variants.values() for name in row))
    rows = [[variant, *(_cell(row.get(column, "")) for column in columns)] for variant, row in variants.items()]
    record.table(title, ["", *columns], rows)


def _cell(value: Any) -> Any:
    if isinstance(value, list):
        return " ".join(f"{one:.2f}" if isinstance(one, float) else str(one) for one in value)
    return value


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """The variants and cases to measure and compare.

    cases: the same in every round, or by round. figure: whose ratios to each of ``bases`` are computed. warm: rounds
    that do not count. more: what a row has besides spreads and ratios. minutes: no round starts that would end later.
    """

    variants: Sequence[Variant]
    cases: Sequence[Case] | Callable[[int], Sequence[Case]]
    figure: str
    bases: Sequence[str] = ()
    rounds: int = 1
    warm: int = 0
    seed: int = 0
    minutes: float = inf
    more: Callable[[list[Taken]], dict[str, Any]] = field(default=lambda taken: {})

    def run(self) -> tuple[list[Taken], Groups]:
        """Measure, compare and show."""
        taken = self.measure()
        groups = self.compare(taken)
        show(groups)
        return taken, groups

    def measure(self) -> list[Taken]:
        """Samples of all rounds. Raises TextsDiffer if two variants emitted different texts for the same case."""
        order, taken, begun = random.Random(self.seed), list[Taken](), time.perf_counter()
        with ProgressBar("measured", self.rounds, "rounds") as progress:
            for turn in range(-self.warm, self.rounds):
                for case in self.cases(turn) if callable(self.cases) else self.cases:
                    samples = self._in_turns(case, turn, order)
                    check_same(case, turn, samples)
                    if turn >= 0:
                        taken += [Taken(one.name, case, turn, samples[one.name]) for one in self.variants]
                        progress.to(turn, ", ".join(filter(None, (case.group, case.name))))
                if turn >= 0 and (time.perf_counter() - begun) * (turn + 2) / (turn + 1) > 60 * self.minutes:
                    print(f"the {self.minutes:g} minutes are up", flush=True)
                    break
        return taken

    def _in_turns(self, case: Case, turn: int, order: random.Random) -> dict[str, Sample]:
        samples: dict[str, Sample] = {}
        running: dict[str, Generator[float, None, Sample]] = {}
        for variant in order.sample(self.variants, len(self.variants)):
            measured = variant.measure(case, turn)
            if isinstance(measured, Sample):
                samples[variant.name] = measured
            else:
                running[variant.name] = measured
        reached = dict.fromkeys(running, 0.0)
        while running:
            name = min(running, key=lambda one: (reached[one], order.random()))
            try:
                reached[name] = next(running[name])
            except StopIteration as end:
                samples[name] = end.value
                del running[name]
        return samples

    def compare(self, taken: Sequence[Taken]) -> Groups:
        """The summary of the samples."""
        rows: dict[str, dict[str, list[Taken]]] = defaultdict(lambda: defaultdict(list))
        for one in taken:
            rows[one.case.group][one.variant].append(one)
        return {group: {name: self._row(mine, of) for name, mine in of.items()} for group, of in rows.items()}

    def _row(self, mine: list[Taken], group: Mapping[str, list[Taken]]) -> dict[str, Any]:
        names = dict.fromkeys(name for one in mine for name in one.sample.figures)
        row: dict[str, Any] = {name: spread(values(mine, name)) for name in names}
        for base in self.bases:
            if base in group and base != mine[0].variant and (times := ratio(mine, group[base], self.figure)):
                row[f"times {base}"] = times
        return row | self.more(mine)


def values(taken: Iterable[Taken], figure: str) -> list[float]:
    """The valid values."""
    return [one.sample.figures[figure] for one in taken if figure in one.sample.figures]


def ratio(over: Iterable[Taken], under: Iterable[Taken], figure: str) -> Ratio | None:
    """One variant over another in the same group, paired by case and round; None if there are no pairs."""
    of = {(one.case.name, one.round): one.sample.figures for one in under}
    pairs: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for one in over:
        mine, theirs = one.sample.figures.get(figure), of.get((one.case.name, one.round), {}).get(figure)
        if mine is not None and theirs is not None:
            pairs[one.case.name].append((mine, theirs))
    return paired_ratio(pairs) if pairs else None


def check_same(case: Case, turn: int, samples: Mapping[str, Sample]) -> None:
    """Raise TextsDiffer, naming the first position, unless all texts are the same."""
    first: tuple[str, Any] | None = None
    for name, sample in samples.items():
        if sample.text is None:
            continue
        other, text = first = first or (name, sample.text)
        if sample.text != text:
            at = next(i for i, (a, b) in enumerate(zip_longest(text, sample.text)) if a != b)
            raise TextsDiffer(
                f"{case.group}, {case.name}, round {turn}: {name} parts from {other} at position {at}: "
                f"{sample.text[at : at + 4]} and {text[at : at + 4]}"
            )
