"""Recurrent states: what recurrent layers keep of a text, in constant size.

::

    tokens of a text    0 ......... boundary ...... length
    state pages                   boundary          page       free pages: the next pass, or commit, writes to these

A state page holds, for all recurrent layers, the state after some number of tokens of one text, and the rows that a
convolution still needs. A shared one is never written to: the next state goes to a spare page, and the one before is
unchanged. So rolling back a draft means not committing it, and a *checkpoint* is one more reference. A text keeps the
state at its last page boundary as its boundary, which becomes a checkpoint of the pool page that ends there once that
is published. A pass writes a record for each node (:class:`StateStore`); committing a path replays those of its nodes.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from torch import Tensor

from foresay.kvpaging.verbs import NONE, OutOfPages, Store, Table, TableState

#: The most nodes of a tree, and how many numbers of a state's row are contiguous.
NODES, LANES = 64, 16


class StatePages(Store):
    """The state pages of one pool, whose pages hold ``page_size`` tokens.

    sequences: the most of a pass that leave records. num_pages: state pages in all, including the padding page 0; a
    running text has up to four, and one where it forked from another. checkpoints: the state page after the last token
    of a page of the pool; the least recently used first. previous: of texts that have gone on since, the last boundary
    before theirs; kept while there is room. filling: pages that are being read back.
    """

    name = "state"

    def __init__(self, sequences: int, num_pages: int, page_size: int) -> None:
        self.sequences, self.num_pages, self.page_size = sequences, num_pages, page_size
        self.checkpoints: OrderedDict[int, int] = OrderedDict()
        self.previous: OrderedDict[TextState, tuple[int, int]] = OrderedDict()
        self.filling: list[int] = []
        self._references, self._free = [0] * num_pages, list(range(num_pages - 1, NONE, -1))

    def allocate(self) -> int:
        """A state page with one reference; ``NONE`` if all are in use. Checkpoints that no text uses are evicted, then
        previous boundaries."""
        while not self._free:
            idle = next((page for page, own in self.checkpoints.items() if self._references[own] == 1), None)
            if idle is not None:
                self.forget(idle)
            elif self.previous:
                self.drop_previous(next(iter(self.previous)))
            else:
                return NONE
        page = self._free.pop()
        self._references[page] = 1
        return page

    def retain(self, page: int) -> int:
        """Add a reference to a page in use; returns it."""
        assert page == NONE or self._references[page], f"state page {page} is free"
        self._references[page] += page != NONE
        return page

    def release(self, page: int) -> None:
        """Drop one reference."""
        if page != NONE:
            assert self._references[page], f"state page {page} is free already"
            self._references[page] -= 1
            if not self._references[page]:
                self._free.append(page)

    def is_shared(self, page: int) -> bool:
        """Whether it has more than one reference."""
        return self._references[page] > 1

    def add_checkpoint(self, page: int, own: int) -> None:
        """Make a state page the checkpoint of a page of the pool, unless that already has one."""
        if page not in self.checkpoints:
            self.checkpoints[page] = self.retain(own)
        self.checkpoints.move_to_end(page)

    def table_state(self, pages: Sequence[int]) -> TextState:
        """The state of an empty text."""
        return TextState(self)

    def local_page(self, page: int) -> int:
        """The state page of a page's checkpoint; ``NONE`` if it has none."""
        return self.checkpoints.get(page, NONE)

    def drop_previous(self, text: TextState) -> None:
        """Release the boundary before a text's last."""
        self.release(self.previous.pop(text, (0, NONE))[1])

    @contextmanager
    def loading(self, page: int) -> Iterator[int]:
        """A state page to fill, at the end the checkpoint of this page of the pool; ``NONE`` if there is no room."""
        if (own := self.allocate()) == NONE:
            yield NONE
            return
        self.filling.append(own)
        try:
            yield own
            self.add_checkpoint(page, own)
        finally:
            self.filling.remove(own)
            self.release(own)

    def forget(self, page: int) -> None:
        """Drop a page's checkpoint: the page is free, or the checkpoint is evicted."""
        self.release(self.checkpoints.pop(page, NONE))

    def replace(self, known: int, page: int) -> None:
        """The checkpoint stays with the text."""
        if known in self.checkpoints:
            self.add_checkpoint(page, self.checkpoints[known])
            self.forget(known)

    def restorable(self, pages: Sequence[int]) -> int:
        """The most leading pages of a text after which it can continue."""
        return max((count for count, page in enumerate(pages, 1) if page in self.checkpoints), default=0)

    def check(self, tables: Iterable[Table], free: Collection[int], cached: Collection[int]) -> None:
        """See :class:`~foresay.kvpaging.verbs.Store`."""
        held = Counter([*self.checkpoints.values(), *self.filling])
        for table in tables:
            if (state := recurrent_state(table)) is not None and state.pages is self:
                held.update(state.held)
                assert state.length <= table.length, f"a state of {state.length} tokens, of a text of {table.length}"
        assert set(cached).issuperset(self.checkpoints), "a checkpoint of a page that no text is found by"
        for page, found in enumerate(self._references):
            assert page == NONE or found == held[page], f"state page {page}: {found} references, {held[page]} found"
        unheld = [page for page in range(1, self.num_pages) if not held[page]]
        assert sorted(self._free) == unheld, "a state page is lost or held twice"


