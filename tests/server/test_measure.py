"""What texts decoded with drafts and without show."""

from __future__ import annotations

import random

import pytest

from foresay.server.cli.bench import Comparison
from foresay.server.engine_process.text_stream import Completion
from foresay.spec.accept import ByDepth
from foresay.spec.request import Delta, Origin
from foresay.spec.trace import Statistics


def statistics(accepted: list[int], speed: float) -> Statistics:
    """Of a text whose steps drafted three tokens and accepted so many of them; the first had no drafts."""
    steps, tokens = len(accepted), sum(accepted) + len(accepted)
    return Statistics(
        prompt_tokens=4,
        completion_tokens=tokens,
        drafted_per_depth=[steps - 1] * 3,
        accepted_per_depth=[sum(number > depth for number in accepted) for depth in range(3)],
        seconds={"propose": 1.0, "forward": 3.0, "prefill": 0.0},
        first=0.1,
        last=0.1 + tokens / speed if speed else 0.1,
        per_step_drafted=[0, *[3] * (steps - 1)],
        per_step_accepted=accepted,
    )


def written(tokens: list[int], counts: Statistics) -> Completion:
    return Completion(
        text="", token_ids=tokens, prompt_token_ids=[], finish_reason="length", seed=0, exact=True, statistics=counts
    )


def test_acceptance_is_cumulative_and_conditional() -> None:
    steps = ([0, 3, 2, 1, 0, 3, 1, 2], [0, 3, 3, 0, 2, 1, 3, 0])  # the first of each read the prompt
    drafted = [written(list(range(20)), statistics(accepted, 30.0)) for accepted in steps]
    alone = [written(list(range(20)), statistics([0] * 20, speed)) for speed in (10.0, 20.0)]
    found = Comparison.of(list(zip(drafted, alone, strict=True)), 0.0)
    assert found.on.accepted_by_depth == ByDepth(14, [11 / 14, 8 / 14, 5 / 14], [11 / 14, 8 / 11, 5 / 8])
    assert str(found.on.accepted_by_depth) == "cumulative 0.79 0.57 0.36, conditional 0.79 0.73 0.62"
    assert found.on.tokens_per_step == 2.5
    assert (found.on.tokens_per_second, found.off.tokens_per_second) == (30.0, 15.0)
    assert found.speedup == 2.0, "the quotient of the speeds in the same report"
    assert found.speedup_spread == (1.5, 3.0)
    assert found.same_tokens


def test_a_text_that_was_over_with_its_prompt_does_not_count_as_the_slowest() -> None:
    """Its speed cannot be measured."""
    whole, alone = statistics([3], 0.0), statistics([0] * 4, 10.0)
    usual = statistics([0, 3, 3], 40.0), statistics([0] * 9, 20.0)
    pairs = [[written([1] * 9, one) for one in both] for both in ((whole, alone), usual)]
    both, one = (Comparison.of(some, 0.0) for some in (pairs, pairs[1:]))
    for found in (both, one):
        assert (found.speedup, found.speedup_spread, found.speedup_interval) == (2.0, (2.0, 2.0), (2.0, 2.0))
        assert (found.on.spread, found.off.spread) == ((40.0, 40.0), (20.0, 20.0))
    nothing = Comparison.of(pairs[:1], 0.0)
    assert (nothing.speedup, nothing.speedup_spread) == (None, None)
    assert nothing.cannot_tell == "every text was over when its prompt was read; ask for longer ones"


@pytest.mark.parametrize(
    ("ratios", "accepted", "said"),
    [
        ([1.5] * 8, [0, 3, 3], ""),
        ([0.7] * 8, [0, 3, 3], ""),
        ([0.95, 1.0, 1.01, 1.02, 1.03, 1.05], [0, 3, 3], ""),
        ([0.8, 0.9, 1.2, 1.25, 1.3], [0, 3, 3], "it may be anything between 0.80x and 1.30x"),
        ([0.4, 1.5, 1.5, 1.5, 4.0], [0, 3, 3], "single texts lie between 0.40x and 4.00x"),
        ([0.8, *[1.5] * 9], [0, 3, 3], ""),
    ],
)
def test_noise_is_no_gain(ratios: list[float], accepted: list[int], said: str) -> None:
    plain = statistics([0] * 20, 10.0)
    texts = [(written([1] * 20, statistics(accepted, 10.0 * ratio)), written([1] * 20, plain)) for ratio in ratios]
    found = Comparison.of(texts, 0.0)
    assert found.cannot_tell.startswith(said) and bool(found.cannot_tell) == bool(said)


def test_an_answer_of_one_token_counts_as_none() -> None:
    text = [written([1], statistics([0], 0.0)) for _ in range(2)]
    assert Comparison.of([text], 0.0).cannot_tell == "the model ended after 1 token: nothing to measure"


def test_a_text_that_came_whole_in_one_step_has_the_speed_of_that_step() -> None:
    """Which is the best that drafts can do, and was taken for no speed at all."""
    whole, read, spent = Statistics(), Statistics(), {"propose": 0.004, "forward": 0.016}
    for one, accepted in ((whole, 3), (read, 0)):
        origin = Origin(1, "", list(range(-1, accepted)), 0, list(range(1, accepted + 1)), spent)
        one.take(Delta(id="r", tokens=[5] * (1 + accepted), origin=origin, elapsed=0.02), 1 + accepted)
    assert whole.decode_tokens_per_second == pytest.approx(200.0)
    assert read.decode_tokens_per_second == 0.0, "its prompt was read in the same time"


def test_the_speed_up_follows_from_the_speeds_and_lies_among_single_ones() -> None:
    rng = random.Random(0)
    for count in range(1, 60):
        speeds = [(rng.uniform(10, 500), rng.uniform(10, 500)) for _ in range(count)]
        found = Comparison.of([[written([1], statistics([0, 1], one)) for one in both] for both in speeds], 0.0)
        assert found.on.tokens_per_second and found.off.tokens_per_second and found.speedup and found.speedup_spread
        assert found.speedup == pytest.approx(found.on.tokens_per_second / found.off.tokens_per_second, rel=2e-3)
        assert found.speedup_spread[0] <= found.speedup <= found.speedup_spread[1]


def test_another_token_is_noticed() -> None:
    pair = [written(tokens, statistics([0, 1], 9.0)) for tokens in ([1, 2], [1, 3])]
    assert not Comparison.of([pair], 0.0).same_tokens
