"""One speculative step: the lines the project exists for.

::

    propose    the drafter hangs a tree below each sequence's root (the root alone, if it has nothing to say); a grammar
               takes out what could not follow and adds what must (:mod:`foresay.spec.constrain`)
    forward    one pass of the target over all rows of all sequences
    sample     a token is sampled at every node, with the noise of its position, from the logits as the request
               wants them
    accept     the path the samples take; its rows become committed KV; the run of tokens goes out

There is no ``if speculative``: plain decoding is the root-only tree, and a prefill chunk is rows without a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor

from foresay.spec.budget.plan import NO_PLAN, Plan
from foresay.spec.commit import Run, emit
from foresay.spec.constrain import Draft, Guarded, MaskThread, graft
from foresay.spec.decide import Nodes
from foresay.spec.features import Features, by_sequence, of_path, reader_of
from foresay.spec.protocols import Drafter, Forward, Rows, Sampled, Verifier, Wanted
from foresay.spec.request import TokenLogprobs
from foresay.spec.score import logprobs_of_run, score_prompt
from foresay.spec.sequence import SequenceState
from foresay.spec.trace import Stopwatch
from foresay.spec.tree import MAX_NODES, DraftTree, TreeShape


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One sequence's part in a step.

    prefill: committed tokens whose KV is computed first (a prefill chunk). shape: the tree to draft below the root;
    None when the chunk does not reach the root, so that nothing is sampled. A chunk that reaches it samples at the root
    only. forced: tokens that the grammar leaves no choice about, a chain below the root beside what is drafted. plan:
    of the budget, by whom the tree is drafted; one without shares leaves that to the engine's drafter.
    """

    sequence: SequenceState
    prefill: int
    shape: TreeShape | None
    forced: Sequence[int] = ()
    plan: Plan = NO_PLAN

    @property
    def nodes(self) -> int:
        """The most nodes verified, the root among them."""
        return 0 if self.shape is None else min(self.shape.nodes + len(self.forced), MAX_NODES)

    @property
    def drafts(self) -> bool:
        """Whether the drafter is asked: not for what could only repeat the forced tokens."""
        if self.shape is None or self.prefill:
            return False
        return (self.plan if self.plan.shares else self.shape).likely_levels > len(self.forced)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Who runs in a step and how large each tree may be. Pages are reserved. choice, news: see
    :class:`~foresay.spec.trace.StepTrace`."""

    batch: list[ScheduledSequence]
    choice: str = ""
    news: str = ""


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """What a step did for one sequence: emitted tokens (none for a prefill chunk) and where they came from.

    tree: what was verified; sampled: the sample at each of its nodes; path: the accepted nodes below the root
    whose tokens went out.
    """

    scheduled: ScheduledSequence
    tree: DraftTree | None = None
    sampled: list[int] | None = None
    path: list[int] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)
    accepted: int = 0
    depths: list[int] = field(default_factory=list)
    forced: int = 0
    logprobs: list[TokenLogprobs] | None = None

    @classmethod
    def of(
        cls,
        scheduled: ScheduledSequence,
        tree: DraftTree,
        sampled: list[int],
        run: Run,
        forced: int = 0,
        logprobs: list[TokenLogprobs] | None = None,
    ) -> VerifyResult:
        """The result on a tree whose run went out."""
        return cls(scheduled, tree, sampled, run.taken, run.emitted, run.accepted, tree.depths[1:], forced, logprobs)


@runtime_checkable
class DraftsByPlan(Drafter, Protocol):
    """Several drafters as one, each told by the budget's plan how much it drafts."""

    def draft(self, sequences: Sequence[SequenceState], plans: Sequence[Plan]) -> list[DraftTree]:
        """A tree for each sequence, of all who share in it."""
        ...


