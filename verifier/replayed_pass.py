"""A pass of a model, and what follows it: captured once, replayed for any rows that it has room for.

::

    forward    the pass over the rows as they are written now
    sample     from each of the wanted ones, as their logits are by then: the host may have changed them
    settle     paths are accepted, and their rows move down; left out where there are only roots
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from foresay.kvpaging import KVStore
from foresay.spec.features import Features
from foresay.spec.protocols import FeatureRequest, Forward, Rows, Sampled
from foresay.spec.sample import Unsampled
from foresay.verifier.graphs.capture import Capture, recorded_bytes
from foresay.verifier.model.decoder import Decoder
from foresay.verifier.model.paged_pass import paged_pass
from foresay.verifier.ops.sample import sample_rows
from foresay.verifier.paged_rows import Sizes, WrittenRows
from foresay.verifier.settle import Settled, WrittenTrees, of_roots, walk

_FORWARD, _SAMPLE, _SETTLE = range(3)


class ReplayedPass:
    """One for rows of these sizes, with the features that one reader asks for. What it returns is good until the next
    pass."""

    def __init__(
        self, decoder: Decoder, store: KVStore, features: FeatureRequest | None, sizes: Sizes, capture: Capture
    ) -> None:
        self._decoder, self._store, self._asked, self.sizes = decoder, store, features, sizes
        device = store.device
        self._rows = WrittenRows(sizes, store.pool.page_size, device, store.windows)
        self._trees = WrittenTrees(sizes.sequences, sizes.wanted, device)
        self._logits: Tensor
        self._features: Features
        self._sampled: Tensor
        self._settled: Settled
        self._starts: tuple[int, ...] = ()
        self._replay = capture(self._work)

    @property
    def recorded_bytes(self) -> int:
        """What a recording of it keeps."""
        return recorded_bytes(self._replay)

    def _work(self) -> Iterator[None]:
        with torch.inference_mode():
            rows = self._rows.laid_out()
            self._logits, self._features = paged_pass(self._decoder, rows, self._store, self._asked)
        yield
        if not self.sizes.wanted:
            return
        with torch.inference_mode():
            self._sampled = sample_rows(self._logits, self._trees.sampling, None, self._trees.rows)
        yield
        with torch.inference_mode():
            self._settled = walk(self._store, rows, self._sampled, self._trees)
        yield

    def __call__(self, rows: Sequence[Rows], features: FeatureRequest | None) -> Forward:
        """Run the rows, storing their KV. features: those of them that are wanted now."""
        self._starts = self._rows.write(rows)
        self._replay.run(_FORWARD)
        wanted, count = () if features is None else features.names, sum(len(part.tokens) for part in rows)
        taken = {name: self._features[name][:count] for name in wanted}
        return Forward(self._logits[: self._starts[-1]], list(self._starts), taken)

    def settle(self, trees: Sequence[Unsampled | None]) -> list[Sampled | None]:
        """See :meth:`foresay.spec.protocols.Verifier.settle`."""
        drafted = self._trees.write(trees, self._starts[1:])
        self._replay.run(_SAMPLE)
        if not drafted:
            return of_roots(self._sampled.tolist(), trees, self._starts[1:])
        self._replay.run(_SETTLE)
        return self._settled.on_host(trees)
