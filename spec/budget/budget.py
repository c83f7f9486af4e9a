"""The budget: which drafters, how much of each, at every step, by what was measured; no draft is one of the ways.

::

    plan      whoever looks things up says what it would draft       found nodes, with the chances they have had so far
              weigh found nodes, each model's tree, both, neither    most expected tokens for the time they take
    stepped   what came tells of all that was proposed, verified or not; what the step took corrects the costs
    dropped   it could not learn from a step: nothing is drafted any more

A model that is not worth it is asked all the same now and then (:mod:`foresay.spec.budget.exploration`), so that it is
noticed when it would be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from foresay.spec.budget.cost import CostModel
from foresay.spec.budget.exploration import Exploration, Looks
from foresay.spec.budget.members import OPEN, RESTING, Member
from foresay.spec.budget.plan import NO_PLAN, Leader, Plan, Share, Why, levels_of, shape_of
from foresay.spec.budget.sequence_stats import SequenceStats, begun, look
from foresay.spec.budget.weigh import NO_TREE, CandidatePlan, Estimate, weigh, weigh_pinned
from foresay.spec.names import NONE, PREDICTION
from foresay.spec.observer import Observer
from foresay.spec.price import Price
from foresay.spec.sequence import SequenceState
from foresay.spec.step import VerifyResult
from foresay.spec.trace import SWITCHED_OFF, StepTrace
from foresay.spec.tree import MAX_NODES, TreeShape

#: Among how many steps catching up is shared out: whoever is taken up is likely to be of use for a while.
_SPREAD = 16
#: The least share of what it brings alone that a tree is taken to bring beside others.
_LEAST_BESIDE = 0.05
#: Phases of a step that do not depend on who drafted.
_OF_THE_TARGET = ("forward", "draw", "commit")


class Budget(Observer):
    """Owns what is known of costs and of how often drafts are right. An observer of its engine, to learn.

    members: who can be asked. cost: of whole steps without drafting, by their rows. pinned: the shape of every draft;
    then only who drafts it is chosen. timed: False takes the costs as they are given, for texts that are replayed.
    why: of the last plan; None if nothing could be drafted. failed: why nothing is drafted any more, if it does not
    learn what steps bring; empty if it does.
    """

    def __init__(
        self, members: Sequence[Member], cost: CostModel, pinned: TreeShape | None = None, timed: bool = True
    ) -> None:
        self.members = {member.name: member for member in members}
        self.cost, self.pinned, self.timed = cost, pinned, timed
        self.why: Why | None = None
        self.failed = self._unsaid = ""
        self.leader = Leader()
        self._models = {member.name: member for member in members if not member.looks}
        self._cases: dict[str, SequenceStats] = {}
        self._exploration, self._looks = Exploration(), Looks()
        self._unread: Mapping[str, int] = {}
        self._plans: Mapping[str, Plan] = {}

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

    # -- learning ------------------------------------------------------------------------------------------------

    def stepped(self, trace: StepTrace, results: Sequence[VerifyResult]) -> None:
        """See what was right, and what the step took."""
        right = 0
        for result in results:
            case = self._cases.get(result.scheduled.sequence.id)
            if case is not None and result.emitted and result.tree is not None:
                case.learn(result)
                right += result.accepted * case.looked
        if self.timed and results and not (trace.prefill_rows or trace.aside):
            self._looks.saw(trace.seconds, right / len(results))
            self._timed(trace, results)

    def _timed(self, trace: StepTrace, results: Sequence[VerifyResult]) -> None:
        """Correct the costs by a step of decoding alone."""
        context = sum(len(result.scheduled.sequence.tokens) for result in results)
        seconds = sum(trace.seconds.get(phase, 0.0) for phase in _OF_THE_TARGET)
        moved = self.cost.saw(trace.rows, trace.rows / len(results), context, seconds)
        for member in self._models.values():  # what moves all steps moves models at rest too: it is mostly the machine
            member.slowed(moved)
            parts = [
                (part, min(len(part), len(v.tree)) - 1)
                for v in results
                if v.tree
                for part in v.tree.parts or (v.tree,)
                if part.drafter == member.name
            ]
            if parts and (drafted := trace.seconds.get("propose", 0.0)):
                levels = max(levels_of(part) for part, _ in parts)
                # Nodes that were not worth their rows were hardly rows of the draft either.
                more = sum(nodes for _, nodes in parts) - levels + self._unread.get(member.name, 0)
                member.costs(not any(part.grown for part, _ in parts)).saw(levels, drafted, max(0, more))

    def ended(self, sequence: SequenceState) -> None:
        """Forget the sequence; what it showed stays with the members."""
        self._cases.pop(sequence.id, None)
        if not self._cases:  # beside others a new text is looked at soon enough
            self._looks.begin()

    def dropped(self, error: Exception) -> None:
        """Nothing is drafted from now on: a choice by what is not known would cost more than it brings."""
        self.failed = self._unsaid = f"{SWITCHED_OFF}: {type(error).__name__}: {error}"
        self.why = None
        for member in self._models.values():
            member.idle = RESTING + 1

    # -- planning ------------------------------------------------------------------------------------------------

    def plan(self, sequences: Sequence[SequenceState]) -> list[Plan]:
        """What is to be drafted for each of these sequences, all that decode in the next step."""
        if self.failed:
            if sequences:  # else the step's trace says nothing of drafting
                self.leader.news, self._unsaid = self._unsaid, ""
            return [NO_PLAN] * len(sequences)
        able, last, self.leader.news = [s for s in sequences if s.speculate and s.most_levels > 0], self.why, ""
        looks = self._looks.due() or not self.timed or any(sequence.prediction for sequence in able)
        plans: Mapping[str, Plan] = {}
        if not able:
            self.why = None
        else:
            cases = [self._cases.setdefault(s.id, self._cases.get(s.id) or begun(s, self.members)) for s in able]
            look(able, cases, list(self.members.values()) if looks else ())
            if looks or last is None or not self._lasts(last, able):
                self._plans = dict(zip((s.id for s in able), self._decide(able, cases), strict=True))
            plans = self._plans  # else planning would be in vain too
        return [plans.get(sequence.id, NO_PLAN) for sequence in sequences]

    def _lasts(self, last: Why, able: Sequence[SequenceState]) -> bool:
        """Whether what was planned is still the thing to do: for the same sequences, and nothing of it found."""
        chosen, plans = last.ways[0], [self._plans.get(sequence.id) for sequence in able]
        if last.probe or any(chosen.found) or len(plans) != len(chosen.found):
            return False
        pairs = zip(plans, able, strict=True)
        return all(plan is not None and plan.shape.levels <= sequence.most_levels for plan, sequence in pairs)

    def _decide(self, able: Sequence[SequenceState], cases: Sequence[SequenceStats]) -> list[Plan]:
        """For each of those that may draft."""
        seconds = self.cost.table(len(able), sum(len(s.tokens) for s in able), min(len(able), 4) * MAX_NODES)
        step = Planning.of(self._models, able, cases, seconds)
        self._unread, ways = step.unread, step.ways(self.pinned)
        reading = {name: of.cost.reading(ways[0].tokens) for name, of in self._models.items()}
        behind = {name: of.cost.reading(step.unread[name] * (1 - 1 / _SPREAD)) for name, of in self._models.items()}
        chosen = self._exploration.due(ways, step.pace, reading, behind)
        looked = tuple(dict.fromkeys(name for case in cases for name in case.found.names))
        others = {way.kind: way for way in reversed(ways) if way.kind != chosen.kind}  # of each kind the best
        self.why = Why((chosen, *reversed(others.values())), looked, chosen is not ways[0])
        self.leader.see(self.why)
        for name, member in self._models.items():
            member.idle = 0 if name == ways[0].model else member.idle + 1
        return step.plans(self.why, self.pinned)


@dataclass(frozen=True, slots=True, eq=False)
class Planning:
    """One step that is to be planned: what is known when its ways of drafting are weighed, and what becomes of one.

    members: the models, by name. able, cases, estimates: the sequences that may draft. seconds: of the step by its
    rows. pace: tokens in a second that time is worth. unread: tokens that each model has to catch up with."""

    members: Mapping[str, Member]
    able: Sequence[SequenceState]
    cases: Sequence[SequenceStats]
    estimates: Sequence[Estimate]
    seconds: Sequence[float]
    pace: float
    unread: Mapping[str, int]

    @classmethod
    def of(
        cls,
        members: Mapping[str, Member],
        able: Sequence[SequenceState],
        cases: Sequence[SequenceStats],
        seconds: Sequence[float],
    ) -> Planning:
        """For these sequences."""
        pairs = list(zip(able, cases, strict=True))
        estimates = [case.estimate(sequence) for sequence, case in pairs]
        pace = sum(case.pace(seconds[1]) for case in cases)
        unread = {name: sum(of.rest(s) for s, case in pairs if name in case.models) for name, of in members.items()}
        return cls(members, able, cases, estimates, seconds, pace, unread)

    def ways(self, pinned: TreeShape | None) -> list[CandidatePlan]:
        """All that could be done, the best first. pinned: the shape of every draft, if it is given."""
        if pinned is not None:
            return weigh_pinned(self.estimates, self.seconds, self._drafting, pinned)
        return weigh(self.estimates, self.seconds, self._drafting, self.pace)

    def _drafting(self, name: str, levels: float, nodes: float, chain: bool) -> float:
        cost = self.members[name].costs(chain)
        return cost.seconds(levels, max(0.0, nodes - levels) + self.unread[name] / _SPREAD)

    def plans(self, why: Why, pinned: TreeShape | None) -> list[Plan]:
        """What each sequence drafts of the way that was chosen."""
        return [self._plan(index, why, pinned) for index in range(len(self.able))]

    def _plan(self, index: int, why: Why, pinned: TreeShape | None) -> Plan:
        way, case, sequence, shares = why.ways[0], self.cases[index], self.able[index], []
        found, tree = way.found[index], way.trees[index] if way.trees else NO_TREE
        case.looked, case.seconds = found > 0, way.seconds
        if found:
            best = case.found.best(found)
            shares.append(Share(best.drafter, shape_of(best), best))
        if tree.levels:
            shape = pinned or (TreeShape.chain(round(tree.levels)) if way.chain else self._open(way, index))
            shares.append(Share(way.model, shape.limited(sequence.most_levels)))
        return Plan.of(shares, why)

    def _open(self, way: CandidatePlan, index: int) -> TreeShape:
        """A tree that grows as long as its levels and rows are worth their price."""
        member, estimate = self.members[way.model], self.estimates[index]
        # One pass drafts the level for all of them.
        level = member.cost.each / sum(tree.levels > 0 for tree in way.trees)
        # Beside others a node comes more seldom than its chance says, so time is worth as much more of these.
        pace = self.pace / max(_LEAST_BESIDE, estimate.beside) if estimate.found else self.pace
        rows = min(max(1, len(way.found) + way.nodes - round(way.trees[index].nodes)), len(self.seconds) - 1)
        levels = max(1, round(way.trees[index].levels))
        return replace(
            OPEN.limited(member.levels), price=Price.of(pace, level, self.seconds[rows : rows + OPEN.nodes], levels)
        )
