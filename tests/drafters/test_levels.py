"""Levels are recorded for few numbers of sequences: after each was met once, a stream never waits for another one."""

from __future__ import annotations

from dataclasses import replace

import pytest

import foresay.drafters.levels
from foresay.spec.tree import TreeShape
from tests.same_tokens.models import engine_of
from tests.same_tokens.runs import assert_same, jobs_of, plain
from tests.same_tokens.witness import run

MOST = 16


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What was recorded of levels."""
    made: list[object] = []
    real = foresay.drafters.levels.recorded

    def recorded(work):
        made.append(work)
        return real(work)

    monkeypatch.setattr(foresay.drafters.levels, "recorded", recorded)
    return made


@pytest.mark.parametrize("shape", ["1,1,1", "3,2,1"])
def test_batches_of_up_to_16_need_five_recordings(pair, recorded, shape) -> None:
    models = pair("llama2")
    lengths = tuple(5 + index for index in range(MOST))
    jobs = [replace(job, arrives=index) for index, job in enumerate(jobs_of(models.vocab_size, lengths, 20))]
    tree = TreeShape.parse(shape)
    engine = engine_of(models.target, models.draft_model, tree, max_seqs=MOST, tokens=2048)
    expected = plain(models.target, jobs)
    assert_same(expected, run(engine, jobs))
    assert len(recorded) <= 5
    again = [replace(job, id=f"{job.id} again", arrives=3 * job.arrives) for job in jobs]
    recorded.clear()
    assert_same({f"{id} again": text for id, text in expected.items()}, run(engine, again))
    assert not recorded