class SavePoint(NamedTuple):
    """After this many rows of a pass the state is saved, in this page."""

    rows: int
    page: int


class TextState(TableState):
    """The state pages of one text.

    length: tokens that the state includes. page: its page; ``NONE`` before the first token. boundary: the last page
    boundary and its state's page (the one before: ``pages.previous``). fork_at: the length of a known prefix whose
    state is not known; 0: none. fork_state: that length and its state's page, once computed. Owns a reference to each.
    """

    __slots__ = ("boundary", "fork_at", "fork_state", "free_pages", "length", "page", "pages")

    def __init__(self, pages: StatePages) -> None:
        self.pages, self.length, self.page, self.fork_at = pages, 0, NONE, 0
        self.boundary = self.fork_state = 0, NONE
        self.free_pages: list[int] = []

    @property
    def held(self) -> list[int]:
        """All pages that it holds a reference to."""
        before = self.pages.previous.get(self, (0, NONE))[1]
        held = (self.page, self.boundary[1], self.fork_state[1], before, *self.free_pages)
        return [page for page in held if page != NONE]

    @property
    def boundaries(self) -> list[tuple[int, int]]:
        """Tokens and state page of each page boundary whose state is still there."""
        found = self.fork_state, self.boundary, (self.length, self.page)
        return [(at, page) for at, page in found if page != NONE and at % self.pages.page_size == 0]

    def reserve(self, fresh: int, steps: int) -> None:
        """See :class:`~foresay.kvpaging.verbs.TableState`. Steps that write without the host need two pages each."""
        if not self.refill(steps) or len(self.free_pages) < 2 * steps:
            raise OutOfPages("all state pages are in use")

    def refill(self, steps: int = 1) -> bool:
        """Get pages to write to for as many steps: one each, and one for a boundary if there is room; False if the
        first has too few. A prompt's last rows and its root are two commits of one pass: the second writes where the
        first came from, unless the text has no page yet or shares it."""
        while len(self.free_pages) < 2 * max(steps, 1) and (page := self.pages.allocate()) != NONE:
            self.free_pages.append(page)
        least = 1 + (self.page == NONE or self.pages.is_shared(self.page))
        if len(self.free_pages) < least and self.boundary[1] != NONE:
            self._drop_boundaries()
            return self.refill()
        return len(self.free_pages) >= least

    def commit_pages(self, ahead: int = 0) -> tuple[int, int, int]:
        """The state page that a step's commit on a device starts from, and those that it writes: after the whole path,
        and at a page boundary inside, ``NONE`` without a page for it. Each step has others, so one that ran ahead and
        was dropped changes nothing. ahead: steps before it whose outcome is not known; pages are reserved for all."""
        end, inside = [*self.free_pages[2 * ahead : 2 * ahead + 2], NONE][:2]
        return self.free_pages[2 * ahead - 2] if ahead else self.page, end, inside

    def align_chunk(self, rows: int) -> int:
        """The number of prompt rows, reduced to end at the branch, whose state is saved."""
        return self.fork_at - self.length if self.length < self.fork_at < self.length + rows else rows

    def save_points(self, rows: int) -> tuple[SavePoint, SavePoint]:
        """Where a pass over the next rows of the text saves states: at the last page boundary inside, and at the end.
        At row 0, that is nowhere, if there are no rows or no page."""
        end = SavePoint(rows, self.free_pages[0]) if rows and self.free_pages else SavePoint(0, NONE)
        inside = self._to_boundary(rows)
        return SavePoint(inside, self.free_pages[1]) if inside and len(self.free_pages) > 1 else SavePoint(0, NONE), end

    def commit_rows(self, rows: int) -> None:
        """A pass over this many rows has run, and they are text now: take over the states that it saved."""
        (inside, boundary), (_, page) = self.save_points(rows)
        assert page != NONE, "a page was reserved"
        if inside:
            self._set_boundary((self.length + inside, boundary))
            self.pages.release(self.page)
            self.free_pages.remove(boundary)
        else:
            self._leave()
            self.free_pages += self.free_pages[1:2]  # those of the next step come first
            del self.free_pages[1:2]
        self.free_pages.remove(page)
        self.page, self.length = page, self.length + rows
        if self.length == self.fork_at:
            self.pages.release(self.fork_state[1])
            self.fork_state = self.length, self.pages.retain(page)

    def replays(self, count: int) -> Iterator[tuple[int, int, int]]:
        """To commit ``count`` nodes of a path: (source state page, destination, nodes to replay); each is applied to
        the text when the next is requested."""
        inside = self._to_boundary(count)
        for part in (inside, count - inside) if inside else (count,):
            page = self._writable()
            yield self.page, page, part
            if page != self.page:
                self._leave()
                self.page = page
            self.length += part

    def checkpoint(self, length: int, page: int) -> None:
        """See :class:`~foresay.kvpaging.verbs.TableState`."""
        for at, own in self.boundaries:
            if at == length:
                self.pages.add_checkpoint(page, own)

    def restore(self, length: int) -> int:
        """Go back to one of the last two boundaries, or to 0, where nothing is held any more."""
        if 0 < length >= self.length:
            return self.length
        known = self.boundary, self.pages.previous.get(self, (0, NONE)), (0, NONE)
        at, page = next(each for each in known if each[0] <= length)
        self.pages.retain(page)
        self.release()
        self.length, self.page = at, page
        return at

    def adopt(self, pages: Sequence[int], known: int) -> None:
        """Start from the checkpoint of the last of these pages. A checkpoint is made where the ``known`` text ends."""
        assert self.page == NONE, "adopt is for an empty text"
        if pages:
            self.length = len(pages) * self.pages.page_size
            self.page = self.pages.retain(self.pages.local_page(pages[-1]))
            self.pages.add_checkpoint(pages[-1], self.page)  # as the one used last
        self.fork_at = known

    def drop_checkpoints(self) -> None:
        """Release what it keeps of its past: checkpoints of later requests, and where it could go back to."""
        self._drop_boundaries()
        self.pages.release(self.fork_state[1])
        self.fork_state = 0, NONE

    def fork(self, other: TableState) -> None:
        """Both write to other pages from now on."""
        assert isinstance(other, TextState)
        other.length, other.page = self.length, self.pages.retain(self.page)
        other.boundary = self.boundary[0], self.pages.retain(self.boundary[1])

    def release(self) -> None:
        """Release all pages."""
        self.pages.drop_previous(self)
        for page in self.held:
            self.pages.release(page)
        self.free_pages.clear()
        self.length, self.page, self.fork_at, self.boundary, self.fork_state = 0, NONE, 0, (0, NONE), (0, NONE)

    def _to_boundary(self, rows: int) -> int:
        """Rows up to the last page boundary before the end of ``rows``; 0 if there is none."""
        size = self.pages.page_size
        return max((self.length + rows - 1) // size * size - self.length, 0) if rows else 0

    def _writable(self) -> int:
        """The page of the next state: the same page, unless it is shared or a boundary's."""
        apart = self.page == NONE or self.pages.is_shared(self.page)
        if not apart and self.length % self.pages.page_size:
            return self.page
        if not self.free_pages:
            self.refill()
        assert self.free_pages or not apart, "a page was reserved"
        return self.free_pages.pop() if self.free_pages else self.page

    def _leave(self) -> None:
        """The state moves to another page: this one becomes the boundary, or is released."""
        if self.length % self.pages.page_size == 0 and self.page != NONE:
            self._set_boundary((self.length, self.page))
        else:
            self.pages.release(self.page)

    def _set_boundary(self, boundary: tuple[int, int]) -> None:
        """The boundary before stays too: a stop string, found by the server, may cut the text before the new one."""
        self.pages.drop_previous(self)
        if self.boundary[1] != NONE:
            self.pages.previous[self] = self.boundary
        self.boundary = boundary

    def _drop_boundaries(self) -> None:
        self.pages.drop_previous(self)
        self.pages.release(self.boundary[1])
        self.boundary = 0, NONE


def recurrent_state(table: Table) -> TextState | None:
    """The state of a page table's text; None if its pool has no state pages."""
    return next((state for state in table.states if isinstance(state, TextState)), None)


class RecurrentShape(Protocol):
    """What recurrent layers, all of the same shape, keep of a text.

    Each of ``value_heads`` heads, if there are any, has a state of ``key_dim`` rows of ``value_dim`` numbers; ``taps``
    rows of ``channels`` numbers enter each row's convolution. record: numbers that a node writes besides its row.
    """

    @property
    def value_heads(self) -> int: ...

    @property
    def key_dim(self) -> int: ...

    @property
    def value_dim(self) -> int: ...

    @property
    def taps(self) -> int: ...

    @property
    def channels(self) -> int: ...

    @property
    def record(self) -> int: ...


class LayerStates(NamedTuple):
    """One layer of a store, or all: then each has a leading layer dimension. P state pages, N records, C channels.

    All are fp32. states: [P, heads, value_dim / 16, key_dim, 16]. tails: [P, taps - 1, C], the inputs of the
    convolution before the next row. records: [N, ..], a node's keys, the differences of its heads' values from the
    remembered ones, and their decays. rows: [N, C], what a node adds to the tail. Node n of sequence number s of a pass
    has record ``s * 64 + n``.
    """

    states: Tensor
    tails: Tensor
    records: Tensor
    rows: Tensor


class StateStore(Store):
    """The recurrent states of one model, in the state pages of a pool.

    layers: of all layers, see :class:`LayerStates`; zeros at the start.
    """

    def __init__(self, pages: StatePages, kind: RecurrentShape, layers: int, zeros: Callable[..., Tensor]) -> None:
        assert kind.value_dim % LANES == 0 and kind.key_dim % LANES == 0, "heads of whole vectors"
        self.pages = pages
        records = layers, pages.sequences * NODES
        tiles = kind.value_heads, kind.value_dim // LANES, kind.key_dim, LANES
        self.layers = LayerStates(
            zeros((layers, pages.num_pages, *tiles)),
            zeros((layers, pages.num_pages, kind.taps - 1, kind.channels)),
            zeros((*records, kind.record)),
            zeros((*records, kind.channels)),
        )

    def __iter__(self) -> Iterator[LayerStates]:
        """The states of each layer."""
        return map(LayerStates, *self.layers)

    def parts(self, kind: Store, own: int) -> list[Tensor]:
        """States and tails of one state page, [L, ..] each, if there are any and the page is of this kind."""
        return [part[:, own] for part in self.layers[:2] if kind is self.pages and part.numel()]

    def forget(self, page: int) -> None:
        """Its checkpoint goes with it."""
        self.pages.forget(page)

    def clamp(self, page: int, rows: int) -> None:
        """Its end is text no more, of which it may have a checkpoint."""
        self.pages.forget(page)
