"""The draft model: its KV is always that of the committed text, and the target as its own draft is never wrong."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch

from foresay.drafters.draft_model import DraftModelDrafter
from foresay.kvpaging import PagePool, PageTable
from foresay.spec.protocols import FeatureRequest, Forward, Rows
from foresay.spec.sample import Noise
from foresay.spec.sampling import SamplingParams
from foresay.spec.sequence import SequenceState
from foresay.spec.tree import TreeShape
from foresay.verifier.model_runner import ModelRunner
from tests.same_tokens.models import Pair, engine_of, paged
from tests.same_tokens.runs import LARGEST, assert_same, jobs_of, plain
from tests.same_tokens.witness import Job, run
from tests.spec.grammars import Automaton
from tests.verifier.families import make
from tests.verifier.reading import Reader, load_decoder, random_tokens


@pytest.mark.parametrize("shape", ["1,1,1", "4,4,2,2,1"])
def test_its_rows_come_with_a_prefix_hit(pair, monkeypatch, shape) -> None:
    """The second chat starts from pages that target and draft model have both filled; the third from the target's."""
    models, made = pair("llama2"), list[ModelRunner]()

    def drafter(pool: PagePool) -> DraftModelDrafter:
        made.append(paged(models.draft, pool))
        return DraftModelDrafter(made[0])

    engine = engine_of(models.target, drafter, TreeShape.parse(shape), prefix=True)
    (job,) = jobs_of(models.vocab_size, (70,), 16)
    run(engine, [job])
    passes = watch_passes(monkeypatch, made[0])
    run(engine, [replace(job, id="again")])
    assert min(base for base, _ in passes) >= 64, "the draft model computed again what the pages held"
    made[0].store.marks[:] = [0] * len(made[0].store.marks)
    passes.clear()
    run(engine, [replace(job, id="rested")])
    assert min(base for base, _ in passes) == 0, "the draft model has to catch up where it has no rows"


def watch_passes(monkeypatch: pytest.MonkeyPatch, model: ModelRunner) -> list[tuple[int, int]]:
    """The list to which each pass of the model adds where its first sequence's rows begin, and how many there are."""
    passes: list[tuple[int, int]] = []
    once = model.run

    def watched(rows: list[Rows], features: FeatureRequest | None = None) -> Forward:
        passes.append((rows[0].base, len(rows[0].tokens)))
        return once(rows, features)

    monkeypatch.setattr(model, "run", watched)
    return passes


@pytest.mark.parametrize("prompt", [300, 500])
def test_long_text_is_caught_up_in_pieces(pair, monkeypatch, prompt) -> None:
    """A drafter that rested: nothing was run for it while the prompt was prefilled."""
    models = pair("llama2")
    pool = PagePool(64, 16)
    draft = paged(models.draft, pool)
    drafter = DraftModelDrafter(draft)
    passes = watch_passes(monkeypatch, draft)
    table = PageTable(pool)
    table.reserve(prompt + 8)
    table.commit(prompt - 1)
    sequence = running(models, random_tokens(random.Random(0), prompt, models.vocab_size), table)
    (tree,) = drafter.propose([sequence], [TreeShape.chain(2)])
    sizes = [count for _, count in passes]
    assert max(sizes) <= 257
    assert sum(sizes) == prompt - 1, "the root is read with the levels"
    reader = Reader(models.draft)
    greedy = [int(reader.alone(sequence.tokens)[-1].argmax())]
    greedy.append(int(reader.alone([*sequence.tokens, greedy[0]])[-1].argmax()))
    assert tree.tokens[1:] == greedy


def running(models: Pair, tokens: list[int], table: PageTable, temperature: float = 0.0) -> SequenceState:
    return SequenceState(
        id="one",
        tokens=tokens,
        prompt_length=len(tokens),
        sampling=SamplingParams(temperature=temperature),
        table=table,
        noise=Noise(3, models.vocab_size),
        limit=1000,
        stop_ids=frozenset(),
    )


def with_itself(pair: Pair, shape: str, temperature: float, steps: int, **filters: float) -> list[int]:
    """Tokens accepted in each step when the target is its own draft model; the text is checked too."""
    levels = shape.count(",") + 1
    params = SamplingParams(temperature=temperature, seed=5, ignore_eos=True, max_tokens=1 + steps * (levels + 1))
    params = msgspec.structs.replace(params, **filters)
    jobs = [Job("one", random_tokens(random.Random(7), 21, pair.vocab_size), params)]
    itself = replace(pair, draft=pair.target)
    texts = run(engine_of(pair.target, itself.draft_model, TreeShape.parse(shape)), jobs)
    assert_same(plain(pair.target, jobs), texts)
    assert texts["one"].statistics is not None
    return texts["one"].statistics.per_step_accepted


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("length", [1, 4, 8])
def test_a_chain_by_the_target_itself_is_always_right(pair, length, temperature) -> None:
    """Draft and target add the same noise to the same logits."""
    shape = ",".join("1" * length)
    assert with_itself(pair("qwen3"), shape, temperature, steps=4) == [0] + [length] * 4


