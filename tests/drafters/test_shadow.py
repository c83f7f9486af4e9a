"""A shadow counts what its drafter would have done: the same that it does when it drafts itself."""

from __future__ import annotations

import math

import pytest

from foresay.drafters.ngram import NgramDrafter
from foresay.drafters.shadow import Shadow
from foresay.drafters.suffix.drafter import SuffixDrafter
from foresay.spec.sampling import SamplingParams
from foresay.spec.trace import ShadowReport, Statistics
from foresay.spec.tree import TreeShape
from tests.combinations import pairwise
from tests.spec.harness import Harness
from tests.spec.tables import Guesser, TableModel

#: With four tokens in all, lookups find something, and are right now and then.
PROMPTS = ([1, 2, 3, 4] * 4, [5, 6, 5, 6, 5, 6, 7], [9] * 6)


def figures(one: ShadowReport | Statistics) -> tuple[object, ...]:
    """What a shadow and a drafter have both counted; a step that computed the prompt drafted nothing."""
    return one.drafted, one.accepted, one.drafted_per_depth, one.accepted_per_depth


def model_of(seed: int) -> TableModel:
    return TableModel(seed, vocab_size=4)


def runs(harness: Harness, temperature: float, stop: tuple[int, ...] = ()) -> list[Statistics]:
    for number, prompt in enumerate(PROMPTS):
        params = SamplingParams(max_tokens=60, min_tokens=30, seed=number, temperature=temperature, stop_token_ids=stop)
        harness.add(str(number), [token % 4 for token in prompt], params)
    answers = harness.run()
    return [answer.statistics for _, answer in sorted(answers.items())]


def suffix() -> SuffixDrafter:
    """One that takes in all at once, so that nothing depends on the clock."""
    return SuffixDrafter(slice_seconds=math.inf)


@pytest.mark.parametrize(
    ("temperature", "levels", "stop", "make", "chunk"),
    pairwise([0.0, 1.0], [1, 4], [(), (3,)], [NgramDrafter, suffix], [256, 3]),
)
def test_what_a_shadow_counts_is_what_happens_when_it_drafts(temperature, levels, stop, make, chunk) -> None:
    """With prompts read in chunks too: the shadow is never shown what comes next. One request at a time, since
    earlier answers are looked up too."""
    model = model_of(3)
    drafting = Harness(model, make(), (1,) * levels, max_chunk=chunk, max_seqs=1)
    wanted = runs(drafting, temperature, stop)
    shadow = Shadow(make(), TreeShape.chain(levels))
    besides = Harness(model, Guesser(model, 0.7, full=True), (2, 2, 1), observers=[shadow], max_chunk=chunk, max_seqs=1)
    runs(besides, temperature, stop)
    reports = shadow.reports()
    assert sum(statistics.drafted for statistics in wanted) > 20
    assert sum(statistics.accepted for statistics in wanted) > 10
    assert sorted(map(figures, reports)) == sorted(map(figures, wanted))
    assert sorted(r.steps for r in reports) == sorted(s.steps for s in wanted)
    assert sum(r.tokens for r in reports) == sum(s.completion_tokens for s in wanted)
    assert shadow.reports() == [], "each is told once"


def test_a_text_cut_short_counts_as_far_as_it_goes() -> None:
    shadow = Shadow(NgramDrafter(), TreeShape.chain(4))
    harness = Harness(model_of(3), Guesser(model_of(3), 1.0, full=True), (1, 1, 1), observers=[shadow])
    harness.add("one", [1, 2] * 6, SamplingParams(max_tokens=60, temperature=0.0))
    for _ in range(8):
        harness.step()
    harness.engine.finish("one", 9)
    harness.run()
    (report,) = shadow.reports()
    assert report.tokens == 9
    assert report.accepted + report.steps >= report.tokens
    assert report.accepted == sum(report.accepted_per_depth) <= 8


def test_a_request_that_leaves_before_its_first_token_leaves_nothing() -> None:
    drafter = NgramDrafter()
    shadow = Shadow(drafter, TreeShape.chain(4))
    harness = Harness(model_of(3), observers=[shadow], max_chunk=3)
    harness.add("gone", [1, 2] * 6, SamplingParams(max_tokens=20))
    harness.step()
    assert drafter._indices
    harness.engine.cancel("gone")
    harness.run()
    harness.engine.notify()
    assert (shadow.reports(), drafter._indices, shadow._walks, shadow._seconds) == ([], {}, {}, {})


def test_requests_that_switch_speculation_off_have_no_shadow() -> None:
    shadow = Shadow(NgramDrafter(), TreeShape.chain(4))
    harness = Harness(model_of(3), observers=[shadow])
    harness.add("off", [1, 2] * 6, SamplingParams(max_tokens=20, temperature=0.0), speculate=False)
    harness.run()
    assert shadow.reports() == []
