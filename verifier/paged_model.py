"""A decoder with a KV store on the shared pages: what the engine calls, as target or as draft model."""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch
from torch import Tensor

from kvpaging import KVStore, PageTable
from spec.draw import Undrawn
from spec.protocols import FeatureRequest, Forward, Rows
from verifier.model.decoder import Decoder
from verifier.model.paged_pass import paged_pass
from verifier.model.recorded_pass import RecordedPass
from verifier.ops.draw import RowSampling, draw_rows
from verifier.ops.eager import compiled
from verifier.paged_rows import StaticRows


class PagedModel:
    """Implements :class:`spec.protocols.Verifier`. Owns its KV store; page tables belong to the sequences."""

    def __init__(self, decoder: Decoder, store: KVStore, max_positions: int) -> None:
        self.decoder, self.store = decoder, store
        self._passes: dict[FeatureRequest | None, RecordedPass] = {}
        self._last: RecordedPass | None = None
        self.vocab_size = decoder.config.vocab_size
        self.max_positions = max_positions

    def run(self, rows: Many[Rows], features: FeatureRequest | None = None) -> Forward:
        """One forward pass over ragged rows of several sequences: trees, chains and prefill chunks mixed.

        Logits come to the host, where they are drawn from; features stay on the model's device. Both are good until the
        next pass.
        """
        if compiled(self.store.keys):
            if features not in self._passes:
                self._passes[features] = RecordedPass(self.decoder, self.store, features)
            self._last = self._passes[features]
            return self._last(rows)
        static = StaticRows.of(rows, self.store.keys.device)
        logits, taken = paged_pass(self.decoder, static, self.store, features)
        return Forward(logits.cpu(), list(static.starts), static.in_order(taken))

    def draw(self, rows: Many[Undrawn]) -> list[Tensor]:
        """int64[N] of each sequence, on the host; drawn where the model is: a device's logarithms are its own."""
        if self._last is not None and self._last.has(rows):
            return self._last.draw(rows)
        device = self.decoder.device
        logits = torch.cat([each.logits for each in rows]).to(device)
        drawn = draw_rows(logits, RowSampling.of_nodes(rows, device))
        return list(drawn.cpu().split([len(each.positions) for each in rows]))

    def committed(self, table: PageTable, moves: tuple[Tensor, Tensor] | None) -> None:
        """Accepted rows move down to be contiguous; everything up to the table's length is then valid."""
        if moves is not None:
            self.store.move(*moves)
        self.store.mark(table, table.length)

    def missing(self, table: PageTable) -> int:
        """Committed tokens without valid KV in this store."""
        return table.length - self.store.filled(table)
