"""The decoder's pass on a CPU, and what is drawn from its logits: recorded once, replayed for any rows."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpaging import KVStore
from spec.draw import Undrawn
from spec.features import Features
from spec.protocols import FeatureRequest, Forward, Rows
from spec.sampling import SamplingParams
from verifier.model.decoder import Decoder
from verifier.model.paged_pass import paged_pass
from verifier.ops.draw import RowSampling, draw_rows
from verifier.ops.kernels.cpu.launch import Recording, recording
from verifier.paged_rows import Sizes, WrittenRows

#: Room that the first recording has at least: rows of a step, sequences, pages and logits.
_LEAST = Sizes(16, 1, 16, 16)


@dataclass
class _Recorded:
    """draw: from its logits, recorded when it is first asked for."""

    rows: WrittenRows
    replay: Recording
    logits: Tensor
    features: Features
    draw: _Draw | None = None


class _Draw:
    """A token from each of the first rows of a pass's logits."""

    def __init__(self, logits: Tensor) -> None:
        count = len(logits)
        sampling = RowSampling.of([SamplingParams()] * count, [0] * count, [0] * count)
        self._columns, self._count = sampling.columns(), torch.zeros(1, dtype=torch.int64)
        with recording() as self._replay:
            self._drawn = draw_rows(logits, sampling, None, self._count)

    def __call__(self, rows: Many[Undrawn]) -> list[Tensor]:
        """int64[N] of each sequence."""
        counts, end = [len(each.positions) for each in rows], 0
        for each, count in zip(rows, counts, strict=True):
            self._columns.write(slice(end, end + count), each.sampling, each.noise.seed, each.positions)
            end += count
        self._count[0] = end
        self._replay()
        return list(self._drawn[:end].clone().split(counts))


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

    def has(self, rows: Many[Undrawn]) -> bool:
        """Whether these are the first rows of the last pass's logits, in order and unchanged."""
        if self._recorded is None:
            return False
        place, width = self._recorded.logits.data_ptr(), self._recorded.logits.shape[1]
        for each in rows:
            if each.logits.data_ptr() != place or each.logits.shape[1] != width:
                return False
            place += each.logits.nbytes
        return True

    def draw(self, rows: Many[Undrawn]) -> list[Tensor]:
        """int64[N] of each sequence: a token from each of these rows, which it :meth:`has`."""
        assert self._recorded is not None, "there was a pass"
        if self._recorded.draw is None:
            self._recorded.draw = _Draw(self._recorded.logits)
        return self._recorded.draw(rows)

    def _record(self, sizes: Sizes, page_size: int) -> _Recorded:
        rows = WrittenRows(sizes, page_size)
        with recording() as replay:
            logits, features = paged_pass(self._decoder, rows.laid_out(), self._store, self._asked)
        return _Recorded(rows, replay, logits, features)
