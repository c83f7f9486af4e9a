"""What every drafter owes, held to at each of its trees: those of a run are what follows from the text alone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from foresay.drafters.last_state import LastStateDrafter
from foresay.drafters.levels import TreeDrafter
from foresay.drafters.self_draft import SelfDrafter
from foresay.kvpaging import PagePool, PageTable
from foresay.spec.adjust import edit_logits
from foresay.spec.logits import edits_of
from foresay.spec.protocols import Drafter, Rows, of_path, reader_of
from foresay.spec.sequence import SequenceState
from foresay.spec.tree import DraftTree, TreeShape
from tests.same_tokens.heads import Passing, Whisper
from tests.same_tokens.models import MakeDrafter, Pair, paged

#: One tree in so many is drafted once more.
EVERY = 4


def uncalibrated(drafter: Any) -> Any:
    """It learns nothing of what is accepted, so that its chances, and where trees stop by them, stay what they were."""
    for one in (drafter, drafter.before if isinstance(drafter, SelfDrafter) else None):
        if isinstance(one, TreeDrafter):
            one.calibration.active = False
            one.calibration.saw = lambda *_, **__: None  # type: ignore[method-assign]
    return drafter


class Fresh:
    """Reads texts at once, each as if it were the first, and drafts."""

    def __init__(self, pair: Pair, make: MakeDrafter, page_size: int = 16) -> None:
        self.pool = PagePool(1 + 1024 // page_size, page_size)
        self.verifier = paged(pair.target, self.pool, pair.kv)
        self.drafter: Any = make(self.pool)
        uncalibrated(self.drafter)

    def drafted(self, sequence: SequenceState, shape: TreeShape) -> DraftTree:
        """Below the last token of this text."""
        table, count = PageTable(self.pool), len(sequence.tokens) - 1
        twin = replace(sequence, id="fresh", tokens=list(sequence.tokens), table=table, unable="")
        table.reserve(count)
        rows = [Rows(table, torch.tensor(twin.tokens[:-1]), 0)] if count else []
        features = self.verifier.run(rows, self.drafter.needs).features if count else {}
        table.commit(count)
        self.verifier.committed(table)
        if reader_of(self.drafter) is not None and count:
            self.drafter.observe(twin, of_path(features, count, []))
        self.drafter.extend(twin)
        table.reserve(shape.nodes)
        (tree,) = self.drafter.propose([twin], [shape])
        self.drafter.finished(twin)
        table.release()
        found: DraftTree = tree
        return found


class Held(Passing):
    """Passes the trees of another drafter on, each of which is to be what it owes. fresh: drafts one in four once more.
    lawful: whether none may break a grammar. compared: how many of more than a root were drafted twice."""

    def __init__(self, inner: Any, fresh: Fresh, lawful: bool = True) -> None:
        super().__init__(uncalibrated(inner))
        self.fresh, self.lawful = fresh, lawful
        self.vocab_size = fresh.verifier.vocab_size
        self.asked = self.compared = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def propose(self, sequences: Sequence[SequenceState], shapes: Sequence[TreeShape]) -> list[DraftTree]:
        trees: list[DraftTree] = self.inner.propose(sequences, shapes)
        for sequence, tree, shape in zip(sequences, trees, shapes, strict=True):
            self._owed(sequence, tree, shape)
            self.asked += 1
            if self.asked % EVERY == 0 and len(sequence.tokens) > 1:
                if isinstance(self.inner, LastStateDrafter) and len(tree) == 1:
                    continue  # of a fork, or where it rested, it has not seen the last state
                alone = self.fresh.drafted(sequence, shape)
                assert (tree.tokens, tree.parents) == (alone.tokens, alone.parents), (sequence.id, sequence.unable)
                assert torch.allclose(torch.tensor(tree.chances), torch.tensor(alone.chances), rtol=1e-4)
                self.compared += len(tree) > 1
        return trees

    def _owed(self, sequence: SequenceState, tree: DraftTree, shape: TreeShape) -> None:
        """A tree below the text's last token, within its budget, of distinct siblings whose chances are some; and
        nothing that the request rules out."""
        whole = DraftTree.build(tree.tokens, tree.parents)
        assert (tree.tokens[0], tree.parents[0]) == (sequence.tokens[-1], -1)
        assert len(tree) <= shape.nodes and max(tree.depths) <= shape.levels
        assert list(tree.depths) == list(whole.depths) and list(tree.ancestors) == list(whole.ancestors)
        pairs = Counter(zip(tree.tokens[1:], tree.parents[1:], strict=True))
        assert not pairs or max(pairs.values()) == 1, "siblings differ"
        sums = Counter[int]()
        for node, (parent, chance) in enumerate(zip(tree.parents, tree.chances, strict=True)):
            assert 0.0 <= chance <= (1.0 if parent < 0 else tree.chances[parent]) + 1e-6
            sums[parent] += chance  # type: ignore[assignment]
            assert node == 0 or sums[parent] <= tree.chances[parent] + 1e-4
        if sequence.constraint is not None and self.lawful:
            assert all(sequence.constraint.legal(tree.tokens, tree.parents))
        if (edits := edits_of(sequence, tree, None)) is not None:
            logits = torch.zeros(len(tree), self.vocab_size)
            edit_logits(logits, edits)
            allowed = logits[list(tree.parents[1:]), list(tree.tokens[1:])] > -torch.inf
            assert allowed.all(), "what the target may not sample there"


class Resting(Whisper):
    """A drafter that rests now and then: others draft then, of whom it hears only how many tokens were committed."""

    def __init__(self, inner: Drafter, known: Mapping[str, list[int]], other: Drafter) -> None:
        super().__init__(inner, known)
        self.other, self._resting = other, set[str]()

    def propose(self, sequences: Sequence[SequenceState], shapes: Sequence[TreeShape]) -> list[DraftTree]:
        trees = dict(zip((s.id for s in sequences), self.other.propose(sequences, shapes), strict=True))
        lots = {s.id: random.Random(f"{s.id}/{len(s.tokens)}").random() < 0.4 for s in sequences}
        self._resting = {name for name, rests in lots.items() if rests}
        drafting = [(s, shape) for s, shape in zip(sequences, shapes, strict=True) if not lots[s.id]]
        if drafting:
            own = super().propose(*zip(*drafting, strict=True))
            trees |= dict(zip((s.id for s, _ in drafting), own, strict=True))
        return [trees[s.id] for s in sequences]

    def committed(self, sequence: SequenceState, path: list[int]) -> None:
        super().committed(sequence, [0, *[-1] * (len(path) - 1)] if sequence.id in self._resting else path)
