"""A decoder with a KV store on the shared pages: the engine's target or draft model.

A pass, and the sampling after it, is captured once and replayed for any rows that fit::

    forward    the pass over the rows that were written
    sample     from each requested row's logits, which requests may have changed in between
    verify     paths are accepted, and their rows move down; left out if there are only roots

Trees have the layout of a captured step, each in a row as wide as the largest tree.

Legend: B sequences of a pass, W of its rows whose logits are requested, N nodes of the largest tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from foresay.kvpaging import KVStore, PageTable, StateStore
from foresay.kvpaging.states import TextState, recurrent_state
from foresay.spec.adjust import LogitEdits
from foresay.spec.protocols import FeatureRequest, Features, Forward, Rows, Verified
from foresay.spec.tree import MAX_NODES
from foresay.verifier.forward_batch import ForwardBatch, Sizes, StaticRows
from foresay.verifier.graphs.capture import Capture, Eager, recorded
from foresay.verifier.graphs.proposer import DeviceTree
from foresay.verifier.graphs.state import sent
from foresay.verifier.model.decoder import Decoder
from foresay.verifier.model.forward import forward
from foresay.verifier.ops.eager import compiled
from foresay.verifier.ops.records import AcceptedPaths
from foresay.verifier.ops.recurrence import replay, replay_paths
from foresay.verifier.ops.rows import join_columns, take_rows
from foresay.verifier.ops.sample import edit_logits, sample_rows
from foresay.verifier.ops.trees import accept_paths, move_paths


def active_experts(spans: Sequence[Tensor]) -> Tensor | None:
    """int64[L]: how many experts of each mixture had rows, from what ``forward`` appends; None: there is no mixture."""
    return torch.cat([each[:1] for each in spans]) if spans else None


def verify(store: KVStore, rows: StaticRows, sampled: Tensor, batch: ForwardBatch) -> Tensor:
    """Accept paths and move rows. sampled: int64[W], from each requested row. Returns int64[B, 1 + 2 N] for the host:
    the length of each path, the path, the sample at each node."""
    assert rows.logits_indices is not None, "logits are those of rows"
    parents, indices, nodes = (batch.tensors[name] for name in ("parents", "indices", "nodes"))

    def of_nodes(column: Tensor, indices: Tensor) -> Tensor:
        return take_rows(column, indices.flatten()).view_as(parents)

    at_nodes, numbers = of_nodes(sampled, indices), of_nodes(rows.logits_indices, indices)
    slots = [each.slots for each in (rows, rows.windowed) if each is not None]
    columns = rows.tokens, batch.tensors["words"], *slots
    tokens, words, own, *windowed = (of_nodes(column, numbers) for column in columns)
    no_depths = nodes  # nothing here reads them
    tree = DeviceTree(tokens, parents, words, no_depths, nodes, chain=False)
    paths = accept_and_move(store, tree, at_nodes, own, None, *windowed)
    return join_columns(paths.lengths[:, None], paths.paths, at_nodes)


def accept_and_move(
    store: KVStore,
    tree: DeviceTree,
    sampled: Tensor,
    slots: Tensor,
    live: Tensor | None = None,
    windowed: Tensor | None = None,
) -> AcceptedPaths:
    """Accept the paths that the samples take, and move their rows down. sampled, slots: int64[B, N], of each node;
    windowed: the slots in layers with window pages. live: int32[B], 0 where nothing is sampled."""

    def accepted(slots: Tensor) -> AcceptedPaths:
        return accept_paths(tree.tokens, tree.parents, tree.ancestors, sampled, tree.counts, slots, live)

    paths = accepted(slots)
    if not tree.chain:
        sources = {False: (paths.sources, slots)}
        if windowed is not None:
            sources[True] = (accepted(windowed).sources, windowed)
        for arrays in store.arrays:
            move_paths(arrays.tensors, *sources[arrays.pages is store.windows], paths.lengths)
    return paths


def replay_state(store: StateStore, state: TextState, index: int, path: Sequence[int]) -> None:
    """Replay the records of a path's nodes. index: the index of the sequence in the last pass."""
    if store.layers.tails.device.type != "cpu":
        return _replay_on_device(store, state, index, path)
    nodes = torch.tensor(path, dtype=torch.int64)
    for source, destination, count in state.replays(len(path)):
        done, nodes = nodes.split((count, len(nodes) - count))
        replay(store.layers, source, destination, not state.length, index, done.contiguous())


