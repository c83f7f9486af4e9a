"""The prediction drafter on literal texts: a token is a letter."""

from __future__ import annotations

import random
import string
import time

import pytest

from foresay.drafters.prediction import PredictionDrafter
from foresay.spec.budget import CostModel
from foresay.spec.sequence import SequenceState
from foresay.spec.tree import DraftTree, TreeShape
from tests.drafters.texts import draft, letters, sequence

PREDICTED = "the cat sat on a warm mat, purred once and fell asleep"
#: A row costs nothing.
FREE = CostModel([1, 64], [1.0, 1.0])


def running(output: str, prediction: str | None = PREDICTED, name: str = "one") -> SequenceState:
    """A sequence of one token of prompt and this output."""
    made = sequence("#" + output, name)
    made.prediction = None if prediction is None else letters(prediction)
    return made


def paths(tree: DraftTree) -> set[str]:
    """What is drafted, from the root to each leaf, as letters."""
    tokens, parents, found = tree.tokens, tree.parents, {0: ""}
    for node in range(1, len(tokens)):
        found[node] = found[parents[node]] + chr(tokens[node])
    return {path for node, path in found.items() if node not in parents}


def first(tree: DraftTree) -> str:
    """The likeliest path."""
    tokens, parents, node, path = tree.tokens, tree.parents, 0, ""
    while node in parents:
        node = parents.index(node)  # likelier nodes come first
        path += chr(tokens[node])
    return path


def drafted(output: str, levels: int = 8, prediction: str = PREDICTED) -> str:
    return first(draft(PredictionDrafter(), running(output, prediction), TreeShape.chain(levels)))


@pytest.mark.parametrize(
    ("output", "coming"),
    [
        ("the cat", " sat on "),  # as predicted
        ("t", "he cat s"),  # from the first token on
        ("the dog sat", " on a wa"),  # replaced
        ("the fat black cat sat", " on a wa"),  # inserted
        ("the cat on", " a warm "),  # left out
        ("the dog sat on a big warm mat, pur", "red once"),  # several at once
        ("purred", " once an"),  # far ahead
        ("the cat sat on a warm mat, purred. the cat sat", " on a wa"),  # back to the prediction
    ],
)
def test_it_drafts_what_comes_next_in_the_prediction(output, coming) -> None:
    assert drafted(output) == coming


def test_it_drafts_near_the_end_and_nothing_after_it() -> None:
    assert drafted("the cat sat on a warm mat, purred once and fell") == " asleep"
    assert drafted(PREDICTED) == ""
    assert drafted("#", prediction="") == ""
    drafter = PredictionDrafter()
    assert len(draft(drafter, running("the cat", None), TreeShape.chain(4))) == 1
    assert len(draft(drafter, running("the cat"), TreeShape())) == 1


def test_right_after_a_miss_several_positions_are_drafted_side_by_side() -> None:
    """One more, one replaced, or some left out: nobody can know yet."""
    tree = draft(PredictionDrafter(), running("the cat sat o_"), TreeShape.chain(12))
    starts = {path[:4] for path in paths(tree)}
    assert {"n a ", " a w"} <= starts  # "_" is one more, or stands for the "n"
    assert not tree.is_chain
    assert len(tree) <= 13
    assert tree.drafter == "prediction"


@pytest.mark.parametrize("change", ["replaced", "left out", "inserted"])
@pytest.mark.parametrize("length", [1, 3, 12])
def test_it_is_back_within_a_few_tokens(change, length) -> None:
    """Every letter of these texts is at many positions, every three letters at hardly more than one."""
    total = 0
    for seed in range(20):
        rng = random.Random(seed)
        text = "".join(rng.choice(string.ascii_letters) for _ in range(400))
        middle = "".join(rng.choice(string.digits) for _ in range(length))
        begin, rest = text[:200], text[200 if change == "inserted" else 200 + length :]
        written = begin + ("" if change == "left out" else middle)
        lost = [n for n in range(12) if not rest[n:].startswith(drafted(written + rest[:n], 4, text) or "-")]
        assert max(lost, default=0) < 5, (seed, lost)
        total += len(lost)
    assert total <= 20 * 2  # one letter says little, two nearly all


def test_it_learns_how_often_it_is_right() -> None:
    """Where every sixth token is replaced, less is drafted than where none is."""
    rng, cost = random.Random(5), CostModel([1, 64], [1.0, 12.0])
    text = "".join(rng.choice(string.ascii_letters) for _ in range(600))
    poor = "".join(rng.choice(string.digits) if n % 6 == 5 else letter for n, letter in enumerate(text))
    drafted_of = []
    for written in (text, poor):
        drafter, output, sizes = PredictionDrafter(cost), running("", text), []
        for begin in range(0, 480, 5):
            output.tokens += letters(written[begin : begin + 5])
            sizes.append(len(draft(drafter, output, TreeShape.chain(32))) - 1)
        drafted_of.append(sum(sizes[-20:]) / 20)
    assert drafted_of[0] > 1.5 * drafted_of[1] > 0


def test_sequences_and_their_predictions_are_kept_apart() -> None:
    drafter = PredictionDrafter()
    one, two = running("ab", "abcdef", "one"), running("ab", "abXYZ", "two")
    trees = drafter.propose([one, two], [TreeShape.chain(3)] * 2)
    assert [first(tree) for tree in trees] == ["cde", "XYZ"]
    drafter.finished(one)
    again = running("ab", "ab__", "one")
    assert first(draft(drafter, again, TreeShape.chain(3))) == "__"


def test_one_that_was_preempted_is_found_again() -> None:
    rng, drafter = random.Random(4), PredictionDrafter()
    text = "".join(rng.choice(string.ascii_letters) for _ in range(900))
    output = running(text[:300] + "!" + text[300:600], text)
    assert first(draft(drafter, output, TreeShape.chain(8))) == text[600:608]
    drafter.finished(output)
    output.tokens += letters(text[600:603])
    assert first(draft(drafter, output, TreeShape.chain(8))) == text[603:611]


@pytest.mark.usefixtures("no_collection")
def test_a_long_prediction_holds_up_nobody() -> None:
    """Processor time of a draft of 32 in step, and of one that looks in a prediction of 100,000 tokens."""
    rng = random.Random(1)
    prediction = [rng.randrange(4000) for _ in range(100_000)]
    output = running("")
    output.prediction = prediction
    drafter, shape = PredictionDrafter(FREE), TreeShape.chain(32)
    output.tokens += prediction[:5]
    taking, in_step, looking = [], [], []
    for _ in range(100_000 // 4096 + 1):
        begun = time.thread_time()
        draft(drafter, output, shape)
        taking.append(time.thread_time() - begun)
    for number in range(200):
        output.tokens += prediction[5 + number : 6 + number]
        begun = time.thread_time()
        draft(drafter, output, shape)
        in_step.append(time.thread_time() - begun)
    for _ in range(200):
        output.tokens.append(rng.randrange(4000))
        begun = time.thread_time()
        draft(drafter, output, shape)
        looking.append(time.thread_time() - begun)
    times = {"taking in": max(taking), "in step": sorted(in_step)[100], "looking": sorted(looking)[100]}
    print(", ".join(f"{what} {1e6 * seconds:.0f} us" for what, seconds in times.items()))
    assert max(times.values()) < 0.003
