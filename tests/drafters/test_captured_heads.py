"""Heads inside captured steps propose what they propose step by step."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foresay.drafters.proposer import Drafts, RootOnly
from foresay.kvpaging import PagePool, PageTable
from foresay.spec.sampling import SamplingParams
from foresay.spec.sequence import SequenceState
from foresay.spec.tree import ROOT_ONLY, TreeShape
from tests.combinations import alternating
from tests.drafters.worlds import Captured, World
from tests.same_tokens.heads import head_drafter, target_of
from tests.verifier.reading import random_tokens, scattered

CHAIN = TreeShape.chain(4)
KINDS = ["eagle3", "eagle1", "medusa", "peagle", "dflash", "dspark", "assistant"]
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=20),
]


@pytest.fixture(scope="module")
def worlds(pair, tmp_path_factory):
    """Two worlds with the same texts, of these lengths; the second scatters its pages and may drive captured steps."""
    directory = tmp_path_factory.mktemp("heads")

    def made(kind: str, shape: str, lengths: list[int]) -> tuple[World, World]:
        target = target_of(pair, kind).target
        make = head_drafter(kind, directory / kind, target, shape)
        both = []
        for pool in (PagePool(64, 16), scattered(PagePool(64, 16))):
            both.append(World(target, pool, make))
        rng = random.Random(4)
        for seed, length in enumerate(lengths):
            prompt = random_tokens(rng, length, target.config.vocab_size)
            for world in both:
                world.read(prompt, SAMPLINGS[seed % len(SAMPLINGS)], seed)
        return both[0], both[1]

    return made


def captured(world: World, shape: TreeShape, capacity: int) -> Captured:
    return Captured(world, Drafts(world.drafter, shape, capacity, world.verifier.vocab_size), capacity)


def compare(eager: World, steps: Captured, shape: TreeShape, count: int, rng: random.Random) -> None:
    """Take steps in both worlds, and find the same trees in them."""
    for _ in range(count):
        choices = [[rng.choice((0, 0, 0, 1)) for _ in range(rng.randrange(6))] for _ in eager.sequences]
        assert steps.step(choices) == eager.step(shape, choices)
    assert [s.tokens for s in steps.world.sequences] == [s.tokens for s in eager.sequences]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("capacity", [1, 5])
def test_chains_are_the_eager_ones(worlds, kind, capacity) -> None:
    """Over many steps, each accepting what is dictated, across page boundaries, with slots that are padding."""
    eager, other = worlds(kind, "chain", [13, 27, 60][: min(3, capacity)])
    steps = captured(other, CHAIN, capacity)
    assert steps.join()
    compare(eager, steps, CHAIN, 12, random.Random(capacity))
    assert eager.sequences[0].table.length > 32, "crosses two pages"
    learnt = [[world.drafter.calibration.first(s.sampling.kind, depth) for depth in range(4)]
              for world in (eager, other) for s in world.sequences[:1]]  # fmt: skip
    assert learnt[0] == learnt[1] != [pytest.approx(0.55)] * 4


@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
def test_the_host_knows_what_was_stored(worlds, kind) -> None:
    """Features of the whole text, and the head's rows up to the last step's root: those of eager steps."""
    eager, other = worlds(kind, "chain", [13, 27])
    steps, rng = captured(other, CHAIN, 2), random.Random(3)
    assert steps.join()
    for _ in range(6):
        compare(eager, steps, CHAIN, 1, rng)
        for ours, theirs in zip(other.sequences, eager.sequences, strict=True):
            assert other.drafter.knows(ours) and eager.drafter.knows(theirs)
            # Eager steps run the root's row before it is text, and do not count it.
            filled = eager.drafter.store.filled(theirs.table)
            assert other.drafter.store.filled(ours.table) == filled + 1
            assert_equal_rows(
                eager.drafter.hidden_states.tensors[0], theirs, other.drafter.hidden_states.tensors[0], ours
            )
            for mine, its in zip(eager.drafter.store.tensors, other.drafter.store.tensors, strict=True):
                assert_equal_rows(mine, theirs, its, ours, filled)


def assert_equal_rows(
    expected: Tensor, theirs: SequenceState, found: Tensor, ours: SequenceState, count: int | None = None
) -> None:
    """The first ``count`` rows of a text, in the pages of two worlds."""
    count = count or theirs.table.length
    left, right = (store[:, s.table.slots(0, count)] for store, s in ((expected, theirs), (found, ours)))
    assert torch.allclose(left, right, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_ran_ahead_may_be_dropped(worlds, kind) -> None:
    """What it left on the device is not taken for the text's."""
    eager, other = worlds(kind, "chain", [18, 25])
    steps, rng = captured(other, CHAIN, 2), random.Random(3)
    assert steps.join()
    for _ in range(4):
        compare(eager, steps, CHAIN, 2, rng)
        for sequence in other.sequences:
            sequence.table.reserve(2 * CHAIN.nodes)
        steps.state.write_tables(*zip(*((s.table.pages, s.table.length) for s in other.sequences), strict=True))
        steps.device_step([[0] * rng.randrange(6) for _ in other.sequences])
        assert steps.join()


