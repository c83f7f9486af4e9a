"""The decoder's pass on a CPU: recorded once, and replayed for any rows there is room for."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

from torch import Tensor

from kvpaging import KVStore
from spec.features import Features
from spec.protocols import FeatureRequest, Forward, Rows
from verifier.model.decoder import Decoder
from verifier.model.paged_pass import paged_pass
from verifier.ops.kernels.cpu.launch import Recording, recording
from verifier.paged_rows import Sizes, WrittenRows

#: Room that the first recording has at least: rows of a step, sequences, pages and logits.
_LEAST = Sizes(16, 1, 16, 16)


@dataclass(frozen=True, slots=True)
class _Recorded:
    rows: WrittenRows
    replay: Recording
    logits: Tensor
    features: Features


class RecordedPass:
    """A pass with the features that one reader asks for. What it returns is good until the next pass."""

    def __init__(self, decoder: Decoder, store: KVStore, features: FeatureRequest | None) -> None:
        self._decoder, self._store, self._asked = decoder, store, features
        self._recorded: _Recorded | None = None

    def __call__(self, rows: Many[Rows]) -> Forward:
        """Run the rows, storing their KV."""
        need = Sizes.of(rows)
        if self._recorded is None or not self._recorded.rows.sizes.holds(need):
            known = _LEAST if self._recorded is None else self._recorded.rows.sizes
            self._recorded = self._record(known.grown(need), rows[0].table.pool.page_size)
        recorded = self._recorded
        starts = recorded.rows.write(rows)
        recorded.replay()
        taken = {name: values[: need.rows] for name, values in recorded.features.items()}
        return Forward(recorded.logits[: need.wanted], list(starts), taken)

    def _record(self, sizes: Sizes, page_size: int) -> _Recorded:
        rows = WrittenRows(sizes, page_size)
        with recording() as replay:
            logits, features = paged_pass(self._decoder, rows.laid_out(), self._store, self._asked)
        return _Recorded(rows, replay, logits, features)
