"""One speculative step: the core of the project.

::

    propose    the drafter proposes a tree below each sequence's root (only the root, if it finds nothing); a grammar
               removes nodes that could not follow and adds forced ones (:mod:`foresay.spec.constrain`)
    forward    one pass of the target over all rows of all sequences
    sample     a token is sampled at every node, with the noise of its position, from the logits as the request
               changes them
    accept     the path that the samples take; its rows become committed KV; its tokens are emitted

There is no ``if speculative``: plain decoding is the root-only tree, and a prefill chunk is rows without a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeAlias, runtime_checkable

from torch import Tensor

from foresay.spec.adjust import LogitEdits
from foresay.spec.budget.plan import NO_PLAN, Plan
from foresay.spec.constrain import Guarded, MaskThread, graft
from foresay.spec.errors import ForesayError
from foresay.spec.logits import edits_of, logprobs_of_run, score_prompt, why_nothing
from foresay.spec.protocols import (
    Drafter,
    FeaturesOfPath,
    Forward,
    LogitRows,
    Rows,
    Verified,
    Verifier,
    by_sequence,
    reader_of,
)
from foresay.spec.request import TokenLogprobs
from foresay.spec.sample import BROKEN
from foresay.spec.sequence import SequenceState
from foresay.spec.trace import Stopwatch
from foresay.spec.tree import MAX_NODES, DraftTree, TreeShape
from foresay.spec.wall import wall_of

#: Returns the raw logits of a tree's nodes, fp32[N, V], or only of its root.
Raw: TypeAlias = Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One sequence's part in a step.

    prefill: committed tokens whose KV is computed first (a prefill chunk). shape: the tree to draft below the root;
    None when the chunk does not reach the root, so that nothing is sampled. A chunk that reaches it samples at the root
    only. forced: tokens that the grammar forces, a chain below the root in addition to the draft. plan: the budget's,
    which drafters draft the tree; one without shares leaves that to the engine's drafter.
    """

    sequence: SequenceState
    prefill: int
    shape: TreeShape | None
    forced: Sequence[int] = ()
    plan: Plan = NO_PLAN

    @property
    def nodes(self) -> int:
        """The most nodes verified, including the root."""
        return 0 if self.shape is None else min(self.shape.nodes + len(self.forced), MAX_NODES)

    @property
    def drafts(self) -> bool:
        """Whether the drafter is called: not if it could only repeat the forced tokens."""
        if self.shape is None or self.prefill:
            return False
        return (self.plan if self.plan.shares else self.shape).likely_levels > len(self.forced)


@dataclass(slots=True)
class VerifyResult:
    """What a step did for one sequence: emitted tokens (none for a prefill chunk) and where they came from.

    tree: what was verified; sampled: the sample at each of its nodes; path: the accepted nodes below the root whose
    tokens were emitted.
    """

    scheduled: ScheduledSequence
    tree: DraftTree | None = None
    sampled: Sequence[int] = ()
    path: Sequence[int] = ()
    emitted: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None

    @property
    def accepted(self) -> int:
        """How many drafted tokens were emitted."""
        return len(self.path)

    @property
    def forced(self) -> int:
        """How many drafted nodes a grammar forced."""
        return 0 if self.tree is None else self.tree.forced

    @property
    def rows(self) -> list[int]:
        """The nodes whose rows were committed, from the root on: at each, an emitted token was sampled."""
        return [0, *self.path][: len(self.emitted)]


@runtime_checkable
class DraftsByPlan(Drafter, Protocol):
    """Several drafters as one; the budget's plan says how much each of them drafts."""

    def draft(self, sequences: Sequence[SequenceState], plans: Sequence[Plan]) -> list[DraftTree]:
        """A tree for each sequence, from all drafters in its plan."""
        ...


