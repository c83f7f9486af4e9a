"""The budget: which drafters, how much of each, at every step, by what was measured; no draft is one of the ways.

::

    plan      whoever looks things up says what it would draft       found nodes, with the chances they have had so far
              weigh found nodes, each model's levels, both, neither  most expected tokens per second
    stepped   what came tells of all that was proposed, verified or not; what the step took corrects the costs

A model that is not worth it is asked all the same now and then (:mod:`spec.budget.probes`), so that it is noticed when
it would be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from dataclasses import replace

from spec.budget.case import Case
from spec.budget.cases import Cases
from spec.budget.cost import StepCost, Table
from spec.budget.held import Held
from spec.budget.leader import Leader
from spec.budget.looks import Looks
from spec.budget.members import OPEN, Member
from spec.budget.mixed import Mixed, Share, Why, shape_of, to_draft
from spec.budget.probes import Probes, allowances
from spec.budget.timing import Prices, Timing
from spec.budget.ways import Offer, Taken
from spec.budget.weigh import pays_up_to, weigh, weigh_found, weigh_pinned, worth_rows
from spec.names import NONE, PREDICTION
from spec.observer import Observer
from spec.price import Price
from spec.sequence import Sequence
from spec.step import Verdict
from spec.trace import StepTrace
from spec.tree import MAX_NODES, ROOT_ONLY, TreeShape

#: A member that took part in less than this share of the last steps (some hundred) is at rest.
_RESTING = 0.05
#: So many steps that draft alike are counted together.
_UNTOLD = 3
#: A passage is copied where as many tokens of what was found are expected to come.
_COPIED = 1.0
#: A choice outlives a draft that was wrong if the first level of what it asks for was tried as often, by any sequence.
_KNOWN = 12


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
        self._cases, self._looks = Cases(self.members), Looks()
        self._table = Table(cost)
        self._sequences = 0
        self._pace = 0.0
        self._timing = Timing(self.members, cost)
        self._probes = Probes()
        self._held: Held | None = None
        self._repeated = self._modelless = self._same = 0
        self._last_told: tuple[str, bool, tuple[str, ...]] | None = None

    @property
    def shape(self) -> TreeShape:
        """The largest that it plans, about."""
        if self.pinned is not None:
            return self.pinned
        return TreeShape.chain(max(m.levels for m in self.members.values() if m.name != PREDICTION))

    @property
    def choice(self) -> str:
        """Who drafts in the step last planned."""
        return NONE if self.why is None else self.why.choice

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
        if self._held is not None and not self._held.sure:
            drafted = [verdict for verdict in verdicts if to_draft(verdict.work.shape)]
            if drafted and not any(verdict.accepted for verdict in drafted):
                self._held = None
        # Of steps that are repeated one in four is enough.
        if self.timed and verdicts and not (trace.prefill_rows or trace.aside):
            self._looks.saw(trace.seconds, any(v.accepted and self._looked(v) for v in verdicts))
            if not self._same % 4:
                self._timing.saw(trace, verdicts)

    def _looked(self, verdict: Verdict) -> bool:
        """Whether something that was looked up was drafted."""
        case = self._cases.known(verdict.work.sequence.id)
        return case is not None and case.looked

    def ended(self, sequence: Sequence) -> None:
        """Forget the sequence; what it showed stays with the members."""
        case = self._cases.known(sequence.id)
        if case is not None:
            self._timing.lasted(case.alone)
        self._cases.ended(sequence.id)
        self._probes.ended()
        self._looks.begin()
        self._held = None

    # -- planning ------------------------------------------------------------------------------------------------

    def plan(self, sequences: Many[Sequence]) -> list[TreeShape]:
        """What is to be drafted for each of these sequences, all that decode in the next step."""
        able = [s for s in sequences if s.speculate and s.most_levels > 0]
        self.why, self.leader.news = None, ""
        self._sequences = len(able)
        if not able:
            return [ROOT_ONLY] * len(sequences)
        looks = self._looks.due() or not self.timed or any(sequence.prediction for sequence in able)
        cases = self._cases.look(able, looks)
        decided = self._decide(able, cases)
        if len(able) == len(sequences):
            return [*decided]
        shapes = dict(zip((sequence.id for sequence in able), decided, strict=True))
        return [shapes.get(sequence.id, ROOT_ONLY) for sequence in sequences]

    def _decide(self, able: Many[Sequence], cases: Many[Case]) -> list[Mixed]:
        """For each of those that may draft: what was decided lately, as far as that still holds."""
        held = self._held
        if held is not None and not held.goes_on([sequence.id for sequence in able]):
            held = self._held = None
        due = held is not None and self._probes.save(held.allowed)
        repeats = held is not None and not due and held.repeats(able)
        if held is not None and repeats and not held.beside and not any(case.found.chances for case in cases):
            return self._repeat(able, cases, held)
        seconds = self._read(able, cases)
        if held is not None and not due and self.pinned is None:
            offers = [Offer(case.found.chances, case.found.first) for case in cases]
            ways = weigh_found(offers, seconds, self._pace)
            if repeats and not held.beaten(ways, self._pace):
                return self._repeat(able, cases, held)
            if held.leaves_out(self._pace):
                ways += [way for way in held.ways if way.model]
                return self._settle(able, cases, held, ways[0], ways)
        return self._weigh(able, cases, seconds, due)

    def _read(self, able: Many[Sequence], cases: Many[Case]) -> Many[float]:
        """Seconds of the step by its rows; and what time is worth now."""
        most = min(len(able) * MAX_NODES, 4 * MAX_NODES)
        seconds = self._table.read(len(able), sum(len(sequence.tokens) for sequence in able), most)
        self._pace = sum(case.pace(seconds[1]) for case in cases)
        return seconds

    def _repeat(self, able: Many[Sequence], cases: Many[Case], held: Held) -> list[Mixed]:
        """What was planned for the step before."""
        self._same += 1
        if held.ways[0].model:
            self._timing.prices([self.members[held.ways[0].model]], able, cases)
        for case, chosen in zip(cases, held.chosen, strict=True):
            case.tokens, case.seconds, case.tree, case.others = chosen
            case.grown = None
            case.looked = False
            case.alone += 1
        if held.why is not None:
            self._told(held.why, held.why.ways[0], cases)
        return [*held.planned]

    def _weigh(self, able: Many[Sequence], cases: Many[Case], seconds: Many[float], due: bool) -> list[Mixed]:
        """The best of all ways. due: whether a model may be asked in its place, by what is saved."""
        prices = self._timing.prices(self._models, able, cases)
        offers = [
            case.offer(self._models, s.most_levels, self.pinned is None) for s, case in zip(able, cases, strict=True)
        ]
        ways = self._ways(offers, seconds, prices)
        running = [sequence.id for sequence in able]
        allowed = allowances(self._models, ways[0], offers)
        best = way = ways[0]
        self._modelless = 0 if best.model else self._modelless + 1
        worth_it = pays_up_to(offers, seconds, prices.shared) if self.pinned is None else math.inf
        fresh = Held.of(running, ways, allowed, self._pace, worth_it, self._modelless)
        if due or (self._held is None and self._probes.save(allowed)):
            way = self._probes.due(self._models, best, offers, prices.whole, seconds, self.pinned)
        probe = way is not best
        paid = way if probe else prices.paid(way)
        if paid is not way:  # what was caught up with is in no later price
            fresh.steps = 0
        return self._settle(able, cases, fresh, paid, ways, probe)

    def _settle(
        self,
        able: Many[Sequence],
        cases: Many[Case],
        held: Held,
        way: Taken,
        ways: Many[Taken],
        probe: bool = False,
    ) -> list[Mixed]:
        """What each of them drafts of a way, remembered as planned. held: what of that may hold for longer; ways: all
        that were weighed; probe: it is not the best of them, but asked to be seen."""
        self._same = 0
        looked = tuple(dict.fromkeys(name for case in cases for name in case.found.names))
        why = Why((way, *(other for other in ways if other.kind != way.kind)), looked, probe)
        self._told(why, way, cases)
        for case, nodes in zip(cases, way.found, strict=True):
            case.looked = nodes > 0
            if not nodes or sum(case.found.chances[:nodes]) < _COPIED:
                case.alone += 1
            elif case.alone:
                self._timing.stretched(case.alone)
                case.alone = 0
        planned = self._shapes(able, cases, way, why)
        # What a probe reads now is in no later price.
        self._held = None if probe else held
        if not any(way.found):
            held.repeat(planned, why, cases, self._sure(way))
        return planned

    def _sure(self, way: Taken) -> bool:
        """Whether so much is known of what a model is asked for that one draft tells little."""
        if not way.model:
            return True
        return self.members[way.model].rates.trials[0] >= _KNOWN

    def _shapes(self, able: Many[Sequence], cases: Many[Case], way: Taken, why: Why) -> list[Mixed]:
        """What each of them drafts, and what is expected of it."""
        tokens = [1.0 + sum(case.found.chances[:found]) for case, found in zip(cases, way.found, strict=True)]
        drafted = (way.tokens - sum(tokens)) / max(1, sum(map(bool, way.levels)))
        for index, (case, own, levels) in enumerate(zip(cases, tokens, way.levels, strict=True)):
            case.tokens, case.seconds = own + bool(levels) * drafted, way.seconds
            case.tree, case.grown = way.grown[index] if way.grown and levels else None, None
        planned = [found + case.nodes(levels) for found, levels, case in zip(way.found, way.levels, cases, strict=True)]
        for case, nodes in zip(cases, planned, strict=True):
            case.others = sum(planned) - nodes
        return [self._shape(*parts, way, index, why) for index, parts in enumerate(zip(able, cases, strict=True))]

    def _told(self, why: Why, way: Taken, cases: Many[Case]) -> None:
        """Remember why, and who takes part; in the steps before it that repeated the one before them, too."""
        self.why, again, told = why, self._repeated, (*way.kind, why.looked)
        if told == self._last_told and again < _UNTOLD:
            self._repeated += 1
            return
        self.leader.see(why, again)
        self._repeated, self._last_told = 0, told
        for member in self.members.values():
            part = way.model == member.name or (member.looks and any(member.name in case.found.names for case in cases))
            member.took_part(part, again)

    def _ways(self, offers: Many[Offer], seconds: Many[float], prices: Prices) -> list[Taken]:
        """The ways to draft what is offered, the best first."""
        if self.pinned is None:
            return weigh(offers, seconds, prices.shared, self._pace, branching=self.cost.branching)
        return weigh_pinned(offers, seconds, prices.shared, self.pinned.levels, self.pinned.nodes - 1)

    def worth(self, sequence: Sequence, chances: Many[float], path: Many[float] | None) -> tuple[int, bool]:
        """How many of the drafted nodes are worth their rows, now that all are there; and whether of those of the
        likeliest path alone.

        A tree takes what branching does beside its rows. chances: of each drafted node of the whole. path: of those of
        the likeliest path; None where nodes that were found stand beside the model's.
        """
        case, seconds = self._cases.known(sequence.id), self._table.seconds
        assert case is not None, "what is drafted was planned"
        rows = min(self._sequences + case.others, len(seconds) - 1)
        count, tokens = worth_rows(sorted(chances, reverse=True), seconds, rows, self._pace)
        if path is None:
            return count, False
        straight, along = worth_rows(path, seconds, rows, self._pace)
        more = seconds[rows + count] - seconds[rows + straight] + self.cost.branching
        alone = tokens - along <= self._pace * more
        if alone:
            count, tokens = straight, along
        if case.tree is not None:
            case.kept(count, tokens, branches=not alone)
        return count, alone

    def _shape(self, sequence: Sequence, case: Case, way: Taken, index: int, why: Why) -> Mixed:
        shares = []
        if way.found[index]:
            tree = case.found.best(way.found[index])
            shares.append(Share(tree.drafter, shape_of(tree), tree))
        if way.levels[index]:
            shape = self.pinned or TreeShape.chain(way.levels[index])
            if case.tree is not None:
                shape = replace(OPEN.limited(self.members[way.model].levels), price=self._price(way, index, case))
            shares.append(Share(way.model, shape.limited(sequence.most_levels)))
        return Mixed.sharing(shares, why)

    def _price(self, way: Taken, index: int, case: Case) -> Price:
        """What levels and rows of a sequence's tree are worth."""
        # One pass drafts the level for all of them.
        level = self.members[way.model].cost.of_a_level(tree=True) / sum(map(bool, way.levels))
        seconds = self._table.seconds
        rows = min(self._sequences + case.others + way.found[index], len(seconds) - 1)
        # A token beside others that were found comes as much more seldom.
        pace = self._pace / case.share_beside(way.model)
        return Price.of(pace, level, seconds[rows : rows + OPEN.nodes], way.levels[index])
