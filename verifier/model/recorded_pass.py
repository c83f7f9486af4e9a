"""The decoder's pass on a CPU, and what follows it: recorded once, replayed for any rows."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

from torch import Tensor

from kvpaging import KVStore
from spec.draw import Undrawn
from spec.features import Features
from spec.protocols import Drawn, FeatureRequest, Forward, Rows
from verifier.model.decoder import Decoder
from verifier.model.paged_pass import paged_pass
from verifier.ops.draw import draw_rows
from verifier.ops.kernels.cpu.launch import Recording, recording
from verifier.paged_rows import Sizes, StaticRows, WrittenRows
from verifier.settle import Settled, WrittenTrees, of_roots, walk

#: Room that the first recording has at least: rows of a step, sequences, pages and logits.
_LEAST = Sizes(16, 1, 16, 16)


@dataclass
class _Settling:
    """What follows a pass, in two parts: drawn, int64[W], and what these come to."""

    written: WrittenTrees
    replay: Recording
    drawn: Tensor
    settled: Settled


@dataclass
class _Recorded:
    """starts: where the wanted rows of each sequence began in the last replay. settling: made when it is first asked
    for, since a draft model's pass has none."""

    written: WrittenRows
    rows: StaticRows
    replay: Recording
    logits: Tensor
    features: Features
    starts: tuple[int, ...] = ()
    settling: _Settling | None = None


class RecordedPass:
    """A pass with the features that one reader asks for. What it returns is good until the next pass."""

    def __init__(self, decoder: Decoder, store: KVStore, features: FeatureRequest | None) -> None:
        self._decoder, self._store, self._asked = decoder, store, features
        self._recorded: _Recorded | None = None

    def __call__(self, rows: Many[Rows]) -> Forward:
        """Run the rows, storing their KV."""
        need = Sizes.of(rows)
        if self._recorded is None or not self._recorded.written.sizes.holds(need):
            known = _LEAST if self._recorded is None else self._recorded.written.sizes
            self._recorded = self._record(known.grown(need), rows[0].table.pool.page_size)
        recorded = self._recorded
        recorded.starts = recorded.written.write(rows)
        recorded.replay()
        taken = {name: values[: need.rows] for name, values in recorded.features.items()}
        return Forward(recorded.logits[: need.wanted], list(recorded.starts), taken)

    def settle(self, trees: Many[Undrawn | None]) -> list[Drawn | None]:
        """See :meth:`spec.protocols.Verifier.settle`."""
        recorded = self._recorded
        assert recorded is not None, "there was a pass"
        if recorded.settling is None:
            recorded.settling = self._record_settling(recorded)
        settling = recorded.settling
        if settling.written.write(trees, recorded.starts[1:]):
            settling.replay()
            return settling.settled.on_host(trees)
        settling.replay.run(0)
        return of_roots(settling.drawn, trees, recorded.starts[1:])

    def _record(self, sizes: Sizes, page_size: int) -> _Recorded:
        written = WrittenRows(sizes, page_size)
        with recording() as replay:
            rows = written.laid_out()
            logits, features = paged_pass(self._decoder, rows, self._store, self._asked)
        return _Recorded(written, rows, replay, logits, features)

    def _record_settling(self, recorded: _Recorded) -> _Settling:
        written = WrittenTrees(recorded.written.sizes.sequences, len(recorded.logits))
        with recording() as replay:
            drawn = draw_rows(recorded.logits, written.sampling, None, written.rows)
            replay.cut()
            settled = walk(self._store, recorded.rows, drawn, written)
        return _Settling(written, replay, drawn, settled)