@pytest.mark.parametrize("filters", [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 30, "top_p": 0.5}])
def test_filters_leave_it_right(pair, filters) -> None:
    assert with_itself(pair("qwen3"), "1,1,1,1", 1.0, steps=8, **filters) == [0] + [4] * 8


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("grammar", [None, Automaton(3, 300, forcing=0.0), Automaton(3, 300, forcing=0.5)])
def test_options_and_grammars_leave_it_right(pair, grammar, temperature) -> None:
    """Drafts are sampled from logits that are changed as the target's are."""
    models = pair("qwen3")
    options: dict[str, Any] = {"repetition_penalty": 1.5, "frequency_penalty": 0.8, "logit_bias": {9: 4.0, 7: -100.0}}
    params = SamplingParams(temperature=temperature, seed=5, ignore_eos=True, max_tokens=41, **options)
    jobs = [Job("one", random_tokens(random.Random(7), 21, models.vocab_size), params, grammar=grammar)]
    itself = replace(models, draft=models.target)
    texts = run(engine_of(models.target, itself.draft_model, TreeShape.chain(4)), jobs)
    assert_same(plain(models.target, jobs), texts)
    statistics = texts["one"].statistics
    assert statistics is not None
    assert statistics.accepted == statistics.drafted >= 30


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("shape", ["1", "3", "3,9", "3,9,27"])
def test_a_tree_that_keeps_everything_by_the_target_itself_is_always_right(pair, shape, temperature) -> None:
    assert with_itself(pair("qwen3"), shape, temperature, steps=4) == [0] + [shape.count(",") + 1] * 4


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("shape", ["3,2,1", "4,4,2,2,1", LARGEST])
def test_a_tree_by_the_target_itself_is_right_at_depth_one_and_often_below(pair, shape, temperature) -> None:
    """Below, it may bet on a path that looks likelier than the one of first choices."""
    accepted = with_itself(pair("qwen3"), shape, temperature, steps=6)[1:-1]
    assert min(accepted) >= 1
    assert sum(accepted) >= 0.5 * len(accepted) * (shape.count(",") + 1)


def test_the_widest_branch_carries_the_shared_noise_draw(pair) -> None:
    """At temperature 1 the first child of a node is what the draft itself would sample there, the next its
    runner-up."""
    models = pair("llama2")
    pool = PagePool(32, 16)
    drafter = models.draft_model(pool)
    tokens = random_tokens(random.Random(1), 20, models.vocab_size)
    table = PageTable(pool)
    table.reserve(24)
    table.commit(19)
    sequence = running(models, tokens, table, temperature=1.0)
    (tree,) = drafter.propose([sequence], [TreeShape((3,))])
    noisy = Reader(models.draft).alone(tokens)[-1] + sequence.noise.row(20)
    assert tree.tokens[1:] == noisy.topk(3).indices.tolist()
    assert tree.parents == [-1, 0, 0, 0]


def test_a_draft_model_with_more_rows_than_the_vocabulary_never_proposes_them(pair, tmp_path) -> None:
    """Vocabularies padded to different sizes: the target has no such tokens."""
    models = other_vocabulary(pair("llama2"), tmp_path, 360)
    jobs = jobs_of(models.vocab_size, (9, 20), 30)
    texts = run(engine_of(models.target, models.draft_model, TreeShape.parse("4,4,2")), jobs)
    assert_same(plain(models.target, jobs), texts)


def test_a_draft_model_with_fewer_rows_lives_with_tokens_it_does_not_know(pair, tmp_path) -> None:
    """In the prompt (token ids are free to name padding) and sampled by the target."""
    models = other_vocabulary(pair("llama2"), tmp_path, 200)
    jobs = [
        replace(job, prompt=[models.vocab_size - 1, *job.prompt, 250])
        for job in jobs_of(models.vocab_size, (9, 60), 30)
    ]
    expected = plain(models.target, jobs)
    assert max(token for text in expected.values() for token in text.tokens) >= 200
    texts = run(engine_of(models.target, models.draft_model, TreeShape.parse("4,4,2"), chunk=24), jobs)
    assert_same(expected, texts)


def other_vocabulary(models: Pair, directory, vocab_size: int) -> Pair:
    make("llama2", directory, vocab_size=vocab_size)
    return replace(models, draft=load_decoder(directory))


def test_rows_of_a_chain_and_of_a_tree_of_width_one_are_the_same_thing(pair) -> None:
    models = pair("llama2")
    reader = Reader(models.draft)
    table = reader.open(random_tokens(random.Random(2), 14, models.vocab_size))
    table.reserve(4)
    tokens = torch.tensor([5, 6, 7])
    (chain,) = reader.run(Rows(table, tokens, 14))
    (tree,) = reader.run(Rows(table, tokens, 14, range(3), [1, 3, 7]))
    assert torch.equal(chain, tree)
