"""The captured steps: by number of sequences, by pages of a table, with and without drafts.

Also the state of a launched step, and the checks before launching one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from foresay.kvpaging import OutOfPages
from foresay.spec.logits import edits_logits
from foresay.spec.sequence import SequenceState
from foresay.spec.step import Raw, ScheduledSequence
from foresay.spec.tree import MAX_NODES
from foresay.verifier.forward_batch import ForwardBatch, Sizes
from foresay.verifier.graphs.capture import Arrival, Capture, recorded
from foresay.verifier.graphs.proposer import Proposer
from foresay.verifier.graphs.state import StepState
from foresay.verifier.graphs.step import SpeculativeStep
from foresay.verifier.model_runner import ModelRunner

#: Sequences of a whole step.
SIZES = (1, 2, 4, 8, 16)
#: Rows of a captured pass over any trees, up to a whole tree.
_ROWS = (4, 16, MAX_NODES)
#: Rows of captured passes over one chunk of a prompt, up to a step's limit; read when an engine is created.
CHUNKS = (128, 512)
#: Context lengths, in tokens, of the buckets.
_CONTEXTS = (1024, 4096, 16384)
#: The longest tables for which steps may have the most rows, and half as many for longer ones: attention has memory for
#: each row, by the length of tables. More rows would take a GPU as long as two steps do.
LONG, _MOST_ROWS = 2 * _CONTEXTS[-1], 256

#: Makes the proposers of steps with this many sequences: first one that drafts nothing, then by size, the smallest
#: first.
MakeProposers = Callable[[int], Sequence[Proposer]]


def sizes(max_seqs: int) -> list[int]:
    """Numbers of sequences that are captured for an engine with at most ``max_seqs``."""
    return [size for size in SIZES if size == 1 or size // 2 < max_seqs]


def widths(max_tokens: int, page_size: int) -> list[int]:
    """Pages of the tables that are captured; the last fits the longest text with its scratch rows."""
    contexts = [tokens for tokens in _CONTEXTS if 2 * tokens <= max_tokens]
    return [-(-tokens // page_size) for tokens in (*contexts, max_tokens)]


def passes(max_seqs: int, max_tokens: int, page_size: int) -> list[Sizes]:
    """The passes over trees that are captured for an engine with at most ``max_seqs``, the smallest first: a larger one
    runs in eager mode."""
    most = min(max_seqs, MAX_NODES)
    found = {
        Sizes(rows, sequences, pages, rows)
        for sequences in (1, most)
        for rows in _ROWS
        if rows >= min(2 * sequences, MAX_NODES)
        for pages in widths(max_tokens, page_size)
    }
    return sorted(found)


def chunks(max_seqs: int, most: int, max_tokens: int, page_size: int) -> list[Sizes]:
    """The passes over one prompt chunk that are captured if a step takes at most ``most`` rows of it, the smallest
    first: without logits, if more of the prompt follows, and with its last row's; and behind trees."""
    pages, others = -(-max_tokens // page_size), min(max_seqs - 1, MAX_NODES)
    rows = [rows for rows in CHUNKS if rows <= most]
    alone = [Sizes(each, 1, pages, logits, 1, each) for each in rows for logits in (0, 1)]
    trees = [each for each in _ROWS if each >= min(2 * others, MAX_NODES)][-2:] if others else []
    return alone + [Sizes(each + own, others + 1, pages, own + 1, 1, each) for each in rows for own in trees]


def mixed(max_seqs: int, most: int) -> dict[int, list[int]]:
    """By sequences of a captured step, the rows of a prompt that are captured with it, if a step takes at most ``most``
    of them. Few sizes are enough: to the rows of a prompt, padding adds little."""
    if max_seqs == 1:
        return {}
    return {size: [rows for rows in CHUNKS if rows <= most] for size in (1, sizes(max_seqs - 1)[-1])}


def drafted_rows(size: int, nodes: int, tokens: int) -> int:
    """Rows of the largest captured step of up to ``size`` sequences whose trees have so many nodes, with tables for
    so many tokens."""
    return max(MAX_NODES, min(size * nodes, _MOST_ROWS if tokens <= LONG else _MOST_ROWS // 2))


def buckets(
    model: ModelRunner,
    make: MakeProposers,
    capture: Capture,
    shapes: tuple[list[int], list[int]],
    prompts: Mapping[int, Sequence[int]] | None = None,
) -> Iterator[tuple[tuple[int, int], Sequence[SpeculativeStep]]]:
    """Capture every step, the largest first, and yield them as they are ready: by sequences and pages, without drafts
    and then with them, the smallest first; then those with rows of a prompt.

    shapes: the numbers of sequences, and the pages of a table. prompts: see :func:`mixed`; None: no step has any.
    """
    page_size, device = model.store.pool.page_size, model.store.device
    nodes = max(each.shape.nodes for each in make(1) if _stops(each))
    logits = torch.empty(drafted_rows(max(shapes[0]), nodes, 0), model.vocab_size, device=device)
    prompts = prompts or {}
    batches = _prompt_batches(model, max(shapes[1]), prompts)
    for size in sorted(shapes[0], reverse=True):
        made = make(size)
        reach = max(2, *(proposer.reach for proposer in made))
        for pages in sorted(shapes[1], reverse=True):
            most = drafted_rows(size, MAX_NODES, pages * page_size)
            proposers = [each for each in made if size * each.shape.nodes <= most]
            recurrent = model.store.states is not None
            state = StepState(size, pages, page_size, reach, device, model.store.windows, recurrent)
            # One of several texts that draft stops so rarely that tables of one width do.
            often = size == 1 or pages == max(shapes[1])
            stops = [_stops(each) and (often or not each.shape.levels) for each in proposers]
            pairs = zip(proposers, stops, strict=True)
            steps = [SpeculativeStep(model, each, state, logits if stop else None) for each, stop in pairs]
            if pages == max(shapes[1]):
                steps += [
                    SpeculativeStep(model, each, state, prompt=batches[rows], prompt_rows=_meant(rows))
                    for rows in prompts.get(size, ())
                    for each in proposers
                    if bool(each.readers) == (each.needs is not None)
                ]
            for step in steps:
                step.capture(capture)
            yield (size, pages), steps


def recorded_steps(model: ModelRunner, proposers: Sequence[Proposer]) -> Iterator[SpeculativeStep]:
    """Record a step of one sequence with each of these, for a CPU."""
    store, reach = model.store, max(2, *(proposer.reach for proposer in proposers))
    state = StepState(1, store.pool.num_pages, store.pool.page_size, reach, store.device, store.windows)
    for proposer in proposers:
        step = SpeculativeStep(model, proposer, state, timed=True)
        step.capture(recorded)
        yield step


def _prompt_batches(model: ModelRunner, pages: int, prompts: Mapping[int, Sequence[int]]) -> dict[int, ForwardBatch]:
    """By their number, where the host writes the rows of a prompt, shared by all steps that have so many."""
    store = model.store
    assert not prompts or store.states is None, "recurrent layers read rows without gaps between them"
    return {
        rows: ForwardBatch(Sizes(rows, 1, pages, 1, 1, rows), store.pool.page_size, store.device, store.windows)
        for rows in {rows for each in prompts.values() for rows in each}
    }


def _meant(rows: int) -> range:
    """How many rows of a prompt a captured number is meant for: with more padding, they run op by op."""
    return range(1 if rows == CHUNKS[0] else rows - MAX_NODES + 1, rows + 1)


def _stops(proposer: Proposer) -> bool:
    """Not where it only finds nodes, so has no name: the host knows them beforehand, and in parts waits once too."""
    return not proposer.shape.levels or bool(proposer.name)


#: Rows past what two steps may write for which pages are reserved too.
_MORE_ROWS = 64


@dataclass(slots=True)
class Launched:
    """A launched step, or the last whose outcome arrived.

    lengths: committed tokens of each sequence before it (of the last one: after it). pages: the tables as it sees them.
    raw: of one with a stop, each sequence's logits before they were edited.
    """

    step: SpeculativeStep
    batch: list[ScheduledSequence]
    lengths: list[int]
    pages: list[list[int]]
    arrival: Arrival
    raw: Sequence[Raw] = ()

    @property
    def sequences(self) -> list[SequenceState]:
        """The sequences that it runs."""
        return [scheduled.sequence for scheduled in self.batch]

    def is_current(self, sequences: list[SequenceState]) -> bool:
        """Whether the device has these sequences, with the same lengths as the host."""
        return sequences == self.sequences and [s.table.length for s in sequences] == self.lengths

    def is_valid(self, sequences: list[SequenceState]) -> bool:
        """Whether it is still valid: its outcome is that of a step launched now."""
        return self.is_current(sequences) and all(
            sequence.table.pages[: len(pages)] == pages for sequence, pages in zip(sequences, self.pages, strict=True)
        )


def capturable(scheduled: ScheduledSequence) -> bool:
    """Whether this step needs nothing that only the host can do."""
    predicted = scheduled.sequence.prediction is not None and scheduled.plan.why is None  # not by a budget
    return not (scheduled.prefill or scheduled.shape is None or scheduled.forced or predicted)


def readable(scheduled: ScheduledSequence) -> bool:
    """The same for a sequence whose prompt is computed."""
    return not scheduled.sequence.scoring and (scheduled.shape is None or not needs_stop(scheduled))


def edited(scheduled: ScheduledSequence) -> bool:
    """Whether the host changes the logits of its nodes."""
    sequence = scheduled.sequence
    return sequence.constraint is not None or sequence.forced is not None or edits_logits(sequence, 0)


def needs_stop(scheduled: ScheduledSequence) -> bool:
    """Whether the host changes them, or looks at them afterwards."""
    return edited(scheduled) or scheduled.sequence.sampling.logprobs is not None


def kept_rows(step: SpeculativeStep) -> int:
    """What it may reach and some more: pages reserved in advance need not be sent to the device while it runs."""
    return step.reach + _MORE_ROWS


def reserved(sequences: list[SequenceState], rows: int, steps: int = 1) -> bool:
    """Make this many rows past each text writable, and state pages for as many steps; False if there are too few
    pages."""
    try:
        for sequence in sequences:
            sequence.table.reserve(rows, steps)
    except OutOfPages:
        return False
    return True
