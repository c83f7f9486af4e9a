"""A decoder with a KV store on the shared pages: what the engine calls, as target or as draft model."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpaging import KVStore, PageTable
from spec.draw import Undrawn
from spec.protocols import Drawn, FeatureRequest, Forward, Rows
from verifier.model.decoder import Decoder
from verifier.model.paged_pass import paged_pass
from verifier.model.recorded_pass import RecordedPass
from verifier.ops.draw import draw_rows
from verifier.ops.eager import compiled
from verifier.paged_rows import StaticRows
from verifier.settle import WrittenTrees, of_roots, settle


@dataclass(frozen=True, slots=True)
class _Passed:
    """A pass that was run op by op. logits: on the host."""

    store: KVStore
    rows: StaticRows
    logits: Tensor

    @torch.inference_mode()
    def settle(self, trees: Many[Undrawn | None]) -> list[Drawn | None]:
        """See :meth:`spec.protocols.Verifier.settle`."""
        written, device = WrittenTrees(len(trees), len(self.logits)), self.rows.slots.device
        if not written.write(trees, self.rows.starts[1:]):
            drawn = draw_rows(self.logits.to(device), written.sampling.to(device))
            return of_roots(drawn.cpu(), trees, self.rows.starts[1:])
        written.move(device)
        return settle(self.store, self.rows, self.logits.to(device), written).on_host(trees)


class PagedModel:
    """Implements :class:`spec.protocols.Verifier`. Owns its KV store; page tables belong to the sequences."""

    def __init__(self, decoder: Decoder, store: KVStore, max_positions: int) -> None:
        self.decoder, self.store = decoder, store
        self._passes: dict[FeatureRequest | None, RecordedPass] = {}
        self._last: RecordedPass | _Passed | None = None
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
        self._last = _Passed(self.store, static, logits.cpu())
        return Forward(self._last.logits, list(static.starts), static.in_order(taken))

    def settle(self, trees: Many[Undrawn | None]) -> list[Drawn | None]:
        """Tokens are drawn where the model is: a device's logarithms are its own."""
        assert self._last is not None, "there was a pass"
        return self._last.settle(trees)

    def committed(self, table: PageTable) -> None:
        """Everything up to the table's length is valid."""
        self.store.mark(table, table.length)

    def missing(self, table: PageTable) -> int:
        """Committed tokens without valid KV in this store."""
        return table.length - self.store.filled(table)
