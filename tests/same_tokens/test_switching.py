"""A drafter that rested, while others took their turns within a sequence, proposes as if it had never rested."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from functools import partial

import pytest

from bench.drive import LOOKUPS
from foresay.drafters.draft_model import DraftModelDrafter
from foresay.drafters.eagle import EagleDrafter
from foresay.drafters.ngram import NgramDrafter
from foresay.drafters.parallel import MedusaDrafter
from foresay.drafters.suffix.drafter import SuffixDrafter
from foresay.kvpaging import PagePool
from foresay.spec.engine import EngineCore
from foresay.spec.protocols import Drafter, FeatureRequest, Features, reader_of
from foresay.spec.sequence import SequenceState
from foresay.spec.tree import ROOT_ONLY, DraftTree, TreeShape
from tests.same_tokens.heads import head_of
from tests.same_tokens.models import MakeDrafter, Pair, engine_of
from tests.same_tokens.situations import assert_same_in


def makers(pair: Pair) -> dict[str, MakeDrafter]:
    """Every kind of drafter, by name."""
    made: dict[str, MakeDrafter] = {name: head_of(pair, name, "tree") for name in ("medusa", "eagle3", "eagle1")}
    return made | {
        "ngram": lambda pool: NgramDrafter(shortest=1),
        "suffix": lambda pool: SuffixDrafter(slice_seconds=math.inf),
        "draft_model": pair.draft_model,
    }


class TakingTurns:
    """Implements :class:`foresay.spec.protocols.Drafter`: a random member, or nobody, drafts a random shape, which the
    state of the sequence decides; beside them others of the same kinds draft in every step, and must propose the same.

    All are notified of what was committed; only the one that proposed learns which nodes of its tree were. requested,
    accepted, compared: by member, how often it drafted, how many of its nodes were kept, and how many trees compared.
    """

    name = "switching"

    def __init__(self, rested: dict[str, Drafter], restless: dict[str, Drafter]) -> None:
        self.rested, self.restless = rested, restless
        self.members = [*rested.values(), *restless.values()]
        needs = [member.needs for member in self.members if member.needs is not None]
        layers = sorted({layer for request in needs for layer in request.layers})
        self.needs: FeatureRequest | None = FeatureRequest(any(request.final for request in needs), tuple(layers))
        self.requested, self.accepted, self.compared = Counter[str](), Counter[str](), Counter[str]()
        self._last: dict[str, str] = {}
        for member in self.members:  # they see other trials, so nothing is calibrated
            if isinstance(member, DraftModelDrafter | MedusaDrafter | EagleDrafter):
                member.calibration.active = False
            elif isinstance(member, SuffixDrafter):
                member.learning = False

    def propose(self, sequences: Sequence[SequenceState], shapes: Sequence[TreeShape]) -> list[DraftTree]:
        turns = [self._turn(sequence, shape) for sequence, shape in zip(sequences, shapes, strict=True)]
        requested = [shape if shape.levels else TreeShape.chain(1) for _, shape in turns]
        wanted = {name: member.propose(sequences, requested) for name, member in self.restless.items()}
        trees = [DraftTree.chain([sequence.tokens[-1]], self.name) for sequence in sequences]
        for name, member in self.rested.items():
            its = [index for index, (one, _) in enumerate(turns) if one == name]
            if not its:
                continue
            self.requested[name] += len(its)
            found = member.propose([sequences[index] for index in its], [turns[index][1] for index in its])
            for index, tree in zip(its, found, strict=True):
                trees[index], other = tree, wanted[name][index]
                assert (tree.tokens, tree.parents) == (other.tokens, other.parents), f"{name}, {sequences[index].id}"
                self.compared[name] += len(tree) > 1
        self._last |= {sequence.id: name for sequence, (name, _) in zip(sequences, turns, strict=True)}
        return trees

    def _turn(self, sequence: SequenceState, most: TreeShape) -> tuple[str, TreeShape]:
        """Whose turn it is, and what it may draft: nothing, a chain, or a tree no larger than ``most``."""
        rng = random.Random(f"{sequence.id}/{len(sequence.tokens)}")
        name, levels = rng.choice(["none", *self.rested]), rng.randint(0, most.levels)
        if name == "none" or levels == 0:
            return "none", ROOT_ONLY
        if rng.random() < 0.3:
            return name, TreeShape.chain(levels)
        return name, TreeShape(tuple(rng.randint(1, width) for width in most.widths[:levels]))

    def observe(self, sequence: SequenceState, features: Features) -> None:
        for member in self.members:
            reader = reader_of(member)
            if reader is not None:
                reader.observe(sequence, features)

    def extend(self, sequence: SequenceState) -> None:
        for member in self.members:
            member.extend(sequence)

    def committed(self, sequence: SequenceState, path: list[int]) -> None:
        last = self._last.pop(sequence.id, "none")
        self.accepted[last] += sum(node > 0 for node in path)
        drafted = self.rested.get(last)
        for member in self.members:  # to those who had proposed nothing, all but the root came from elsewhere
            member.committed(sequence, path if member is drafted else [0, *(-1 for _ in path[1:])])

    def finished(self, sequence: SequenceState) -> None:
        self._last.pop(sequence.id, None)
        for member in self.members:
            member.finished(sequence)


def engine_with(pair: Pair, texts: dict[str, list[int]], **changes: int | bool) -> EngineCore:
    """Nobody whispers here: what is proposed is the drafters' own."""

    def made(pool: PagePool) -> Drafter:
        rested, restless = ({name: make(pool) for name, make in makers(pair).items()} for _ in range(2))
        return TakingTurns(rested, restless)  # type: ignore[arg-type]

    return engine_of(pair.target, made, TreeShape.parse("4,6,4,2"), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("situation", ["in a batch", "back", pytest.param("preempted", marks=pytest.mark.soak)])
def test_a_rested_drafter_has_caught_up(pair, situation) -> None:
    models = pair("llama2")
    engine, _ = assert_same_in(situation, models, partial(engine_with, models))
    drafter = engine.drafter
    assert isinstance(drafter, TakingTurns)
    assert all(drafter.compared[name] > 3 for name in makers(models) if name not in LOOKUPS), drafter.compared
    # A draft model that reads the text as it is agrees with most of the target's samples.
    assert drafter.accepted["draft_model"] > drafter.requested["draft_model"] / 2
