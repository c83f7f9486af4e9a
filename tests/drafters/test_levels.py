"""Levels are recorded for few numbers of sequences: after each was met once, a stream never waits for another one."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import foresay.drafters.levels
from foresay.drafters.last_state import LastStateDrafter
from foresay.drafters.levels import levels_ahead
from foresay.kvpaging import PagePool, PageTable
from foresay.spec.budget.members import OPEN
from foresay.spec.price import Price
from foresay.spec.sampling import SamplingParams
from foresay.spec.tree import TreeShape
from foresay.verifier.graphs.capture import Replay, Work, recorded
from tests.drafters.growing import sequence
from tests.same_tokens.models import engine_of
from tests.same_tokens.runs import assert_same, jobs_of, plain
from tests.same_tokens.witness import Job, run

MOST = 16


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What was recorded of levels."""
    made: list[object] = []

    def noted(work: Work) -> Replay:
        made.append(work)
        return recorded(work)

    monkeypatch.setattr(foresay.drafters.levels, "recorded", noted)
    return made


@pytest.mark.parametrize("shape", ["1,1,1", "3,2,1"])
def test_batches_of_up_to_16_need_five_recordings(pair, recordings, shape) -> None:
    models = pair("llama2")
    lengths = tuple(5 + index for index in range(MOST))
    jobs = [replace(job, arrives=index) for index, job in enumerate(jobs_of(models.vocab_size, lengths, 20))]
    tree = TreeShape.parse(shape)
    engine = engine_of(models.target, models.draft_model, tree, max_seqs=MOST, tokens=2048)
    expected = plain(models.target, jobs)
    assert_same(expected, run(engine, jobs))
    assert len(recordings) <= 5
    again = [replace(job, id=f"{job.id} again", arrives=3 * job.arrives) for job in jobs]
    recordings.clear()
    assert_same({f"{id} again": text for id, text in expected.items()}, run(engine, again))
    assert not recordings


def test_those_that_were_used_last_are_kept(pair, recordings, monkeypatch) -> None:
    monkeypatch.setattr(foresay.drafters.levels, "_MOST_LEVELS", 2)
    models = pair("llama2")
    drafter = models.draft_model(PagePool(9, 16))
    for count in (1, 2, 1, 4, 1):
        drafter._made(TreeShape.chain(1), models.vocab_size, (count, 4, False, False, False))
    assert len(recordings) == 3
    for _ in drafter.capture_ahead(TreeShape.chain(1), models.vocab_size, [(8, 4), (8, 4)], drafter.capture):
        drafter._made(TreeShape.chain(1), models.vocab_size, (2, 4, False, False, False))
    assert [kind[0] for kind, _ in drafter._levels] == [8, 1, 2], "and those that were made ahead"


def test_chains_are_drafted_without_a_stop_and_shorter_ones_from_the_recording_of_longer_ones(
    pair, recordings, monkeypatch
) -> None:

    def unstopped(work: Work) -> Replay:
        recordings.append(work)
        replay = recorded(work)
        run = replay.run

        def whole(part: int, end: int | None = None) -> None:
            assert end is not None, "a stop after a part"
            run(part, end)

        monkeypatch.setattr(replay, "run", whole)
        return replay

    monkeypatch.setattr(foresay.drafters.levels, "recorded", unstopped)
    models = pair("llama2")
    engine = engine_of(models.target, models.draft_model, TreeShape.chain(2), max_seqs=1, tokens=512)
    for length in (2, 3, 1, 4):
        engine.scheduler.shape = TreeShape.chain(length)
        params = SamplingParams(temperature=0.8, seed=length, max_tokens=20, ignore_eos=True)
        jobs = [Job(f"{length}", [3, 1, 4, 1, 5], params)]
        assert_same(plain(models.target, jobs), run(engine, jobs))
        assert len(recordings) == 1


def test_a_device_drafts_little_more_levels_than_are_likely_to_be_worth_it() -> None:
    """It is not called after each. What costs more than anything is not drafted beyond them."""
    assert levels_ahead(replace(OPEN, price=Price(0.1, [0.0], 3))) == 4
    assert levels_ahead(replace(OPEN, price=Price(0.1, [0.0], 12))) == OPEN.levels
    assert levels_ahead(replace(OPEN, price=Price(math.inf, [0.0]))) == 1
    assert levels_ahead(TreeShape.chain(5)) == 5


def test_a_state_is_only_that_of_the_text_it_was_kept_of() -> None:
    """Of a text that went back by a token there is none, and none until it is observed again."""
    pool, device = PagePool(4), torch.device("cpu")
    drafter = LastStateDrafter("mtp", pool, 2, torch.float32, device)  # type: ignore[abstract]
    text = sequence([5, 6, 7, 8])
    text.table = PageTable(pool)
    assert not drafter.able(text)
    text.table.reserve(3)
    text.table.commit(3)
    drafter.observe(text, {"final": torch.ones(3, 2)})
    assert drafter.able(text)
    text.table.truncate(2)
    assert not drafter.able(text)
