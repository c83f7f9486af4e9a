"""Who runs in the next step: admission, chunked prefill, pages, preemption.

::

    waiting ──admit──> running: prefilling ──> running: decoding ──> finished
       ^                                            │
       └───────────── preempt (youngest) ───────────┘    tokens are kept, KV is computed again

Sequences are admitted in order of arrival, as long as there is a place and pages for all their tokens so far. Every
decoding sequence is in every step. What the cost curve leaves goes to the oldest prefilling sequence first.
"""

from __future__ import annotations

from collections import deque

from kvpaging import OutOfPages, PagePool, PrefixIndex
from spec.budget import StepCost
from spec.sequence import Sequence
from spec.step import StepPlan, Work
from spec.tree import MAX_NODES, ROOT_ONLY, TreeShape


class Scheduler:
    """Owns the waiting and the running sequences; reserves the pages a plan needs."""

    def __init__(
        self,
        pool: PagePool,
        prefix: PrefixIndex | None,
        shape: TreeShape,
        cost: StepCost,
        max_seqs: int,
        max_chunk: int = 256,
    ) -> None:
        self.pool, self.prefix, self.shape, self.cost = pool, prefix, shape, cost
        self.max_seqs, self.max_chunk = max_seqs, max_chunk
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preempted: list[Sequence] = []

    def plan(self) -> StepPlan:
        """Admit, choose rows, reserve pages. Sequences preempted on the way are listed in ``preempted``."""
        self.preempted = []
        self._admit()
        works: list[Work] = []
        decoding = [s for s in self.running if not s.pending]
        for sequence in decoding:
            self._schedule(sequence, Work(sequence, 0, self.shape.limited(sequence.most_levels)), works)
        self._schedule_prefill(works)
        return StepPlan([work for work in works if work.sequence not in self.preempted])

    def _schedule_prefill(self, works: list[Work]) -> None:
        rows = sum(work.shape.nodes for work in works if work.shape)
        left = self.cost.chunk(rows, self.max_chunk)
        for sequence in [s for s in self.running if s.pending]:
            lead = min(sequence.pending, left)
            if lead <= 0:
                return
            # The root is one more row; it goes along when the chunk ends right before it.
            shape = ROOT_ONLY if lead == sequence.pending else None
            self._schedule(sequence, Work(sequence, lead, shape), works)
            left -= lead

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.max_seqs:
            sequence = self.waiting[0]
            needed = self.pool.pages_for(len(sequence.tokens) + self.shape.nodes)
            if self.running and needed > self.pool.available:
                return
            self.waiting.popleft()
            self._start(sequence)

    def _start(self, sequence: Sequence) -> None:
        if self.prefix is not None:
            pages = self.prefix.match(sequence.tokens, sequence.salt)
            found = len(pages) * self.pool.page_size
            sequence.table.adopt(pages, found)
            if not sequence.trace.preemptions:
                sequence.cached_tokens = found
        self.running.append(sequence)

    def _schedule(self, sequence: Sequence, work: Work, works: list[Work]) -> None:
        """Reserve the work's pages: shrink its tree, then preempt younger sequences, until it fits."""
        while sequence not in self.preempted:
            try:
                sequence.table.reserve(work.lead + (work.shape.nodes if work.shape else 0))
            except OutOfPages:
                if work.shape and work.shape.levels:
                    work = Work(sequence, work.lead, ROOT_ONLY)
                else:
                    self._preempt(self.running[-1])
            else:
                works.append(work)
                return

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the head of the queue: tokens are kept, pages given back."""
        self.running.remove(sequence)
        sequence.table.release()
        sequence.trace.preemptions += 1
        self.waiting.appendleft(sequence)
        self.preempted.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """The sequence is over: its pages go back to the pool (and stay findable, where published)."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.table.release()

    def settle(self) -> None:
        """After a step: give back the pages that no committed token needs."""
        for sequence in self.running:
            sequence.table.trim()

    @property
    def most_tokens(self) -> int:
        """The longest sequence that fits the pool alone, its scratch included."""
        return (self.pool.num_pages - 1) * self.pool.page_size - MAX_NODES
