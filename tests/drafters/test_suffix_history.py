"""What is kept of earlier answers, and what makes room."""

from __future__ import annotations

import math
import random

from foresay.drafters.suffix.drafter import SuffixDrafter
from foresay.drafters.suffix.suffix_tree import MAX_SALTS, History
from foresay.spec.tree import TreeShape
from tests.drafters.texts import answered, letters, proposed, sequence


def drafter_of(of_salt: int, in_all: int) -> SuffixDrafter:
    return SuffixDrafter(History(of_salt, in_all), slice_seconds=math.inf)


def knows(drafter: SuffixDrafter, begin: str, salt: str = "") -> bool:
    running = sequence(f"??{begin}", "asking", salt=salt)
    drafted = proposed(drafter, running, 1)
    drafter.finished(running)
    return bool(drafted)


def test_the_oldest_answers_of_a_salt_make_room() -> None:
    drafter = drafter_of(40, 1000)
    for letter in "abcdefgh":
        answered(drafter, f"?{letter}123456{letter.upper()}")
    known = [letter for letter in "abcdefgh" if knows(drafter, letter)]
    assert known == list("efgh")
    assert len(drafter.history) <= 40


def test_the_salt_that_was_quiet_longest_makes_room() -> None:
    drafter = drafter_of(40, 40)
    for salt in ("one", "two", "three"):
        answered(drafter, f"?{salt[0]}23456789abc", salt=salt)
    answered(drafter, "?One more", salt="one")
    answered(drafter, "?four more", salt="four")
    assert knows(drafter, "O", "one") and knows(drafter, "f", "four")
    assert not knows(drafter, "t", "two")
    assert len(drafter.history) <= 40


def test_of_a_long_answer_the_end_is_kept() -> None:
    drafter = drafter_of(40, 100)
    text = "".join(map(chr, range(200, 300)))
    answered(drafter, text)
    assert knows(drafter, text[-10]) and not knows(drafter, text[10])
    assert len(drafter.history) <= 40


def test_no_history_is_kept_where_there_is_no_room() -> None:
    drafter = drafter_of(0, 100)
    answered(drafter, "?abcdef")
    assert not knows(drafter, "ab") and len(drafter.history) == 0


def test_bounds_hold_whatever_comes() -> None:
    rng, history = random.Random(4), History(300, 1000)
    for _ in range(3000):
        history.add(str(rng.randrange(20)), [rng.randrange(50) for _ in range(rng.choice([0, 1, 20, 149, 151, 900]))])
        assert len(history) <= 1000
        assert all(len(history.answers(str(salt))) <= 300 for salt in range(20))
    assert len(history) == sum(len(history.answers(str(salt))) for salt in range(20)) > 500


def test_callers_cannot_make_it_remember_ever_more_salts() -> None:
    history = History()
    history.add("first", [1, 2, 3])
    for number in range(MAX_SALTS):
        history.answers(f"salt {number}")
    assert len(history.answers("first")) == 0 and len(history) == 0


def test_a_running_sequence_outlives_what_is_forgotten() -> None:
    """Its salt's answers are dropped, and their memory given back, while it drafts from them."""
    drafter = drafter_of(40, 40)
    answered(drafter, "?abcdef", salt="one")
    running = sequence("xyab", salt="one")
    assert proposed(drafter, running) == "cdef"
    for letter in "uvw":
        answered(drafter, "?" + letter * 18, salt="two")
    assert proposed(drafter, running) == ""
    assert drafter.history.dropped == [], "given back"


def test_what_is_dropped_is_given_back_in_slices() -> None:
    drafter = SuffixDrafter()
    long = sequence(random.Random(1).choices(range(5000), k=20_000), "long")
    while drafter._of(long).tree.pending > 0:
        drafter.propose([long], [TreeShape.chain(1)])
    drafter.finished(long)
    (dropped,) = drafter.history.dropped
    other, steps = sequence(letters("abc"), "other"), 0
    while not dropped.is_empty:
        drafter.propose([other], [TreeShape.chain(1)])
        steps += 1
    assert steps > 2
