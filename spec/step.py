"""One speculative step: the lines the project exists for.

::

    propose    the drafter hangs a tree below each sequence's root (the root alone, if it has nothing to say); a grammar
               takes out what could not follow and adds what must (:mod:`spec.constrain`)
    forward    one pass of the target over all rows of all sequences
    draw       a token is drawn at every node, with the noise of its position, from the logits as the request wants them
    accept     the path the draws take; its rows become committed KV; the run of tokens goes out

There is no ``if speculative``: plain decoding is the root-only tree, and a prefill chunk is rows without a draw.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from spec.budget.plan import NO_PLAN, Plan
from spec.commit import Run, emit
from spec.constrain import Draft, Guarded, MaskThread, graft
from spec.decide import Nodes, why_nothing
from spec.features import Features, by_sequence, of_path, reader_of
from spec.protocols import Drafter, Drawn, Rows, Verifier, Wanted
from spec.request import TokenLogprobs
from spec.score import logprobs_of_run, score_prompt
from spec.sequence import Sequence
from spec.trace import Stopwatch
from spec.tree import MAX_NODES, DraftTree, TreeShape


@dataclass(frozen=True, slots=True)
class Work:
    """One sequence's part in a step.

    lead: committed tokens whose KV is computed first (a prefill chunk). shape: the tree to draft below the root; None
    when the chunk does not reach the root, so that nothing is drawn. A chunk that reaches it draws at the root only.
    forced: tokens that the grammar leaves no choice about, a chain below the root beside what is drafted. plan: of the
    budget, by whom the tree is drafted; one without shares leaves that to the engine's drafter.
    """

    sequence: Sequence
    lead: int
    shape: TreeShape | None
    forced: Many[int] = ()
    plan: Plan = NO_PLAN

    @property
    def nodes(self) -> int:
        """The most nodes verified, the root among them."""
        return 0 if self.shape is None else min(self.shape.nodes + len(self.forced), MAX_NODES)

    @property
    def drafts(self) -> bool:
        """Whether the drafter is asked: not for what could only repeat the forced tokens."""
        if self.shape is None or self.lead:
            return False
        return (self.plan if self.plan.shares else self.shape).likely_levels > len(self.forced)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Who runs in a step and how large each tree may be. Pages are reserved. choice, news: see
    :class:`~spec.trace.StepTrace`."""

    works: list[Work]
    choice: str = ""
    news: str = ""


@dataclass(slots=True)
class Ticket:
    """A submitted step."""

    plan: StepPlan
    watch: Stopwatch


@dataclass(slots=True)
class PartsTicket(Ticket):
    """One that was run in parts; its lists are in the order of the plan's works.

    logits: fp32[W, V], the rows that were wanted. nodes, drawn: None where nothing is drawn. features: of all rows.
    """

    drafts: list[Draft]
    logits: list[Tensor]
    nodes: list[Nodes | None]
    drawn: list[Drawn | None]
    features: list[Features]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a step did for one sequence: emitted tokens (none for a prefill chunk) and where they came from.

    tree: what was verified; drawn: int64[N], the draw at each of its nodes; path: the accepted nodes below the root
    whose tokens went out.
    """

    work: Work
    tree: DraftTree | None = None
    drawn: Tensor | None = None
    path: list[int] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)
    accepted: int = 0
    depths: list[int] = field(default_factory=list)
    forced: int = 0
    logprobs: list[TokenLogprobs] | None = None

    @classmethod
    def of(
        cls,
        work: Work,
        tree: DraftTree,
        drawn: Tensor,
        run: Run,
        forced: int = 0,
        logprobs: list[TokenLogprobs] | None = None,
    ) -> Verdict:
        """The verdict on a tree whose run went out."""
        depths = tree.depths.tolist()[1:]
        return cls(work, tree, drawn, run.taken, run.emitted, run.accepted, depths, forced, logprobs)


@runtime_checkable
class DraftsByPlan(Drafter, Protocol):
    """Several drafters as one, each told by the budget's plan how much it drafts."""

    def draft(self, sequences: Many[Sequence], plans: Many[Plan]) -> list[DraftTree]:
        """A tree for each sequence, of all who share in it."""
        ...


class StepRunner(Protocol):
    """Runs steps: what the engine calls. A step is submitted and then collected; one at a time."""

    verifier: Verifier

    def submit(self, plan: StepPlan) -> Ticket:
        """Begin a step."""
        ...

    def collect(self, ticket: Ticket) -> list[Verdict]:
        """Wait for it and commit: afterwards every sequence's tokens, pages and caches agree again."""
        ...

    def ahead(self, sequence: Sequence) -> int:
        """Rows past the committed length that may still be written: pages that must not be given back yet."""
        ...

    def rest(self) -> None:
        """Let go of whatever runs ahead of the plan."""
        ...


