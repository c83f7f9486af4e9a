"""A decoder with a KV store on the shared pages: what the engine calls, as target or as draft model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from foresay.kvpaging import KVStore, PageTable
from foresay.spec.adjust import LogitEdits
from foresay.spec.protocols import FeatureRequest, Forward, Rows, Verified
from foresay.verifier.graphs.capture import Capture, Direct, recorded
from foresay.verifier.model.decoder import Decoder
from foresay.verifier.ops.eager import compiled
from foresay.verifier.paged_rows import Sizes, needed
from foresay.verifier.replayed_pass import ReplayedPass

#: Room that the first recording of a CPU has at least: rows of a step, sequences, pages and logits.
_LEAST = Sizes(16, 1, 16, 16)


class PagedModel:
    """Implements :class:`foresay.spec.protocols.Verifier`. Owns its KV store; page tables belong to the sequences."""

    def __init__(self, decoder: Decoder, store: KVStore, max_positions: int) -> None:
        self.decoder, self.store = decoder, store
        self._replayed: dict[FeatureRequest | None, list[ReplayedPass]] = {}
        self._last: ReplayedPass | None = None
        self._kept = store.parts[0]
        self.vocab_size = decoder.config.vocab_size
        self.max_positions = max_positions

    def capture(self, features: FeatureRequest | None, sizes: Sequence[Sizes], capture: Capture) -> Iterator[None]:
        """Capture passes of these sizes, the smallest first, in the place of others; stops after each.

        A CPU does so when they are needed.
        """
        passes = self._replayed[features] = []
        for each in sizes:
            passes.append(self._made(features, each, capture))
            yield

    @property
    def recorded_bytes(self) -> int:
        """What recordings of a CPU keep."""
        return sum(one.recorded_bytes for passes in self._replayed.values() for one in passes)

    def drop_recordings(self) -> None:
        """Let go of what a CPU recorded; it does so again, as large as is needed by then."""
        if compiled(self._kept):
            self._replayed.clear()
            self._last = None

    def run(self, rows: Sequence[Rows], features: FeatureRequest | None = None) -> Forward:
        """One forward pass over ragged rows of several sequences: trees, chains and prefill chunks mixed.

        Logits and features stay on the model's device. Both are good until the next pass.
        """
        self._last = self._holding(rows, features) or self._made(features, Sizes.of(rows), Direct)
        return self._last(rows, features)

    def _made(self, features: FeatureRequest | None, sizes: Sizes, capture: Capture) -> ReplayedPass:
        return ReplayedPass(self.decoder, self.store, features, sizes, capture)

    def _holding(self, rows: Sequence[Rows], features: FeatureRequest | None) -> ReplayedPass | None:
        """A captured pass that has room for these; None if they are to be run op by op."""
        passes = self._replayed.setdefault(features, [])
        if compiled(self._kept):
            need = needed(rows)
            if not passes or not passes[0].sizes.holds(need):
                sizes = (passes[0].sizes if passes else _LEAST).grown(need)
                passes[:] = [self._made(features, sizes, recorded)]
            return passes[0]
        if self.store.device.type == "cpu":
            return None
        if features is None and not passes:  # one that returns features will do where none are wanted
            passes = next(filter(None, self._replayed.values()), passes)
        return next((one for one in passes if one.sizes.takes(rows)), None)

    def verify(self, edits: Sequence[LogitEdits | None]) -> list[Verified | None]:
        """Tokens are sampled where the model is: a device's logarithms are its own."""
        assert self._last is not None, "there was a pass"
        return self._last.verify(edits)

    def committed(self, table: PageTable) -> None:
        """Everything up to the table's length is valid."""
        self.store.mark(table, table.length)

    def missing(self, table: PageTable) -> int:
        """Committed tokens without valid KV in this store."""
        return table.length - self.store.filled(table)
