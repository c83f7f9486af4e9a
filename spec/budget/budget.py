"""The budget: which drafters, and how much of each, at every step, by measurements; no draft is one of the options.

::

    plan      lookups return what they would draft               found nodes, with the acceptance rates so far
              weigh found nodes, each model's tree, both, neither    most expected tokens for the time they take
              or repeat the last choice, where steps are short compared with choosing
    stepped   emitted tokens give outcomes for all proposals, verified or not; drafting time corrects the costs
    dropped   it failed to learn from a step, or to plan three in a row: nothing is drafted any more

A model that is not worth its cost still drafts from time to time (:mod:`foresay.spec.budget.exploration`), so that it
is noticed when it would be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from foresay.spec.budget.chance import Claims
from foresay.spec.budget.cost import CostModel, DraftCosts
from foresay.spec.budget.exploration import Exploration, Looks
from foresay.spec.budget.guard import Guard
from foresay.spec.budget.members import NOTHING, OPEN, RESTING, Found, Member, SequenceStats
from foresay.spec.budget.plan import NO_PLAN, Leader, Plan, Share, Why
from foresay.spec.budget.weigh import CandidatePlan, Estimate, StepCosts, weigh, weigh_pinned
from foresay.spec.names import NONE, PREDICTION
from foresay.spec.observer import Observer
from foresay.spec.sequence import SequenceState
from foresay.spec.step import VerifyResult
from foresay.spec.trace import SWITCHED_OFF, StepTrace
from foresay.spec.tree import MAX_NODES, DraftTree, TreeShape
from foresay.spec.wall import Wall

#: Over how many steps the cost of catching up is spread: a model in use stays useful for a while.
_SPREAD = 16
#: Drafts of each model before the priors of start-up are trusted, and how many of these in one text: texts differ.
_FIRST_TRIES, _IN_A_TEXT = 8, 4
#: Where nothing is drafted, choosing again can wait if fewer than one in so many sequences came or went.
_ABOUT = 4
#: What fails when a plan does, in words.
_CHOICE = "the choice of drafts"
#: The least share of its tokens that a tree is taken to contribute next to others.
_LEAST_REMAINING = 0.05


class Budget(Observer):
    """Estimates how often drafts are accepted and what they cost. Observes its engine, to learn.

    members: the drafters. cost: of whole steps without drafting, by their rows. pinned: the shape of every draft; then
    only the drafter is chosen. timed: False takes the costs as given, for replayed texts. why: of the last plan; None
    if nothing could be drafted. wall: around the members. failed: why nothing is drafted any more, after it failed to
    learn from a step, or to plan three in a row; else empty.
    """

    def __init__(
        self, members: Sequence[Member], cost: CostModel, pinned: TreeShape | None = None, timed: bool = True
    ) -> None:
        self.members = {member.name: member for member in members}
        self.cost, self.pinned, self.timed = cost, pinned, timed
        self.why: Why | None = None
        self.failed = ""
        self.wall, self._off = Wall(), 0
        self.leader, self.guard = Leader(), Guard()
        self._models = {member.name: member for member in members if not member.looks}
        for member in members:
            member.costs = DraftCosts(member.cost, cost.pace)
        self._cases: dict[str, SequenceStats] = {}
        self._exploration, self._looks = Exploration(), Looks()
        self._unread: dict[str, int] = {}
        self._plans: Mapping[str, Plan] = {}
        self._kept = 0  # steps since the last choice
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
        return NONE if self.why is None or self.guard.now else self.why.choice

    @property
    def news(self) -> str:
        """Why drafts changed in the last step; mostly ""."""
        return self.guard.news or self.leader.news

    @property
    def looks(self) -> bool:
        """Whether the step last planned was chosen anew."""
        return self._looks.now and not self.guard.now

    # -- learning ------------------------------------------------------------------------------------------------

    def stepped(self, trace: StepTrace, results: Sequence[VerifyResult]) -> None:
        """Learn from what was accepted, and from the time that drafting took."""
        alone = self.timed and bool(results) and not (trace.prefill_rows or trace.aside)
        if alone and not trace.plain:
            self._measured(trace, results)
        if not (self.looks or trace.drafted or any(result.scheduled.plan.shares for result in results)):
            return  # not chosen in this step, and nothing to learn from
        right = 0
        for result in results:
            case = self._cases.get(result.scheduled.sequence.id)
            if case is not None and result.emitted and result.tree is not None:
                case.learn(result)
                right += result.accepted * case.looked
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
        tried = why is not None and why.probe
        self.guard.saw(drafter, len(results), tokens / len(results), trace.seconds, tried)

    def _timed(self, trace: StepTrace, trees: Sequence[DraftTree], right: int) -> None:
        """Correct a model's costs by the time that drafting took. right: found nodes that were accepted."""
        total, why = sum(trace.seconds.values()), self.why
        if self.looks:
            chosen, drafts = trace.seconds.get("plan", 0.0), why is not None and bool(why.ways[why.probe].model)
            self._looks.saw(chosen, total - chosen, right / len(trees) - self._found, drafts, not self._models)
        if why is not None and why.probe:
            self._exploration.took(why.ways[0].model, total, why.ways[0].seconds)
        seconds = trace.seconds.get("propose", 0.0)
        for name, member in self._models.items() if seconds else ():
            pairs = [(part, tree) for tree in trees for part in tree.parts or (tree,) if part.drafter == name]
            levels = max([part.levels for part, _ in pairs], default=0)
            if levels:
                # Nodes that were not worth their rows were hardly rows of the draft either.
                more = sum(min(len(part), len(tree)) - 1 for part, tree in pairs) - levels + self._unread.get(name, 0)
                member.costs.saw(levels, max(0, more), any(member.grows(part) for part, _ in pairs), seconds)

    def ended(self, sequence: SequenceState) -> None:
        """Forget the sequence; the members keep what they learnt from it."""
        self._cases.pop(sequence.id, None)
        if not self._cases:  # with other texts running, a new one is looked at soon enough
            self._looks.begin()

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
        self.leader.news, self._kept = "", self._kept + 1
        if self.timed and self.pinned is None and self.guard.due():
            return [NO_PLAN] * len(sequences)
        planned = self.wall.ask(_CHOICE, self._choose, sequences)
        if planned is None:
            self._forget()
            if _CHOICE in self.wall.off:
                self._switch_off("the log says more")
        return planned or [NO_PLAN] * len(sequences)

    def _forget(self) -> None:
        """Begin anew with all texts, without the drafters that are off."""
        self._cases, self._plans, self.why = {}, {}, None
        self._off = len(self.wall.off)

    def _choose(self, sequences: Sequence[SequenceState]) -> list[Plan]:
        able = [sequence for sequence in sequences if sequence.drafts]
        if not able:
            self.why, self._plans, self._looks.now = None, {}, False
        elif self._looks.due() or not self.timed or not self._lasts(able) or any(one.prediction for one in able):
            self._looks.now = True
            self._decide(able)
        else:
            for sequence in able:
                if sequence.id in self._plans:
                    self._cases[sequence.id].repeated(sequence)
        return [self._plans.get(sequence.id, NO_PLAN) for sequence in sequences]

    def _lasts(self, able: Sequence[SequenceState]) -> bool:
        """Whether the last plan still applies: to the same sequences, and with no found nodes in it; without drafts to
        about as many."""
        why, plans = self.why, self._plans
        if why is None or why.probe or self.guard.paused(why.ways[0].model):
            return False
        way = why.ways[0]
        if not way.nodes:
            return _ABOUT * abs(len(able) - len(plans)) < len(plans)
        if any(way.found) or any(way.first) or len(able) != len(plans):
            return False
        pairs = [(plans.get(sequence.id), sequence) for sequence in able]
        return all(plan is not None and plan.shape.levels <= sequence.most_levels for plan, sequence in pairs)

    def _decide(self, able: Sequence[SequenceState]) -> None:
        """Choose for all that may draft."""
        standing = {name: member for name, member in self.members.items() if name not in self.wall.off}
        cases = [self._cases.get(s.id) or SequenceStats.begun(s, standing) for s in able]
        self._cases.update((s.id, case) for s, case in zip(able, cases, strict=True))
        self._look(able, cases)
        if not self._models and not any(case.found.names for case in cases) and self._lasts(able) and self.why:
            return self.leader.see(self.why)  # weighing takes several times as long as looking up
        pairs, costs = list(zip(able, cases, strict=True)), self._costs(able, cases)
        estimates = [case.estimate(sequence) for sequence, case in pairs]
        ways = weigh(estimates, costs) if self.pinned is None else weigh_pinned(estimates, costs, self.pinned)
        ways = [way for way in ways if not self.guard.paused(way.model)]
        chosen = self._explored(ways, costs, cases)
        looked = tuple(dict.fromkeys(name for case in cases for name in case.found.names))
        others = {way.kind: way for way in reversed(ways) if way.kind != chosen.kind}  # the best of each kind
        self.why = why = Why((chosen, *reversed(others.values())), looked, chosen is not ways[0])
        self.leader.see(why)
        self._found = costs.seconds[len(able) + sum(chosen.found)] / costs.seconds[len(able)] - 1.0
        for name, member in self._models.items():
            member.idle = 0 if name == ways[0].model else member.idle + self._kept
        self._kept = 0
        self._plans = {}
        for index, (sequence, case) in enumerate(pairs):
            case.looked = any((*chosen.found[index : index + 1], *chosen.first[index : index + 1]))
            case.seconds = chosen.seconds * (1.0 + self._looks.share)
            shares = self._shares(chosen, index, sequence, case, estimates[index], costs)
            self._plans[sequence.id] = Plan.of(shares, why)

    def _costs(self, able: Sequence[SequenceState], cases: Sequence[SequenceStats]) -> StepCosts:
        """The costs of this step. Uncertain costs are taken at their optimistic end."""
        context, rows = sum([len(s.tokens) for s in able]), min(len(able), 4) * MAX_NODES
        seconds = self.cost.table(len(able), context, rows, self.timed)
        pairs = list(zip(able, cases, strict=True))
        for name, member in self._models.items():
            self._unread[name] = sum([member.rest(s) for s, case in pairs if name in case.members])
        unread = {name: count / _SPREAD for name, count in self._unread.items()}
        drafts = {name: member.costs.now(self.timed) for name, member in self._models.items()}
        checks = [name for name, member in self._models.items() if member.checks]
        pace = sum([case.pace(seconds[1]) for case in cases])
        return StepCosts(seconds, drafts, pace, unread, checks)

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
        rows = {name: member.costs.now().token for name, member in self._models.items()}
        reading = {name: row * ways[0].tokens for name, row in rows.items()}
        behind = {name: row * self._unread[name] * (1 - 1 / _SPREAD) for name, row in rows.items()}
        return self._exploration.due(ways, costs.pace, reading, behind, self._kept)

    def _look(self, able: Sequence[SequenceState], cases: Sequence[SequenceStats]) -> None:
        """Call the lookups for each of the sequences."""
        proposed: list[list[tuple[Claims, DraftTree]]] = [[] for _ in cases]
        for name, member in self.members.items():
            indices = [index for index, case in enumerate(cases) if member.looks and name in case.claims]
            found = self.wall.ask(name, member.find, [able[i] for i in indices]) if indices else None
            for index, chain in zip(indices, found or (), strict=found is not None):
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
