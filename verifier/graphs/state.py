"""The state of sequences that a captured step reads, and how it advances from step to step.

The tensors live as long as the engine. The host writes them when a sequence joins or its pages change; after that each
step updates them for the next one, so that the next can start before the host has this one's outcome.

Legend: S sequences, P pages of a table, T tokens of a text's end, N nodes of a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foresay.kvpaging import WindowPages
from foresay.kvpaging.states import NONE
from foresay.spec.sampling import SamplingParams
from foresay.verifier.forward_batch import StaticRows
from foresay.verifier.ops.records import AcceptedPaths, RowSampling, StateRows
from foresay.verifier.ops.trees import advance, positions_below


@dataclass(frozen=True, slots=True)
class BatchSlot:
    """One sequence when it joins a captured step. text: its end, the root last. states: the state pages before and
    after the text's last row."""

    pages: list[int]
    length: int
    text: Sequence[int]
    sampling: SamplingParams
    seed: int
    states: tuple[int, int] = NONE, NONE

    @property
    def sampled(self) -> tuple[object, ...]:
        """Everything that determines how its rows are sampled, except their positions."""
        return self.sampling, self.seed, self is _PADDING


_PADDING = BatchSlot([], 0, (), SamplingParams(temperature=0.0), 0)


class StateColumns:
    """The states that captured passes with recurrent layers start from: before the last row of each text, as a draft
    model needs it, and after it, before nodes; and where a captured step on a device leaves the next ones."""

    def __init__(self, sequences: int, device: torch.device) -> None:
        def column(*row: int) -> Tensor:
            return torch.tensor([row] * sequences, dtype=torch.int32).to(device)

        self._text = column(NONE, NONE, NONE), column(0, 1), column(1).flatten()
        self._nodes = column(NONE, NONE, NONE), column(0, 0), column(0).flatten()

    def write(self, first: int, pages: Sequence[tuple[int, int]]) -> None:
        """Write the state pages of :class:`BatchSlot`, from the first of these sequences on."""
        those = slice(first, first + len(pages))
        write(self._text[0][those], [(before, NONE, page) for before, page in pages])
        write(self._nodes[0][those], [(page, NONE, NONE) for _, page in pages])

    @property
    def targets(self) -> Tensor:
        """int32[S, 3]: see :func:`foresay.verifier.ops.recurrence.replay_paths`."""
        return self._nodes[0]

    def aim(self, targets: Sequence[tuple[int, int, int]]) -> None:
        """Write them for the next step, of the first sequences."""
        write(self.targets[: len(targets)], targets)

    def with_states(self, rows: StaticRows, text: bool = False) -> StaticRows:
        """Add the states to the rows of nodes, or of a text's last row and a node."""
        (group,), states = rows.groups, self._text if text else self._nodes
        return replace(rows, states=StateRows(replace(group.paged, is_prefill=states[-1]), *states, rows.count))


