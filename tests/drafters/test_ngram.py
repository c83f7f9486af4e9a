"""Prompt lookup on literal texts: a token is a letter."""

from __future__ import annotations

import pytest

from foresay.drafters.ngram import NgramDrafter
from tests.drafters.texts import proposed, sequence


@pytest.mark.parametrize(
    ("text", "drafted"),
    [
        ("abcdefab", "cdef"),  # what followed "ab"
        ("abXXabYYab", "YYab"),  # the most recent time
        ("abcXabYYabc", "XabY"),  # a longer match decides before a more recent one
        ("abcdXbcdYcdZabcd", "Xbcd"),
        ("abcYdab", "cYda"),
        ("xyzab", ""),  # never seen
        ("abab", "ab"),  # the text has no more
        ("aaaa", "a"),  # the end itself is no earlier time
        ("ab", ""),
        ("a", ""),
    ],
)
def test_it_proposes_what_followed_the_last_time(text, drafted) -> None:
    assert proposed(NgramDrafter(), sequence(text)) == drafted


@pytest.mark.parametrize(
    ("shortest", "longest", "drafted"),
    [(1, 1, "Z_ab"), (1, 2, "YcZ_"), (2, 2, "YcZ_"), (3, 3, "XbcY"), (2, 4, "XbcY"), (4, 4, "")],
)
def test_only_grams_of_the_requested_sizes_count(shortest, longest, drafted) -> None:
    """The last time "c" was followed by Z, "bc" by Y and "abc" by X."""
    running = sequence("abcXbcYcZ_abc")
    assert proposed(NgramDrafter(shortest, longest), running) == drafted