class StepRunner:
    """Runs the engine's steps, one after the other. woken: experts used in the last pass."""

    def __init__(self, verifier: Verifier, drafter: Drafter | None) -> None:
        self.verifier, self.drafter, self.woken = verifier, drafter, 0.0
        self._wall = wall_of(drafter)
        self._by_plan: DraftsByPlan | None = drafter if isinstance(drafter, DraftsByPlan) else None
        self._masks = MaskThread()

    def run(self, batch: list[ScheduledSequence], watch: Stopwatch) -> list[VerifyResult]:
        """Propose, run the forward pass, sample, accept and commit; afterwards tokens, pages and caches agree again."""
        trees = self._propose(batch)
        watch.lap("propose")
        rows = [rows_of(scheduled, _pruned(scheduled, tree)) for scheduled, tree in zip(batch, trees, strict=True)]
        forward, masks = self._forward(batch, rows, watch)
        verified, raw = self._verify(batch, rows, forward, masks)
        self.woken = forward.woken  # a device, too, has ended the pass
        watch.lap("draw")
        for index, scheduled in enumerate(batch):
            if scheduled.sequence.scoring:
                score_prompt(scheduled.sequence, forward.of(index))
        features = by_sequence(forward.features, [len(part.tokens) for part in rows])
        results = [self._finish(*part) for part in zip(batch, trees, rows, verified, raw, features, strict=True)]
        watch.lap("commit")
        return results

    def _forward(
        self, batch: list[ScheduledSequence], rows: list[Rows], watch: Stopwatch
    ) -> tuple[Forward, list[Tensor | None]]:
        """Run the pass, and meanwhile compute the grammar masks of each tree's nodes."""
        constrained = [_constrained(scheduled, part) for scheduled, part in zip(batch, rows, strict=True)]
        masks = self._masks.begin(constrained) if any(constrained) else None
        if masks is not None:
            watch.lap("mask")
        forward = self.verifier.run(rows, None if self.drafter is None else self.drafter.needs)
        watch.lap("forward")
        if masks is None:
            return forward, [None] * len(batch)
        allowed = masks.result()
        watch.lap("mask")
        return forward, allowed

    def ahead(self, sequence: SequenceState) -> int:
        """Rows past the committed length that may still be written: their pages must not be freed yet."""
        return 0

    def rest(self) -> None:
        """Drop whatever runs ahead of the plan; here nothing does."""

    def _propose(self, batch: list[ScheduledSequence]) -> list[DraftTree]:
        trees = [DraftTree.chain(scheduled.sequence.tokens[-1:]) for scheduled in batch]
        drafting = [index for index, scheduled in enumerate(batch) if scheduled.drafts]
        if self.drafter is not None and drafting:
            for index, tree in zip(drafting, self._drafted([batch[index] for index in drafting]), strict=True):
                trees[index] = tree.within(self.verifier.vocab_size)
        return trees

    def _drafted(self, batch: list[ScheduledSequence]) -> list[DraftTree]:
        sequences = [scheduled.sequence for scheduled in batch]
        if self._by_plan is not None:
            return self._by_plan.draft(sequences, [scheduled.plan for scheduled in batch])
        assert self.drafter is not None, "there is a drafter"
        return self.drafter.propose(sequences, [scheduled.shape for scheduled in batch if scheduled.shape is not None])

    def _verify(
        self, batch: list[ScheduledSequence], rows: list[Rows], forward: Forward, masks: list[Tensor | None]
    ) -> tuple[list[Verified | None], list[Raw]]:
        """The samples and accepted paths, and the nodes' raw logits, as far as they are needed later."""
        edits: list[LogitEdits | None] = []
        raw: list[Raw] = []
        for index, (scheduled, part, allowed) in enumerate(zip(batch, rows, masks, strict=True)):
            edit, kept = edits_and_raw(scheduled, part.tree, allowed, partial(_of_nodes, forward, index, part))
            edits.append(edit)
            raw.append(kept)
        if all(part.tree is None for part in rows):
            return [None] * len(rows), raw
        return self.verifier.verify(edits), raw

    def _finish(
        self,
        scheduled: ScheduledSequence,
        proposed: DraftTree,
        rows: Rows,
        verified: Verified | None,
        raw: Raw,
        features: FeaturesOfPath | None,
    ) -> VerifyResult:
        result = self._commit(
            scheduled,
            proposed,
            rows.tree,
            verified,
            why_nothing=lambda: why_nothing(scheduled.sequence, raw()[0]),
            show=partial(self._show, scheduled, features),
        )
        if result.tree is not None:
            self.look_at(scheduled, result, raw)
        return result

    def _commit(
        self,
        scheduled: ScheduledSequence,
        proposed: DraftTree,
        tree: DraftTree | None,
        verified: Verified | None,
        why_nothing: Callable[[], ForesayError],
        show: Callable[[list[int]], None],
    ) -> VerifyResult:
        """Commit the prompt's rows, and the path of the tree if there is one. proposed: what the drafter made of it.
        show: called with the committed nodes before drafters are."""
        sequence, table = scheduled.sequence, scheduled.sequence.table
        table.commit(scheduled.prefill)
        if tree is None or verified is None:
            self.verifier.committed(table)
            show([])
            if self.drafter is not None and sequence.speculate:
                self.drafter.extend(sequence)
            return VerifyResult(scheduled)
        result = self.emitted(scheduled, tree, verified, why_nothing)
        path = result.rows
        show(path)
        if self.drafter is not None and path:
            self.drafter.committed(sequence, proposed.path_of(result.emitted))
        return result

    @staticmethod
    def look_at(scheduled: ScheduledSequence, result: VerifyResult, raw: Raw) -> None:
        """Compute the log-probabilities of what was emitted, if requested. raw: the logits of the tree's nodes."""
        if scheduled.sequence.sampling.logprobs is not None:
            result.logprobs = logprobs_of_run(scheduled.sequence, raw(), result.rows, result.emitted)

    def emitted(
        self,
        scheduled: ScheduledSequence,
        tree: DraftTree,
        verified: Verified,
        why_nothing: Callable[[], ForesayError],
        captured: bool = False,
    ) -> VerifyResult:
        """Emit the tokens sampled along the path, and commit its rows; an error ends only this sequence.

        why_nothing: called if no token could be sampled at the root. captured: whether the step was one captured step,
        which has advanced recurrent states.
        """
        (sampled, path), table = verified, scheduled.sequence.table
        emitted = _append(scheduled.sequence, [sampled[node] for node in path], why_nothing)
        table.commit(len(emitted))
        self.verifier.committed(table, path[: len(emitted)], len(path) if captured else 0)
        return VerifyResult(scheduled, tree, sampled, path[1 : len(emitted) + 1], emitted)

    def _show(self, scheduled: ScheduledSequence, features: FeaturesOfPath | None, path: list[int]) -> None:
        """Pass the features of the rows just committed to a drafter that reads them."""
        if features is not None and (scheduled.prefill or path):
            reader = reader_of(self.drafter)
            assert reader is not None, "a drafter that needs features reads them"
            reader.observe(scheduled.sequence, features(scheduled.prefill, path))


