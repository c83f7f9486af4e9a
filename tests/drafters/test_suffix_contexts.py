"""The positions of contexts, and what they cost, against looking everywhere."""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

import pytest

from foresay.drafters.suffix.drafter import PIECE, Slices, SuffixDrafter
from foresay.drafters.suffix.suffix_tree import MAX_CONTEXT, MAX_POSITIONS, History, SuffixTree
from foresay.spec.tree import TreeShape
from tests.drafters.texts import sequence

pytestmark = pytest.mark.usefixtures("no_collection")
#: Tokens of history at which costs are stated.
LONG = 100_000


def texts(seed: int) -> list[int]:
    """Random texts that repeat themselves: few tokens, pieces copied from before, now and then one over and over."""
    rng, text = random.Random(seed), [0]
    tokens = rng.choice([1, 2, 3, 8, 50])
    while len(text) < 400:
        begin = rng.randrange(len(text))
        piece = text[begin : begin + rng.randint(1, 40)] if rng.random() < 0.5 else [rng.randrange(tokens)]
        text += piece * rng.choice([1, 1, 1, 5])
    return text


def common(text: list[int], position: int, query: list[int], longest: int) -> int:
    """How many tokens before a position are those that end the query, up to ``longest``."""
    length = 0
    while length < min(position, len(query), longest) and text[position - 1 - length] == query[-1 - length]:
        length += 1
    return length


@pytest.mark.parametrize("seed", range(40))
def test_every_position_of_every_context_is_found(seed) -> None:
    """The nodes passed are those where positions part; with each come the latest of all positions that agree so far."""
    text, most = texts(seed), (MAX_CONTEXT, 4)[seed % 2]
    rng, contexts = random.Random(seed), SuffixTree(text, most)
    while contexts.pending > 0:
        contexts.index(rng.randint(1, 50))
        end = contexts.indexed
        begin = rng.randrange(end)
        query = rng.choice([text[:end], text[begin : begin + 30], [*text[begin : begin + 20], 99]])
        lengths = {position: common(text, position, query, most) for position in range(1, end)}
        found = contexts.matches(query)
        longest = max(lengths.values(), default=0)
        assert (found[-1][0] if found else 0) == longest
        assert all(a[0] < b[0] for a, b in pairwise(found))
        for length, positions in found:
            agreeing = [position for position, known in lengths.items() if known >= length]
            assert list(positions) == agreeing[-len(positions) :]
            assert len(positions) == len(agreeing) or len(positions) >= MAX_POSITIONS


def long_text(rng: random.Random, length: int = LONG) -> list[int]:
    """Words of a few tokens, frequent and rare ones."""
    words = [[rng.randrange(20_000) for _ in range(rng.randint(1, 5))] for _ in range(3000)]
    text: list[int] = []
    while len(text) < length:
        text += words[min(int(rng.paretovariate(0.7)), len(words)) - 1]
    return text[:length]


def cpu(run: Callable[[], object]) -> float:
    begun = time.thread_time()
    run()
    return time.thread_time() - begun


def measured() -> Iterator[tuple[SuffixDrafter, list[int]]]:
    """A drafter with so much history, and a text like it."""
    rng, drafter = random.Random(5), SuffixDrafter(History(2 * LONG, 2 * LONG), slice_seconds=1e9)
    text = long_text(rng, LONG + 5000)
    drafter.history.add("", text[:LONG])
    yield drafter, text[LONG - 3000 :]


def test_taking_in_and_proposing_cost_little_with_much_history() -> None:
    """The promise is 20 us a token and 50 us a draft; ten times that may pass on a busy machine."""
    ((drafter, text),) = measured()
    (history,) = drafter.history.pending
    assert cpu(lambda: history.index(LONG)) / LONG < 200e-6
    running = sequence(text[:1000])
    drafter.propose([running], [TreeShape.chain(8)])
    times = []
    for token in text[1000:3000]:
        running.tokens.append(token)
        times.append(cpu(lambda: drafter.propose([running], [TreeShape.chain(8)])))
    assert sorted(times)[len(times) // 2] < 500e-6


def test_memory_is_bounded_by_the_tokens_taken_in() -> None:
    text = long_text(random.Random(6), 20_000)
    tracemalloc.start()
    try:
        contexts = SuffixTree([*text, *text])
        before = tracemalloc.get_traced_memory()[0]
        contexts.index(len(contexts.tokens))
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 10 < grown / len(contexts.tokens) < 400, "bytes a token"


def test_a_long_prompt_holds_nobody_up() -> None:
    """Each step takes in a slice: in the middle one step costs less than a millisecond, and all of it is taken in."""
    drafter, running = SuffixDrafter(), sequence(long_text(random.Random(7)))
    times: list[float] = []
    own = drafter._of(running).tree
    while own.pending > 0 and len(times) < LONG:
        times.append(cpu(lambda: drafter.propose([running], [TreeShape.chain(8)])))
    assert own.pending == 0
    assert len(times) > LONG * 0.5e-6 / 1e-3
    assert sorted(times)[len(times) // 2] < 1e-3
    assert sorted(times)[int(len(times) * 0.9)] < 2e-3


def test_prefill_takes_in_too_and_several_sequences_share_a_slice() -> None:
    drafter = SuffixDrafter()
    running = [sequence(long_text(random.Random(n)), str(n)) for n in range(3)]
    for _ in range(5):
        times = [cpu(partial(drafter.extend, one)) for one in running]
        assert sum(times) < 2e-3
    assert drafter._of(running[0]).tree.indexed > 100


def test_a_slice_ends_in_time() -> None:
    slices, text = Slices(0.0), SuffixTree(list(range(1000)))
    slices.begin()
    assert not slices.index(text) and text.indexed == 1 + PIECE, "one piece, however late it is"
    assert not slices.index(text) and text.indexed == 1 + PIECE
    slices.extend("one")
    assert not slices.index(text) and text.indexed == 1 + PIECE, "a chunk of the same step"
    slices.extend("one")
    assert not slices.index(text) and text.indexed == 1 + 2 * PIECE, "the next step"
    slices = Slices(1e9)
    slices.begin()
    assert slices.index(text) and text.pending == 0
    assert slices.dispose(text) and text.is_empty
