"""The budget: which drafters, and how much of each, at every step, by measurements; no draft is one of the options.

::

    plan      every few steps: weigh nothing and each model's chain and tree      most expected tokens for their time
              every step: lookups return what they would draft                    what is found is weighed beside these
    stepped   emitted tokens give outcomes for all proposals, verified or not; the time it took corrects the costs
    dropped   it failed to learn from a step, or to plan three in a row: nothing is drafted any more

A model that is not worth its cost still drafts from time to time, so that it is noticed when it would be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter

from foresay.spec.budget.chance import LEAST, Claims
from foresay.spec.budget.cost import CostModel, DraftCosts
from foresay.spec.budget.guard import Guard
from foresay.spec.budget.members import NOTHING, OPEN, RESTING, Found, Member, SequenceStats
from foresay.spec.budget.pauses import DRAFTING, NOTHING_DRAFTED, Intervals
from foresay.spec.budget.plan import NO_PLAN, Leader, Plan, Share, Why
from foresay.spec.budget.weigh import CandidatePlan, Estimate, StepCosts
from foresay.spec.names import NONE, PREDICTION
from foresay.spec.observer import Observer
from foresay.spec.sequence import SequenceState
from foresay.spec.step import VerifyResult
from foresay.spec.trace import SWITCHED_OFF, StepTrace
from foresay.spec.tree import MAX_NODES, DraftTree, TreeShape
from foresay.spec.wall import Wall

#: The share of the time that may be lost by drafting with each model in vain.
PROBING = 0.003
#: A try that took longer than so many times its estimate was delayed by something else.
_MOST_OVER = 4.0
#: Drafts of each model before the priors of start-up are trusted, and how many of these in one text: texts differ.
_FIRST_TRIES, _IN_A_TEXT = 8, 4
#: A plan without drafts still holds if fewer than one in so many texts came or went.
_ABOUT = 4
#: What fails when a plan does, in words.
_CHOICE = "the choice of drafts"


class Budget(Observer):
    """Estimates how often drafts are accepted and what they cost. Observes its engine, to learn.

    members: the drafters. cost: of whole steps without drafting, by their rows. pinned: the shape of every draft; then
    only the drafter is chosen. timed: False takes the costs as given, for replayed texts. why: of the last plan; None
    if nothing could be drafted. looks: whether anything was chosen in it, rather than repeated. wall: around the
    members. failed: why nothing is drafted any more, after it failed to learn from a step, or to plan three in a row;
    else empty.
    """

    def __init__(
        self, members: Sequence[Member], cost: CostModel, pinned: TreeShape | None = None, timed: bool = True
    ) -> None:
        self.members = {member.name: member for member in members}
        self.cost, self.pinned, self.timed = cost, pinned, timed
        self.why: Why | None = None
        self.failed, self.looks = "", True
        self.wall, self._off = Wall(), 0
        self.leader, self.guard = Leader(), Guard()
        self._models = {member.name: member for member in members if not member.looks}
        self._lookups = {member.name: member for member in members if member.looks}
        for member in members:
            member.costs = DraftCosts(member.cost, cost.pace)
        self._cases: dict[str, SequenceStats] = {}
        self._weighing, self._looking = Intervals(), Intervals()
        self._saved: dict[str, float] = {}  # seconds that each model may lose in a try
        self._since = self._unread = 0  # steps since plans were weighed; tokens that the planned model catches up with
        self._beyond = 0.0  # what the rows of found nodes take in the planned step, relative to one without drafts
        # As last weighed: the texts, their models' trees and chains, the costs, the plans by worth, and the best one.
        self._able: list[str] = []
        self._running = set[str]()  # the texts last planned
        self._estimates: list[Estimate] = []
        self._costs = StepCosts((), {}, 0.0)
        self._ways: list[CandidatePlan] = []
        self._standing: Why | None = None
        self._plans: Mapping[str, Plan] = {}

    @property
    def shape(self) -> TreeShape:
        """About the largest shape that it plans."""
        if self.pinned is not None:
            return self.pinned
        return TreeShape.chain(max(m.levels for m in self.members.values() if m.name != PREDICTION))

    @property
    def choice(self) -> str:
        """The drafters of the step last planned."""
        return NONE if self.why is None or self.guard.now else self.why.choice

    @property
    def news(self) -> str:
        """Why drafts changed in the last step; mostly ""."""
        return self.guard.news or self.leader.news

    # -- learning ------------------------------------------------------------------------------------------------

    def stepped(self, trace: StepTrace, results: Sequence[VerifyResult]) -> None:
        """Learn from what was accepted, and from the time that drafting took."""
        alone = self.timed and bool(results) and not (trace.prefill_rows or trace.aside)
        if alone and not trace.plain:
            self._measured(trace, results)
        if not (self.looks or trace.drafted or any(result.scheduled.plan.shares for result in results)):
            return  # not chosen in this step, and nothing to learn from
        # As expected, since uncertain costs are expected to be low: with real ones, time would seem worth too little.
        right, seconds = 0, 0.0 if self.why is None else self.why.ways[0].seconds * (1.0 + self._looking.part)
        for result in results:
            case = self._cases.get(result.scheduled.sequence.id)
            if case is not None and result.emitted and result.tree is not None:
                case.learn(result, seconds)
                right += result.accepted * any(share.tree or share.first for share in result.scheduled.plan.shares)
        if self.why is not None and self.why.probe and not self.guard.now:
            self._saved[self.why.ways[0].model] = 0.0
            for case in self._cases.values():
                case.explored += 1
            self._weighing.begin()
        if alone:
            self._timed(trace, [result.tree for result in results if result.tree is not None], right)

    def _measured(self, trace: StepTrace, results: Sequence[VerifyResult]) -> None:
        """Tell the guard what this step came to, unless grammars forced tokens in it."""
        tokens, why = 0, None
        for result in results:
            if result.forced or result.tree is None:
                return
            tokens += len(result.emitted)
            if result.scheduled.plan.shares:
                why = result.scheduled.plan.why
        drafter = NONE if why is None else why.ways[0].model
        self.guard.saw(drafter, len(results), tokens / len(results), trace.seconds, why is not None and why.probe)

    def _timed(self, trace: StepTrace, trees: Sequence[DraftTree], right: int) -> None:
        """Correct a model's costs by the time that drafting took. right: found nodes that were accepted."""
        total, why, chosen = sum(trace.seconds.values()), self.why, trace.seconds.get("plan", 0.0)
        share = DRAFTING if not self._models or (why is not None and why.ways[0].model) else NOTHING_DRAFTED
        if self._looking.now:
            self._looking.took(chosen, total - chosen, right / len(trees) - self._beyond, share)
        if self._weighing.now:
            self._weighing.took(chosen, total - chosen, 0.0, share)
        if (
            why is not None and why.probe and not self.guard.now
        ):  # what it took beyond its estimate is saved before the next
            over, expected = total - why.ways[0].seconds, why.ways[0].seconds
            self._saved[why.ways[0].model] -= min(max(0.0, over), _MOST_OVER * expected)
        seconds = trace.seconds.get("propose", 0.0)
        for name, member in self._models.items() if seconds else ():
            pairs = [(part, tree) for tree in trees for part in tree.parts or (tree,) if part.drafter == name]
            member.tries += why is not None and why.ways[0].model == name
            if levels := max([part.levels for part, _ in pairs], default=0):
                # Nodes that were not worth their rows were hardly rows of the draft either.
                more = sum([min(len(part), len(tree)) - 1 for part, tree in pairs]) - levels + self._unread
                member.costs.saw(levels, max(0, more), any(member.grows(part) for part, _ in pairs), seconds)

    def ended(self, sequence: SequenceState) -> None:
        """Forget the sequence; the members keep what they learnt from it."""
        self._cases.pop(sequence.id, None)
        if self._running == {sequence.id}:  # with other texts running, a new one is looked at soon enough
            self._looking.begin()
            self._weighing.begin()
        self._running.discard(sequence.id)

    def dropped(self, error: Exception) -> None:
        """Draft nothing from now on: choosing without estimates would cost more than it brings."""
        self._switch_off(f"{type(error).__name__}: {error}")

    def _switch_off(self, why: str) -> None:
        self.failed = f"{SWITCHED_OFF}: {why}."
        self.why = None
        for member in self._models.values():
            member.idle = RESTING + 1

    # -- planning ------------------------------------------------------------------------------------------------

    def plan(self, sequences: Sequence[SequenceState]) -> list[Plan]:
        """What to draft for each of these sequences, all that decode in the next step."""
        if self.failed:
            return [NO_PLAN] * len(sequences)
        if len(self.wall.off) > self._off:
            self._forget()
        for name in self.wall.off:
            self.wall.explain(name, sequences)
        self.leader.news, self.looks, self._since = "", False, self._since + 1
        if self.timed and self.pinned is None and self.guard.due():
            self._weighing.now = self._looking.now = False
            return [NO_PLAN] * len(sequences)
        planned = self.wall.ask(_CHOICE, self._choose, sequences)
        if planned is None:
            self._forget()
            if _CHOICE in self.wall.off:
                self._switch_off("the log says more")
        return planned or [NO_PLAN] * len(sequences)

    def _forget(self) -> None:
        """Begin anew with all texts, without the drafters that are off."""
        self._cases, self._able, self._standing, self.why = {}, [], None, None
        self._off = len(self.wall.off)

    def _choose(self, sequences: Sequence[SequenceState]) -> list[Plan]:
        able = [sequence for sequence in sequences if sequence.drafts]
        self._running = {sequence.id for sequence in able}
        if not able:
            self.why, self._weighing.now, self._looking.now = None, False, False
            return [NO_PLAN] * len(sequences)
        weighs, looks = self._weighing.due() or not self._lasts(able), self._looking.due()
        looks = not self.timed or (bool(self._lookups) and (looks or any(one.prediction for one in able)))
        if weighs or not self.timed:
            self._weigh(able)
        self._weighing.now, self._looking.now, self.looks = weighs, looks, weighs or looks
        found = self._look(able) if looks else []
        if any(each.tree for each in found):
            plans: Mapping[str, Plan] = self._beside(able, found)
        else:
            self.why, plans, self._beyond = self._standing, self._plans, 0.0
        assert self.why is not None, "plans were weighed"
        if self.looks:
            self.leader.see(self.why)
        planned = [plans.get(sequence.id, NO_PLAN) if sequence.drafts else NO_PLAN for sequence in sequences]
        if model := self.why.ways[0].model:
            drafting = [s for s, plan in zip(sequences, planned, strict=True) if plan.drafts_with(model)]
            self._unread = sum([self._models[model].behind(sequence) for sequence in drafting])
        return planned

    def _lasts(self, able: Sequence[SequenceState]) -> bool:
        """Whether the standing plan still applies: drafts to the same sequences, which have room for them."""
        why, plans = self._standing, self._plans
        if why is None or self.guard.paused(why.ways[0].model):
            return False
        if not why.ways[0].model:
            return _ABOUT * abs(len(able) - len(plans)) < len(plans)
        pairs = [(plans.get(sequence.id), sequence) for sequence in able]
        return len(able) == len(plans) and all(
            plan is not None and plan.shape.levels <= sequence.most_levels for plan, sequence in pairs
        )

    def _case(self, sequence: SequenceState) -> SequenceStats:
        if sequence.id not in self._cases:
            standing = [member for name, member in self.members.items() if name not in self.wall.off]
            self._cases[sequence.id] = SequenceStats.begun(sequence, standing)
        return self._cases[sequence.id]

    def _weigh(self, able: Sequence[SequenceState]) -> None:
        """Weigh what models could draft. Uncertain costs are taken at their optimistic end."""
        cases, names = [self._case(s) for s in able], list(self._models)
        context, rows = sum([len(s.tokens) for s in able]), min(len(able), 4) * MAX_NODES
        seconds = self.cost.table(context, rows, self.timed)
        drafts = {name: self._models[name].costs.now(self.timed) for name in names}
        pace = sum([case.pace(seconds[len(able)]) for case in cases])
        checks = [name for name in names if self._models[name].checks]
        self._costs = costs = StepCosts(seconds, drafts, pace if self.pinned is None else 0.0, checks)
        self._able = [s.id for s in able]
        self._estimates = [case.estimate(sequence) for case, sequence in zip(cases, able, strict=True)]
        self._ways = ways = self._sorted(costs.alone(self._estimates))
        chosen = self._explored(ways, cases, pace)
        for name, member in self._models.items():
            member.idle = 0 if name == ways[0].model else member.idle + self._since
        self._since = 0
        self._standing, self._plans = self._plans_of(able, chosen, ways, [NOTHING] * len(able))

    def _sorted(self, ways: Sequence[CandidatePlan]) -> list[CandidatePlan]:
        """Those that are possible, by their worth. With a pinned shape, whatever drafts it comes first."""
        ways = [way for way in ways if not self.guard.paused(way.model)]
        if self.pinned is None:
            return sorted(ways, key=attrgetter("worth"), reverse=True)
        ways = [way for way in ways if not (way.model and any(way.found)) and not any(way.first)]
        return sorted(ways, key=lambda way: (way.nodes > 0, way.tokens / way.seconds), reverse=True)

    def _explored(self, ways: Sequence[CandidatePlan], cases: Sequence[SequenceStats], pace: float) -> CandidatePlan:
        """The best plan, or one to try instead: a model's first ones, and later as many as may be lost in vain. What a
        try loses is saved beforehand, so the dearer it is, the rarer. pace: tokens a second."""
        best = ways[0]
        if self.timed and all(case.explored < _IN_A_TEXT for case in cases):
            for way in ways:
                if way.model and self._models[way.model].tries < _FIRST_TRIES:
                    return way
        others = {way.model: way for way in reversed(ways[1:]) if way.model and way.chain == best.chain}
        for model, way in others.items():
            self._saved[model] = self._saved.get(model, 0.0) + PROBING * best.seconds * self._since
            if self._saved[model] >= max(way.seconds - best.seconds, (best.worth - way.worth) / pace):
                return way
        return best

    def _look(self, able: Sequence[SequenceState]) -> list[Found]:
        """Call the lookups for each of the sequences."""
        cases = [self._case(sequence) for sequence in able]
        proposed: list[list[tuple[Claims, DraftTree]]] = [[] for _ in able]
        for name, member in self._lookups.items():
            indices = [index for index, case in enumerate(cases) if name in case.claims]
            found = self.wall.ask(name, member.find, [able[i] for i in indices]) if indices else None
            for index, chain in zip(indices, found or (), strict=found is not None):
                if chain is not None:
                    proposed[index].append((cases[index].claims[name], chain))
        for sequence, case, chains in zip(able, cases, proposed, strict=True):
            case.found, case.length = Found.of(chains) if chains else NOTHING, len(sequence.tokens)
        return [case.found for case in cases]

    def _beside(self, able: Sequence[SequenceState], found: Sequence[Found]) -> Mapping[str, Plan]:
        """Weigh what was found beside what models could draft."""
        if self._able != [sequence.id for sequence in able]:
            self._weigh(able)
        chances = [each.chances if self.pinned is None else each.chances[: self.pinned.nodes - 1] for each in found]
        ways = self._sorted([*self._ways, *self._costs.beside(self._estimates, chances, [one.left for one in found])])
        seconds, chosen = self._costs.seconds, ways[0]
        self._beyond = seconds[len(able) + sum(chosen.found)] / seconds[len(able)] - 1.0
        self.why, plans = self._plans_of(able, chosen, ways, found)
        return plans

    def _plans_of(
        self,
        able: Sequence[SequenceState],
        chosen: CandidatePlan,
        ways: Sequence[CandidatePlan],
        found: Sequence[Found],
    ) -> tuple[Why, Mapping[str, Plan]]:
        """Why, and each sequence's plan."""
        others = {way.kind: way for way in reversed(ways) if way.kind != chosen.kind}  # the best of each kind
        looked = tuple(dict.fromkeys([name for each in found for name in each.names]))
        why = Why((chosen, *reversed(others.values())), looked, chosen is not ways[0])
        plans = [Plan.of(self._shares(chosen, *one), why) for one in zip(range(len(able)), able, found, strict=True)]
        return why, dict(zip([sequence.id for sequence in able], plans, strict=True))

    def _shares(self, way: CandidatePlan, index: int, sequence: SequenceState, found: Found) -> list[Share]:
        """A sequence's share of the chosen plan."""
        shares, levels = [], way.trees[index].levels if way.trees else 0.0
        if way.found[index]:
            best = found.best(way.found[index])
            shares.append(Share(best.drafter, best.shape, best))
        if levels:
            shape = self.pinned or TreeShape.chain(round(levels))
            if self.pinned is None and not way.chain:
                # Next to others a node is emitted less often than its chance, so time is worth as much more for these.
                shape = OPEN.limited(self._models[way.model].levels)
                pace = self._costs.pace / max(LEAST, found.left)
                shape = replace(shape, price=self._costs.price(way, index, pace, shape.nodes))
            shape = shape.limited(sequence.most_levels)
            checked = min(way.first[index], shape.levels) if way.first else 0  # pages are reserved for the shape
            shares.append(Share(way.model, shape, first=found.best(checked) if checked else None))
        return shares