def _replay_on_device(store: StateStore, state: TextState, index: int, path: Sequence[int]) -> None:
    """The same on a device, without waiting for it."""
    if not path:
        return
    state.refill()
    numbers = sent(torch.tensor([*state.commit_pages(), state.length, len(path), *path]), store.layers.tails.device)
    targets, length, taken, nodes = numbers.split((3, 1, 1, len(path)))
    replay_paths(store.layers, targets[None], length, taken, nodes[None], state.pages.page_size, index)
    state.commit_rows(len(path))


_FORWARD, _SAMPLE, _VERIFY = range(3)


class GraphRunner:
    """A captured pass for rows of these sizes, with the features that one reader requests. Its results are valid until
    the next pass."""

    def __init__(
        self, decoder: Decoder, store: KVStore, features: FeatureRequest | None, sizes: Sizes, capture: Capture
    ) -> None:
        self._decoder, self._store, self._requested, self.sizes = decoder, store, features, sizes
        states, stack = None if store.states is None else store.states.pages, decoder.config.stack
        narrow = stack.num_kv_layers < len(stack.layers) and (features or FeatureRequest()).below(stack.num_kv_layers)
        self._batch = ForwardBatch(sizes, store.pool.page_size, store.device, store.windows, states, narrow)
        self._rows: Sequence[Rows] = ()
        self._logits: Tensor
        self._features: Features
        self._sampled: Tensor
        self._verified: Tensor
        self._spans: list[Tensor] = []
        self._active_experts: Tensor | None = None
        self._replay = capture(self._work)

    def _work(self) -> Iterator[None]:
        with torch.inference_mode():
            rows = self._batch.static_rows()
            self._spans.clear()
            self._logits, self._features = forward(self._decoder, rows, self._store, self._requested, self._spans)
            if self._store.device.type != "cpu":
                self._active_experts = active_experts(self._spans)
        yield
        if not self.sizes.logits:
            return
        with torch.inference_mode():
            self._sampled = sample_rows(self._logits, self._batch.sampling, None, self._batch.tensors["counts"][1:2])
        if self._store.device.type == "cpu":  # else a walk of roots alone takes less than one more launch
            yield
        with torch.inference_mode():
            self._verified = verify(self._store, rows, self._sampled, self._batch)
        yield

    def __call__(self, rows: Sequence[Rows], features: FeatureRequest | None) -> Forward:
        """Run the rows, storing their KV. features: the captured ones that are requested now."""
        self._rows = rows
        self._batch.write(rows)
        self._replay.run(_FORWARD)
        woken = active_experts(self._spans) if self._store.device.type == "cpu" else self._active_experts
        names = () if features is None else features.names
        own = {name: self._batch.without_padding(self._of_all(name)) for name in names}
        return Forward(self._logits, self._batch.starts, own, woken)

    def _of_all(self, name: str) -> Tensor:
        """[R, H]: a feature; rows that did not go through all layers have zeros for their final state."""
        found, sampled = self._features[name], self._batch.sampled
        if sampled is None or name != "final":
            return found
        every = found.new_zeros(self.sizes.rows, found.shape[1])
        return every.index_copy_(0, sampled, found[: len(sampled)])

    def index_of(self, table: PageTable) -> int:
        """The index of this sequence in the last pass."""
        return next(index for index, part in enumerate(self._rows) if part.table is table)

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
        if self._store.device.type == "cpu":
            self._replay.run(_VERIFY)
        found = zip(trees, self._verified.tolist(), strict=False)
        return [None if tree is None else _of_tree(row, len(tree)) for tree, row in found]


def _of_tree(row: list[int], nodes: int) -> Verified:
    """row: length of the path, the path, samples. A tree with only a root was not walked."""
    samples = 1 + MAX_NODES
    return row[samples : samples + nodes], row[1 : 1 + row[0]] or [0]


#: For a runner of a few short texts.
_MIN_SIZES = Sizes(16, 1, 16, 16)


