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

from spec.budget.case import Case
from spec.budget.cases import Cases
from spec.budget.cost import StepCost, Table
from spec.budget.held import Held, far
from spec.budget.leader import Leader
from spec.budget.members import Member
from spec.budget.mixed import NOBODY, Mixed, Share, Why, shape_of, to_draft
from spec.budget.probes import Probes, allowances
from spec.budget.timing import Prices, Timing
from spec.budget.ways import Offer, Taken
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
        self._held: Held | None = None
        self._idle = 0

    @property
    def shape(self) -> TreeShape:
        """The largest that it plans, about."""
        if self.pinned is not None:
            return self.pinned
        return TreeShape.chain(max(m.levels for m in self.members.values() if m.name != PREDICTION))

    @property
    def choice(self) -> str:
        """Who drafts in the step last planned."""
        return NOBODY if self.why is None else self.why.choice

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
                for name in filter(self.resting, case.learn(verdict)):
                    self._probes.surprised(name)
        drafted = [verdict for verdict in verdicts if to_draft(verdict.work.shape)]
        if drafted and not any(verdict.accepted for verdict in drafted):
            self._held = None
        # Where nobody drafts little can change: one step in four is enough.
        idle = self._held is not None and self._held.idle is not None and self._held.steps
        if self.timed and not (trace.prefill_rows or trace.aside or idle) and verdicts:
            self._timing.saw(trace, verdicts)

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
        held = self._held and self._held.later([sequence.id for sequence in able])
        due = held is not None and self._probes.save(held.allowed)
        found = sum(case.found.first for case in cases) if any(case.found.chances for case in cases) else None
        if held is not None and held.idle is not None and found is None and not due:
            self._held, self.why, idle = held, held.idle, Mixed(why=held.idle)
            self._idle += 1
            for case in cases:
                case.alone += 1
            return [idle if sequence in able else ROOT_ONLY for sequence in sequences]
        planned = self._choose(able, cases, held, found, due)
        shapes = dict(zip((sequence.id for sequence in able), planned, strict=True))
        return [shapes.get(sequence.id, ROOT_ONLY) for sequence in sequences]

    def _choose(
        self, able: Many[Sequence], cases: Many[Case], held: Held | None, found: float | None, due: bool
    ) -> list[Mixed]:
        """For each of those that may draft. held: what was weighed, if that still holds; found: see :class:`Held`; due:
        whether a model may be asked in the place of what is best, by what is saved."""
        most = min(len(able) * MAX_NODES, 4 * MAX_NODES)
        seconds = self._table.read(len(able), sum(len(sequence.tokens) for sequence in able), most)
        self._pace = sum(case.pace(seconds[1]) for case in cases)
        left_out = held if held is not None and not due and held.leaves_out(found) else None
        models = self._models if left_out is None else []
        prices = self._timing.prices(models, able, cases)
        if held is None or found is not None or held.found is not None:
            offers = [
                case.offer(models, s.most_levels, self.pinned is None) for s, case in zip(able, cases, strict=True)
            ]
            ways = self._ways(offers, seconds, prices)
            fresh = self._weighed(able, offers, ways, found) if left_out is None else left_out.anew(ways)
            due = due or (held is None and self._probes.save(fresh.allowed))
            held = fresh
        best = way = held.ways[0]
        if due:
            way = self._probes.due(self._models, best, held.offers, prices.whole, seconds, self.pinned)
        probe = way is not best
        way = way if probe else prices.paid(way)
        looked = "+".join(dict.fromkeys(name for case in cases for name in case.found.names))
        why = Why((way, *(other for other in held.ways if other.kind != way.kind)), looked, probe)
        # What a probe reads now is in no later price.
        self._held = None if probe else held._replace(idle=None if looked or way.nodes else why)
        self._told(why, way, cases)
        for case, nodes in zip(cases, way.found, strict=True):
            case.alone = 0 if nodes else case.alone + 1
        return self._shapes(able, cases, way, why)

    def _shapes(self, able: Many[Sequence], cases: Many[Case], way: Taken, why: Why) -> list[Mixed]:
        """What each of them drafts, remembered as planned."""
        tokens = [1.0 + sum(case.found.chances[:found]) for case, found in zip(cases, way.found, strict=True)]
        drafted = (way.tokens - sum(tokens)) / max(1, sum(map(bool, way.levels)))
        for case, own, levels in zip(cases, tokens, way.levels, strict=True):
            case.tokens, case.seconds, case.bush = own + bool(levels) * drafted, way.seconds, None
        shapes = [self._shape(*parts, way, index, why) for index, parts in enumerate(zip(able, cases, strict=True))]
        planned = [found + case.nodes(levels) for found, levels, case in zip(way.found, way.levels, cases, strict=True)]
        for case, nodes in zip(cases, planned, strict=True):
            case.others = sum(planned) - nodes
        return shapes

    def _told(self, why: Why, way: Taken, cases: Many[Case]) -> None:
        """Remember why, and who takes part; in the steps before it in which nobody did, too."""
        self.why = why
        self.leader.see(why, self._idle)
        for member in self.members.values():
            part = way.model == member.name or (member.looks and any(member.name in case.found.names for case in cases))
            member.asked = _REMEMBERED ** (1 + self._idle) * member.asked + (1 - _REMEMBERED) * part
        self._idle = 0

    def _ways(self, offers: Many[Offer], seconds: Many[float], prices: Prices) -> list[Taken]:
        """The ways to draft what is offered, the best first."""
        if self.pinned is None:
            return weigh(offers, seconds, prices.shared, self._pace, branching=self.cost.branching)
        return weigh_pinned(offers, seconds, prices.shared, self.pinned.levels, self.pinned.nodes - 1)

    def _weighed(self, able: Many[Sequence], offers: list[Offer], ways: list[Taken], found: float | None) -> Held:
        """What holds for a few steps of that."""
        distant = self.pinned is None and far(ways, self._pace)
        running = [sequence.id for sequence in able]
        return Held(running, offers, ways, allowances(self._models, ways[0], offers), found, distant)

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

    def _shape(self, sequence: Sequence, case: Case, way: Taken, index: int, why: Why) -> Mixed:
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
