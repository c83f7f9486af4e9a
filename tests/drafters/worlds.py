"""The same texts drafted twice, in pages of their own: by a drafter step by step, and inside captured steps.

The target runs over what was proposed, for its features alone. Which nodes are accepted is dictated, so that paths of
every length come up. A captured step runs op by op here, as it is captured on a GPU; whatever no host has marked is
poisoned with NaN before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from foresay.kvpaging import KVStore, PagePool, PageTable
from foresay.spec.accept import accept
from foresay.spec.protocols import Rows, of_path
from foresay.spec.sample import Noise
from foresay.spec.sampling import SamplingParams
from foresay.spec.sequence import SequenceState
from foresay.spec.step import ScheduledSequence
from foresay.spec.tree import DraftTree, TreeShape
from foresay.verifier.graphs.proposer import AcceptedTree, DeviceTree, Proposer
from foresay.verifier.graphs.rows import Nodes, rows_of
from foresay.verifier.graphs.state import BatchSlot, StepState
from foresay.verifier.model.decoder import Decoder
from foresay.verifier.model.forward import forward
from foresay.verifier.ops.trees import accept_paths, move_paths
from tests.poison import poison_store
from tests.same_tokens.models import MakeDrafter, paged

_OTHER = 3


def dictated(tokens: list[int], parents: list[int], choices: Sequence[int]) -> list[int]:
    """The sample at every node, so that the path goes to the child of that number at each depth, and then ends."""
    sampled, node = [_OTHER] * len(tokens), 0
    for choice in choices:
        children = [child for child, parent in enumerate(parents) if parent == node]
        if choice >= len(children):
            break
        sampled[node] = tokens[children[choice]]
        node = children[choice]
    return sampled


@dataclass
class World:
    """A pool, the target's pages in it, an eager drafter and the sequences. make: makes the drafter on the pool."""

    target: Decoder
    pool: PagePool
    make: MakeDrafter
    sequences: list[SequenceState] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.verifier = paged(self.target, self.pool)
        self.drafter: Any = self.make(self.pool)

    def read(self, prompt: list[int], sampling: SamplingParams, seed: int) -> None:
        """A new sequence; all of its prompt but the last token is computed and shown to the drafter."""
        table, count = PageTable(self.pool), len(prompt) - 1
        noise = Noise(seed, self.target.config.vocab_size)
        sequence = SequenceState(str(seed), list(prompt), len(prompt), sampling, table, noise, 10_000, frozenset())
        table.reserve(count)
        forward = self.verifier.run([Rows(table, torch.tensor(prompt[:-1]), 0)], self.drafter.needs)
        table.commit(count)
        self.verifier.committed(table)
        self.drafter.observe(sequence, of_path(forward.features, count, []))
        self.drafter.extend(sequence)
        self.sequences.append(sequence)

    def step(self, shape: TreeShape, choices: Sequence[Sequence[int]]) -> list[list[int]]:
        """One step by the drafter's own passes; the tokens it proposed."""
        for sequence in self.sequences:
            sequence.table.reserve(shape.nodes)
        trees = self.drafter.propose(self.sequences, [shape] * len(self.sequences))
        rows = [Rows.of_tree(s.table, tree) for s, tree in zip(self.sequences, trees, strict=True)]
        features, first = self.verifier.run(rows, self.drafter.needs).features, 0
        for sequence, tree, chosen in zip(self.sequences, trees, choices, strict=True):
            sampled = dictated(tree.tokens, tree.parents, chosen)
            path, base = accept(tree, sampled), sequence.table.length
            slots = sequence.table.slots(base, base + len(tree))
            sequence.tokens += [sampled[node] for node in path]
            sequence.table.commit(len(path))
            self.verifier.store.move(slots[path], slots[: len(path)])
            self.verifier.committed(sequence.table)
            mine = {name: values[first : first + len(tree)] for name, values in features.items()}
            self.drafter.observe(sequence, of_path(mine, 0, path))
            self.drafter.committed(sequence, path)
            first += len(tree)
        return [tree.tokens for tree in trees]


