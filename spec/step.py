"""One speculative step: the lines the project exists for.

::

    propose    the drafter hangs a tree below each sequence's root (the root alone, if it has nothing to say)
    forward    one pass of the target over all rows of all sequences
    draw       a token is drawn at every node, with the noise of its position
    accept     the path the draws take; its rows become committed KV; the run of tokens goes out

There is no ``if speculative``: plain decoding is the root-only tree, and a prefill chunk is rows without a draw.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from spec.accept import accept
from spec.draw import BROKEN, draw
from spec.features import Features, by_sequence, of_path, reader_of
from spec.protocols import Drafter, Forward, Rows, Verifier
from spec.sequence import Sequence
from spec.trace import Stopwatch
from spec.tree import DraftTree, TreeShape


@dataclass(frozen=True, slots=True)
class Work:
    """One sequence's part in a step.

    lead: committed tokens whose KV is computed first (a prefill chunk). shape: the tree to draft below the root; None
    when the chunk does not reach the root, so that nothing is drawn. A chunk that reaches it draws at the root only.
    """

    sequence: Sequence
    lead: int
    shape: TreeShape | None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Who runs in a step and how large each tree may be. Pages are reserved."""

    works: list[Work]


@dataclass(slots=True)
class Ticket:
    """A submitted step: trees, draws and the features of all rows, in the order of the plan's works."""

    plan: StepPlan
    trees: list[DraftTree]
    drawn: list[Tensor | None]
    features: list[Features]
    watch: Stopwatch


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a step did for one sequence: emitted tokens (none for a prefill chunk) and where they came from."""

    work: Work
    emitted: list[int] = field(default_factory=list)
    accepted: int = 0
    depths: list[int] = field(default_factory=list)


class EagerRunner:
    """Runs steps one after the other, op by op."""

    def __init__(self, verifier: Verifier, drafter: Drafter | None) -> None:
        self.verifier, self.drafter = verifier, drafter

    def submit(self, plan: StepPlan) -> Ticket:
        """Propose, run the forward pass and draw."""
        watch = Stopwatch()
        trees = self._propose(plan.works)
        watch.lap("propose")
        rows = [_rows(work, tree) for work, tree in zip(plan.works, trees, strict=True)]
        needs = self.drafter.needs if self.drafter is not None else None
        forward = self.verifier.run(rows, needs)
        watch.lap("forward")
        drawn = [_drawn(work, trees[i], forward, i) for i, work in enumerate(plan.works)]
        watch.lap("draw")
        features = by_sequence(forward.features, [len(part.tokens) for part in rows])
        return Ticket(plan, trees, drawn, features, watch)

    def collect(self, ticket: Ticket) -> list[Verdict]:
        """Accept and commit: afterwards every sequence's tokens, pages and caches agree again."""
        parts = zip(ticket.plan.works, ticket.trees, ticket.drawn, ticket.features, strict=True)
        verdicts = [self._commit(*part) for part in parts]
        ticket.watch.lap("commit")
        return verdicts

    def _propose(self, works: list[Work]) -> list[DraftTree]:
        trees = [DraftTree.chain([work.sequence.tokens[-1]]) for work in works]
        drafting = [
            (i, work.shape) for i, work in enumerate(works) if work.shape and work.shape.levels and not work.lead
        ]
        if self.drafter is not None and drafting:
            sequences = [works[i].sequence for i, _ in drafting]
            for (i, _), tree in zip(drafting, self.drafter.propose(sequences, [s for _, s in drafting]), strict=True):
                trees[i] = tree
        return trees

    def _commit(self, work: Work, tree: DraftTree, drawn: Tensor | None, features: Features) -> Verdict:
        sequence, table = work.sequence, work.sequence.table
        table.commit(work.lead)
        if drawn is None:
            self.verifier.committed(table, None)
            self._show(work, [], features)
            if self.drafter is not None:
                self.drafter.extend(sequence)
            return Verdict(work)
        acceptance = accept(tree, drawn)
        # A broken draw is no child, so it is the last of its run: what came before it stands.
        sound = [token for token in acceptance.emitted if token != BROKEN]
        emitted = sequence.append(sound)
        if not sequence.finished and len(sound) < len(acceptance.emitted):
            sequence.finish_reason, sequence.error = "error", "the model's logits are not finite"
        path = acceptance.path[: len(emitted)]
        moves = _moves(sequence, path)
        table.commit(len(path))
        self.verifier.committed(table, moves)
        self._show(work, path, features)
        if self.drafter is not None and path:
            self.drafter.committed(sequence, path, moves)
        sequence.noise.forget_before(len(sequence.tokens))
        return Verdict(work, emitted, min(acceptance.accepted, len(emitted)), tree.depths.tolist()[1:])

    def _show(self, work: Work, path: list[int], features: Features) -> None:
        """Hand the features of what was just committed to a drafter that reads them."""
        reader = reader_of(self.drafter)
        if reader is not None and features and (work.lead or path):
            reader.observe(work.sequence, of_path(features, work.lead, path))


def _rows(work: Work, tree: DraftTree) -> Rows:
    """The rows of one sequence: its tree, or the chunk of committed tokens (ending in the root, if it gets there)."""
    if not work.lead:
        return Rows.of_tree(work.sequence.table, tree)
    base = work.sequence.table.length
    reaches = work.shape is not None
    chunk = work.sequence.tokens[base : base + work.lead + reaches]
    return Rows(work.sequence.table, torch.tensor(chunk), base, wanted="last" if reaches else "none")


def _drawn(work: Work, tree: DraftTree, forward: Forward, index: int) -> Tensor | None:
    """int64[N]: the draw at every node; None where nothing is drawn."""
    if work.shape is None:
        return None
    sequence = work.sequence
    # The token drawn at depth d sits one position past the node: tokens are numbered from 0, the root is the last.
    positions = [len(sequence.tokens) + depth for depth in tree.depths.tolist()]
    logits = _suppress_stops(forward.of(index), sequence, positions)
    noise = None if sequence.sampling.greedy else sequence.noise.rows(positions)
    drawn = draw(logits, sequence.sampling, noise)
    if sequence.forced is not None:
        return torch.tensor(
            [_forced(sequence, position, int(token)) for position, token in zip(positions, drawn, strict=True)]
        )
    return drawn


def _forced(sequence: Sequence, position: int, drawn: int) -> int:
    """The recorded token of this position, where the trace has one (bench: forced draws)."""
    index = position - sequence.prompt_length
    if sequence.forced is None or index >= len(sequence.forced) or drawn == BROKEN:
        return drawn
    return sequence.forced[index]


def _suppress_stops(logits: Tensor, sequence: Sequence, positions: list[int]) -> Tensor:
    """Rows whose token would be output number ``min_tokens`` or earlier cannot draw a stop token."""
    last = sequence.prompt_length + sequence.sampling.min_tokens
    early = [row for row, position in enumerate(positions) if position < last]
    if not early or not sequence.stop_ids:
        return logits
    logits = logits.clone()
    logits[torch.tensor(early)[:, None], torch.tensor(sorted(sequence.stop_ids))] = -torch.inf
    return logits


def _moves(sequence: Sequence, path: list[int]) -> tuple[Tensor, Tensor] | None:
    """Source and destination slots that make the accepted path contiguous; None if it is already (any chain)."""
    jumped = [(node, depth) for depth, node in enumerate(path) if node != depth]
    if not jumped:
        return None
    base = sequence.table.length
    slots = sequence.table.slots(base, base + path[-1] + 1)
    nodes, depths = zip(*jumped, strict=True)
    return slots[torch.tensor(nodes)], slots[torch.tensor(depths)]
