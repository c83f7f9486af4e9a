"""Drafters that read the target's hidden state of a text's last committed position, and of none before.

That state comes from the very pass that the root was sampled from, so none is missing after a prefix hit or a
preemption, and pages need not keep one for each of their positions. Two are enough: the latest that was written in it,
and the one that the step which wrote it began with::

    position     0 .. page size - 1 | page size ..    length - 1 | length     ..
    states                          |                 kept         root       latest, of a step that ran ahead

If that step is dropped, the text goes on from the other one. Both are functions of the text alone, as the page is, so
texts that share a page share them too.

Legend: H width of a state, S sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foresay.drafters.hidden_states import HiddenStateDrafter
from foresay.kvpaging import PagePool, Store
from foresay.spec.protocols import FeatureRequest, Features
from foresay.spec.sequence import SequenceState
from foresay.verifier.graphs.proposer import AcceptedTree
from foresay.verifier.graphs.state import StepState


class LastStates(Store):
    """A text that became shorter writes its last state again before it reads it.

    rows: [2 * pages, H], two of each page. latest: int64[pages], which of the two was written last; positions:
    int64[pages], of which position.
    """

    def __init__(self, pool: PagePool, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.rows = torch.zeros(2 * pool.num_pages, width, dtype=dtype, device=device)
        self.latest, self.positions = (torch.zeros(pool.num_pages, dtype=torch.int64).to(device) for _ in range(2))
        pool.attach(self)

    def read(self, pages: Tensor, positions: Tensor) -> Tensor:
        """[S, H]: the states of these positions, int64[S] like their pages: each the last that was written there, or
        the one that was kept then."""
        other = self.positions.index_select(0, pages) != positions
        return self.rows.index_select(0, 2 * pages + (self.latest.index_select(0, pages) ^ other))

    def write(self, pages: Tensor, positions: Tensor, states: Tensor, kept: Tensor) -> None:
        """kept: int64[S], the positions whose states must stay."""
        same = self.positions.index_select(0, pages) == kept
        latest = self.latest.index_select(0, pages) ^ same
        self.rows.index_copy_(0, 2 * pages + latest, states)
        self.latest.index_copy_(0, pages, latest)
        self.positions.index_copy_(0, pages, positions)

    def put(self, page: int, position: int, state: Tensor) -> None:
        """The same of one position, [H], from the host: nothing is kept."""
        self.rows[2 * page], self.latest[page], self.positions[page] = state, 0, position

    def copy(self, source: int, destination: int) -> None:
        """The copy has the same states."""
        for each, count in ((self.rows, 2), (self.latest, 1), (self.positions, 1)):
            each[count * destination : count * (destination + 1)] = each[count * source : count * (source + 1)]


class LastStateDrafter(HiddenStateDrafter):
    """Owns ``last``, the rows. width, dtype: of the target's state after its last norm, H the width."""

    def __init__(self, name: str, pool: PagePool, width: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(name, device, pool)
        self.needs = FeatureRequest(final=True, sampled=True)
        self.last = LastStates(pool, width, dtype, device)
        #: Of each sequence: how long the text was whose state is kept, and one that has yet to be written.
        self._lengths: dict[str, int] = {}
        self._unwritten: dict[str, Tensor] = {}

    def observe(self, sequence: SequenceState, features: Features) -> None:
        """The last one is written when a draft needs it."""
        self._unwritten[sequence.id] = features["final"][-1]
        self._lengths[sequence.id] = sequence.table.length

    def able(self, sequence: SequenceState) -> bool:
        """Whether there is a text, and its last state is known."""
        table = sequence.table
        if not table.length or self._lengths.get(sequence.id) != table.length:
            return False
        if (state := self._unwritten.pop(sequence.id, None)) is not None:
            self.last.put(table.pages[(table.length - 1) // self._page_size], table.length - 1, state)
        return True

    def keep(self, features: Features, positions: Tensor, slots: Tensor) -> None:
        """Of the rows of a prompt, each page's last; the others, as padding, go to the padding page."""
        pages = slots // self._page_size
        ends = torch.cat((pages[1:] != pages[:-1], pages.new_ones(1, dtype=torch.bool)))
        self.last.write(pages * ends, positions, features["final"], torch.full_like(positions, -1))

    def follow(self, state: StepState, taken: AcceptedTree, levels: int) -> None:
        """Keep the state of each path's last node."""
        last = (taken.paths.lengths - 1).clamp(min=0)[:, None]
        nodes, slots = (each.gather(1, last)[:, 0] for each in (taken.paths.paths, taken.slots))
        first = torch.arange(state.size, device=nodes.device) * taken.slots.shape[1]
        final = taken.features["final"].index_select(0, nodes.clamp(min=0) + first)
        begun = state.lengths.long()
        self.last.write(slots // self._page_size, begun + last[:, 0], final, begun - 1)

    def before(self, state: StepState, slots: Tensor) -> Tensor:
        """[S, H]: the states before the roots. slots: int64[S], of those positions; anything where there is only
        padding."""
        return self.last.read(slots * state.live // self._page_size, state.lengths.long() - 1)

    def stored(self, sequence: SequenceState, count: int) -> None:
        """The last position's state is written."""
        self._unwritten.pop(sequence.id, None)
        self._lengths[sequence.id] = sequence.table.length

    def finished(self, sequence: SequenceState) -> None:
        """Forget what is known of it."""
        super().finished(sequence)
        self._unwritten.pop(sequence.id, None)
        self._lengths.pop(sequence.id, None)
