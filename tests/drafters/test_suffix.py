"""Suffix lookup on literal texts: a token is a letter."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from foresay.drafters.suffix.drafter import SuffixDrafter
from foresay.spec.sequence import SequenceState
from foresay.spec.tree import TreeShape
from tests.drafters.texts import answered, draft, letters, proposed, sequence


def suffix() -> SuffixDrafter:
    """One that has always taken in everything."""
    return SuffixDrafter(slice_seconds=math.inf)


def children(drafter: SuffixDrafter, running: SequenceState, widths: tuple[int, ...]) -> dict[str, float]:
    """The paths of a drafted tree, as letters, and their chances."""
    tree = draft(drafter, running, TreeShape(widths))
    paths = [""]
    for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
        paths.append(paths[parent] + chr(token))
    assert len(set(paths)) == len(paths), "siblings differ"
    return dict(zip(paths, tree.chances, strict=True))


@pytest.mark.parametrize(
    ("text", "drafted"),
    [
        ("abcdefab", "cdef"),  # what followed "ab"
        ("abXXabYYab", "YYab"),  # once each: the most recent time
        ("abXcabXdabYeab", "Xdab"),  # twice X, once Y; of the two, the later goes on
        ("abcXabYYabc", "XabY"),  # a longer match decides before a more recent one
        ("xyzpqxyzab", ""),  # never seen
        ("abab", "abab"),  # the text has no more, so it is thought to repeat itself
        ("aaaa", "aaaa"),
        ("ab", ""),
        ("a", ""),
    ],
)
def test_it_proposes_what_mostly_followed_the_longest_context(text, drafted) -> None:
    assert proposed(suffix(), sequence(text)) == drafted


def test_the_longest_context_counts_up_to_sixteen_tokens() -> None:
    """Of two positions the later is taken, unless one of them has more than the other and no more than 16 count."""
    known, other = "abcdefghijklmnop", "Xbcdefghijklmnop"
    assert proposed(suffix(), sequence(f"{known}1{other}2{known}"), 1) == "1"
    assert proposed(suffix(), sequence(f"Y{known}1Z{known}2Y{known}"), 1) == "2"


@pytest.mark.parametrize(("levels", "drafted"), [(1, "c"), (3, "cde"), (6, "cdefgh")])
def test_a_chain_is_at_most_as_deep_as_its_shape(levels, drafted) -> None:
    assert proposed(suffix(), sequence("abcdefghijab"), levels) == drafted


def test_a_chain_ends_where_it_is_hardly_right() -> None:
    """A context of one token is worth a few; one of sixteen is worth many."""
    rng = random.Random(1)
    text = "".join(map(chr, rng.sample(range(200, 900), 200)))
    short, long = proposed(suffix(), sequence(text + text[0]), 60), proposed(suffix(), sequence(text + text[:20]), 60)
    assert text.startswith(text[0] + short) and text[20:].startswith(long)
    assert 2 <= len(short) < len(long) <= 60


def test_a_tree_holds_what_followed_shorter_contexts_too() -> None:
    """The longest predicts 1; "c" alone was followed by 2."""
    assert set(children(suffix(), sequence("abc1_c2_abc"), (4,))) == {"", "1", "2"}


def test_misses_make_it_draft_less_and_hits_more() -> None:
    """Two letters are always followed by two others, or by what they never were followed by before."""
    rng, lengths = random.Random(3), {}
    for right in (True, False):
        drafter, running = suffix(), sequence("")
        for step in range(80):
            running.tokens += [300, 301]
            drafted = draft(drafter, running, TreeShape.chain(8)) if step else None
            running.tokens += [302, 303, 304, 305] if right else [rng.randrange(10**6) + 1000 for _ in range(4)]
        assert drafted is not None
        lengths[right] = sum(drafted.chances[1:])
    assert lengths[False] < 0.5 < 2 < lengths[True]


def test_choices_of_one_prompt_go_their_own_ways() -> None:
    drafter, first = suffix(), sequence("abcdab", "r-0", prompt=6)
    second = replace(first, id="r-1", tokens=list(first.tokens))
    first.tokens += letters("cXab")
    second.tokens += letters("cYab")
    assert [proposed(drafter, one, 2) for one in (first, second)] == ["cX", "cY"]
    first.finish_reason = "stop"
    drafter.finished(first)
    second.tokens += letters("cX")
    assert proposed(drafter, second, 2) == "ab", "as the other, which is over, went on"


def test_an_answer_ends_where_it_ends() -> None:
    """Nothing is drafted beyond it, nor the beginning of the next one."""
    drafter = suffix()
    answered(drafter, "?abcd", "first")
    answered(drafter, "?efgh", "second")
    assert proposed(drafter, sequence("xyab")) == "cd"


def test_the_end_of_the_prompt_leads_to_the_answer_and_the_rest_is_not_kept() -> None:
    drafter = suffix()
    text = "secret: 1234567 " + "q" * 16 + "answer"
    answered(drafter, text, prompt=len(text) - 6)
    assert proposed(drafter, sequence("_" + "q" * 16), 6) == "answer"
    assert proposed(drafter, sequence("_secret")) == ""


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"finish_reason": "stop"}, True),
        ({"finish_reason": "cancelled"}, True),
        ({"finish_reason": None}, False),  # preempted: it comes back
        ({"finish_reason": "error"}, False),
        ({"finish_reason": "stop", "aside": True}, False),
        ({"finish_reason": "stop", "speculate": False}, False),
    ],
)
def test_which_texts_are_kept(changes, kept) -> None:
    drafter = suffix()
    drafter.finished(replace(sequence("?abcdef"), **changes))
    assert proposed(drafter, sequence("xyab", "later")) == ("cdef" if kept else "")


def test_nothing_is_looked_up_across_salts() -> None:
    drafter = suffix()
    answered(drafter, "?abcdef", salt="key-one")
    assert proposed(drafter, sequence("xyab", "theirs", salt="key-two")) == ""
    assert proposed(drafter, sequence("xyab", "nobody's")) == ""
    assert proposed(drafter, sequence("xyab", "ours", salt="key-one")) == "cdef"


def test_a_text_that_was_cut_is_kept_as_far_as_it_goes() -> None:
    drafter, running = suffix(), sequence("?abcdefXYZ")
    assert proposed(drafter, running) == ""
    del running.tokens[5:]
    running.finish_reason = "stop"
    drafter.finished(running)
    assert proposed(drafter, sequence("xyab", "later")) == "cd"