def _append(sequence: SequenceState, sampled: list[int], why_nothing: Callable[[], ForesayError]) -> list[int]:
    """Append these tokens and advance the grammar; returns those that were appended."""
    constraint = sequence.constraint
    if constraint is not None and constraint.error is not None:
        sequence.fail(constraint.error)
        return []
    # A broken sample is no child, so it is the last on its path: the tokens before it are valid, and the next step,
    # whose root that node is, samples the same again.
    emitted = sequence.append([token for token in sampled if token != BROKEN])
    if not emitted:
        sequence.fail(why_nothing())
    elif constraint is not None and not sequence.finished:
        constraint.advance(emitted)
        if constraint.error is not None:
            sequence.fail(constraint.error)
    return emitted


def _pruned(scheduled: ScheduledSequence, tree: DraftTree) -> DraftTree:
    """What is verified: the proposed tree, without nodes that a grammar does not allow."""
    constraint = scheduled.sequence.constraint
    if constraint is None or scheduled.prefill or scheduled.shape is None:
        return tree
    return graft(constraint, scheduled.forced, tree, scheduled.nodes)


def _constrained(scheduled: ScheduledSequence, rows: Rows) -> tuple[Guarded, DraftTree] | None:
    """The constraint and tree that need masks for sampling, or None."""
    constraint = scheduled.sequence.constraint
    return None if constraint is None or rows.tree is None else (constraint, rows.tree)


def rows_of(scheduled: ScheduledSequence, tree: DraftTree) -> Rows:
    """The rows of one sequence: its tree, or the chunk of committed tokens (ending in the root, if it reaches that)."""
    sequence, table = scheduled.sequence, scheduled.sequence.table
    if not scheduled.prefill:
        return Rows.of_tree(table, tree, sequence)
    reaches = scheduled.shape is not None
    chunk = sequence.tokens[table.length : table.length + scheduled.prefill + reaches]
    logits: LogitRows = "all" if sequence.scoring else "last" if reaches else "none"
    if not reaches:
        return Rows(table, chunk, table.length, logits=logits)
    return Rows(table, chunk, table.length, None, None, logits, tree, sequence.sampling, sequence.noise)


def _of_nodes(forward: Forward, index: int, rows: Rows) -> Tensor:
    """fp32[N, V]: the logits of the nodes of a sequence's tree."""
    logits = forward.of(index)
    return logits if rows.tree is None else logits[len(logits) - len(rows.tree) :]


def edits_and_raw(
    scheduled: ScheduledSequence, tree: DraftTree | None, allowed: Tensor | None, logits: Raw
) -> tuple[LogitEdits | None, Raw]:
    """A request's changes to the logits of its tree's nodes, and the raw logits, as far as they are needed later.
    allowed: see :func:`foresay.spec.logits.edits_of`."""
    edits = None if tree is None else edits_of(scheduled.sequence, tree, allowed)
    if edits is None:
        return None, logits
    kept = logits() if scheduled.sequence.sampling.logprobs is not None else logits()[:1]
    copy = kept.clone()
    return edits, lambda: copy
