"""The budget: which drafters, how much of each, at every step, by what was measured; no draft is one of the ways.

::

    plan      whoever looks things up says what it would draft       found nodes, with the chances they have had so far
              weigh found nodes, each model's levels, both, neither  most expected tokens per second
    stepped   what came tells of all that was proposed, verified or not; what the step took corrects the costs

A model that is not worth it is asked all the same now and then (:mod:`spec.budget.probes`), so that it is noticed when
it would be.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace
from typing import NamedTuple

from spec.budget.case import Case
from spec.budget.cases import Cases
from spec.budget.cost import StepCost, Table
from spec.budget.leader import Leader
from spec.budget.members import Member
from spec.budget.mixed import Mixed, Share, Why, drafted_by, shape_of
from spec.budget.probes import Probes
from spec.budget.timing import Timing
from spec.budget.ways import DraftSeconds, Offer, Taken
from spec.budget.weigh import weigh, weigh_pinned
from spec.observer import Observer
from spec.request import PREDICTION
from spec.sequence import Sequence
from spec.step import Verdict
from spec.trace import StepTrace
from spec.tree import MAX_NODES, ROOT_ONLY, TreeShape

#: How often a level of a tree is hit below a node that came, about: by what a level costs it says when to stop.
_NEXT = 0.6
#: A tree is grown by one level at least.
_MOST_LEAST = 0.95
#: A member that took part in less than this share of the last steps (some hundred) is at rest.
_RESTING, _REMEMBERED = 0.05, 0.99
#: For how many steps more a choice holds where nothing is found.
_HELD = 3


class _Held(NamedTuple):
    """What was weighed for these sequences, where nothing was found, and for how many steps more it holds."""

    running: list[str]
    offers: list[Offer]
    ways: list[Taken]
    steps: int


class Budget(Observer):
    """Owns what is known of costs and of how often drafts are right. An observer of its engine, to learn.

    members: who can be asked. cost: of whole steps without drafting, by their rows. pinned: the shape of every draft;
    then only who drafts it is chosen. timed: False takes the costs as they are given, for texts that are replayed.
    why: of the last plan; None if nothing could be drafted.
    """

    def __init__(
        self, members: Many[Member], cost: StepCost, pinned: TreeShape | None = None, timed: bool = True
    ) -> None:
        self.members = {member.name: member for member in members}
        self.cost, self.pinned, self.timed = cost, pinned, timed
        self.why: Why | None = None
        self.leader = Leader()
        self._models = [member for member in members if not member.looks]
        self._cases = Cases(self.members)
        self._table = Table(cost)
        self._sequences = 0
        self._pace = 0.0
        self._timing = Timing(self.members, cost)
        self._probes = Probes()
        self._held: _Held | None = None

    @property
    def shape(self) -> TreeShape:
        """The largest that it plans, about."""
        if self.pinned is not None:
            return self.pinned
        return TreeShape.chain(max(m.levels for m in self.members.values() if m.name != PREDICTION))

    @property
    def choice(self) -> str:
        """Who drafts in the step last planned."""
        return "none" if self.why is None else self.why.choice

    def resting(self, name: str) -> bool:
        """Whether a model is asked so seldom that what was written need not be shown to it at once."""
        member = self.members[name]
        return not member.looks and member.asked < _RESTING

    # -- learning ------------------------------------------------------------------------------------------------

    def stepped(self, trace: StepTrace, verdicts: Many[Verdict]) -> None:
        """See what was right, and what the step took."""
        for verdict in verdicts:
            case = self._cases.known(verdict.work.sequence.id)
            if case is not None and verdict.emitted and verdict.tree is not None:
                self._learn(case, verdict)
        if self.timed and not trace.prefill_rows and not trace.aside and verdicts:
            self._timing.saw(trace, verdicts)

    def _learn(self, case: Case, verdict: Verdict) -> None:
        tree, emitted = verdict.tree, verdict.emitted
        assert tree is not None, "whoever emits has a tree"
        current = case.length == len(verdict.work.sequence.tokens) - len(emitted)
        missed = case.found.learn(emitted, tree) if current else False
        if current:
            case.stepped(len(emitted))
        grown = max((drafted_by(name, tree)[0] for name in case.records if not self.members[name].looks), default=0)
        if current and case.bush is not None and grown:
            case.grew(grown)
        for part in tree.parts or (tree,):
            record = case.records.get(part.drafter)
            if record is not None and not record.member.looks and len(part) > 1:
                bush = case.bush if case.bush in record.member.bushes else None
                hit = record.learn(part, emitted, verdict.accepted, bush)
                if missed:
                    record.beside.saw(0, hit)
                if hit and self.resting(part.drafter):
                    self._probes.surprised(part.drafter)

    def ended(self, sequence: Sequence) -> None:
        """Forget the sequence; what it showed stays with the members."""
        self._cases.ended(sequence.id)
        self._probes.ended()
        self._held = None

    # -- planning ------------------------------------------------------------------------------------------------

    def plan(self, sequences: Many[Sequence]) -> list[TreeShape]:
        """What is to be drafted for each of these sequences, all that decode in the next step."""
        able = [s for s in sequences if s.speculate and s.most_levels > 0]
        self.why, self.leader.news = None, ""
        self._sequences = len(able)
        if not able:
            return [ROOT_ONLY] * len(sequences)
        cases = self._cases.look(able)
        most = min(len(able) * MAX_NODES, 4 * MAX_NODES)
        seconds = self._table.read(len(able), sum(len(sequence.tokens) for sequence in able), most)
        self._timing.begin()
        rest = {member.name: self._timing.unread(member, able, cases) for member in self._models}

        def drafting(name: str, levels: float, nodes: float) -> float:
            return self.members[name].cost.seconds(levels, rest[name], nodes - levels)

        self._pace = sum(case.pace(seconds[1]) for case in cases)
        offers, ways = self._weighed(able, cases, seconds, drafting)
        way = self._probes.due(self._models, ways[0], offers, drafting, seconds, self.pinned)
        probe = way is not ways[0]
        if probe:  # what it reads now is in no later price
            self._held = None
        looked = "+".join(dict.fromkeys(name for case in cases for name in case.found.names))
        self.why = why = Why((way, *(other for other in ways if other.kind != way.kind)), looked, probe)
        self.leader.see(why)
        self._count(way, cases)
        for case in cases:
            case.seconds, case.bush = way.seconds, None
        shapes = {
            sequence.id: self._shape(sequence, case, way, index, why)
            for index, (sequence, case) in enumerate(zip(able, cases, strict=True))
        }
        planned = [found + case.nodes(levels) for found, levels, case in zip(way.found, way.levels, cases, strict=True)]
        for case, own in zip(cases, planned, strict=True):
            case.others = sum(planned) - own
        return [shapes.get(sequence.id, ROOT_ONLY) for sequence in sequences]

    def _weighed(
        self, able: Many[Sequence], cases: Many[Case], seconds: Many[float], drafting: DraftSeconds
    ) -> tuple[list[Offer], list[Taken]]:
        """What could be drafted, and the ways to, the best first. Where nothing is found this moves slowly, and holds
        for a few steps: weighing takes time too."""
        running, looked = [sequence.id for sequence in able], any(case.found.chances for case in cases)
        held = self._held
        if held is not None and held.steps and held.running == running and not looked:
            self._held = held._replace(steps=held.steps - 1)
            return held.offers, held.ways
        trees = self.pinned is None
        offers = [case.offer(self._models, s.most_levels, trees) for s, case in zip(able, cases, strict=True)]
        if self.pinned is None:
            ways = weigh(offers, seconds, drafting, self._pace, branching=self.cost.branching)
        else:
            ways = weigh_pinned(offers, seconds, drafting, self.pinned.levels, self.pinned.nodes - 1)
        self._held = None if looked else _Held(running, offers, ways, _HELD)
        return offers, ways

    def worth(self, sequence: Sequence, chances: Many[float], found: int) -> int:
        """How many of a model's tree and the ``found`` nodes beside it are worth their rows, now that all are there.

        chances: of each drafted node of the whole.
        """
        case, table = self._cases.known(sequence.id), self._table.seconds
        assert case is not None, "what is drafted was planned"
        rows, last = min(self._sequences + case.others, len(table) - 1), len(table) - 1
        best, count, value = 0.0, 0, 0.0
        for taken, chance in enumerate(sorted(chances, reverse=True)[: last - rows], start=1):
            value += chance
            worth = value - self._pace * (table[rows + taken] - table[rows])
            if worth > best:
                best, count = worth, taken
        if case.bush is not None and len(chances) > found:
            planned = min(rows + found + round(case.bush.kept), last)
            case.kept(max(0, count - found), table[planned] - table[min(rows + count, last)])
        return count

    def _count(self, way: Taken, cases: Many[Case]) -> None:
        """Remember who took part."""
        for member in self.members.values():
            part = way.model == member.name or (member.looks and any(member.name in case.found.names for case in cases))
            member.asked = _REMEMBERED * member.asked + (1 - _REMEMBERED) * part

    def _shape(self, sequence: Sequence, case: Case, way: Taken, index: int, why: Why) -> TreeShape:
        shares = []
        if way.found[index]:
            tree = case.found.best(way.found[index])
            shares.append(Share(tree.drafter, shape_of(tree), tree))
        if way.levels[index]:
            bushes = self.members[way.model].bushes
            case.bush = next((bush for bush in bushes if bush.shape is way.tree), None)
            shape = way.tree or self.pinned or TreeShape.chain(way.levels[index])
            if case.bush is not None:
                level = self.members[way.model].cost.of_a_level(tree=not shape.is_chain)
                # One pass drafts the level for all of them. Nothing is drafted by a tree whose root is too unlikely.
                least = self._pace * level / (_NEXT * sum(map(bool, way.levels)))
                shape = replace(shape, least=min(least, _MOST_LEAST))
            shares.append(Share(way.model, shape.limited(sequence.most_levels)))
        return Mixed.sharing(shares, why)