class StepRunner(Protocol):
    """Runs steps: what the engine calls."""

    verifier: Verifier

    def run(self, plan: StepPlan, watch: Stopwatch) -> list[VerifyResult]:
        """Run a step and commit it: afterwards every sequence's tokens, pages and caches agree again."""
        ...

    def ahead(self, sequence: SequenceState) -> int:
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

    def run(self, plan: StepPlan, watch: Stopwatch) -> list[VerifyResult]:
        """Propose, run the forward pass, sample, accept and commit."""
        batch = plan.batch
        trees = self._propose(batch)
        watch.lap("propose")
        drafts = [_draft(scheduled, tree) for scheduled, tree in zip(batch, trees, strict=True)]
        rows = [_rows(scheduled, draft.tree) for scheduled, draft in zip(batch, drafts, strict=True)]
        forward, banned = self._forward(batch, drafts, rows, watch)
        logits = [forward.of(index) for index in range(len(batch))]
        nodes = [
            None if scheduled.shape is None else Nodes(scheduled.sequence, draft.tree, _of_nodes(scheduled, raw), ban)
            for scheduled, draft, raw, ban in zip(batch, drafts, logits, banned, strict=True)
        ]
        sampled = self._sampled(nodes)
        watch.lap("draw")
        for scheduled, raw in zip(batch, logits, strict=True):
            if scheduled.sequence.scoring:
                score_prompt(scheduled.sequence, raw)
        features = by_sequence(forward.features, [len(part.tokens) for part in rows])
        results = [self._commit(*part) for part in zip(batch, drafts, nodes, sampled, features, strict=True)]
        watch.lap("commit")
        return results

    def _forward(
        self, batch: list[ScheduledSequence], drafts: list[Draft], rows: list[Rows], watch: Stopwatch
    ) -> tuple[Forward, list[Tensor | None]]:
        """The pass, and beside it what grammars rule out behind each tree's nodes."""
        asked = [_asked(scheduled, draft) for scheduled, draft in zip(batch, drafts, strict=True)]
        masks = self._masks.begin(asked) if any(asked) else None
        if masks is not None:
            watch.lap("mask")
        forward = self.verifier.run(rows, None if self.drafter is None else self.drafter.needs)
        watch.lap("forward")
        if masks is None:
            return forward, [None] * len(batch)
        banned = masks.result()
        watch.lap("mask")
        return forward, banned

    def ahead(self, sequence: SequenceState) -> int:
        """Nothing runs ahead."""
        return 0

    def rest(self) -> None:
        """Nothing runs ahead."""

    def _propose(self, batch: list[ScheduledSequence]) -> list[DraftTree]:
        trees = [DraftTree.chain([scheduled.sequence.tokens[-1]]) for scheduled in batch]
        drafting = [index for index, scheduled in enumerate(batch) if scheduled.drafts]
        if self.drafter is not None and drafting:
            for index, tree in zip(drafting, self._drafted([batch[index] for index in drafting]), strict=True):
                trees[index] = tree.within(self.verifier.vocab_size)
        return trees

    def _drafted(self, batch: list[ScheduledSequence]) -> list[DraftTree]:
        sequences = [scheduled.sequence for scheduled in batch]
        if self._by_plan is not None:
            return self._by_plan.draft(sequences, [scheduled.plan for scheduled in batch])
        assert self.drafter is not None, "somebody drafts"
        return self.drafter.propose(sequences, [scheduled.shape for scheduled in batch if scheduled.shape is not None])

    def _sampled(self, nodes: list[Nodes | None]) -> list[Sampled | None]:
        unsampled = [None if each is None else each.unsampled() for each in nodes]
        return self.verifier.settle(unsampled) if any(unsampled) else [None] * len(nodes)

    def _commit(
        self,
        scheduled: ScheduledSequence,
        draft: Draft,
        nodes: Nodes | None,
        sampled: Sampled | None,
        features: Features,
    ) -> VerifyResult:
        sequence, table = scheduled.sequence, scheduled.sequence.table
        table.commit(scheduled.prefill)
        if nodes is None or sampled is None:
            self.verifier.committed(table)
            self._show(scheduled, [], features)
            if self.drafter is not None and sequence.speculate:
                self.drafter.extend(sequence)
            return VerifyResult(scheduled)
        run = emit(sequence, sampled.taken, nodes.why_nothing)
        table.commit(len(run.path))
        self.verifier.committed(table)
        self._show(scheduled, run.path, features)
        if self.drafter is not None and run.path:
            self.drafter.committed(sequence, draft.proposed(run.path))
        probed = logprobs_of_run(sequence, nodes.logits, run.path, run.emitted)
        return VerifyResult.of(scheduled, draft.tree, sampled.tokens, run, draft.forced, probed)

    def _show(self, scheduled: ScheduledSequence, path: list[int], features: Features) -> None:
        """Hand the features of what was just committed to a drafter that reads them."""
        if features and (scheduled.prefill or path):
            reader = reader_of(self.drafter)
            assert reader is not None, "who asks for features reads them"
            reader.observe(scheduled.sequence, of_path(features, scheduled.prefill, path))


def _draft(scheduled: ScheduledSequence, tree: DraftTree) -> Draft:
    """What is verified: the proposed tree, as far as a grammar lets it."""
    constraint = scheduled.sequence.constraint
    if constraint is None or scheduled.prefill or scheduled.shape is None:
        return Draft(tree)
    return graft(constraint, scheduled.forced, tree, scheduled.nodes)


def _asked(scheduled: ScheduledSequence, draft: Draft) -> tuple[Guarded, DraftTree] | None:
    """Whose masks the sample needs."""
    constraint = scheduled.sequence.constraint
    return None if constraint is None or scheduled.shape is None else (constraint, draft.tree)


def _rows(scheduled: ScheduledSequence, tree: DraftTree) -> Rows:
    """The rows of one sequence: its tree, or the chunk of committed tokens (ending in the root, if it gets there)."""
    if not scheduled.prefill:
        return Rows.of_tree(scheduled.sequence.table, tree)
    base = scheduled.sequence.table.length
    reaches = scheduled.shape is not None
    chunk = scheduled.sequence.tokens[base : base + scheduled.prefill + reaches]
    wanted: Wanted = "all" if scheduled.sequence.scoring else "last" if reaches else "none"
    return Rows(scheduled.sequence.table, chunk, base, wanted=wanted)


def _of_nodes(scheduled: ScheduledSequence, logits: Tensor) -> Tensor:
    """The rows of the tree's nodes: behind a chunk the root's alone."""
    return logits[-1:] if scheduled.prefill else logits
