"""An EAGLE head proposes, level by level, a chain or a tree.

::

    position          0     1     2     3    4 = length          row p is made of token p and the feature of p - 1
    features         f0    f1    f2    f3                        the target's own, fused; stored when they are committed
    head's KV     nothing   r1    r2    r3 | r4  drafted         r4 is the root's; drafted rows are scratch

All that is known of a text lies in its pages: the fused features in one store, the head's keys and values in another.
So nothing is kept of a sequence. Before it drafts, the head runs the committed rows it has not run yet with their true
features, in one pass with the root; what it drafted is never kept. A text whose features nobody stored (pages from a
time when another drafter was asked) gets no drafts until it is computed again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Many
from functools import cached_property

import torch
from torch import Tensor

from drafters.calibration import Calibration
from drafters.growth import Growing, lengthened
from kvpaging import KVStore, PagePool, PageTable
from spec.features import Features
from spec.names import EAGLE, EAGLE3
from spec.protocols import FeatureRequest, Rows, Wanted
from spec.sequence import Sequence
from spec.tree import DraftTree, TreeShape
from verifier.heads.eagle import EagleHead
from verifier.ops import nodes

log = logging.getLogger("foresay.drafters")

#: Committed text is caught up in pieces of at most this many rows, to bound the pass's memory.
_CATCH_UP_ROWS = 256


class EagleDrafter:
    """Implements :class:`spec.protocols.Drafter`. Owns the two stores. dynamic: see :mod:`drafters.growth`.

    shared_noise: whether drafts are sampled with the target's own noise; False is for comparison.
    """

    shared_noise: bool = True

    def __init__(self, head: EagleHead, pool: PagePool, dynamic: bool = True, name: str = "") -> None:
        layer, device = head.layer, head.device
        self.name = name or (EAGLE3 if head.config.generation == 3 else EAGLE)
        self.needs: FeatureRequest | None = head.config.needs
        self.dynamic = dynamic
        self.store = KVStore(pool, layer.num_layers, layer.num_kv_heads, layer.head_dim, head.dtype, device)
        self.features = KVStore(pool, 1, 1, layer.hidden_size, head.dtype, device, value_dim=0)
        self.head, self.calibration = head, Calibration()
        self._grown: dict[str, Growing] = {}
        self._warned = False

    @cached_property
    def _token_ids(self) -> Tensor | None:
        """The head's, on the host; brought there when first needed, since an outline of a head has none to bring."""
        return None if self.head.token_ids is None else self.head.token_ids.cpu()

    @property
    def trained_positions(self) -> int:
        """The longest text the head was made for, by its configuration."""
        return self.head.layer.max_positions

    def observe(self, sequence: Sequence, features: Features) -> None:
        """Fuse and store the features of newly committed positions, unless some before them are missing."""
        table, fused = sequence.table, self.head.fuse(features)
        self.features.keys[0, table.slots(table.length - len(fused), table.length), 0] = fused
        self.stored(table, len(fused))

    def stored(self, table: PageTable, count: int, ran: bool = False) -> None:
        """The features of the last ``count`` positions were stored; ran: and the row of the first of them was run."""
        self._warn(table.length)
        start = table.length - count
        if self.features.filled(table) >= start:
            self.features.mark(table, table.length)
        if ran:
            self.store.mark(table, min(table.length, start + 1))

    def _warn(self, length: int) -> None:
        """Say once that a text is longer than any the head was trained on."""
        if length > self.trained_positions and not self._warned:
            self._warned = True
            log.warning(
                "a text has passed %d tokens, the longest the %s head was trained on: it may guess worse from here on",
                self.trained_positions,
                self.name,
            )

    def extend(self, sequence: Sequence) -> None:
        """Run committed rows that were not run yet, at most ``_CATCH_UP_ROWS`` of them."""
        table = sequence.table
        if self.knows(sequence) and table.length:
            start = self._start(sequence)
            stop = min(table.length, start + _CATCH_UP_ROWS)
            if stop > start:
                self._run([self._text(sequence, start, stop, "none")], [self._true_features(sequence, start, stop)])
            self.store.mark(table, stop)

    def committed(self, sequence: Sequence, path: list[int]) -> None:
        """Drafted rows are not kept; the true ones are run before the next draft. The calibration learns."""
        if grown := self._grown.pop(sequence.id, None):
            grown.learn(path)

    def finished(self, sequence: Sequence) -> None:
        """Nothing outlives the sequence: its rows are in its pages."""
        self._grown.pop(sequence.id, None)

    def propose(self, sequences: Many[Sequence], shapes: Many[TreeShape]) -> list[DraftTree]:
        """One tree per sequence, all sequences' frontiers in one pass per level."""
        growing = [
            Growing.below(s, shape, self.dynamic, self.calibration) for s, shape in zip(sequences, shapes, strict=True)
        ]
        able = [g for g in growing if self.knows(g.sequence) and g.sequence.table.length]
        states: dict[str, Tensor] = {}
        while active := [g for g in able if not g.done]:
            rows = [g.frontier_rows() if g.depth else self._with_root(g.sequence) for g in active]
            hidden = [
                states[g.sequence.id]
                if g.depth
                else self._true_features(g.sequence, part.base, g.sequence.table.length + 1)
                for g, part in zip(active, rows, strict=True)
            ]
            found = self._run(rows, hidden)
            logits = [rows for rows, _ in found]
            going = lengthened(active, logits, nodes, self.shared_noise, self._token_ids)
            states |= {g.sequence.id: state[rows] for g, (_, state), rows in zip(active, found, going, strict=True)}
        self._grown.update((g.sequence.id, g) for g in growing if g.depth)
        return [g.tree(self.name) for g in growing]

    def knows(self, sequence: Sequence) -> bool:
        """Whether the features of all committed positions are there."""
        return self.features.filled(sequence.table) == sequence.table.length

    def unread(self, sequence: Sequence) -> int:
        """Tokens whose rows were not run, the root among them."""
        return len(sequence.tokens) - self.store.filled(sequence.table)

    def _start(self, sequence: Sequence) -> int:
        """The first position whose row was not run; slot 0, of which no row is made, is cleared."""
        filled = self.store.filled(sequence.table)
        if filled:
            return filled
        first = sequence.table.slots(0, 1)
        self.store.keys[:, first] = 0
        self.store.values[:, first] = 0
        return 1

    def _with_root(self, sequence: Sequence) -> Rows:
        """The rows from the first one not run to the root; long stretches run beforehand."""
        while sequence.table.length - self._start(sequence) > _CATCH_UP_ROWS:
            self.extend(sequence)
        start = self._start(sequence)
        return self._text(sequence, start, sequence.table.length + 1, "last")

    def _text(self, sequence: Sequence, start: int, stop: int, wanted: Wanted) -> Rows:
        return Rows(sequence.table, torch.tensor(sequence.tokens[start:stop]), start, wanted=wanted)

    def _true_features(self, sequence: Sequence, start: int, stop: int) -> Tensor:
        """[R, H]: what the rows of positions start .. stop - 1 are made of, the features one place before."""
        return self.features.keys[0, sequence.table.slots(start - 1, stop - 1), 0]

    def _run(self, rows: list[Rows], hidden: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Logits and states of the wanted rows, by sequence. Committed rows that were run are marked."""
        logits, states, starts = self.head.run(rows, torch.cat(hidden), self.store)
        for part in rows:
            if part.base < part.table.length:
                self.store.mark(part.table, min(part.table.length, part.base + len(part.tokens)))
        spans = [slice(*starts[index : index + 2]) for index in range(len(rows))]
        return [(logits[span], states[span]) for span in spans]