class PartsRunner:
    """Runs steps one after the other, in parts."""

    def __init__(self, verifier: Verifier, drafter: Drafter | None) -> None:
        self.verifier, self.drafter = verifier, drafter
        self._by_plan: DraftsByPlan | None = drafter if isinstance(drafter, DraftsByPlan) else None
        self._masks = MaskThread()

    def submit(self, plan: StepPlan) -> PartsTicket:
        """Propose, run the forward pass and draw."""
        watch = Stopwatch()
        trees = self._propose(plan.works)
        watch.lap("propose")
        drafts = [_draft(work, tree) for work, tree in zip(plan.works, trees, strict=True)]
        asked = [_asked(work, draft) for work, draft in zip(plan.works, drafts, strict=True)]
        masks = None
        if any(asked):
            masks = self._masks.begin(asked)
            watch.lap("mask")
        rows = [_rows(work, draft.tree) for work, draft in zip(plan.works, drafts, strict=True)]
        needs = self.drafter.needs if self.drafter is not None else None
        forward = self.verifier.run(rows, needs)
        watch.lap("forward")
        banned: list[Tensor | None] = [None] * len(rows)
        if masks is not None:
            banned = masks.result()
            watch.lap("mask")
        logits = [forward.of(index) for index in range(len(plan.works))]
        parts = zip(plan.works, drafts, logits, banned, strict=True)
        nodes = [
            None if work.shape is None else Nodes(work.sequence, draft.tree, _of_nodes(work, raw), ban)
            for work, draft, raw, ban in parts
        ]
        drawn = self._drawn(nodes)
        watch.lap("draw")
        features = by_sequence(forward.features, [len(part.tokens) for part in rows])
        return PartsTicket(plan, watch, drafts, logits, nodes, drawn, features)

    def collect(self, ticket: Ticket) -> list[Verdict]:
        """Accept and commit: afterwards every sequence's tokens, pages and caches agree again."""
        assert isinstance(ticket, PartsTicket), "who submitted a step collects it"
        for work, logits in zip(ticket.plan.works, ticket.logits, strict=True):
            if work.sequence.scoring:
                score_prompt(work.sequence, logits)
        parts = zip(ticket.plan.works, ticket.drafts, ticket.nodes, ticket.drawn, ticket.features, strict=True)
        verdicts = [self._commit(*part) for part in parts]
        ticket.watch.lap("commit")
        return verdicts

    def ahead(self, sequence: Sequence) -> int:
        """Nothing runs ahead."""
        return 0

    def rest(self) -> None:
        """Nothing runs ahead."""

    def _propose(self, works: list[Work]) -> list[DraftTree]:
        trees = [DraftTree.chain([work.sequence.tokens[-1]]) for work in works]
        drafting = [index for index, work in enumerate(works) if work.drafts]
        if self.drafter is not None and drafting:
            for index, tree in zip(drafting, self._drafted([works[index] for index in drafting]), strict=True):
                trees[index] = tree.within(self.verifier.vocab_size)
        return trees

    def _drafted(self, works: list[Work]) -> list[DraftTree]:
        sequences = [work.sequence for work in works]
        if self._by_plan is not None:
            return self._by_plan.draft(sequences, [work.plan for work in works])
        assert self.drafter is not None, "somebody drafts"
        return self.drafter.propose(sequences, [work.shape for work in works if work.shape is not None])

    def _drawn(self, nodes: list[Nodes | None]) -> list[Drawn | None]:
        undrawn = [None if each is None else each.undrawn() for each in nodes]
        return self.verifier.settle(undrawn) if any(undrawn) else [None] * len(nodes)

    def _commit(
        self, work: Work, draft: Draft, nodes: Nodes | None, drawn: Drawn | None, features: Features
    ) -> Verdict:
        sequence, table = work.sequence, work.sequence.table
        table.commit(work.lead)
        if nodes is None or drawn is None:
            self.verifier.committed(table)
            self._show(work, [], features)
            if self.drafter is not None and sequence.speculate:
                self.drafter.extend(sequence)
            return Verdict(work)
        run = emit(sequence, drawn.taken, lambda: why_nothing(sequence, nodes.logits[0]))
        table.commit(len(run.path))
        self.verifier.committed(table)
        self._show(work, run.path, features)
        if self.drafter is not None and run.path:
            self.drafter.committed(sequence, draft.proposed(run.path))
        probed = logprobs_of_run(sequence, nodes.logits, run.path, run.emitted)
        return Verdict.of(work, draft.tree, drawn.tokens, run, draft.forced, probed)

    def _show(self, work: Work, path: list[int], features: Features) -> None:
        """Hand the features of what was just committed to a drafter that reads them."""
        if features and (work.lead or path):
            reader = reader_of(self.drafter)
            assert reader is not None, "who asks for features reads them"
            reader.observe(work.sequence, of_path(features, work.lead, path))


def _draft(work: Work, tree: DraftTree) -> Draft:
    """What is verified: the proposed tree, as far as a grammar lets it."""
    constraint = work.sequence.constraint
    if constraint is None or work.lead or work.shape is None:
        return Draft(tree)
    return graft(constraint, work.forced, tree, work.nodes)


def _asked(work: Work, draft: Draft) -> tuple[Guarded, DraftTree] | None:
    """Whose masks the draw needs."""
    constraint = work.sequence.constraint
    return None if constraint is None or work.shape is None else (constraint, draft.tree)


def _rows(work: Work, tree: DraftTree) -> Rows:
    """The rows of one sequence: its tree, or the chunk of committed tokens (ending in the root, if it gets there)."""
    if not work.lead:
        return Rows.of_tree(work.sequence.table, tree)
    base = work.sequence.table.length
    reaches = work.shape is not None
    chunk = work.sequence.tokens[base : base + work.lead + reaches]
    wanted: Wanted = "all" if work.sequence.scoring else "last" if reaches else "none"
    return Rows(work.sequence.table, torch.tensor(chunk), base, wanted=wanted)


def _of_nodes(work: Work, logits: Tensor) -> Tensor:
    """The rows of the tree's nodes: behind a chunk the root's alone."""
    return logits[-1:] if work.lead else logits
