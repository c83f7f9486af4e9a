"""Who runs in the next step: admission, chunked prefill, pages, preemption.

::

    waiting ──admit──> running: prefilling ──> running: decoding ──> finished
       ^                                            │
       └───────────── preempt (youngest) ───────────┘    tokens are kept, KV is computed again, as it is for
                                                         a sequence that comes with output of an engine before

Sequences are admitted in order of arrival, as long as there is a free batch slot and pages for all their tokens so far.
Every decoding sequence is in every step. What the cost curve leaves goes to the oldest prefilling sequence first.

A fork (another choice for the same prompt) waits outside the queue until its leader's prompt is computed, takes that KV
and queues with it. It needs its leader for nothing else: whatever happens to the leader, or to the shared pages, the
fork goes on as a request of its own.
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

#: As deep a draft may be where the request brought a prediction: beyond, a row costs more than one more token is worth,
#: even if all is accepted but one in fifty.
PREDICTED_LEVELS = 32
#: A step that mixes prefill with decoding takes at most this many times the decode step alone, or so many seconds,
#: which nobody sees in a text: small pieces of a prompt cost more by the row, so all would wait longer for it.
MIXED_STEP_FACTOR, MIXED_STEP_SECONDS = 2.0, 0.05
#: Rows of a prompt read at once for a background sequence: the next request waits for no more than that.
_ASIDE_CHUNK = 32


class Scheduler:
    """Owns the waiting and the running sequences; reserves the pages a plan needs.

    shape: what is drafted for each sequence, unless a budget says it, then the most that is. choice, news: of the step
    last planned, see :class:`~foresay.spec.trace.StepTrace`.
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
        """Admit, choose which sequences run and how large each tree may be, reserve pages. Sequences preempted on the
        way are listed in ``preempted``."""
        self.preempted, self.choice, self.news = [], "", ""
        self._admit()
        batch: list[ScheduledSequence] = []
        decoding = [s for s in self.running if not s.pending]
        for sequence, plan in zip(decoding, self._plans(decoding), strict=True):
            self._schedule(sequence, self._decode(sequence, plan, len(decoding)), batch)
        self._schedule_prefill(batch)
        if self.budget is not None and decoding:
            self.choice, self.news = self.budget.choice, self.budget.leader.news
        return [scheduled for scheduled in batch if scheduled.sequence not in self.preempted]

    def levels_of(self, sequence: SequenceState) -> int:
        """The deepest that is ever drafted for a sequence: what has a prediction may go far ahead along it."""
        return max(self.shape.levels, PREDICTED_LEVELS) if sequence.prediction else self.shape.levels

    def _shape_of(self, sequence: SequenceState) -> TreeShape:
        """The most that is drafted for a sequence now."""
        most = sequence.most_levels
        return self.shape.limited(most).deepened(min(self.levels_of(sequence), most))

    def _plans(self, decoding: list[SequenceState]) -> list[Plan]:
        """What is to be drafted for each."""
        if self.budget is not None:
            return self.budget.plan(decoding)
        return [Plan(shape=self._shape_of(sequence)) for sequence in decoding]

    def _decode(self, sequence: SequenceState, plan: Plan, decoding: int) -> ScheduledSequence:
        if not sequence.speculate:
            return ScheduledSequence(sequence, 0, ROOT_ONLY)
        if sequence.constraint is None:
            return ScheduledSequence(sequence, 0, plan.shape, plan=plan)
        most = MAX_NODES - 1
        if decoding > 1:  # the others should not wait for a long run of forced tokens, no more than for a prompt
            most = self.chunk(decoding * self.shape.nodes, most)
        return ScheduledSequence(
            sequence, 0, plan.shape, sequence.constraint.forced(min(sequence.most_levels, most)), plan
        )

    def _schedule_prefill(self, batch: list[ScheduledSequence]) -> None:
        prefilling = [s for s in self.running if s.pending]
        if not prefilling:
            return
        # How far along a prediction is drafted, and how large a tree grows, is decided later: that it may be far shall
        # hold up nobody.
        rows = sum(min(w.nodes, self.shape.nodes + len(w.forced)) for w in batch)
        left = self.chunk(rows, self.max_chunk)
        for sequence in prefilling:
            prefill = min(sequence.pending, left, _ASIDE_CHUNK if sequence.aside else left)
            if prefill <= 0:
                return
            if sequence.table.state is not None:
                prefill = sequence.table.state.within(prefill)
            # The root is one more row; it goes along when the chunk ends right before it.
            shape = ROOT_ONLY if prefill == sequence.pending else None
            self._schedule(sequence, ScheduledSequence(sequence, prefill, shape), batch)
            left -= prefill

    def chunk(self, decode_rows: int, most: int) -> int:
        """Prefill rows that may join ``decode_rows`` rows of running sequences; at least one, so that all move on."""
        if not decode_rows:
            return most
        within = max(MIXED_STEP_FACTOR * self.cost.seconds(decode_rows), MIXED_STEP_SECONDS)
        return max(1, bisect_right(range(decode_rows + most + 1), within, key=self.cost.seconds) - 1 - decode_rows)

    def add(self, sequence: SequenceState) -> None:
        """Queue a sequence; one with a leader, as soon as the leader's prompt is computed."""
        leader = sequence.leader
        if leader is None:
            self.waiting.append(sequence)
        else:
            self.forks.append(sequence)
            if leader.table.length >= leader.prompt_length - 1:
                self.share_prompt(leader)

    def share_prompt(self, leader: SequenceState) -> None:
        """The leader's prompt is computed: its forks take the KV of all but the last token, and queue."""
        for fork in [fork for fork in self.forks if fork.leader is leader]:
            fork.table = leader.table.fork()
            fork.table.truncate(leader.prompt_length - 1)
            fork.cached_tokens = leader.cached_tokens
            self._queue_fork(fork)

    def _queue_fork(self, fork: SequenceState) -> None:
        """Into the queue, in order of arrival."""
        fork.leader = None
        self.forks.remove(fork)
        earlier = sum(1 for other in self.waiting if other.trace.arrived < fork.trace.arrived)
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
        """Pages it still lacks for its tokens so far and one tree; a last page that is shared will be copied."""
        table, pool = sequence.table, self.pool
        copied = bool(table.length % pool.page_size) and pool.references(table.pages[-1]) > 1
        return pool.pages_for(len(sequence.tokens) + self._shape_of(sequence).nodes) - len(table.pages) + copied

    @staticmethod
    def _reuses(sequence: SequenceState) -> bool:
        """Whether it takes KV that others left. Rows whose logits are wanted have to be computed all the
        same."""
        return not (sequence.table.length or sequence.scoring or sequence.aside)

    def _start(self, sequence: SequenceState) -> None:
        if self.prefix is not None and self._reuses(sequence):
            pages = self.prefix.match(sequence.tokens, sequence.salt)
            found = len(pages) * self.pool.page_size
            sequence.table.adopt(pages, found)
            if sequence.table.state is not None:
                sequence.table.state.branch = self.prefix.known
            if not (sequence.trace.preemptions or sequence.resumed_at):
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
        """Take what was read for the first one in the queue, or its shared prompt from the last fork there that has
        one: it will be read or computed again."""
        if self._reading is not None and self._reading.stop():
            return True
        for sequence in reversed(self.waiting):
            if sequence.table.pages:
                sequence.table.release()
                return True
        return False

    def _preempt(self, sequence: SequenceState) -> None:
        """Back to the head of the queue: tokens are kept, pages given back."""
        self.running.remove(sequence)
        sequence.table.release()
        sequence.trace.preemptions += 1
        self.waiting.appendleft(sequence)
        self.preempted.append(sequence)

    def remove(self, sequence: SequenceState) -> None:
        """The sequence is over: its pages go back to the pool (and stay findable, where published)."""
        if self._reading is not None and self._reading.of(sequence):
            self._reading.stop()
        for place in (self.running, self.waiting, self.forks):
            if sequence in place:
                place.remove(sequence)
        for fork in [fork for fork in self.forks if fork.leader is sequence]:
            self._queue_fork(fork)
        sequence.table.release()

    def trim(self, ahead: Callable[[SequenceState], int]) -> None:
        """After a step: give back the pages that no committed token needs. ahead: rows that may still be written."""
        for sequence in self.running:
            sequence.table.trim(ahead(sequence))

    @property
    def most_tokens(self) -> int:
        """The longest sequence that fits the pool alone, its scratch included."""
        return (self.pool.num_pages - 1) * self.pool.page_size - MAX_NODES
