"""The state of sequences that a captured step reads, and how it advances from step to step.

The tensors live as long as the engine, in one buffer. The host writes it when a sequence joins, and the part of it that
steps only read when pages change; each step updates the rest for the next one, so that the next can start before the
host has this one's outcome.

Legend: S sequences, P pages of a table, T tokens of a text's end, N nodes of a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foresay.kvpaging import WindowPages
from foresay.kvpaging.verbs import NONE
from foresay.spec.sampling import SamplingParams
from foresay.verifier.forward_batch import StaticRows
from foresay.verifier.graphs.staging import Column, PageTables, Staged
from foresay.verifier.ops.records import SAMPLING, AcceptedPaths, RowSampling, SamplingColumns, StateRows
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
    def is_live(self) -> bool:
        """Whether it is more than padding."""
        return self is not _PADDING

    @property
    def sampled(self) -> tuple[object, ...]:
        """Everything that determines how its rows are sampled, except their positions."""
        return self.sampling, self.seed


_PADDING = BatchSlot([], 0, (), SamplingParams(temperature=0.0), 0)


class StateColumns:
    """The states that captured passes with recurrent layers start from: before the last row of each text, as a draft
    model needs it, and after it, before nodes; and where a captured step on a device leaves the next ones."""

    def __init__(self, staged: Staged, sequences: int, device: torch.device) -> None:
        def column(*row: int) -> Tensor:
            return torch.tensor([row] * sequences, dtype=torch.int32).to(device)

        self._staged = staged
        self._text = staged.tensors["text_states"], column(0, 1), column(1).flatten()
        self._nodes = staged.tensors["node_states"], column(0, 0), column(0).flatten()

    def write(self, first: int, pages: Sequence[tuple[int, int]]) -> None:
        """Write the state pages of :class:`BatchSlot`, from the first of these sequences on."""
        to, those = self._staged.writable(), slice(first, first + len(pages))
        to["text_states"][those] = [(before, NONE, page) for before, page in pages]
        to["node_states"][those] = [(page, NONE, NONE) for _, page in pages]

    @property
    def targets(self) -> Tensor:
        """int32[S, 3]: see :func:`foresay.verifier.ops.recurrence.replay_paths`."""
        return self._nodes[0]

    def aim(self, targets: Sequence[tuple[int, int, int]]) -> None:
        """Write them for the next step, of the first sequences."""
        self._staged.writable()["node_states"][: len(targets)] = targets

    def with_states(self, rows: StaticRows, text: bool = False) -> StaticRows:
        """Add the states to the rows of nodes, or of a text's last row and a node."""
        (group,), states = rows.groups, self._text if text else self._nodes
        return replace(rows, states=StateRows(replace(group.metadata, is_prefill=states[-1]), *states, rows.count))


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
        self.size, self.page_size, self.device = sequences, page_size, torch.device(device)
        tables, each = ((sequences, pages), torch.int32), ((sequences,), torch.int32)
        columns: dict[str, Column] = {"tables": tables, "live": each}
        columns |= {} if windows is None else {"window_tables": tables}
        columns |= dict.fromkeys(("text_states", "node_states"), ((sequences, 3), torch.int32)) if recurrent else {}
        ends, recent = ((sequences, 1), torch.int64), ((sequences, reach), torch.int64)
        self._staged = Staged(self.device, columns, {"lengths": each, "ends": ends, "recent": recent})
        self.states = StateColumns(self._staged, sequences, self.device) if recurrent else None
        there, self._tables = self._staged.tensors, PageTables(self._staged, windows)
        self.tables, self.live, self.window_tables = there["tables"], there["live"], there.get("window_tables")
        self.lengths, self.ends, self.recent = there["lengths"], there["ends"], there["recent"]
        self._sampling: dict[int, Staged] = {}
        self._offsets: dict[int, Tensor] = {}
        self._rows_of_live: dict[int, Tensor] = {}
        self._slots = [_PADDING] * sequences
        self.join([])

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
        return sum(slot.is_live for slot in self._slots)

    def sampling(self, depths: Tensor) -> RowSampling:
        """How the tokens below nodes of these depths are sampled, N rows for each sequence.

        depths: int32[S, N], contiguous. All tensors except the positions are filled by the host (:meth:`join`).
        """
        nodes = depths.shape[-1]
        if nodes not in self._sampling:
            rows = (self.size * nodes,)
            self._sampling[nodes] = Staged(self.device, {name: (rows, dtype) for name, dtype in SAMPLING.items()})
            self._write_sampling(nodes)
        return RowSampling(**self._sampling[nodes].tensors | {"positions": positions_below(self.ends, depths)})

    @torch.inference_mode()
    def join(self, sequences: Sequence[BatchSlot]) -> None:
        """Write all batch slots; those past the given sequences become padding."""
        to, before, reach = self._staged.writable(), self._slots, self.recent.shape[1]
        self._slots = [*sequences, *[_PADDING] * (self.size - len(sequences))]
        for number, slot in enumerate(self._slots):
            self._tables.write(number, slot.pages, slot.length)
            to["lengths"][number], to["ends"][number], to["live"][number] = slot.length, slot.length + 1, slot.is_live
            end = list(slot.text[-reach:])
            to["recent"][number] = [*[0] * (reach - len(end)), *end]
        if self.states is not None:
            self.states.write(0, [slot.states for slot in self._slots])
        self._staged.send()
        for count, rows in self._rows_of_live.items():
            write(rows, [count * self._live])
        if [slot.sampled for slot in before] != [slot.sampled for slot in self._slots]:
            for nodes in self._sampling:
                self._write_sampling(nodes)

    @torch.inference_mode()
    def write_tables(
        self, pages: Sequence[list[int]], lengths: Sequence[int], targets: Sequence[tuple[int, int, int]] = ()
    ) -> None:
        """Write the page ids of the first batch slots; nothing is sent if they are unchanged.

        lengths: at least how many tokens their texts have. targets: of recurrent layers, see :class:`StateColumns`.
        """
        changed = [self._tables.write(number, *each) for number, each in enumerate(zip(pages, lengths, strict=True))]
        if self.states is not None and targets:
            self.states.aim(targets)
        if any(changed) or targets:
            self._staged.send(advanced=False)

    @torch.inference_mode()
    def write_states(self, number: int, states: tuple[int, int]) -> None:
        """Write the state pages of one batch slot."""
        assert self.states is not None, "there are recurrent layers"
        self.states.write(number, [states])
        self._staged.send(advanced=False)

    @torch.inference_mode()
    def mark_live(self, going: Sequence[bool]) -> None:
        """Which of the first batch slots are more than padding, until the next :meth:`join`."""
        self._staged.writable()["live"][: len(going)] = going
        self._staged.send(advanced=False)

    def _write_sampling(self, nodes: int) -> None:
        """Write how ``nodes`` rows of each batch slot are sampled."""
        columns = SamplingColumns(**self._sampling[nodes].writable())
        for number, slot in enumerate(self._slots):
            columns.write(slice(number * nodes, number * nodes + nodes), slot.sampling, slot.seed, 0)
        self._sampling[nodes].send()

    def advance(self, taken: AcceptedPaths) -> None:
        """The accepted paths become text; the last emitted token of each is the new root."""
        # The host does not emit a broken sample, and drops the step that runs ahead.
        advance(self.recent, self.lengths, self.ends, taken.emitted, taken.lengths)


def sent(values: Tensor, device: torch.device) -> Tensor:
    """Values of the host on a device, without waiting for it."""
    if device.type == "cpu":
        return values
    there = torch.empty_like(values, device=device)
    write(there, values)
    return there


def write(target: Tensor, values: Tensor | Sequence[object]) -> None:
    """Copy from the host without waiting for the device: through pinned memory, kept until it is read."""
    if target.device.type == "cpu":
        target.numpy()[:] = values
        return
    fresh = values if isinstance(values, Tensor) else torch.tensor(values, dtype=target.dtype)
    if target.device.type == "cuda":
        fresh = fresh.pin_memory()
    target.copy_(fresh, non_blocking=True)
