"""A decoder with a KV store on the shared pages: what the engine calls, as target or as draft model."""

from __future__ import annotations

from collections.abc import Sequence as Many

from torch import Tensor

from kvpaging import KVStore, PageTable
from spec.protocols import FeatureRequest, Forward, Rows
from verifier.batch import ForwardBatch
from verifier.model.decoder import Decoder


class PagedModel:
    """Implements :class:`spec.protocols.Verifier`. Owns its KV store; page tables belong to the sequences."""

    def __init__(self, decoder: Decoder, store: KVStore, max_positions: int) -> None:
        self.decoder, self.store = decoder, store
        self.vocab_size = decoder.config.vocab_size
        self.max_positions = max_positions

    def run(self, rows: Many[Rows], features: FeatureRequest | None = None) -> Forward:
        """One forward pass over ragged rows of several sequences: trees, chains and prefill chunks mixed.

        Logits come to the host, where they are drawn from; features stay on the model's device.
        """
        batch = ForwardBatch.build(rows, self.decoder.group, self.decoder.window, self.decoder.device)
        logits, taken = self.decoder(batch, self.store, features)
        return Forward(logits.cpu(), batch.starts, taken)

    def committed(self, table: PageTable, moves: tuple[Tensor, Tensor] | None) -> None:
        """Accepted rows move down to be contiguous; everything up to the table's length is then valid."""
        if moves is not None:
            self.store.move(*moves)
        self.store.mark(table, table.length)

    def missing(self, table: PageTable) -> int:
        """Committed tokens without valid KV in this store."""
        return table.length - self.store.filled(table)
