"""The same tokens where layers are recurrent: with drafts, company, too few pages, prefixes, forks and cuts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from foresay.kvpaging import LayerStates
from foresay.kvpaging.states import TextState, recurrent_state
from foresay.spec.engine import Engine
from foresay.spec.protocols import Rows
from foresay.verifier import model_runner
from foresay.verifier.forward_batch import ForwardBatch
from foresay.verifier.model_runner import ModelRunner
from foresay.verifier.ops import recurrence
from tests.poison import parts_of
from tests.same_tokens.models import Pair
from tests.same_tokens.runs import (
    assert_same,
    cut_short,
    drafting,
    expected,
    jobs_of,
    plain,
    replace_params,
    returning,
    whole,
)
from tests.same_tokens.witness import Job, run

#: Prompts around the borders of pages, and where the convolution begins.
LENGTHS = (9, 60, 17, 1, 33, 3)
DRAFTED = ["none", "ngram", "suffix tree", "chain4", "8,8", "garbage", "truth"]


@pytest.fixture(params=["qwen3_5", "lfm2", "falcon_h1"])
def models(pair, request) -> Pair:
    found: Pair = pair(request.param)
    return found


@pytest.mark.parametrize("drafter", DRAFTED)
def test_every_drafter_with_four_at_once_and_too_few_pages(models, drafter) -> None:
    jobs, wanted = jobs_of(models.vocab_size, LENGTHS, 40), expected(models, LENGTHS, 40)
    engine = drafting(models, drafter, whole(jobs, wanted), page_size=8, chunk=16, prefix=True, tokens=176)
    texts = run(engine, jobs)
    assert_same(wanted, texts)
    assert sum(text.statistics.preemptions for text in texts.values() if text.statistics)


@pytest.mark.parametrize("drafter", ["ngram", "truth"])
def test_bf16(pair, drafter) -> None:
    models = pair("qwen3_5", torch.bfloat16)
    jobs, wanted = jobs_of(models.vocab_size, LENGTHS, 40), expected(models, LENGTHS, 40)
    assert_same(wanted, run(drafting(models, drafter, whole(jobs, wanted), page_size=8, chunk=16), jobs))


@pytest.mark.parametrize("drafter", ["none", "truth", "chain4"])
def test_texts_that_come_back(models, drafter) -> None:
    """Prompts, and turns behind what was answered, are found where a checkpoint is."""
    first, later, texts = returning(models)
    engine = drafting(models, drafter, whole([*first, *later], texts), page_size=8, prefix=True, tokens=2048)
    found = run(engine, [*first, *later])
    assert_same({job.id: texts[job.id] for job in [*first, *later]}, found)
    assert sum(found[job.id].cached_tokens > 0 for job in later) >= 9


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
    """As a stop string does it, a token or many before what was written last."""
    (job,) = jobs_of(models.vocab_size, (50,), 80, ["greedy"])
    text = job.prompt + plain(models.target, [job])[job.id].tokens
    engine = drafting(models, "truth", {job.id: text}, page_size=8, prefix=True)
    rest = cut_short(engine, job, text, cut)
    assert_same(plain(models.target, [rest]), run(engine, [rest]))


def test_aborted_in_the_middle_of_a_prompt_and_sent_again(models) -> None:
    """Nothing of what was not read to the end is found."""
    jobs = jobs_of(models.vocab_size, (90,), 12, ["warm"])
    engine = drafting(models, "garbage", {}, page_size=8, chunk=20, prefix=True)
    run(engine, [replace(job, cancelled=2) for job in jobs])
    assert_same(plain(models.target, jobs), run(engine, jobs))


def _states(engine: Engine, job: Job) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """How many tokens a text's state has read, and its bytes, step by step."""
    engine.add(job.request())
    while engine.has_work:
        sequence = engine._sequences.get(job.id)
        engine.step()
        if sequence is not None and (state := recurrent_state(sequence.table)) is not None and state.at:
            yield state.at, parts_of(engine.runner.verifier.store.states, state)  # type: ignore[attr-defined]


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


# -- breaches, seen by: prompts in pieces, drafts, company, texts that come back ---------------------------------------


