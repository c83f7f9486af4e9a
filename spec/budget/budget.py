"""The budget: which drafters, and how much of each, at every step, by measurements; no draft is one of the options.

::

    plan      lookups return what they would draft               found nodes, with the acceptance rates so far
              weigh found nodes, each model's tree, both, neither    most expected tokens for the time they take
              or repeat the last choice, where steps are short compared with choosing
    stepped   emitted tokens give outcomes for all proposals, verified or not; drafting time corrects the costs
    dropped   it failed to learn from a step: nothing is drafted any more

A model that is not worth its cost still drafts from time to time (:mod:`foresay.spec.budget.exploration`), so that it
is noticed when it would be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from foresay.spec.budget.chance import Claims
from foresay.spec.budget.cost import CostModel, DraftSeconds, of_draft
from foresay.spec.budget.exploration import Exploration, Looks
from foresay.spec.budget.members import NOTHING, OPEN, RESTING, Found, Member, SequenceStats
from foresay.spec.budget.plan import NO_PLAN, Leader, Plan, Share, Why
from foresay.spec.budget.weigh import CandidatePlan, Estimate, StepCosts, weigh, weigh_pinned
from foresay.spec.names import NONE, PREDICTION
from foresay.spec.observer import Observer
from foresay.spec.sequence import SequenceState
from foresay.spec.step import VerifyResult
from foresay.spec.trace import SWITCHED_OFF, StepTrace
from foresay.spec.tree import MAX_NODES, DraftTree, TreeShape

#: Over how many steps the cost of catching up is spread: a model in use stays useful for a while.
_SPREAD = 16
#: Drafts of each model before the priors of start-up are trusted, and how many of these in one text: texts differ.
_FIRST_TRIES, _IN_A_TEXT = 8, 4
#: Where nothing is drafted, choosing anew can wait if fewer than one in so many sequences came or went.
_ABOUT = 4
#: The least share of its tokens that a tree is taken to contribute next to others.
_LEAST_REMAINING = 0.05


class Budget(Observer):
    """Estimates how often drafts are accepted and what they cost. Observes its engine, to learn.

    members: the drafters. cost: of whole steps without drafting, by their rows. pinned: the shape of every draft; then
    only the drafter is chosen. timed: False takes the costs as given, for replayed texts. why: of the last plan; None
    if nothing could be drafted. failed: why nothing is drafted any more, after it failed to learn from a step; else
    empty.
    """

    def __init__(
        self, members: Sequence[Member], cost: CostModel, pinned: TreeShape | None = None, timed: bool = True
    ) -> None:
        self.members = {member.name: member for member in members}
        self.cost, self.pinned, self.timed = cost, pinned, timed
        self.why: Why | None = None
        self.failed = ""
        self.leader = Leader()
        self._models = {member.name: member for member in members if not member.looks}
        for member in members:
            member.costs = cost.drafts(member.cost)
        self._cases: dict[str, SequenceStats] = {}
        self._exploration, self._looks = Exploration(), Looks()
        self._unread: dict[str, int] = {}
        self._plans: Mapping[str, Plan] = {}
        self._undrafted: tuple[list[SequenceState], list[Plan]] = [], []  # a step without drafts, to be repeated
        self._kept = 0  # steps since the last choice
        self._drafts = False  # whether the best plan drafts with a model
        self._found = 0.0  # what the rows of found nodes take in the planned step, relative to one without drafts

    @property
    def shape(self) -> TreeShape:
        """About the largest shape that it plans."""
        if self.pinned is not None:
            return self.pinned
        return TreeShape.chain(max(m.levels for m in self.members.values() if m.name != PREDICTION))

    @property
    def choice(self) -> str:
        """The drafters of the step last planned."""
        return NONE if self.why is None else self.why.choice

    @property
    def looks(self) -> bool:
        """Whether the step last planned was chosen anew."""
        return self._looks.now

    # -- learning ------------------------------------------------------------------------------------------------

    def stepped(self, trace: StepTrace, results: Sequence[VerifyResult]) -> None:
        """Learn from what was accepted, and from the time that drafting took."""
        if not (self._looks.now or trace.drafted or any(result.scheduled.plan.shares for result in results)):
            return  # not chosen in this step, and nothing to learn from
        right = 0
        for result in results:
            case = self._cases.get(result.scheduled.sequence.id)
            if case is not None and result.emitted and result.tree is not None:
                case.learn(result)
                right += result.accepted * case.looked
        if self.timed and results and not (trace.prefill_rows or trace.aside):
            if self._looks.now:
                self._looks.saw(trace.seconds, right / len(results) - self._found, self._drafts, not self._models)
            elif trace.root_seconds:
                plain = trace.root_seconds * trace.emitted / len(results)
                self._looks.gained(plain - sum(trace.seconds.values()))
            if self.why is not None and self.why.probe:
                tried = self.why.ways[0]
                self._exploration.took(tried.model, sum(trace.seconds.values()), tried.seconds)
            if drafted := trace.seconds.get("propose", 0.0):
                self._timed(drafted, [result.tree for result in results if result.tree is not None])

    def _timed(self, seconds: float, trees: Sequence[DraftTree]) -> None:
        """Correct a model's costs by the time that drafting took."""
        for name, member in self._models.items():
            pairs = [(part, tree) for tree in trees for part in tree.parts or (tree,) if part.drafter == name]
            levels = max([part.levels for part, _ in pairs], default=0)
            if levels and member.costs.due(seconds, levels):
                # Nodes that were not worth their rows were hardly rows of the draft either.
                more = sum(min(len(part), len(tree)) - 1 for part, tree in pairs) - levels + self._unread.get(name, 0)
                grown = any(member.grows(part) for part, _ in pairs)
                member.costs.saw(of_draft(levels, max(0, more), grown), seconds)

    def ended(self, sequence: SequenceState) -> None:
        """Forget the sequence; the members keep what they learnt from it."""
        self._cases.pop(sequence.id, None)
        self._undrafted = [], []
        if not self._cases:  # with other texts running, a new one is looked at soon enough
            self._looks.begin()

    def dropped(self, error: Exception) -> None:
        """Draft nothing from now on: choosing without estimates would cost more than it brings."""
        self.failed = f"{SWITCHED_OFF}: {type(error).__name__}: {error}."
        self.why = None
        for member in self._models.values():
            member.idle = RESTING + 1

    # -- planning ------------------------------------------------------------------------------------------------

    def plan(self, sequences: Sequence[SequenceState]) -> list[Plan]:
        """What to draft for each of these sequences, all that decode in the next step."""
        if self.failed:
            return [NO_PLAN] * len(sequences)
        self.leader.news = ""
        self._kept += 1
        repeated = bool(sequences) and sequences == self._undrafted[0]
        if repeated and not self._looks.due():
            return self._undrafted[1]
        able = [sequence for sequence in sequences if sequence.drafts]
        if not able:
            self.why, self._plans, self._undrafted, self._looks.now = None, {}, ([], []), False
            return [NO_PLAN] * len(sequences)
        predicted = any(sequence.prediction for sequence in able)
        looks = (self._looks.now if repeated else self._looks.due()) or not self.timed or predicted
        if looks or not self._lasts(able):
            self._decide(able, looks)
        plans = [self._plans.get(sequence.id, NO_PLAN) for sequence in sequences]
        repeats = self.timed and not predicted and not any(plan.shares for plan in plans)
        self._undrafted = (list(sequences), plans) if repeats else ([], [])
        return plans

    def _lasts(self, able: Sequence[SequenceState]) -> bool:
        """Whether the last plan still applies: to the same sequences, and with no found nodes in it; without drafts to
        about as many."""
        why, plans = self.why, self._plans
        if why is None or why.probe or any(why.ways[0].found) or any(why.ways[0].first):
            return False
        if not why.ways[0].nodes:
            return _ABOUT * abs(len(able) - len(plans)) < len(plans)
        if len(able) != len(plans) or any(sequence.id not in plans for sequence in able):
            return False
        if any(plans[sequence.id].shape.levels > sequence.most_levels for sequence in able):
            return False
        for sequence in able:
            self._cases[sequence.id].length = len(sequence.tokens)
            self._cases[sequence.id].found = NOTHING
        return True

    def _decide(self, able: Sequence[SequenceState], looks: bool) -> None:
        """Choose for all that may draft."""
        cases = [self._cases.get(s.id) or SequenceStats.begun(s, self.members) for s in able]
        self._cases.update((s.id, case) for s, case in zip(able, cases, strict=True))
        self._look(able, cases, looks)
        nothing = not self._models and not any(case.found.names for case in cases)
        if nothing and self._lasts(able) and self.why is not None:
            return self.leader.see(self.why)  # weighing takes several times as long as looking up
        pairs, costs = list(zip(able, cases, strict=True)), self._costs(able, cases)
        estimates = [case.estimate(sequence) for sequence, case in pairs]
        ways = weigh(estimates, costs) if self.pinned is None else weigh_pinned(estimates, costs, self.pinned)
        chosen = self._explored(ways, costs, cases)
        looked = tuple(dict.fromkeys(name for case in cases for name in case.found.names))
        others = {way.kind: way for way in reversed(ways) if way.kind != chosen.kind}  # the best of each kind
        self.why = why = Why((chosen, *reversed(others.values())), looked, chosen is not ways[0])
        self.leader.see(why)
        self._drafts = bool(ways[0].model)
        self._found = costs.seconds[len(able) + sum(chosen.found)] / costs.seconds[len(able)] - 1.0
        for name, member in self._models.items():
            member.idle = 0 if name == ways[0].model else member.idle + self._kept
        self._kept = 0
        self._plans = {}
        for index, (sequence, case) in enumerate(pairs):
            case.looked, case.seconds = (
                any((*chosen.found[index : index + 1], *chosen.first[index : index + 1])),
                chosen.seconds * (1.0 + self._looks.share),
            )
            shares = self._shares(chosen, index, sequence, case, estimates[index], costs)
            self._plans[sequence.id] = Plan.of(shares, why)

    def _costs(self, able: Sequence[SequenceState], cases: Sequence[SequenceStats]) -> StepCosts:
        """The costs of this step. Uncertain costs are taken at their optimistic end."""
        context, rows = sum([len(s.tokens) for s in able]), min(len(able), 4) * MAX_NODES
        seconds = self.cost.table(len(able), context, rows, self.timed)
        pairs, drafts = list(zip(able, cases, strict=True)), {}
        for name, member in self._models.items():
            self._unread[name] = unread = sum([member.rest(s) for s, case in pairs if name in case.members])
            drafts[name] = DraftSeconds.of(member.costs, unread / _SPREAD, self.timed)
        checks = [name for name, member in self._models.items() if member.checks]
        pace = sum([case.pace(seconds[1]) for case in cases])
        return StepCosts(seconds, drafts, pace, self.cost.siblings, checks)

    def _explored(
        self, ways: Sequence[CandidatePlan], costs: StepCosts, cases: Sequence[SequenceStats]
    ) -> CandidatePlan:
        """The best plan, or one that is explored."""
        if self.timed and all(case.explored < _IN_A_TEXT for case in cases):
            for way in ways:
                if way.model and self._models[way.model].tries < _FIRST_TRIES:
                    for case in cases:
                        case.explored += 1
                    return way
        rows = {name: of.row for name, of in costs.drafts.items()}
        reading = {name: row * ways[0].tokens for name, row in rows.items()}
        behind = {name: row * self._unread[name] * (1 - 1 / _SPREAD) for name, row in rows.items()}
        return self._exploration.due(ways, costs.pace, reading, behind, self._kept)

    def _look(self, able: Sequence[SequenceState], cases: Sequence[SequenceStats], looks: bool) -> None:
        """Call the lookups for each of the sequences."""
        proposed: list[list[tuple[Claims, DraftTree]]] = [[] for _ in cases]
        for name, member in self.members.items() if looks else ():
            indices = [index for index, case in enumerate(cases) if member.looks and name in case.claims]
            for index, chain in zip(indices, member.find([able[i] for i in indices]) if indices else (), strict=True):
                if chain is not None:
                    proposed[index].append((cases[index].claims[name], chain))
        for sequence, case, chains in zip(able, cases, proposed, strict=True):
            case.found, case.length = Found.of(chains) if chains else NOTHING, len(sequence.tokens)

    def _shares(
        self,
        way: CandidatePlan,
        index: int,
        sequence: SequenceState,
        case: SequenceStats,
        estimate: Estimate,
        costs: StepCosts,
    ) -> list[Share]:
        """A sequence's share of the chosen plan."""
        shares, levels = [], way.trees[index].levels if way.trees else 0.0
        if way.found[index]:
            best = case.found.best(way.found[index])
            shares.append(Share(best.drafter, best.shape, best))
        if levels:
            shape = self.pinned or TreeShape.chain(round(levels))
            if self.pinned is None and not way.chain:
                # Next to others a node is emitted less often than its chance, so time is worth as much more for these.
                pace = costs.pace / max(_LEAST_REMAINING, estimate.remaining) if estimate.found else costs.pace
                shape = OPEN.limited(self._models[way.model].levels)
                shape = replace(shape, price=costs.price(way, index, pace, shape.nodes))
            shape = shape.limited(sequence.most_levels)
            checked = min(way.first[index], shape.levels) if way.first else 0  # pages are reserved for the shape
            shares.append(Share(way.model, shape, first=case.found.best(checked) if checked else None))
        return shares