class StepState:
    """The sequences of one bucket; all tensors are on the device, and never replaced.

    tables: int32[S, P], page ids, 0 (the padding page) where there is none. lengths: int32[S], committed tokens, whose
    KV the target has. ends: int64[S, 1], the position after the root. live: int32[S], 1, or 0 for a batch slot that is
    only padding. recent: int64[S, T], the ends of the texts, the root last; tokens before the ``length + 1 - T``-th are
    not known. window_tables: int32[S, P], the same for layers with window pages; None if there are none. states: of
    recurrent layers; None if there are none.
    """

    def __init__(
        self,
        sequences: int,
        pages: int,
        page_size: int,
        reach: int,
        device: torch.device | str,
        windows: WindowPages | None = None,
        recurrent: bool = False,
    ) -> None:
        self.page_size, self.device, self._windows = page_size, torch.device(device), windows
        self.states = StateColumns(sequences, self.device) if recurrent else None
        self.tables = torch.zeros(sequences, pages, dtype=torch.int32, device=device)
        self.window_tables = None if windows is None else torch.zeros_like(self.tables)
        self.lengths = torch.zeros(sequences, dtype=torch.int32, device=device)
        self.ends = torch.ones(sequences, 1, dtype=torch.int64, device=device)
        self.live = torch.zeros(sequences, dtype=torch.int32, device=device)
        self.recent = torch.zeros(sequences, reach, dtype=torch.int64, device=device)
        self._sampling: dict[int, RowSampling] = {}
        self._offsets: dict[int, Tensor] = {}
        self._rows_of_live: dict[int, Tensor] = {}
        self._places = [_PADDING] * sequences
        self._pages: list[list[int]] = [[] for _ in range(sequences)]
        self._seen: list[list[int]] = [[] for _ in range(sequences)]

    @property
    def size(self) -> int:
        """S, the number of batch slots."""
        return len(self.lengths)

    @property
    def roots(self) -> Tensor:
        """int64[S]: the last committed token of each, whose KV is not stored yet."""
        return self.recent[:, -1]

    def offsets(self, count: int) -> Tensor:
        """int32[S + 1]: the row offset of each sequence if each has ``count`` rows."""
        if count not in self._offsets:
            self._offsets[count] = (torch.arange(self.size + 1, dtype=torch.int32) * count).to(self.device)
        return self._offsets[count]

    def live_rows(self, count: int) -> Tensor:
        """int64[1]: the number of rows before padding if each sequence has ``count``."""
        if count not in self._rows_of_live:
            self._rows_of_live[count] = torch.tensor([count * self._live]).to(self.device)
        return self._rows_of_live[count]

    @property
    def _live(self) -> int:
        return sum(place is not _PADDING for place in self._places)

    def sampling(self, depths: Tensor) -> RowSampling:
        """How the tokens below nodes of these depths are sampled, N rows for each sequence.

        depths: int32[S, N], contiguous. All tensors except the positions are filled by the host (:meth:`join`).
        """
        nodes = depths.shape[-1]
        if nodes not in self._sampling:
            self._sampling[nodes] = self._rows(nodes, self.device)
        return replace(self._sampling[nodes], positions=positions_below(self.ends, depths))

    @torch.inference_mode()
    def join(self, sequences: Sequence[BatchSlot]) -> None:
        """Write all batch slots; those past the given sequences become padding."""
        size = self.size
        places = [*sequences, *[_PADDING] * (size - len(sequences))]
        self.write_tables([place.pages for place in places], [place.length for place in places])
        write(self.lengths, [place.length for place in places])
        write(self.ends, [[place.length + 1] for place in places])
        write(self.recent, [self._end(place.text) for place in places])
        if self.states is not None:
            self.states.write(0, [place.states for place in places])
        before, self._places = self._places, places
        if [place.sampled for place in before] == [place.sampled for place in places]:
            return
        write(self.live, [int(place is not _PADDING) for place in places])
        for count, rows in self._rows_of_live.items():
            write(rows, [count * self._live])
        for nodes, kept in self._sampling.items():
            fresh = self._rows(nodes, "cpu")
            for name in ("temperature", "top_k", "top_p", "min_p", "seeds"):
                write(getattr(kept, name), getattr(fresh, name))

    @torch.inference_mode()
    def write_tables(self, pages: Sequence[list[int]], lengths: Sequence[int]) -> None:
        """Write the page ids of the first batch slots, of which only the first P matter; nothing is copied if they are
        unchanged.

        Entries after them are not read, except without any: rows of padding go to the padding page. lengths: at least
        how many tokens their texts have.
        """
        width = self.tables.shape[1]
        for place, row in enumerate(pages):
            if self._pages[place] != row[:width]:
                self._pages[place] = list(row[:width])
                if row:
                    write(self.tables[place, : len(row)], self._pages[place])
                else:
                    self.tables[place].zero_()
        if self._windows is not None:
            for place, (row, length) in enumerate(zip(pages, lengths, strict=True)):
                self._write_window(self._windows, place, row[:width], self._windows.first(length))

    def _write_window(self, windows: WindowPages, place: int, row: list[int], first: int) -> None:
        """Write the window pages of a batch slot, from the first that is attended to."""
        assert self.window_tables is not None
        own = windows.of[row[first:]].tolist()
        if self._seen[place] != [first, *own]:
            self._seen[place] = [first, *own]
            if own:
                write(self.window_tables[place, first : len(row)], own)
            else:
                self.window_tables[place].zero_()

    def _rows(self, nodes: int, device: torch.device | str) -> RowSampling:
        """How ``nodes`` rows of each batch slot are sampled, at position 0."""
        params = [place.sampling for place in self._places for _ in range(nodes)]
        seeds = [place.seed for place in self._places for _ in range(nodes)]
        return RowSampling.of(params, seeds, [0] * len(params), device)

    def _end(self, text: Sequence[int]) -> list[int]:
        reach = self.recent.shape[1]
        end = list(text[-reach:])
        return [*[0] * (reach - len(end)), *end]

    def advance(self, taken: AcceptedPaths) -> None:
        """The accepted paths become text; the last emitted token of each is the new root."""
        # The host does not emit a broken sample, and drops the step that runs ahead.
        advance(self.recent, self.lengths, self.ends, taken.emitted, taken.lengths)


def write(target: Tensor, values: Tensor | Sequence[object]) -> None:
    """Copy from the host without waiting for the device: through pinned memory, kept until it is read."""
    if target.device.type == "cpu":
        target.numpy()[:] = values
        return
    fresh = values if isinstance(values, Tensor) else torch.tensor(values, dtype=target.dtype)
    if target.device.type == "cuda":
        fresh = fresh.pin_memory()
    target.copy_(fresh, non_blocking=True)