class ModelRunner:
    """Implements :class:`foresay.spec.protocols.Verifier`. Owns its KV store; page tables belong to the sequences.

    room: the least capacity of a CPU's first recording: if a later pass needs more, it is recorded again.
    """

    def __init__(self, decoder: Decoder, store: KVStore, max_positions: int, min_sizes: Sizes = _MIN_SIZES) -> None:
        self.decoder, self.store, self._min_sizes = decoder, store, min_sizes
        self._replayed: dict[FeatureRequest | None, list[GraphRunner]] = {}
        self._last: GraphRunner | None = None
        self._kept = store.tensors[0]
        self.vocab_size = decoder.config.vocab_size
        self.max_positions = max_positions

    def capture(self, features: FeatureRequest | None, sizes: Sequence[Sizes], capture: Capture) -> Iterator[None]:
        """Capture passes of these sizes, the smallest first, replacing others; yields after each.

        A CPU records passes when they are needed.
        """
        passes = self._replayed[features] = []
        for each in sizes:
            passes.append(self._runner(features, each, capture))
            yield

    def drop_recordings(self) -> None:
        """Drop a CPU's recordings; it records again when needed, with the capacity needed then."""
        if compiled(self._kept):
            self._replayed.clear()
            self._last = None

    def record(self, features: FeatureRequest | None) -> None:
        """Record passes on a CPU now, instead of at the first one."""
        if compiled(self._kept) and not self._replayed.get(features):
            self._record(features, self._min_sizes)

    def _record(self, features: FeatureRequest | None, need: Sizes) -> None:
        passes = self._replayed.setdefault(features, [])
        fits = not passes and self._min_sizes.covers(need)
        sizes = self._min_sizes if fits else (passes[0].sizes if passes else self._min_sizes).enlarged(need)
        passes[:] = [self._runner(features, sizes, recorded)]

    def run(self, rows: Sequence[Rows], features: FeatureRequest | None = None) -> Forward:
        """One forward pass over ragged rows of several sequences: trees, chains and prefill chunks mixed.

        Logits and features stay on the model's device. Both are valid until the next pass.
        """
        self._last = self._fitting_runner(rows, features) or self._runner(features, Sizes.from_rows(rows), Eager)
        return self._last(rows, features)

    def _runner(self, features: FeatureRequest | None, sizes: Sizes, capture: Capture) -> GraphRunner:
        return GraphRunner(self.decoder, self.store, features, sizes, capture)

    def _fitting_runner(self, rows: Sequence[Rows], features: FeatureRequest | None) -> GraphRunner | None:
        """A captured pass that has room for these; None to run them in eager mode."""
        if features is None and not self._replayed.get(None):  # one that returns features also serves passes without
            features = next((requested for requested, passes in self._replayed.items() if passes), None)
        passes = self._replayed.setdefault(features, [])
        if compiled(self._kept):
            need = Sizes.from_rows(rows)
            if not passes or not passes[0].sizes.covers(need):
                self._record(features, need)
            return passes[0]
        if self.store.device.type == "cpu":
            return None
        return next((one for one in passes if one.sizes.fits(rows)), None)

    def verify(self, edits: Sequence[LogitEdits | None]) -> list[Verified | None]:
        """Sample tokens on the model's device, since logarithms differ between devices."""
        assert self._last is not None, "there was a pass"
        return self._last.verify(edits)

    def committed(self, table: PageTable, path: Sequence[int] = (), advanced: int = 0) -> None:
        """Mark everything up to the table's length as valid; advance recurrent states along the path."""
        self.store.mark(table, table.length)
        if self.store.states is None or (state := recurrent_state(table)) is None:
            return
        if not advanced:
            self._replay_state(self.store.states, table, state, path)
        elif advanced == len(path):
            state.commit_rows(advanced)

    def _replay_state(self, store: StateStore, table: PageTable, state: TextState, path: Sequence[int]) -> None:
        certain = table.length - len(path) - state.length
        if certain:
            state.commit_rows(certain)
        if not path:
            return
        assert self._last is not None, "there was a pass"
        replay_state(store, state, self._last.index_of(table), path)

    def missing(self, table: PageTable) -> int:
        """Committed tokens without valid KV in this store."""
        return table.length - self.store.filled(table)