def stale_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step goes on from the last page boundary's state, although the text is past it (vLLM #39273)."""
    written = ForwardBatch._write_states

    def stale(self: ForwardBatch, index: int, part: Rows, state: TextState) -> None:
        written(self, index, part, state)
        if state.mark[1]:
            self._staged.arrays["states"][index, 0] = state.mark[1]

    monkeypatch.setattr(ForwardBatch, "_write_states", stale)


def trimmed_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are dropped from the end of a prefix, and the state at its end is kept (vLLM #53912)."""

    def adopted(self: TextState, pages: Sequence[int], known: int) -> None:
        if pages:
            self.at = len(pages) * self.pages.page_size
            self.page = self.pages.retain(next(iter(self.pages.checkpoints.values())))
        self.branch = known

    monkeypatch.setattr(TextState, "adopt", adopted)


def window_not_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The convolution goes on from the last rows of the tree, accepted or not (vLLM #50272)."""
    committed: Any = recurrence.replay

    def replayed(layers: LayerStates, source: int, goal: int, fresh: bool, sequence: int, path: torch.Tensor) -> None:
        committed(layers, source, goal, fresh, sequence, path)
        layers.tails[:, goal, -1] = layers.rows[:, sequence * 64 + int(path[-1]) + 1]

    monkeypatch.setattr(model_runner, "replay", replayed)


def in_order_of_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first nodes are committed instead of the accepted ones."""
    committed: Any = recurrence.replay

    def replayed(*given: Any) -> None:
        committed(*given[:-1], torch.arange(len(given[-1])))

    monkeypatch.setattr(model_runner, "replay", replayed)


def not_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step behind one that accepted several goes on from before those."""
    committed: Any = recurrence.replay

    def replayed(*given: Any) -> None:
        committed(*given[:-1], given[-1][:1])

    monkeypatch.setattr(model_runner, "replay", replayed)


def published_before_it_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint is the page that the next pass is to write to (vLLM #56525)."""

    def boundaries(self: TextState) -> list[tuple[int, int]]:
        size = self.pages.page_size
        return [(self.at // size * size, page) for page in self.spares[-1:]]

    monkeypatch.setattr(TextState, "boundaries", property(boundaries))


def written_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that others share is written to."""
    writable = TextState._writable
    in_place = lambda self: self.page if self.pages.is_shared(self.page) else writable(self)  # noqa: E731
    monkeypatch.setattr(TextState, "_writable", in_place)


def prompts_in_another_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass over several rows of a text leaves a state that is as exact, with other last bits than row by row."""
    go_on = ModelRunner._go_on

    def otherwise(self: ModelRunner, *given: Any) -> None:
        store, table, state, path = given
        rows = table.length - len(path) - state.at
        go_on(self, *given)
        if rows > 1:
            for kept in store.layers[:2]:
                kept[:, state.page] *= 1 + 2**-23

    monkeypatch.setattr(ModelRunner, "_go_on", otherwise)


MUTATIONS = [
    stale_page, trimmed_prefix, window_not_rolled_back, in_order_of_slots, not_committed, published_before_it_ran,
    written_in_place, prompts_in_another_form,
]  # fmt: skip


@pytest.mark.parametrize("mutation", [None, *MUTATIONS])
def test_a_breach_is_seen(models, mutation, monkeypatch) -> None:
    first, later, texts = returning(models)
    # Three that come back right where a page begins: drafts hang on a state that others share.
    (one,) = jobs_of(models.vocab_size, (49,), 20, ["warm"])
    held = [replace(one, id=f"held {turn}", arrives=100 + 40 * turn) for turn in range(3)]
    jobs, texts = [*first, *later, *held], texts | plain(models.target, held)
    engine = drafting(models, "truth", whole(jobs, texts), page_size=8, chunk=20, prefix=True, tokens=2048)
    if mutation is None:
        assert_same({job.id: texts[job.id] for job in jobs}, run(engine, jobs))
        return
    mutation(monkeypatch)
    if mutation is prompts_in_another_form:  # by itself it is right: it differs from others of the same text
        texts = plain(models.target, [*first, *later, *held])
    with pytest.raises(AssertionError):
        assert_same({job.id: texts[job.id] for job in jobs}, run(engine, jobs))
