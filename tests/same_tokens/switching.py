"""Drafters in turns: several over one target and pool, another one used at every step of every sequence.

All are notified of what was committed. Only the one that proposed learns which nodes of its tree were; others rested.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence

from foresay.drafters.draft_model import DraftModelDrafter
from foresay.drafters.eagle import EagleDrafter
from foresay.drafters.ngram import NgramDrafter
from foresay.drafters.parallel import MedusaDrafter
from foresay.drafters.suffix.drafter import SuffixDrafter
from foresay.kvpaging import PagePool
from foresay.spec.protocols import Drafter, FeatureRequest, Features, reader_of
from foresay.spec.sequence import SequenceState
from foresay.spec.tree import ROOT_ONLY, DraftTree, TreeShape
from tests.same_tokens.heads import head_of, whispered
from tests.same_tokens.models import MakeDrafter, Pair


def makers(pair: Pair) -> dict[str, MakeDrafter]:
    """Every kind of drafter, by name."""
    made: dict[str, MakeDrafter] = {name: head_of(pair, name, "tree") for name in ("medusa", "eagle3", "eagle1")}
    return made | {
        "ngram": lambda pool: NgramDrafter(shortest=1),
        "suffix": lambda pool: SuffixDrafter(slice_seconds=math.inf),
        "draft_model": pair.draft_model,
    }


def switching(pair: Pair, known: Mapping[str, list[int]], seed: int = 0) -> MakeDrafter:
    """Makes a drafter that takes turns. Heads, which are random, get the truth; the others find some of it."""

    def made(pool: PagePool) -> Drafter:
        members: dict[str, Drafter] = {}
        for name, make in makers(pair).items():
            drafter = (whispered(make, known) if name.startswith(("medusa", "eagle")) else make)(pool)
            assert drafter is not None
            members[name] = drafter
        return Switching(members, seed)

    return made


class Switching:
    """Implements :class:`foresay.spec.protocols.Drafter`: a random member of its own, or nobody, drafts a random shape.

    The choice is a function of the seed and the state of the sequence. requested, accepted: by member, how often it
    drafted and how many of its nodes were kept.
    """

    name = "switching"

    def __init__(self, members: Mapping[str, Drafter], seed: int = 0) -> None:
        self.members, self._seed, self._names = members, seed, list(members)
        self.needs: FeatureRequest | None = united([member.needs for member in members.values()])
        self.requested: Counter[str] = Counter()
        self.accepted: Counter[str] = Counter()
        self._last: dict[str, str] = {}

    def propose(self, sequences: Sequence[SequenceState], shapes: Sequence[TreeShape]) -> list[DraftTree]:
        trees = [DraftTree.chain([sequence.tokens[-1]], self.name) for sequence in sequences]
        turns: dict[str, list[tuple[int, TreeShape]]] = {}
        for index, (sequence, most) in enumerate(zip(sequences, shapes, strict=True)):
            name, shape = self.turn(sequence, most)
            self._last[sequence.id] = name
            turns.setdefault(name, []).append((index, shape))
        for name, turn in turns.items():
            if name == "none":
                continue
            self.requested[name] += len(turn)
            found = self.members[name].propose([sequences[index] for index, _ in turn], [shape for _, shape in turn])
            for (index, _), tree in zip(turn, found, strict=True):
                trees[index] = tree
        return trees

    def turn(self, sequence: SequenceState, most: TreeShape) -> tuple[str, TreeShape]:
        """Whose turn it is, and what it may draft: nothing, a chain, or a tree no larger than ``most``."""
        rng = random.Random(f"{self._seed}/{sequence.id}/{len(sequence.tokens)}")
        name = rng.choice(["none", *self._names])
        levels = rng.randint(0, most.levels)
        if name == "none" or levels == 0:
            return "none", ROOT_ONLY
        if rng.random() < 0.3:
            return name, TreeShape.chain(levels)
        return name, TreeShape(tuple(rng.randint(1, width) for width in most.widths[:levels]))

    def observe(self, sequence: SequenceState, features: Features) -> None:
        for member in self.members.values():
            reader = reader_of(member)
            if reader is not None:
                reader.observe(sequence, features)

    def extend(self, sequence: SequenceState) -> None:
        for member in self.members.values():
            member.extend(sequence)

    def committed(self, sequence: SequenceState, path: list[int]) -> None:
        last = self._last.pop(sequence.id, "none")
        self.accepted[last] += sum(node > 0 for node in path)
        for name, member in self.members.items():
            if name == last:
                member.committed(sequence, path)
            else:
                # To those who had proposed nothing, all but the root came from elsewhere.
                member.committed(sequence, [0, *(-1 for _ in path[1:])])

    def finished(self, sequence: SequenceState) -> None:
        self._last.pop(sequence.id, None)
        for member in self.members.values():
            member.finished(sequence)


class Compared(Switching):
    """Takes turns between members that rest, next to others that draft in every step.

    What a rested one proposes must be what its restless twin does. Twins see other trials, so nothing is calibrated.
    """

    def __init__(self, rested: Mapping[str, Drafter], restless: Mapping[str, Drafter], seed: int = 0) -> None:
        super().__init__({**rested, **{f"{name}, restless": member for name, member in restless.items()}}, seed)
        self._names, self._restless = list(rested), restless
        for member in self.members.values():
            if isinstance(member, DraftModelDrafter | MedusaDrafter | EagleDrafter):
                member.calibration.active = False
            elif isinstance(member, SuffixDrafter):
                member.learning = False
        self.compared: Counter[str] = Counter()

    def propose(self, sequences: Sequence[SequenceState], shapes: Sequence[TreeShape]) -> list[DraftTree]:
        turns = [self.turn(sequence, shape) for sequence, shape in zip(sequences, shapes, strict=True)]
        requested = [shape if shape.levels else TreeShape.chain(1) for _, shape in turns]
        wanted = {name: member.propose(sequences, requested) for name, member in self._restless.items()}
        trees = super().propose(sequences, shapes)
        for index, (name, _) in enumerate(turns):
            if name != "none":
                assert_equal(trees[index], wanted[name][index], f"{name} for {sequences[index].id}")
                self.compared[name] += len(trees[index]) > 1
        return trees


def united(needs: Sequence[FeatureRequest | None]) -> FeatureRequest:
    """What all of them need together."""
    requested = [request for request in needs if request is not None]
    layers = sorted({layer for request in requested for layer in request.layers})
    return FeatureRequest(any(request.final for request in requested), tuple(layers))


def assert_equal(ours: DraftTree, theirs: DraftTree, where: str) -> None:
    assert ours.tokens == theirs.tokens, where
    assert ours.parents == theirs.parents, where
