"""The budget: which drafters, and how much of each, at every step, by measurements; no draft is one of the options.

::

    plan      every few steps: weigh nothing and each model's chain and tree      most expected tokens for their time
              every step: lookups return what they would draft                    what is found is weighed beside these
    stepped   emitted tokens give outcomes for all proposals, verified or not; the time it took corrects the costs
    dropped   it failed to learn from a step, or to plan three in a row: nothing is drafted any more

A model that is not worth its cost still drafts from time to time, so that it is noticed when it would be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

from foresay.spec.budget.chance import LEAST, Claims
from foresay.spec.budget.cost import CostModel, DraftCost, DraftCosts
from foresay.spec.budget.guard import Guard
from foresay.spec.budget.members import NOTHING, OPEN, RESTING, Found, Member, TextStats
from foresay.spec.budget.plan import NO_PLAN, Leader, Plan, Share, Why
from foresay.spec.budget.turns import Turns
from foresay.spec.budget.weigh import DraftOption, Expected, StepCosts
from foresay.spec.names import NONE, PREDICTION
from foresay.spec.observer import Observer
from foresay.spec.sequence import SequenceState
from foresay.spec.step import VerifyResult
from foresay.spec.trace import SWITCHED_OFF, StepTrace
from foresay.spec.tree import MAX_NODES, DraftTree, TreeShape
from foresay.spec.wall import Wall

#: The share of the time that may be lost in vain: by choosing, by looking up, and by trying each model.
CHOOSING, LOOKING, TRYING = 0.003, 0.002, 0.003
#: Drafts that may follow one in a text, besides as many as it has tokens already.
_SOON = 16
#: Drafts of each model before the priors of start-up are trusted.
_FIRST_TRIES = 6
#: A try that took longer than so many times its estimate was delayed by something else.
_MOST_OVER = 4.0
#: One of so many steps is learnt from where little changes: plain ones that were not chosen, and, after so many drafts,
#: what these take.
_SAMPLED, _KNOWN = 4, 64
#: What fails when a plan does, in words.
_CHOICE = "the choice of drafts"


class Standing(NamedTuple):
    """What was weighed last, and is drafted until it is weighed again. texts: what their models may draft, by id.
    ways: by worth. why: of the first, or of a try; plans: of each text, by it."""

    texts: Mapping[str, Expected] = {}
    costs: StepCosts = StepCosts()
    ways: Sequence[DraftOption] = ()
    why: Why | None = None
    plans: Mapping[str, Plan] = {}

    def lasts(self, able: Sequence[SequenceState]) -> bool:
        """Whether it still applies: to the same texts, which have room for it, or to no drafts for about as many."""
        if self.why is None:
            return False
        if not self.why.ways[0].model:
            return abs(len(able) - len(self.plans)) * 4 < len(self.plans)
        return len(able) == len(self.plans) and all(
            one.id in self.plans and self.plans[one.id].shape.levels <= one.most_levels for one in able
        )


class Budget(Observer):
    """Estimates how often drafts are accepted and what they cost. Observes its engine, to learn.

    members: the drafters. cost: of whole steps without drafting, by their rows. pinned: the shape of every draft; then
    only the drafter is chosen. timed: False takes the costs as given, for replayed texts. why: of the last plan; None
    if nothing could be drafted. looks: whether anything was chosen in it, rather than repeated. wall: around the
    members. failed: why nothing is drafted any more; else empty.
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
        self._texts: dict[str, TextStats] = {}
        self._weighing, self._looking = Turns(CHOOSING), Turns(LOOKING)
        self._standing = Standing()
        self._running = set[str]()  # the texts last planned
        self._since = self._unread = 0  # steps since plans were weighed; tokens that the planned model catches up with
        self._beyond = 0.0  # what the rows of found nodes take in the planned step, relative to one without drafts

    @property
    def shape(self) -> TreeShape:
        """About the largest shape that it plans."""
        levels = max(member.levels for member in self.members.values() if member.name != PREDICTION)
        return self.pinned or TreeShape.chain(levels)

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
        model = "" if self.why is None or self.guard.now else self.why.ways[0].model
        plain = not (self.looks or trace.drafted or model)
        stands_for = _SAMPLED if plain and not self.guard.now else 1
        if trace.number % stands_for:
            return
        alone = self.timed and bool(results) and not (trace.prefill_rows or trace.aside)
        if alone and not trace.plain and self.pinned is None:
            self._measured(trace, results, model, stands_for)
        if plain:
            return  # there is nothing else to learn from
        # As expected, since uncertain costs are expected to be low: with real ones, time would seem worth too little.
        right, seconds = 0, 0.0 if self.why is None else self.why.ways[0].seconds * (1.0 + self._looking.part)
        for result in results:
            text = self._texts.get(result.scheduled.sequence.id)
            if text is not None and result.emitted and result.tree is not None:
                text.learn(result, seconds)
                right += result.accepted * any(share.tree or share.first for share in result.scheduled.plan.shares)
        if self.why is not None and any(result.scheduled.plan.drafts_with(model) for result in results):
            self._drafted(self.why, sum(trace.seconds.values()) if alone else 0.0)
        if alone:
            self._timed(trace, [result.tree for result in results if result.tree is not None], right)

    def _measured(self, trace: StepTrace, results: Sequence[VerifyResult], model: str, steps: int) -> None:
        """Pass to the guard what this step came to, and as many like it, unless grammars forced tokens in it."""
        if any(result.forced or result.tree is None for result in results):
            return
        drafted = any(result.scheduled.plan.shares for result in results)
        tried = drafted and self.why is not None and self.why.probe
        tokens = sum([len(result.emitted) for result in results]) / len(results)
        self.guard.saw(model if drafted else NONE, len(results), tokens, trace.seconds, tried, steps)

    def _drafted(self, why: Why, seconds: float) -> None:
        """Count a model's draft. What a try took beyond its estimate is saved before the next one. seconds: of the
        step; 0 if something else was in it."""
        way, member = why.ways[0], self._models[why.ways[0].model]
        member.tries += 1
        if why.probe:
            expected = way.seconds + member.costs.now().token * self._unread
            member.saved = -min(max(0.0, seconds - expected), _MOST_OVER * expected)
            self._standing = Standing()  # it is tried once

    def _timed(self, trace: StepTrace, trees: Sequence[DraftTree], right: int) -> None:
        """Correct a model's costs by the time that drafting took. right: found nodes that were accepted."""
        chosen, drafting = trace.seconds.get("plan", 0.0), trace.seconds.get("propose", 0.0)
        rest = sum(trace.seconds.values()) - chosen
        if self._looking.now:
            self._looking.took(chosen, rest, right / len(trees) - self._beyond)
        if self._weighing.now:
            self._weighing.took(chosen, rest)
        tried = self.why is not None and self.why.probe
        for name, member in self._models.items() if drafting else ():
            if member.tries > _KNOWN and trace.number % _SAMPLED and not tried:
                continue
            pairs = [(part, tree) for tree in trees for part in tree.parts or (tree,) if part.drafter == name]
            if levels := max([part.levels for part, _ in pairs], default=0):
                # Nodes that were not worth their rows were hardly rows of the draft either.
                more = sum([min(len(part), len(tree)) - 1 for part, tree in pairs]) - levels + self._unread
                member.costs.saw(levels, max(0, more), any(member.grows(part) for part, _ in pairs), drafting)

    def ended(self, sequence: SequenceState) -> None:
        """Forget the sequence; the members keep what they learnt from it."""
        self._texts.pop(sequence.id, None)
        if self._running == {sequence.id}:  # with other texts running, a new one is looked at soon enough
            self._looking.begin()
            self._weighing.begin()
        self._running.discard(sequence.id)

    def dropped(self, error: Exception) -> None:
        """Draft nothing from now on: choosing without estimates would cost more than it brings."""
        self._switch_off(f"{type(error).__name__}: {error}")

    def _switch_off(self, why: str) -> None:
        self.failed, self.why = f"{SWITCHED_OFF}: {why}.", None
        for member in self._models.values():
            member.idle = RESTING + 1

    # -- planning ------------------------------------------------------------------------------------------------

    def plan(self, sequences: Sequence[SequenceState]) -> list[Plan]:
        """What to draft for each of these sequences, all that decode in the next step."""
        nothing = [NO_PLAN] * len(sequences)
        if self.failed:
            return nothing
        if len(self.wall.off) > self._off:
            self._forget()
        for name in self.wall.off:
            self.wall.explain(name, sequences)
        self.leader.news, self.looks, self._since = "", False, self._since + 1
        self.guard.now = self._weighing.now = self._looking.now = False
        able = [sequence for sequence in sequences if sequence.drafts]
        self.why = self.why if able else None
        if not able or (self.timed and self.pinned is None and self.guard.due()):
            return nothing
        plans = self.wall.ask(_CHOICE, self._choose, able)
        if plans is None:
            self._forget()
            if _CHOICE in self.wall.off:
                self._switch_off("the log says more")
            return nothing
        return [plans.get(one.id, NO_PLAN) if one.drafts else NO_PLAN for one in sequences]

    def _forget(self) -> None:
        """Begin again with all texts, without the drafters that are off."""
        self._texts, self._standing, self.why = {}, Standing(), None
        self._off = len(self.wall.off)

    def _choose(self, able: Sequence[SequenceState]) -> Mapping[str, Plan]:
        self._running = {sequence.id for sequence in able}
        paused = self._standing.ways and self.guard.paused(self._standing.ways[0].model)
        weighs = self._weighing.due() or not self.timed or bool(paused) or not self._standing.lasts(able)
        looks = self._looking.due() or not self.timed or any(one.prediction for one in able)
        self._weighing.now, self._looking.now = weighs, looks = weighs, looks and bool(self._lookups)
        self.looks = weighs or looks
        if weighs:
            self._standing = self._weigh(able)
        found = self._look(able) if looks else []
        if any(each.tree for each in found):
            self.why, plans = self._beside(able, found)
        else:
            self.why, plans, self._beyond = self._standing.why, self._standing.plans, 0.0
        assert self.why is not None, "plans were weighed"
        if self.looks:
            self.leader.see(self.why)
        if model := self.why.ways[0].model:
            self._unread = self._behind(self._models[model], [one for one in able if plans[one.id].drafts_with(model)])
        return plans

    def _text(self, sequence: SequenceState) -> TextStats:
        if sequence.id not in self._texts:
            members = [member for name, member in self.members.items() if name not in self.wall.off]
            self._texts[sequence.id] = TextStats.begun(sequence, members)
        return self._texts[sequence.id]

    def _weigh(self, able: Sequence[SequenceState]) -> Standing:
        """Weigh what models could draft. Uncertain costs are taken at their optimistic end."""
        context, rows = sum([len(s.tokens) for s in able]), min(len(able), 4) * MAX_NODES
        seconds = self.cost.table(context, rows, self.timed)
        drafts = {n: self._cost(m, able) for n, m in self._models.items() if n not in self.wall.off}
        pace = sum([self._text(s).pace(seconds[len(able)]) for s in able]) if self.pinned is None else 0.0
        checks = [name for name, member in self._models.items() if member.checks]
        costs, texts = StepCosts(seconds, drafts, pace, checks), {s.id: self._text(s).expected(s) for s in able}
        ways = self._sorted(costs.ways(list(texts.values())))
        chosen = self._tried(ways, able)
        for name, member in self._models.items():
            member.idle = 0 if name == ways[0].model else member.idle + self._since
        self._since = 0
        return Standing(texts, costs, ways, *self._plans_of(able, costs, chosen, ways, [NOTHING] * len(able)))

    def _cost(self, member: Member, able: Sequence[SequenceState]) -> DraftCost:
        """Of one draft. What it has to catch up with is shared out among the drafts that may follow: a text goes on for
        about as long as it went on so far."""
        cost = member.costs.now(self.timed)
        unread = sum(
            [
                member.behind(s) / min(_SOON + s.output_length, s.limit - len(s.tokens))
                for s in able
                if member.name in self._text(s).members
            ]
        )
        return replace(cost, start=cost.start + cost.token * unread)

    def _behind(self, member: Member, able: Iterable[SequenceState]) -> int:
        """Tokens that it has to catch up with, of the texts for which it may draft."""
        return sum([member.behind(sequence) for sequence in able if member.name in self._text(sequence).members])

    def _sorted(self, ways: Iterable[DraftOption]) -> list[DraftOption]:
        """Those that are possible, by their worth. With a pinned shape, whatever drafts it comes first."""
        ways = [way for way in ways if not self.guard.paused(way.model)]
        if self.pinned is None:
            return sorted(ways, key=attrgetter("worth"), reverse=True)
        ways = [way for way in ways if not (way.model and any(way.found)) and not any(way.first)]
        return sorted(ways, key=lambda way: (way.nodes > 0, way.tokens / way.seconds), reverse=True)

    def _tried(self, ways: Sequence[DraftOption], able: Sequence[SequenceState]) -> DraftOption:
        """The best plan, or a model's to be tried instead: its first ones, and later as many as may be lost in vain.
        What a try loses is saved beforehand, so the dearer it is, the rarer."""
        best = ways[0]
        for name, member in self._models.items():
            member.saved += TRYING * best.seconds * self._since * (name != best.model)
        for way in ways[1:]:
            if way.model and way.model != best.model:
                member = self._models[way.model]
                lost = max(way.seconds - best.seconds, (best.worth - way.worth) * best.seconds / best.tokens)
                lost += member.costs.now().token * self._behind(member, able)
                if self.timed * _FIRST_TRIES > member.tries or member.saved >= lost:
                    return way
        return best

    def _look(self, able: Sequence[SequenceState]) -> list[Found]:
        """Call the lookups for each of the sequences."""
        texts = [self._text(sequence) for sequence in able]
        proposed: list[list[tuple[Claims, DraftTree]]] = [[] for _ in able]
        for name, member in self._lookups.items():
            indices = [index for index, text in enumerate(texts) if name in text.claims]
            found = self.wall.ask(name, member.find, [able[i] for i in indices]) if indices else None
            for index, chain in zip(indices, found or (), strict=found is not None):
                if chain is not None:
                    proposed[index].append((texts[index].claims[name], chain))
        for sequence, text, chains in zip(able, texts, proposed, strict=True):
            text.found, text.length = Found.of(chains) if chains else NOTHING, len(sequence.tokens)
        return [text.found for text in texts]

    def _beside(self, able: Sequence[SequenceState], found: Sequence[Found]) -> tuple[Why, Mapping[str, Plan]]:
        """Weigh what was found beside what models could draft."""
        if list(self._standing.texts) != [sequence.id for sequence in able]:
            self._standing = self._weigh(able)
        standing, costs = self._standing, self._standing.costs
        most = None if self.pinned is None else self.pinned.nodes - 1
        chances, left = [each.chances[:most] for each in found], [one.left for one in found]
        ways = self._sorted([*standing.ways, *costs.ways(list(standing.texts.values()), chances, left)])
        self._beyond = costs.seconds[len(able) + sum(ways[0].found)] / costs.seconds[len(able)] - 1.0
        return self._plans_of(able, costs, ways[0], ways, found)

    def _plans_of(
        self,
        able: Sequence[SequenceState],
        costs: StepCosts,
        chosen: DraftOption,
        ways: Sequence[DraftOption],
        found: Sequence[Found],
    ) -> tuple[Why, Mapping[str, Plan]]:
        """Why, and each sequence's plan."""
        others = {way.kind: way for way in reversed(ways) if way.kind != chosen.kind}  # the best of each kind
        looked = tuple(dict.fromkeys([name for each in found for name in each.names]))
        why, plans = Why((chosen, *reversed(others.values())), looked, chosen is not ways[0]), {}
        for index, (sequence, one) in enumerate(zip(able, found, strict=True)):
            plans[sequence.id] = Plan.of(self._shares(costs, chosen, index, sequence, one), why)
        return why, plans

    def _shares(
        self, costs: StepCosts, way: DraftOption, index: int, sequence: SequenceState, found: Found
    ) -> list[Share]:
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
                shape = replace(shape, price=costs.price(way, index, costs.pace / max(LEAST, found.left), shape.nodes))
            shape = shape.limited(sequence.most_levels)
            checked = min(way.first[index], shape.levels) if way.first else 0  # pages are reserved for the shape
            shares.append(Share(way.model, shape, first=found.best(checked) if checked else None))
        return shares
