"""A grammar in the step: the tokens of plain decoding under its masks, drafts pruned and forced, trouble kept apart."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from foresay.spec.adjust import unpacked
from foresay.spec.budget import CostModel
from foresay.spec.constrain import Guarded
from foresay.spec.errors import InvalidRequest
from foresay.spec.request import Grammar, Request
from foresay.spec.sampling import SamplingParams
from foresay.spec.sequence import SequenceState
from foresay.spec.tree import DraftTree, TreeShape
from tests.spec.grammars import Automaton, Odd
from tests.spec.harness import Answer, Harness
from tests.spec.tables import Guesser, Plain, TableModel, plain

VOCAB, END = 32, 30
PROMPT = [3, 1, 4, 1, 5]
SHAPES: list[tuple[int, ...]] = [(), (1,), (1,) * 5, (3, 2, 1), (4, 4, 2, 2), (21, 21, 21)]


def _sampling(seed: int, **fields: Any) -> SamplingParams:
    return SamplingParams(**({"seed": seed, "temperature": seed % 2 * 1.0, "max_tokens": 25} | fields))


def _run(harness: Harness, seeds: Sequence[int], **fields: Any) -> list[Answer]:
    for seed in seeds:
        harness.add(str(seed), PROMPT, _sampling(seed, **fields), grammar=Automaton(seed, VOCAB, [END]))
    answers = harness.run()
    return [answers[str(seed)] for seed in seeds]


def _expected(model: TableModel, seeds: Sequence[int], **fields: Any) -> list[Plain]:
    return [
        plain(model, PROMPT, _sampling(seed, **fields), [END], grammar=Automaton(seed, VOCAB, [END])) for seed in seeds
    ]


@pytest.mark.parametrize("skill", [None, 0.0, 0.8, 1.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_tokens_with_any_drafter(shape: tuple[int, ...], skill: float | None) -> None:
    model, seeds = TableModel(1), range(6)
    drafter = None if skill is None else Guesser(model, skill)
    answers = _run(Harness(model, drafter, shape, max_seqs=3, eos=[END]), seeds)
    assert [answer.plain for answer in answers] == _expected(model, seeds)
    assert {answer.last.finish_reason for answer in answers} == {"stop", "length"}


def test_forced_tokens_fill_a_tree_and_no_more() -> None:
    model = TableModel(2)
    grammar = Automaton(1, VOCAB, forcing=1.0)
    harness = Harness(model, Guesser(model, 1.0), (21, 21, 21), max_model_len=200)
    answer = harness.answer(PROMPT, _sampling(1, max_tokens=150), grammar=grammar)
    assert answer.runs == [1, 64, 64, 21]


def test_forced_tokens_do_not_keep_others_waiting() -> None:
    """Eight rows cost twice what two cost: one of the two who decode may have six rows more."""
    model, cost = TableModel(2), CostModel([2, 8, 64], [1.0, 2.0, 20.0])
    harness = Harness(model, cost=cost)
    harness.add("free", PROMPT, _sampling(3, max_tokens=6))
    harness.add("forced", PROMPT, _sampling(1, max_tokens=60), grammar=Automaton(1, VOCAB, forcing=1.0))
    answers = harness.run()
    assert {trace.rows for trace in harness.traces if trace.sequences == 2 and not trace.prefill_rows} == {8}
    *together, alone = answers["forced"].runs[1:]
    assert together == [7] * len(together) and len(together) >= 4
    assert alone == 59 - 7 * len(together)


def test_the_drafter_does_not_draft_what_is_forced_anyway() -> None:
    model = TableModel(2)
    harness = Harness(model, _Silent(model, 1.0), (2, 2))
    answer = harness.answer(PROMPT, _sampling(1), grammar=Automaton(1, VOCAB, forcing=1.0))
    assert answer.runs == [1, 24]


class _Silent(Guesser):
    """Must not be called."""

    def propose(self, sequences: Sequence[SequenceState], shapes: Sequence[TreeShape]) -> list[DraftTree]:
        raise AssertionError("asked for drafts")


@pytest.mark.parametrize("skill", [0.0, 0.9])
def test_when_preempted_and_in_company(skill: float) -> None:
    model, seeds = TableModel(3), range(8)
    harness = Harness(
        model,
        Guesser(model, skill),
        (3, 2),
        pages=26,
        page_size=4,
        max_seqs=5,
        max_model_len=60,
        max_chunk=7,
        eos=[END],
    )
    harness.add("free", PROMPT * 4, _sampling(1, max_tokens=30))
    answers = _run(harness, seeds, max_tokens=40, ignore_eos=True)
    assert [answer.plain for answer in answers] == _expected(model, seeds, max_tokens=40, ignore_eos=True)
    assert harness.answers["free"].plain == plain(model, PROMPT * 4, _sampling(1, max_tokens=30), [END])
    assert sum(answer.statistics.ending.preemptions for answer in harness.answers.values()) > 0


def test_forks_have_grammars_of_their_own() -> None:
    model = TableModel(3)
    harness = Harness(model, Guesser(model, 0.8), (2, 2), eos=[END])
    grammar = Automaton(4, VOCAB, [END])
    for seed in range(4):
        harness.add(str(seed), PROMPT, _sampling(seed), fork_of="0" if seed else None, grammar=grammar.fork())
    for name, answer in harness.run().items():
        expected = plain(model, PROMPT, _sampling(int(name)), [END], grammar=Automaton(4, VOCAB, [END]))
        assert answer.plain == expected


ENDS = {"stop_token_ids": st.sets(st.integers(0, VOCAB - 1), max_size=2).map(tuple)} | {
    "max_tokens": st.integers(1, 30),
    "temperature": st.sampled_from([0.0, 0.8, 1.0]),
    "seed": st.integers(0, 50),
    "ignore_eos": st.booleans(),
    "presence_penalty": st.sampled_from([0.0, 1.5]),
    "repetition_penalty": st.sampled_from([1.0, 1.3]),
    "bad_words": st.sampled_from([(), ((3,), (1, 2))]),
    "logprobs": st.sampled_from([None, 0, 2]),
}


@settings(max_examples=150, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(
    fields=st.fixed_dictionaries(ENDS),
    least=st.integers(0, 12),
    shape=st.sampled_from(SHAPES),
    skill=st.sampled_from([0.0, 0.9, 1.0]),
    forcing=st.sampled_from([0.0, 0.4, 0.9]),
    eos=st.integers(0, VOCAB - 1),
    constrained=st.booleans(),
)
def test_ends_anywhere_in_a_run(
    fields: dict[str, Any],
    least: int,
    shape: tuple[int, ...],
    skill: float,
    forcing: float,
    eos: int,
    constrained: bool,
) -> None:
    """EOS, stop tokens, max_tokens, min_tokens and the grammar's states, wherever in accepted runs they fall."""
    model = TableModel(fields["seed"] % 5)
    sampling = SamplingParams(**fields, min_tokens=min(least, fields["max_tokens"]))
    grammars = [Automaton(fields["seed"], VOCAB, [eos], forcing) if constrained else None for _ in range(2)]
    harness = Harness(model, Guesser(model, skill, fields["seed"]), shape, eos=[eos])
    answer = harness.answer(PROMPT, sampling, grammar=grammars[0])
    assert answer.plain == plain(model, PROMPT, sampling, [eos], grammar=grammars[1])
    if sampling.logprobs is not None:
        assert len(answer.logprobs) == len(answer.tokens)
    if grammars[0] is not None:
        emitted = grammars[0].emitted
        assert emitted == answer.tokens[: len(emitted)], "the grammar is not told of what lies past the cut"
        assert (
            len(emitted) == len(answer.tokens) - len(answer.deltas[-1].tokens) or answer.last.finish_reason == "error"
        )