@dataclass
class Captured:
    """Captured steps over a world's sequences. Places past them are padding."""

    world: World
    proposer: Proposer
    capacity: int

    def __post_init__(self) -> None:
        pool, needs = self.world.pool, self.proposer.reach
        self.state = StepState(self.capacity, 16, pool.page_size, needs, "cpu")
        self.device_step([])  # warm: whatever lives as long as the step is made here
        self.state.join([])

    def join(self) -> bool:
        """Make everything ready for steps of the sequences as they are."""
        joined = [BatchSlot(s.table.pages, s.table.length, s.tokens, s.sampling, s.noise.seed) for s in self._sequences]
        ready = self.proposer.prepare(self._sequences)
        self.state.join(joined)
        return ready

    @property
    def _sequences(self) -> list[SequenceState]:
        return self.world.sequences

    def step(self, choices: Sequence[Sequence[int]]) -> list[list[int]]:
        """One step; the tokens that were proposed."""
        for sequence in self._sequences:
            sequence.table.reserve(self.proposer.shape.nodes)
        self.state.write_tables(*zip(*((s.table.pages, s.table.length) for s in self._sequences), strict=True))
        for store in self.world.pool.stores:
            if isinstance(store, KVStore):
                poison_store(store)
        shape = self.proposer.shape
        self.proposer.write([ScheduledSequence(sequence, 0, shape) for sequence in self._sequences])
        taken = self.device_step(choices)
        for index, sequence in enumerate(self._sequences):
            self._collect(sequence, taken, index)
        pairs = zip(taken.tree.tokens.tolist(), taken.tree.counts.tolist(), strict=True)
        return [tokens[:count] for tokens, count in pairs][: len(self._sequences)]

    def device_step(self, choices: Sequence[Sequence[int]]) -> AcceptedTree:
        """What is captured of a step; the host gets nothing."""
        state, store = self.state, self.world.verifier.store
        tree = self.proposer.propose(state)
        tree = replace(tree, tokens=tree.tokens.clone())  # roots are read from the state, which moves on
        numbers = torch.arange(tree.tokens.shape[1]).expand(state.size, -1)
        rows = rows_of(state, Nodes(tree.tokens, numbers, tree.ancestors, tree.depths))
        slots = rows.slots.view_as(tree.tokens)
        features = forward(self.world.target, rows, store, self.proposer.needs)[1]
        sampled = torch.tensor(
            [dictated(*pair, chosen) for pair, chosen in zip(_pairs(tree), self._filled(choices), strict=True)]
        )
        paths = accept_paths(tree.tokens, tree.parents, tree.ancestors, sampled, tree.counts * state.live, slots)
        for arrays in store.arrays:
            move_paths(arrays.tensors, paths.sources, slots, paths.lengths)
        taken = AcceptedTree(tree, paths, slots, features)
        self.proposer.committed(state, taken)
        state.advance(paths)
        return taken

    def _filled(self, choices: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        return [*choices, *[()] * (self.capacity - len(choices))]

    def _collect(self, sequence: SequenceState, taken: AcceptedTree, index: int) -> None:
        count = int(taken.paths.lengths[index])
        sequence.tokens += taken.paths.emitted[index, :count].tolist()
        sequence.table.commit(count)
        self.world.verifier.committed(sequence.table)
        nodes = int(taken.tree.counts[index])
        tokens, parents = (column[index, :nodes].tolist() for column in (taken.tree.tokens, taken.tree.parents))
        tree = self.proposer.arrived(sequence, index, DraftTree.build(tokens, parents), taken.tree.more)
        self.proposer.collected(sequence, tree, taken.paths.paths[index, :count].tolist())


def _pairs(tree: DeviceTree) -> zip[tuple[list[int], list[int]]]:
    return zip(tree.tokens, tree.parents, strict=True)
