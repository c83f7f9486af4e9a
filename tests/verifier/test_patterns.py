"""Patterns of a checkpoint: they say what ``re`` says, and none of them holds the loading up."""

from __future__ import annotations

import random
import re

import pytest

from foresay.verifier.model.patterns import MOST_CHARACTERS, Pattern

NAMES = [
    "lm_head",
    "model.embed_tokens",
    "model.layers.0.self_attn.q_proj",
    "model.layers.3.self_attn.o_proj",
    "model.layers.17.mlp.gate_up_proj",
    "model.layers.17.mlp.gate",
    "model.layers.61.mlp.experts.12.down_proj",
    "model.visual.blocks.4.attn.qkv",
    "language_model.model.layers.1.linear_attn.in_proj_ba",
    "mtp.fc",
    "",
]
#: As published configurations have them, and as we write them.
PUBLISHED = [
    ".*lm_head",
    "lm_head",
    "visual.*",
    "^mtp.*",
    ".*visual.*",
    ".*norm.*",
    ".*mlp.gate$",
    r".*\.mlp\.gate$",
    r".*\.mlp\.shared_expert_gate$",
    ".*linear_attn.*",
    ".*embed_tokens$",
    ".*kv_a_proj_with_mqa$",
    ".*self_attn.*_proj$",
    ".*self_attn[.](q|k|v|o)_proj$",
    r".*mlp\.(gate|up|gate_up|down)_proj.*",
    r"model\.layers\.\d+\.mlp.gate$",
    r"model\.layers\.(?:0|3|17)\.(?:self_attn\.q_proj|self_attn\.o_proj)$",
    r"^model\.layers\.([0-9]|1[0-7])\..*$",
    r"model\.layers\.[0-9]{1,2}\.mlp\..*",
    r"^(?!.*experts).*$",
    r"^(?!.*language_model\.model\.layers\.)",
    r"^(?!.*\.mlp\.experts(?:\.|$)).*$",
    r"(?=.*proj)(?!.*q_proj).*layers",
    "",
]
#: With these ``re`` does not come to an end, or not soon.
HOSTILE = [
    "([a-z0-9_.]+)+!",
    "(.*)*!",
    "(.|.)*!",
    "(?:.?){20}!" * 3,
    ".*" * 40 + "!",
    "(a|a)*" * 30 + "!",
    "((((.*)*)*)*)*!",
    "^(?!(.*)*!)(.+)+!",
    "([a-z_.0-9]*)*([a-z_.0-9]*)*!",
]


@pytest.mark.parametrize("text", PUBLISHED)
def test_published_patterns_say_what_re_says(text) -> None:
    pattern = Pattern(text)
    assert [pattern.matches(name) for name in NAMES] == [re.match(text, name) is not None for name in NAMES]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_patterns_are_matched(text) -> None:
    pattern = Pattern(text)
    assert not pattern.matches("model.layers.0.self_attn.q_proj" * 3)
    for short in ("a!", "!", "a", "aa!!!"):
        assert pattern.matches(short) is (re.match(text, short) is not None)


ITEMS = ["a", "b", ".", "[ab]", "[^a]", r"\w", r"\d", r"\.", "^", "$", r"\Z"]
QUANTIFIERS = ["", "", "", "", "*", "+", "?", "*?", "+?", "??", "{2}", "{1,2}", "{,2}", "{1,}"]


def written(rng: random.Random, depth: int) -> str:
    """A short pattern of anything that is supported."""
    parts = []
    for _ in range(rng.randrange(4)):
        item = rng.choice(ITEMS)
        if depth and rng.random() < 0.4:
            inside = "|".join(written(rng, depth - 1) for _ in range(rng.randrange(1, 3)))
            item = rng.choice(["(", "(?:"]) + inside + ")"
        parts.append(item + ("" if item in "^$" or item == r"\Z" else rng.choice(QUANTIFIERS)))
    return "".join(parts)


def test_any_supported_pattern_says_what_re_says() -> None:
    rng = random.Random(7)
    names = ["", "a", "b", "ab", "ba", "a.b", "1a", "aab", "abab", "b1."]
    for _ in range(600):
        text = written(rng, 2)
        if rng.random() < 0.2:
            text = f"{rng.choice(['(?=', '(?!'])}{written(rng, 1)}){text}"
        pattern = Pattern(text)
        found = [pattern.matches(name) for name in names]
        assert found == [re.match(text, name) is not None for name in names], text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("(", "is no pattern"),
        ("[z-a]", "is no pattern"),
        ("(" * 3000 + ")" * 3000, "is no pattern"),
        (r"(a)\1", r"has \1"),
        (r"\bgate\b", r"has \b"),
        (".*(?<!gate)$", "has (?<!"),
        ("(?i)gate", "has (?"),
        ("a(?=b)", "has (?="),
        ("((?=b)b)*", "has (?="),
        ("(?!(?!a))b", "has (?!"),
        ("(?P<x>a)(?P=x)", "has (?P="),
        ("a*+", "has +"),
        ("((a{90}){90}){90}", "repeats too much"),
        ("(){1000000000}", "repeats too much"),
    ],
)
def test_what_is_not_supported_is_named(text, said) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        Pattern(text)


def test_the_longest_pattern_of_all_is_matched() -> None:
    pattern = Pattern("(.*.*)*" * (MOST_CHARACTERS // 7) + "!")
    assert not any(pattern.matches(name) for name in NAMES)
