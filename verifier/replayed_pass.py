"""A pass of a model, and what follows it: captured once, replayed for any rows that it has room for.

::

    forward    the pass over the rows as they are written now
    sample     from each of the wanted ones, as their logits are by then: requests may have changed them
    verify     paths are accepted, and their rows move down; left out where there are only roots
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from foresay.kvpaging import KVStore
from foresay.spec.adjust import LogitEdits
from foresay.spec.protocols import FeatureRequest, Features, Forward, Rows, Verified
from foresay.spec.tree import MAX_NODES
from foresay.verifier.graphs.capture import Capture, recorded_bytes
from foresay.verifier.model.decoder import Decoder
from foresay.verifier.model.paged_pass import paged_pass
from foresay.verifier.ops.sample import edit_logits, sample_rows
from foresay.verifier.paged_rows import ForwardBatch, Sizes
from foresay.verifier.verify import verify

_FORWARD, _SAMPLE, _VERIFY = range(3)


class ReplayedPass:
    """One for rows of these sizes, with the features that one reader asks for. What it returns is good until the next
    pass."""

    def __init__(
        self, decoder: Decoder, store: KVStore, features: FeatureRequest | None, sizes: Sizes, capture: Capture
    ) -> None:
        self._decoder, self._store, self._asked, self.sizes = decoder, store, features, sizes
        self._batch = ForwardBatch(sizes, store.pool.page_size, store.device, store.windows)
        self._rows: Sequence[Rows] = ()
        self._logits: Tensor
        self._features: Features
        self._sampled: Tensor
        self._verified: Tensor
        self._replay = capture(self._work)

    @property
    def recorded_bytes(self) -> int:
        """What a recording of it keeps."""
        return recorded_bytes(self._replay)

    def _work(self) -> Iterator[None]:
        with torch.inference_mode():
            rows = self._batch.laid_out()
            self._logits, self._features = paged_pass(self._decoder, rows, self._store, self._asked)
        yield
        if not self.sizes.wanted:
            return
        with torch.inference_mode():
            self._sampled = sample_rows(self._logits, self._batch.sampling, None, self._batch.tensors["counts"][1:2])
        yield
        with torch.inference_mode():
            self._verified = verify(self._store, rows, self._sampled, self._batch)
        yield

    def __call__(self, rows: Sequence[Rows], features: FeatureRequest | None) -> Forward:
        """Run the rows, storing their KV. features: those of them that are wanted now."""
        self._rows = rows
        self._batch.write(rows)
        self._replay.run(_FORWARD)
        if features is None:
            return Forward(self._logits, self._batch.starts, {})
        count = sum(len(part.tokens) for part in rows)
        taken = {name: self._features[name][:count] for name in features.names}
        return Forward(self._logits, self._batch.starts, taken)

    def verify(self, edits: Sequence[LogitEdits | None]) -> list[Verified | None]:
        """See :meth:`foresay.spec.protocols.Verifier.verify`."""
        trees, ends = [part.tree for part in self._rows], self._batch.starts[1:]
        for tree, end, edit in zip(trees, ends, edits, strict=True):
            if tree is not None and edit is not None:
                edit_logits(self._logits[end - len(tree) : end], edit)
        self._replay.run(_SAMPLE)
        if not self._batch.drafted:
            sampled: list[int] = self._sampled.tolist()
            return [None if tree is None else ([sampled[end - 1]], [0]) for tree, end in zip(trees, ends, strict=True)]
        self._replay.run(_VERIFY)
        found = zip(trees, self._verified.tolist(), strict=False)
        return [None if tree is None else _of_tree(row, len(tree)) for tree, row in found]


def _of_tree(row: list[int], nodes: int) -> Verified:
    """row: length of the path, the path, samples. Of a root alone nothing was walked."""
    samples = 1 + MAX_NODES
    return row[samples : samples + nodes], row[1 : 1 + row[0]] or [0]
