"""What all lookups share: what is found is what is proposed, from what a sequence emitted itself, as it is now."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from foresay.drafters.ngram import NgramDrafter
from foresay.drafters.prediction import PredictionDrafter
from foresay.drafters.suffix.drafter import SuffixDrafter
from foresay.spec.protocols import Drafter, LooksUp
from foresay.spec.sequence import SequenceState
from foresay.spec.tree import TreeShape
from tests.drafters import texts
from tests.drafters.test_combined import sequence


def patient_suffix() -> SuffixDrafter:
    """One that takes all in at once, however long that takes on a busy machine."""
    return SuffixDrafter(slice_seconds=1e9)


def written(rng: random.Random, words: int) -> SequenceState:
    one = sequence()
    one.tokens[:] = [rng.randrange(words) for _ in range(30)]
    one.prediction = [rng.randrange(words) for _ in range(40)]
    return one


@pytest.mark.parametrize("make", [NgramDrafter, patient_suffix])
def test_each_sequence_is_looked_up_in_its_own_text_until_it_is_finished(make: Callable[[], Drafter]) -> None:
    """The same id may come again, with another text."""
    drafter, one, other = make(), texts.sequence("abcdab", "one"), texts.sequence("xyab", "two")
    for _ in range(3):  # looking changes nothing
        assert [len(tree) for tree in drafter.propose([one, other], [TreeShape.chain(2)] * 2)] == [3, 1]
    drafter.finished(one)
    assert texts.proposed(drafter, texts.sequence("xyab", "one")) == ""


@pytest.mark.parametrize("make", [NgramDrafter, patient_suffix])
def test_each_token_read_as_it_comes_gives_what_the_whole_text_gives(make: Callable[[], Any]) -> None:
    drafter, running = make(), texts.sequence("a")
    drafter.learning = False  # of a suffix drafter
    for letter in "bracadabra abracadabra, abraham: abrac":
        running.tokens.append(ord(letter))
        assert texts.proposed(drafter, running) == texts.proposed(make(), running)


@pytest.mark.parametrize("make", [NgramDrafter, patient_suffix, PredictionDrafter])
@pytest.mark.parametrize("shape", ["1", "1,1,1", "3,2,1"])
def test_nothing_is_found_exactly_where_a_root_is_proposed(make: Callable[[], Drafter], shape: str) -> None:
    rng, both = random.Random(3), set()
    for words in (4, 40, 400):
        finding, proposing, one = make(), make(), written(rng, words)
        assert isinstance(finding, LooksUp)
        for _ in range(40):
            one.tokens.append(rng.randrange(words))
            (found,) = finding.find([one], [TreeShape.parse(shape)])
            (tree,) = proposing.propose([one], [TreeShape.parse(shape)])
            assert (found is None) == (len(tree) == 1)
            both.add(found is None)
            if found is not None:
                assert found.tokens == tree.tokens
                assert found.chances == tree.chances
    assert both == {True, False}


@pytest.mark.parametrize("shape", ["1,1,1", "3,2,1"])
def test_what_never_came_is_found_no_more(shape: str) -> None:
    """After one token seventeen others came: each is so unlikely in the end that none is drafted."""
    drafter, one = patient_suffix(), sequence()
    one.tokens[:] = [token for other in range(100, 140) for token in (5, other)]
    (tree,) = drafter.find([one], [TreeShape.parse(shape)])
    for other in range(200, 900):
        one.tokens += [5]
        (tree,) = drafter.find([one], [TreeShape.parse(shape)])
        if tree is None:
            break
        assert len(tree) > 1
        one.tokens += [other]
        drafter.find([one], [TreeShape.parse(shape)])
    assert tree is None