@pytest.mark.parametrize("kind", KINDS)
def test_plain_steps_keep_up_with_the_text(worlds, kind) -> None:
    """Also if the first captured step of these slots is a plain one."""
    eager, other = worlds(kind, "chain", [18, 25])
    steps = captured(other, CHAIN, 2)
    plain = Captured(other, RootOnly(2, "cpu", [other.drafter]), 2)
    for _ in range(2):
        assert plain.join()
        compare(eager, plain, ROOT_ONLY, 7, random.Random(1))
        assert steps.join()
        compare(eager, steps, CHAIN, 2, random.Random(1))


@pytest.mark.parametrize(("length", "kind"), alternating(range(2, CHAIN.levels + 4), KINDS))
def test_short_texts(worlds, kind, length) -> None:
    """The first pass of an EAGLE head has K + 1 rows, and of position 0 there is none."""
    eager, other = worlds(kind, "chain", [length])
    steps = captured(other, CHAIN, 2)
    assert steps.join()
    compare(eager, steps, CHAIN, 5, random.Random(1))


@pytest.mark.parametrize("kind", KINDS)
def test_texts_that_nobody_showed_are_left_to_eager_steps(worlds, kind) -> None:
    _, other = worlds(kind, "chain", [20])
    other.sequences.append(replace(other.sequences[0], id="new", table=PageTable(other.pool)))
    new = other.sequences[1].table
    new.reserve(30)
    new.commit(19)
    assert not captured(other, CHAIN, 2).join()


@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
def test_rows_that_were_not_run_are_run_before_it_joins(worlds, kind) -> None:
    """The features are there, the head's own rows are not: so a text is after another drafter had its turn."""
    eager, other = worlds(kind, "chain", [40, 21])
    for page in range(other.pool.num_pages):
        other.drafter.store.clamp(page, 0)
    for sequence in other.sequences:
        sequence.table.full.clear()
    steps = captured(other, CHAIN, 2)
    assert steps.join()
    compare(eager, steps, CHAIN, 3, random.Random(1))


@pytest.mark.parametrize("kind", KINDS)
def test_trees_are_the_eager_ones(worlds, kind) -> None:
    """Those that grow by their chances are cut on the device, and learnt from on the host."""
    shape = TreeShape((3, 4, 2))
    eager, other = worlds(kind, "tree", [20, 33])
    steps = captured(other, shape, 3)
    assert steps.join()
    compare(eager, steps, shape, 8, random.Random(2))
    mine, others = (
        [each.shift for kind in world.drafter.calibration._ranks for counts in kind for each in counts]
        for world in (eager, other)
    )
    assert mine == others and any(mine)


@pytest.mark.parametrize("kind", KINDS)
def test_the_road_changes_at_any_time(worlds, kind) -> None:
    """Captured steps, eager ones, and captured ones in another bucket, the sequences in other slots."""
    eager, other = worlds(kind, "chain", [18, 25])
    narrow, wide = captured(other, CHAIN, 2), captured(other, CHAIN, 4)
    rng = random.Random(6)
    for steps in (narrow, wide, narrow):
        assert steps.join()
        compare(eager, steps, CHAIN, 3, rng)
        for _ in range(2):
            choices = [[0] * rng.randrange(6) for _ in eager.sequences]
            assert other.step(CHAIN, choices) == eager.step(CHAIN, choices)
        for world in (eager, other):
            world.sequences.reverse()


@pytest.mark.parametrize("kind", KINDS)
def test_slots_change_without_an_eager_step_between(worlds, kind) -> None:
    eager, other = worlds(kind, "chain", [18, 25, 30])
    steps, others = captured(other, CHAIN, 3), captured(other, CHAIN, 4)
    rng = random.Random(6)
    for bucket in (steps, steps, others, steps):
        assert bucket.join()
        compare(eager, bucket, CHAIN, 2, rng)
        for world in (eager, other):
            world.sequences.append(world.sequences.pop(0))
