"""Which sequences run in the next step: admission, chunked prefill, pages, preemption.

::

    waiting ──admit──> running: prefilling ──> running: decoding ──> finished
       ^                                            │
       └───────────── preempt (youngest) ───────────┘    tokens are kept, KV is computed again, as it is for
                                                         a sequence that comes with output of an engine before

Sequences are admitted in order of arrival, as long as there is a free batch slot and pages for all their tokens so far.
Every decoding sequence is in every step. The rows that the cost curve leaves go to the oldest prefilling sequence
first.

A fork (another choice for the same prompt) waits outside the queue until its leader's prompt is computed, shares that
KV and is queued with it. It needs its leader for nothing else: whatever happens to the leader or the shared pages, the
fork goes on as its own request.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable

from foresay.kvpaging import OutOfPages, PagePool, PrefixIndex
from foresay.spec.budget import CostModel
from foresay.spec.budget.budget import Budget
from foresay.spec.budget.plan import Plan
from foresay.spec.reading import DiskReader
from foresay.spec.sequence import SequenceState
from foresay.spec.shape import MAX_CHUNK
from foresay.spec.step import ScheduledSequence
from foresay.spec.tree import MAX_NODES, ROOT_ONLY, TreeShape

#: The deepest draft of a request with a prediction: beyond it, a row costs more than one more token is worth, even if
#: 49 of 50 are accepted.
PREDICTED_LEVELS = 32
#: A step that mixes prefill with decoding takes at most this many times the decode step alone, or this many seconds,
#: which no reader of a text notices: smaller prompt chunks cost more per row, so everything would wait longer.
MIXED_STEP_FACTOR, MIXED_STEP_SECONDS = 2.0, 0.05
#: Prompt rows computed at once for a background sequence: the next request waits for no more than that.
_ASIDE_CHUNK = 32


class Scheduler:
    """Owns the waiting and the running sequences; reserves the pages a plan needs.

    shape: what is drafted for each sequence; with a budget, the most that is. choice, news: of the step planned last,
    see :class:`~foresay.spec.trace.StepTrace`.
    """

    def __init__(
        self,
        pool: PagePool,
        prefix: PrefixIndex | None,
        shape: TreeShape,
        cost: CostModel,
        max_seqs: int,
        max_chunk: int = MAX_CHUNK,
        budget: Budget | None = None,
    ) -> None:
        self.pool, self.prefix, self.shape, self.cost = pool, prefix, shape, cost
        self.max_seqs, self.max_chunk = max_seqs, max_chunk
        self.budget = budget
        self.waiting: deque[SequenceState] = deque()
        self.running: list[SequenceState] = []
        self.forks: list[SequenceState] = []
        self.preempted: list[SequenceState] = []
        self.choice = self.news = ""
        self._reading = None if prefix is None else DiskReader(prefix, cost, max_chunk)

    def plan(self) -> list[ScheduledSequence]:
        """Admit, choose which sequences run and how large each tree may be, reserve pages. Sequences preempted
        meanwhile are listed in ``preempted``."""
        self.preempted, self.choice, self.news = [], "", ""
        self._admit()
        batch: list[ScheduledSequence] = []
        decoding = [s for s in self.running if not s.pending]
        for sequence, plan in zip(decoding, self._plans(decoding), strict=True):
            self._schedule(sequence, self._decode(sequence, plan, len(decoding)), batch)
        self._schedule_prefill(batch)
        if self.budget is not None and decoding:
            self.choice, self.news = self.budget.choice, self.budget.news
        return [scheduled for scheduled in batch if scheduled.sequence not in self.preempted]

    def levels_of(self, sequence: SequenceState) -> int:
        """The deepest draft a sequence ever gets: one with a prediction may draft far ahead along it."""
        return max(self.shape.levels, PREDICTED_LEVELS) if sequence.prediction else self.shape.levels

    def _shape_of(self, sequence: SequenceState) -> TreeShape:
        """The largest tree that is drafted for a sequence now."""
        most = sequence.most_levels
        return self.shape.limited(most).deepened(min(self.levels_of(sequence), most))

    def _plans(self, decoding: list[SequenceState]) -> list[Plan]:
        """The draft plan for each."""
        if self.budget is not None:
            return self.budget.plan(decoding)
        return [Plan(shape=self._shape_of(sequence)) for sequence in decoding]

    def _decode(self, sequence: SequenceState, plan: Plan, decoding: int) -> ScheduledSequence:
        if not sequence.speculate:
            return ScheduledSequence(sequence, 0, ROOT_ONLY)
        if sequence.constraint is None:
            return ScheduledSequence(sequence, 0, plan.shape, plan=plan)
        most = MAX_NODES - 1
        if decoding > 1:  # the others must not wait for a long run of forced tokens, as they do not for a prompt
            most = self.chunk(decoding * self.shape.nodes, most)
        return ScheduledSequence(
            sequence, 0, plan.shape, sequence.constraint.forced(min(sequence.most_levels, most)), plan
        )

    def _schedule_prefill(self, batch: list[ScheduledSequence]) -> None:
        prefilling = [s for s in self.running if s.pending]
        if not prefilling:
            return
        # How far along a prediction is drafted, and how large a tree grows, is decided later: the upper limits must not
        # delay prefill.
        rows = sum(min(w.nodes, self.shape.nodes + len(w.forced)) for w in batch)
        left = self.chunk(rows, self.max_chunk)
        for sequence in prefilling:
            prefill = min(sequence.pending, left, _ASIDE_CHUNK if sequence.aside else left)
            if prefill <= 0:
                break
            prefill = sequence.table.align_chunk(prefill)
            # The root is one more row; it is added when the chunk ends right before it.
            shape = ROOT_ONLY if prefill == sequence.pending else None
            self._schedule(sequence, ScheduledSequence(sequence, prefill, shape), batch)
            left -= prefill
        # Those with more rows than a tree may have come last.
        batch.sort(key=lambda scheduled: scheduled.prefill + (scheduled.shape is not None) > MAX_NODES)

    def chunk(self, decode_rows: int, most: int) -> int:
        """Prefill rows that may join ``decode_rows`` rows of running sequences; at least one, so that all make
        progress."""
        if not decode_rows:
            return most
        within = max(MIXED_STEP_FACTOR * self.cost.seconds(decode_rows), MIXED_STEP_SECONDS)
        return max(1, bisect_right(range(decode_rows + most + 1), within, key=self.cost.seconds) - 1 - decode_rows)

    def add(self, sequence: SequenceState) -> None:
        """Queue a sequence; one with a leader is queued once the leader's prompt is computed."""
        leader = sequence.leader
        if leader is None:
            self.waiting.append(sequence)
        else:
            self.forks.append(sequence)
            if leader.table.length >= leader.prompt_length - 1:
                self.share_prompt(leader)

    def share_prompt(self, leader: SequenceState) -> None:
        """The leader's prompt is computed: its forks share the KV of all but the last token, and are queued."""
        for fork in [fork for fork in self.forks if fork.leader is leader]:
            fork.table = leader.table.fork()
            fork.table.truncate(leader.prompt_length - 1)
            fork.cached_tokens = leader.cached_tokens
            self._queue_fork(fork)

    def _queue_fork(self, fork: SequenceState) -> None:
        """Insert a fork into the queue, in order of arrival."""
        fork.leader = None
        self.forks.remove(fork)
        earlier = sum(1 for other in self.waiting if other.arrived < fork.arrived)
        self.waiting.insert(earlier, fork)

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.max_seqs:
            sequence, reading = self.waiting[0], self._reading
            if reading is None or not reading.of(sequence):
                promised = sum(self._pages_wanted(each) for each in self.running)
                if self.running and promised + self._pages_wanted(sequence) > self.pool.available:
                    return
            decoding = any(not each.pending for each in self.running)
            if reading is not None and self._reuses(sequence) and not reading.go_on(sequence, decoding):
                return
            self._start(self.waiting.popleft())

    def _pages_wanted(self, sequence: SequenceState) -> int:
        """Pages it still needs for its tokens so far and one tree; a shared last page will be copied."""
        table, pool = sequence.table, self.pool
        copied = bool(table.length % pool.page_size) and pool.references(table.pages[-1]) > 1
        return pool.pages_for(len(sequence.tokens) + self._shape_of(sequence).nodes) - len(table.pages) + copied

    @staticmethod
    def _reuses(sequence: SequenceState) -> bool:
        """Whether it reuses cached KV. Rows whose logits are needed have to be computed anyway."""
        return not (sequence.table.length or sequence.scoring or sequence.aside)

    def _start(self, sequence: SequenceState) -> None:
        if self.prefix is not None and self._reuses(sequence):
            pages = self.prefix.match(sequence.tokens, sequence.salt, sequence.drafts)
            found = len(pages) * self.pool.page_size
            sequence.table.adopt(pages, found, self.prefix.known)
            if not (sequence.preemptions or sequence.resumed_at):
                sequence.cached_tokens = found
        self.running.append(sequence)

    def _schedule(self, sequence: SequenceState, scheduled: ScheduledSequence, batch: list[ScheduledSequence]) -> None:
        """Reserve the sequence's pages: shrink its tree, then preempt younger sequences, until it fits."""
        while sequence not in self.preempted:
            try:
                sequence.table.reserve(scheduled.prefill + scheduled.nodes)
            except OutOfPages:
                if scheduled.nodes > 1:
                    scheduled = ScheduledSequence(sequence, scheduled.prefill, ROOT_ONLY)
                elif not self._take_from_the_queue():
                    self._preempt(self.running[-1])
            else:
                batch.append(scheduled)
                return

    def _take_from_the_queue(self) -> bool:
        """Free the pages read from disk for the first one in the queue, or the shared prompt of the last fork in the
        queue that has one: they will be read or computed again."""
        if self._reading is not None and self._reading.stop():
            return True
        for sequence in reversed(self.waiting):
            if sequence.table.pages:
                sequence.table.release()
                return True
        return False

    def _preempt(self, sequence: SequenceState) -> None:
        """Move it back to the head of the queue: tokens are kept, pages are freed."""
        self.running.remove(sequence)
        sequence.table.release()
        sequence.preemptions += 1
        self.waiting.appendleft(sequence)
        self.preempted.append(sequence)

    def remove(self, sequence: SequenceState) -> None:
        """The sequence has ended: its pages go back to the pool (published ones stay in the prefix cache)."""
        if self._reading is not None and self._reading.of(sequence):
            self._reading.stop()
        for queue in (self.running, self.waiting, self.forks):
            if sequence in queue:
                queue.remove(sequence)
        for fork in [fork for fork in self.forks if fork.leader is sequence]:
            self._queue_fork(fork)
        sequence.table.release()

    def trim(self, ahead: Callable[[SequenceState], int]) -> None:
        """After a step: free the pages that no committed token needs. ahead: rows that may still be written."""
        for sequence in self.running:
            sequence.table.trim(ahead(sequence))
