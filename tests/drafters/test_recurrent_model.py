"""A draft model of recurrent layers has the states that its text leaves, whatever was drafted, shared or left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from foresay.drafters.draft_model import RecurrentDraftDrafter
from foresay.spec.protocols import Forward, Rows
from foresay.spec.step import ScheduledSequence, VerifyResult
from foresay.spec.trace import Stopwatch
from foresay.spec.tree import DraftTree, TreeShape
from tests.combinations import pairwise
from tests.same_tokens.models import Pair, engine_of
from tests.same_tokens.runs import assert_same, drafting, expected, jobs_of, plain, replace_params
from tests.same_tokens.witness import Witness, run

LENGTHS = (9, 60, 17, 1, 33, 3)
OPTIONS: list[dict[str, Any]] = [
    {"max_seqs": 1},
    {"page_size": 8, "chunk": 16, "prefix": True, "tokens": 200},
    {"page_size": 8, "chunk": 16, "prefix": True, "tokens": 2048},
]


FAMILIES = ["qwen3_5", "lfm2", "falcon_h1"]


@pytest.fixture
def alike(pair, family) -> Pair:
    """A target that drafts for itself: with the same noise it is never wrong, unless a state is."""
    found: Pair = pair(family)
    return replace(found, draft=found.target)


class Compared(Witness):
    """Each step's draws against what the draft model held for the likeliest below each node that it expanded.

    compared: how many nodes.
    """

    compared = 0

    def run(self, batch: list[ScheduledSequence], watch: Stopwatch) -> list[VerifyResult]:
        results = super().run(batch, watch)
        for result in results:
            if (tree := self.grown.pop(result.scheduled.sequence.id, None)) is not None:
                begin, above = 0, 1
                looked: list[Any] = [children for children, _ in tree.looked] or [[[each]] for each in tree.tokens[1:]]
                numbers = list(enumerate(tree.numbers or range(len(looked))))
                for children, level in zip(looked, tree.fixed, strict=False):
                    nodes = [(node, each - begin) for node, each in numbers if 0 <= each - begin < level.front]
                    assert [children[row][0] for _, row in nodes] == [result.sampled[node] for node, _ in nodes]
                    self.compared += len(nodes)
                    begin, above = begin + above, level.kept
        return results

    def _propose(self, batch: list[ScheduledSequence]) -> list[DraftTree]:
        trees = super()._propose(batch)
        assert isinstance(self.drafter, RecurrentDraftDrafter)
        self.grown = dict(self.drafter._grown)
        return trees


@pytest.mark.parametrize(("family", "shape", "options"), pairwise(FAMILIES, ["chain4", "3,2,1", "4,4,2,2,1"], OPTIONS))
def test_a_target_that_drafts_for_itself_is_never_wrong(alike, shape, options) -> None:
    """At no node, taken or not. Twice, the second time with prefixes. (What top_p leaves is approximated for trees.)"""
    jobs = jobs_of(alike.vocab_size, LENGTHS, 40, ["greedy", "cool", "warm"])
    wanted = plain(alike.target, jobs)
    engine = drafting(alike, shape, {}, **options)
    engine.runner = Compared(engine.runner.verifier, engine.drafter)
    for _ in range(2):
        texts = run(engine, jobs)
        assert_same(wanted, texts)
        whole = [text.statistics for text in texts.values() if text.finish_reason != "stop"]
        assert shape != "chain4" or all(each.accepted == each.drafted for each in whole if each)
    assert engine.runner.compared > 300


@pytest.mark.parametrize("shape", ["chain4", "8,8"])
@pytest.mark.parametrize("kinds", [("qwen3", "qwen3_5"), ("qwen3_5", "qwen3")])
def test_together_with_a_model_of_attention_alone(pair, kinds, shape) -> None:
    target, draft = (pair(kind) for kind in kinds)
    models = replace(target, draft=draft.draft)
    jobs, wanted = jobs_of(models.vocab_size, LENGTHS, 40), expected(target, LENGTHS, 40)
    for options in OPTIONS:
        assert_same(wanted, run(drafting(models, shape, {}, **options), jobs))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_that_others_begin_with_is_not_read_again(alike, monkeypatch) -> None:
    """From the first's end it is gone on with; what leaves it further in front is read once, and has a checkpoint."""
    (first,) = jobs_of(alike.vocab_size, (70,), 8, ["warm"])
    text = first.prompt + plain(alike.target, [first])[first.id].tokens
    prompts = [[*text, 1, 2], text[:40] + [3] * 9, text[:40] + [4] * 9, text[:64] + [5] * 9]
    others = [replace(first, id=f"{number}", prompt=prompt) for number, prompt in enumerate(prompts)]
    drafters, read = list[RecurrentDraftDrafter](), list[int]()

    def make(pool: Any) -> RecurrentDraftDrafter:
        made = alike.draft_model(pool)
        assert isinstance(made, RecurrentDraftDrafter)
        passed = made.model.run

        def counted(rows: Sequence[Rows]) -> Forward:
            read[-1] += sum(len(part.tokens) for part in rows)
            return passed(rows)

        monkeypatch.setattr(made.model, "run", counted)
        drafters.append(made)
        return made

    engine = engine_of(alike.target, make, TreeShape.chain(2), page_size=8, prefix=True)
    for job in [first, *others]:
        read.append(0)
        run(engine, [replace(job, params=replace_params(job.params, ignore_eos=True))])
    assert read[1:] == [len(prompts[0]) - 1 - 72, 48, 8, 8], read
    assert not drafters[0]._texts
    pages = drafters[0].model.store.states
    assert pages is not None
    pages.pages.check([], free=(), cached=pages.pages.checkpoints)


@pytest.mark.parametrize("shape", ["chain4", pytest.param("8,8", marks=pytest.mark.soak)])
def test_many_texts_that_leave_others_have_four_states_each(pair, monkeypatch, shape) -> None:
    """Up to five are of use to a text: what it keeps for other requests is given up where these are too many."""
    monkeypatch.setattr("tests.same_tokens.models.MAX_SEQS", 24)
    found = replace(pair("qwen3"), draft=pair("qwen3_5").draft)
    (base,) = jobs_of(found.vocab_size, (80,), 8, ["warm"])
    whole = [replace(base, id=f"whole {number}", prompt=[number + 1, *base.prompt]) for number in range(24)]
    params = replace_params(base.params, max_tokens=60, ignore_eos=True)
    jobs = [replace(one, id=f"left {one.id}", prompt=[*one.prompt[:45], *[9] * 9], params=params) for one in whole]
    engine = drafting(found, shape, {}, max_seqs=24, page_size=8, prefix=True, tokens=1 << 15)
    assert isinstance(engine.drafter, RecurrentDraftDrafter)
    pages = engine.drafter._store.pages
    for _ in range(pages.num_pages - 1 - 4 * 24):
        pages.allocate()
    run(engine, whole)
    assert_same(plain(found.target, jobs), run(engine, jobs))