# -- masks ---------------------------------------------------------------------------------------------------------


class _Elsewhere(Odd):
    """Remembers the threads that computed masks."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[int] = []

    def masks(self, tokens: list[int], parents: list[int]) -> Tensor | None:
        self.threads.append(threading.get_ident())
        return super().masks(tokens, parents)


def test_masks_are_computed_in_another_thread() -> None:
    grammar, harness = _Elsewhere(), Harness(TableModel(1))
    answer = harness.answer(PROMPT, _sampling(1), grammar=grammar)
    assert all(token % 2 for token in answer.tokens)
    assert len(grammar.threads) == len(answer.tokens)
    assert len(set(grammar.threads)) == 1
    assert threading.get_ident() not in grammar.threads
    assert "mask" in harness.traces[-1].seconds


def test_without_a_grammar_nothing_is_timed() -> None:
    harness = Harness(TableModel(1))
    harness.answer(PROMPT, _sampling(1))
    assert "mask" not in harness.traces[-1].seconds


def test_a_narrow_mask_allows_nothing_past_its_end() -> None:
    masks = Guarded(Odd(masks=torch.tensor([[-1], [5]], dtype=torch.int32)), 40).masks([0, 1], [-1, 0])
    assert masks is not None
    assert masks.shape == (2, 2)
    assert unpacked(masks, 40).nonzero().tolist() == [[0, token] for token in range(32)] + [[1, 0], [1, 2]]


class _Hurried(Automaton):
    """Has no time for masks but the root's and the first few others'."""

    def masks(self, tokens: list[int], parents: list[int]) -> Tensor | None:
        masks = super().masks(tokens, parents)
        if masks is not None:
            masks[3:] = 0
        return masks


@pytest.mark.parametrize("shape", SHAPES)
def test_masks_may_be_left_out_for_want_of_time(shape: tuple[int, ...]) -> None:
    model = TableModel(1)
    for seed in range(6):
        harness = Harness(model, Guesser(model, 1.0), shape, eos=[END])
        answer = harness.answer(PROMPT, _sampling(seed), grammar=_Hurried(seed, VOCAB, [END]))
        assert [answer.plain] == _expected(model, [seed])


# -- trouble -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("replies", "says"),
    [
        ({"forced": ValueError("bad forced")}, "bad forced"),
        ({"forced": [VOCAB]}, "no tokens of the model: [32]"),
        ({"legal": ValueError("bad legal")}, "bad legal"),
        ({"legal": [True]}, "1 answers for 4 nodes"),
        ({"masks": KeyError()}, "KeyError"),
        ({"masks": torch.zeros(9, 1, dtype=torch.int32)}, "9 masks for"),
        ({"advance": RuntimeError("bad advance")}, "bad advance"),
    ],
)
def test_a_grammar_that_fails_ends_its_own_request(replies: dict[str, Any], says: str) -> None:
    model = TableModel(1)
    harness = Harness(model, Guesser(model, 1.0, full=True), (1, 1, 1))
    harness.add("sick", PROMPT, _sampling(1), grammar=Odd(**replies))
    harness.add("fine", PROMPT, _sampling(2))
    harness.add("free", PROMPT, _sampling(3), grammar=Odd())
    answers = harness.run()
    last = answers["sick"].last
    assert last.finish_reason == "error"
    assert str(last.error).startswith("the grammar failed: ")
    assert says in str(last.error)
    assert all(token % 2 for token in answers["sick"].tokens), "nothing goes out that was sampled without the mask"
    assert answers["fine"].plain == plain(model, PROMPT, _sampling(2))
    assert len(answers["free"].tokens) == 25


def test_where_the_grammar_allows_nothing() -> None:
    nothing = Odd(masks=torch.zeros(1, 1, dtype=torch.int32))
    harness = Harness(TableModel(1))
    assert harness.answer(PROMPT, _sampling(1), grammar=nothing).last.error == (
        "no token is allowed here: the grammar leaves none"
    )
    only_even = _sampling(1, allowed_token_ids=(2, 4))
    assert harness.answer(PROMPT, only_even, grammar=Odd()).last.error == (
        "no token is allowed here: allowed_token_ids together with the grammar leaves none"
    )


def test_a_grammar_nobody_compiled_is_refused() -> None:
    harness = Harness(TableModel(1))
    request = Request(id="a", prompt=[1], params=_sampling(1), grammar=Grammar(text="", param="response_format"))
    with pytest.raises(InvalidRequest) as caught:
        harness.engine.add(request)
    assert caught.value.param == "response_format"
    assert not harness.engine.has_work
