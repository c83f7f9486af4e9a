"""The same tokens where layers are recurrent: with drafts, company, too few pages, prefixes, forks and cuts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch

from foresay.kvpaging.states import recurrent_state
from foresay.spec.engine import EngineCore
from tests.poison import parts_of
from tests.same_tokens.models import Pair
from tests.same_tokens.runs import assert_same, drafting, jobs_of, plain, replace_params, whole
from tests.same_tokens.situations import assert_goes_on
from tests.same_tokens.witness import Job, run


@pytest.fixture(params=["qwen3_5", "lfm2", "falcon_h1"])
def models(pair, request) -> Pair:
    found: Pair = pair(request.param)
    return found


@pytest.mark.parametrize("length", [64, 62], ids=["ends read", "drafts on a held state"])
def test_one_held_prefix_is_never_corrupted_by_drafts(models, length) -> None:
    """A, B, A, with one prefix and other ends (vLLM #43559): drafts that are mostly wrong between two that are read."""
    (base,) = jobs_of(models.vocab_size, (length,), 20, ["greedy"])
    ends = [replace(base, id=f"{turn}", prompt=base.prompt + [turn % 2 + 5] * 3) for turn in range(2)]
    wanted = plain(models.target, ends)
    engine = drafting(models, "garbage", {}, max_seqs=1, prefix=True)
    for round_ in range(100):
        found = run(engine, [replace(ends[round_ % 2], id="probe")])
        assert_same({"probe": wanted[str(round_ % 2)]}, found)
        assert found["probe"].cached_tokens >= 48 * (round_ > 1)


def test_where_texts_part_a_state_is_kept(models) -> None:
    """The first finds nothing, nor does the second, which leaves the first's text where no state is; others do."""
    (base,) = jobs_of(models.vocab_size, (44,), 12, ["warm"])
    jobs = [replace(base, id=f"{turn}", prompt=base.prompt + [turn] * 30, arrives=40 * turn) for turn in range(4)]
    found = run(drafting(models, "garbage", {}, page_size=8, chunk=28, prefix=True, tokens=2048), jobs)
    assert_same(plain(models.target, jobs), found)
    assert [found[job.id].cached_tokens for job in jobs] == [0, 0, 40, 40]


def test_other_choices_of_a_prompt(models) -> None:
    """Forks take the prompt when it is computed, and much later."""
    for length in (70, 64, 65):  # the last row of the prompt begins a page, or ends one
        (first,) = jobs_of(models.vocab_size, (length,), 30, ["warm"])
        forks = [replace(first, id=f"fork{arrives}", fork_of=first.id, arrives=arrives) for arrives in (0, 1, 12, 20)]
        jobs = [first, *(replace(fork, params=replace_params(fork.params, seed=fork.arrives)) for fork in forks)]
        for prefix in (False, True):
            engine = drafting(models, "garbage", {}, page_size=8, chunk=24, prefix=prefix)
            assert_same(plain(models.target, jobs), run(engine, jobs))


@pytest.mark.parametrize("cut", [1, 35])
def test_a_text_cut_short_can_be_gone_on_with(models, cut) -> None:
    assert_goes_on(models, partial(drafting, models, "truth"), cut)


def test_aborted_in_the_middle_of_a_prompt_and_sent_again(models) -> None:
    """Nothing of what was not read to the end is found."""
    jobs = jobs_of(models.vocab_size, (90,), 12, ["warm"])
    engine = drafting(models, "garbage", {}, page_size=8, chunk=20, prefix=True)
    run(engine, [replace(job, cancelled=2) for job in jobs])
    assert_same(plain(models.target, jobs), run(engine, jobs))


def _states(engine: EngineCore, job: Job) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """How many tokens a text's state has read, and its bytes, step by step."""
    engine.add(job.request())
    while engine.has_work:
        sequence = engine._sequences.get(job.id)
        engine.step()
        if sequence is not None and (state := recurrent_state(sequence.table)) is not None and state.length:
            yield state.length, parts_of(engine.runner.verifier.store.states, state)  # type: ignore[attr-defined]


@pytest.mark.parametrize("drafter", ["truth", "garbage"])
def test_after_each_step_the_state_has_the_bits_of_plain_decoding(models, drafter) -> None:
    """Of a hundred tokens, whatever was accepted: nothing, one, all; and a stop inside a path ends as plain does."""
    (job,) = jobs_of(models.vocab_size, (13,), 100, ["warm"])
    job = replace(job, params=replace_params(job.params, ignore_eos=True))
    wanted = plain(models.target, [job])
    alone = dict(_states(drafting(models, "none", {}, max_seqs=1), job))
    seen = dict(_states(drafting(models, drafter, whole([job], wanted), max_seqs=1), job))
    assert len(seen) > 10
    for at, parts in seen.items():
        for mine, its in zip(parts, alone[at], strict=True):
            assert torch.equal(mine, its), f"after {at} tokens"
