"""A constraint's answers over trees, against matchers that were fed each path from the beginning."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.schemas import schemas
from foresay.server.text.grammars import constraint as constraint_module
from foresay.server.text.grammars.compiler import MOST_KEPT, GrammarCompiler, tokenizer_text
from foresay.server.text.grammars.constraint import GrammarFailed, LlguidanceConstraint
from foresay.server.text.grammars.fields import (
    ANY_OBJECT,
    BOUNDED,
    choice_grammar,
    lark_grammar,
    regex_grammar,
    schema_grammar,
)
from foresay.spec.constrain import Constraint
from foresay.spec.errors import InvalidRequest
from foresay.spec.request import Grammar
from tests.grammar.oracle import DONE, ENDS, SIZE, TARGET, THINK, allowed, bits, compiler, tokenizer
from tests.server.conftest import sentencepiece_tokenizer


@pytest.fixture(autouse=True)
def _all_the_time_in_the_world(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(constraint_module, "MOST_SECONDS", 60.0)


@cache
def grammars() -> list[str]:
    return [
        *(schema_grammar(schema, "schema") for schema in schemas(30, seed=7)),
        schema_grammar(ANY_OBJECT, "object", BOUNDED),
        schema_grammar({"const": "<|end|>"}, "special"),
        regex_grammar(r"\d{3}-[a-z]+", "regex"),
        choice_grammar(["yes", "yes please", "<|user|>"], "choice"),
        lark_grammar('start: "(" start? ")"', "lark"),
    ]


def spoken(grammar: Grammar, rng: random.Random, length: int) -> list[int]:
    """A random beginning of what the grammar allows, never past its end."""
    text: list[int] = []
    for _ in range(length):
        following = sorted((allowed(grammar, text) or set()) - set(ENDS))
        if not following:
            break
        likely = [token for token in (grammar.opens, grammar.after) if token in following]
        text.append(rng.choice(likely if likely and rng.random() < 0.4 else following))
    return text


def grown(grammar: Grammar, text: list[int], rng: random.Random, nodes: int) -> tuple[list[int], list[int]]:
    """A random tree below ``text``: mostly tokens that may be there, some that may not, some ends."""
    tokens, parents, paths = [text[-1] if text else 9], [-1], [text]
    for _ in range(nodes):
        parent = rng.randrange(len(tokens))
        good = sorted(allowed(grammar, paths[parent]) or set())
        token = rng.choice(good) if good and rng.random() < 0.7 else rng.choice([*ENDS, DONE, rng.randrange(SIZE)])
        if token not in [tokens[n] for n in range(1, len(tokens)) if parents[n] == parent]:
            tokens.append(token)
            parents.append(parent)
            paths.append([*paths[parent], token])
    return tokens, parents


def path(tokens: list[int], parents: list[int], node: int) -> list[int]:
    """The tokens from below the root to ``node``."""
    return [] if node == 0 else [*path(tokens, parents, parents[node]), tokens[node]]


def constrained(grammar: Grammar, text: list[int]) -> LlguidanceConstraint:
    constraint = compiler().compile(grammar)
    constraint.advance(text)
    return constraint


def check(constraint: Constraint, grammar: Grammar, text: list[int], tokens: list[int], parents: list[int]) -> None:
    """Masks and legality are those of a fresh matcher at each node."""
    legal, masks = constraint.legal(tokens, parents), constraint.masks(tokens, parents)
    for node in range(len(tokens)):
        wanted = allowed(grammar, text + path(tokens, parents, node))
        assert legal[node] == (wanted is not None)
        if masks is None:
            assert wanted == set(range(SIZE))
        elif wanted is not None:
            assert set(np.flatnonzero(bits(masks)[node]).tolist()) == wanted


@settings(max_examples=60)
@given(
    which=st.integers(0, 34),
    begins=st.sampled_from([(None, None), (DONE, None), (DONE, THINK)]),
    length=st.integers(0, 12),
    nodes=st.integers(0, 12),
    seed=st.integers(0, 999),
)
def test_each_node_has_the_mask_of_a_fresh_matcher(
    which: int, begins: tuple[int | None, int | None], length: int, nodes: int, seed: int
):
    rng = random.Random(seed)
    grammar = Grammar(text=grammars()[which], after=begins[0], opens=begins[1])
    text = spoken(grammar, rng, length)
    constraint = constrained(grammar, text)
    tokens, parents = grown(grammar, text, rng, nodes)
    check(constraint, grammar, text, tokens, parents)
    # Nothing of the tree stays behind: after any other path the answers are right again, in a fork as well.
    twin = constraint.fork()
    more = spoken(grammar, rng, len(text) + 3)
    if more[: len(text)] == text:
        constraint.advance(more[len(text) :])
        check(constraint, grammar, more, *grown(grammar, more, rng, 4))
    check(twin, grammar, text, tokens, parents)


@settings(max_examples=60)
@given(which=st.integers(0, 34), length=st.integers(0, 20), most=st.integers(0, 12), seed=st.integers(0, 999))
def test_forced_tokens_are_the_only_ones(which: int, length: int, most: int, seed: int):
    grammar = Grammar(text=grammars()[which])
    text = spoken(grammar, random.Random(seed), length)
    forced = constrained(grammar, text).forced(most)
    assert len(forced) <= most
    for count, token in enumerate(forced):
        assert allowed(grammar, text + forced[:count]) == {token}


def test_forced_tokens_are_many_where_keys_are_given():
    schema = {"type": "object", "properties": {"first name": {"type": "integer"}}, "required": ["first name"]}
    forced = constrained(Grammar(text=schema_grammar(schema, "")), []).forced(20)
    assert tokenizer().decode_str(forced).startswith('{"first name":')
    assert constrained(Grammar(text=schema_grammar(schema, "")), []).forced(2) == forced[:2]


def test_a_single_end_of_text_is_forced_and_several_are_not():
    grammar = Grammar(text=choice_grammar(["yes"], "choice"))
    forced = constrained(grammar, []).forced(9)
    assert tokenizer().decode_str(forced) == "yes"
    text = tokenizer_text(TARGET)
    assert text is not None
    assert GrammarCompiler(text, SIZE, [1]).compile(grammar).forced(9) == [*forced, 1]


def test_nothing_is_constrained_before_the_thinking_ends():
    grammar = Grammar(text=choice_grammar(["yes", "no"], "choice"), after=DONE)
    constraint = constrained(grammar, [50, 60])
    assert constraint.masks([60, 70, 80], [-1, 0, 1]) is None
    assert constraint.forced(5) == []
    masks = constraint.masks([60, DONE, DONE], [-1, 0, 1])
    assert masks is not None
    found = bits(masks)[:, :SIZE]
    assert found[0].all() and not found[1].all()
    assert found[2].all()  # the second one is no end of thinking any more, so nobody can come there


def test_the_end_of_text_is_allowed_just_where_the_grammar_may_end():
    yes, please = tokenizer().tokenize_str("yes"), tokenizer().tokenize_str(" please")
    constraint = constrained(Grammar(text=choice_grammar(["yes", "yes please"], "choice")), yes)
    tokens, parents = [yes[-1], *please, 1, 1], [-1, *range(len(please)), len(please), 0]
    masks = constraint.masks(tokens, parents)
    assert masks is not None
    found = [set(np.flatnonzero(row).tolist()) for row in bits(masks)]
    assert set(ENDS) < found[0]
    assert found[len(please)] == found[-2] == found[-1] == set(ENDS)
    assert constraint.legal(tokens, parents) == [True] * len(tokens)


def test_a_tokenizer_that_spells_characters_in_bytes():
    made = sentencepiece_tokenizer()
    compiled = GrammarCompiler(made._backend.to_str(), made.vocab_size, [2])
    constraint, written = compiled.compile(Grammar(text=choice_grammar(["é a"], "choice"))), []
    while 2 not in written:
        masks = constraint.masks([9], [-1])
        assert masks is not None
        written.append(int(np.flatnonzero(bits(masks)[0])[-1]))
        constraint.advance(written[-1:])
    assert made.decode(written) == "é a"


def test_padding_ids_are_never_allowed():
    text = tokenizer_text(TARGET)
    assert text is not None
    padded = GrammarCompiler(text, 4200, ENDS)
    for grammar in ('start: <[*]> "a"', r"start: /(?s:.*)/"):
        masks = padded.compile(Grammar(text=grammar)).masks([9], [-1])
        assert masks is not None and masks.shape == (1, 132)
        assert bits(masks)[0, :SIZE].any() and not bits(masks)[0, SIZE:].any()


def test_a_model_smaller_than_its_tokenizer_gets_masks_of_its_own_width():
    text = tokenizer_text(TARGET)
    assert text is not None
    masks = GrammarCompiler(text, 1000, ENDS).compile(Grammar(text="start: /a+/")).masks([9], [-1])
    assert masks is not None and masks.shape == (1, 32)


def test_an_automaton_full_of_other_requests_states_is_begun_again():
    text = tokenizer_text(TARGET)
    assert text is not None
    small = GrammarCompiler(text, SIZE, ENDS, most_states=400)
    grammar = Grammar(text=schema_grammar({"type": "string", "maxLength": 5000}, ""))
    words = tokenizer().tokenize_str('"' + "so it was " * 12)
    for _ in range(6):
        constraint = small.compile(grammar)
        for token in words:
            masks = constraint.masks([0, token], [-1, 0])
            assert masks is not None and bits(masks)[0, token]
            constraint.advance([token])


def test_the_kept_grammars_of_all_salts_together_are_bounded():
    text = tokenizer_text(TARGET)
    assert text is not None
    small, grammar = GrammarCompiler(text, SIZE, ENDS), Grammar(text="start: /a+/")
    for salt in range(MOST_KEPT + 1):
        small.compile(grammar, str(salt))
    assert [small.kept(grammar, str(salt)) is not None for salt in (0, 1, MOST_KEPT)] == [False, True, True]


def test_a_grammar_too_complex_for_its_limits_fails_alone_and_says_so():
    text = tokenizer_text(TARGET)
    assert text is not None
    small = GrammarCompiler(text, SIZE, ENDS, most_states=40)
    grammar = Grammar(text=schema_grammar({"type": "string", "maxLength": 5000}, ""))
    constraint, words = small.compile(grammar), tokenizer().tokenize_str('"' + "so it was " * 60)

    def write() -> None:
        for token in words:
            constraint.masks([0, token], [-1, 0])
            constraint.advance([token])

    with pytest.raises(GrammarFailed, match=r"too many states|does not allow"):
        write()
    assert small.compile(Grammar(text="start: /a+/")).masks([9], [-1]) is not None


def test_without_time_the_rest_of_a_tree_is_left_for_the_next_step(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(constraint_module, "MOST_SECONDS", 0.0)
    constraint = compiler().compile(Grammar(text="start: /[0-9]+/"))
    two, three = tokenizer().tokenize_str("2")[0], tokenizer().tokenize_str("3")[0]
    masks = constraint.masks([9, two, three], [-1, 0, 1])
    assert masks is not None and bits(masks).any(axis=-1).tolist() == [True, False, False]


def test_a_dead_end_is_an_error_and_no_end_of_text():
    constraint = compiler().compile(Grammar(text='start: "a" x | "b"\nx: y "c"\ny: x "d"'))
    (a,) = tokenizer().tokenize_str("a")
    masks = constraint.masks([9, a], [-1, 0])
    assert masks is not None and not bits(masks)[1].any()
    constraint.advance([a])
    with pytest.raises(GrammarFailed, match="allows nothing here"):
        constraint.masks([a], [-1])


def test_an_end_of_text_in_the_middle_of_a_grammar_is_none():
    constraint = constrained(Grammar(text='start: "a" <|end|> "b"'), tokenizer().tokenize_str("a"))
    with pytest.raises(GrammarFailed, match="allows nothing here"):
        constraint.masks([9], [-1])


def test_a_token_the_grammar_does_not_allow_cannot_be_committed():
    with pytest.raises(GrammarFailed, match="does not allow token 7"):
        compiler().compile(Grammar(text='start: "a"')).advance([7])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("start: foo", 'unknown name: "foo"'),
        ('start: ""', "matches no text"),
        ("start: a\na: a", "allows nothing here"),
        (schema_grammar({"type": "nothing"}, ""), "Invalid type: nothing"),
        (schema_grammar({"type": "object", "properties": {"a": {"not": {}}}}, ""), r'Unimplemented keys: \["not"\]'),
        (schema_grammar({"$ref": "#/nowhere"}, ""), "does not exist"),
        (schema_grammar({"$ref": "http://127.0.0.1:9/schema"}, ""), "not present"),
        (regex_grammar("(a", ""), "unclosed group"),
    ],
)
def test_what_cannot_be_compiled_names_the_field_and_the_reason(text: str, reason: str):
    with pytest.raises(InvalidRequest, match=reason) as caught:
        compiler().compile(Grammar(text=text, param="some.field"))
    assert caught.value.param == "some.field" and "some.field" in caught.value.message
    assert "<state>" not in caught.value.message
