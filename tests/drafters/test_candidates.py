"""Candidates are those of logits changed as the target's will be: nothing is drafted that is not allowed."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from foresay.drafters.tree_builder import adjusted, adjusts
from foresay.kvpaging import PagePool, PageTable
from foresay.spec.adjust import Adjustment, edit_logits, packed, paths_of, unpacked
from foresay.spec.constrain import Ahead, Guarded
from foresay.spec.logits import edits_of
from foresay.spec.protocols import Rows
from foresay.spec.request import Request
from foresay.spec.sample import Noise, sample
from foresay.spec.sampling import SamplingParams
from foresay.spec.sequence import SequenceState
from foresay.spec.tree import TreeShape
from foresay.verifier.ops.records import RowSampling
from foresay.verifier.ops.sample import best_children
from tests.same_tokens.models import engine_of
from tests.spec.grammars import Automaton
from tests.spec.tables import sampled_at
from tests.spec.trees import random_tree

VOCAB = 300
OPTIONS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.7},
    {"frequency_penalty": 1.1, "presence_penalty": -0.6},
    {"logit_bias": {3: 2.0, 4: -100.0, 9: 100.0}},
    {"bad_words": [[5], [9, 9], [1, 2, 3]], "logit_bias": {9: 8.0}},
    {"allowed_token_ids": [2, 4, 8, 16, 32], "presence_penalty": 2.0},
    {"min_tokens": 6},
]


def sequence(temperature: float, **options: Any) -> SequenceState:
    params = SamplingParams(temperature=temperature, **options)
    rng = random.Random(3)
    prompt = [rng.randrange(40) for _ in range(20)]
    s = SequenceState("s", prompt, 20, params, PageTable(PagePool(4, 16)), Noise(3, VOCAB), 99, frozenset({7, 11}))
    s.adjustment = Adjustment.of(params, prompt, VOCAB)
    s.append([1, 2, 30])
    return s


def likeliest(logits: Tensor, s: SequenceState, depth: int) -> list[int]:
    """The best child of each row."""
    count, position = len(logits), len(s.tokens) + depth
    sampling = RowSampling.from_params([s.sampling] * count, [s.noise.seed] * count, [position] * count)
    tokens, _ = best_children(logits, sampling, 1)
    best: list[int] = tokens[:, 0].tolist()
    return best


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options))
def test_the_likeliest_candidate_is_the_draw_that_the_target_would_make_of_these_logits(options, temperature) -> None:
    rng = random.Random(1)
    for _ in range(10):
        s = sequence(temperature, **options)
        tree = random_tree(rng, 20, 40, root=30)
        logits, banned = torch.randn(len(tree), VOCAB), torch.rand(len(tree), VOCAB) < 0.3
        logits[:, [7, 11]] += 3
        banned[:, [2, 7, 32]] = False
        changed, edits = logits.clone(), edits_of(s, tree, packed(~banned))
        assert edits is not None
        edit_logits(changed, edits)
        sampled = sampled_at(replace(Rows.of_tree(s.table, tree, s), base=len(s.tokens) - 1), changed)
        paths = paths_of(tree.tokens, tree.parents)
        for node, depth in enumerate(tree.depths):
            assert adjusts(s, depth) == (s.adjustment is not None or depth < 3)
            row = adjusted(logits[node : node + 1], s, depth, [paths[node]], [packed(~banned[node : node + 1])[0]])
            assert likeliest(row, s, depth) == [int(sampled[node])]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options))
def test_other_vocabularies_are_changed_alike(options) -> None:
    """Fewer or more columns than the target has tokens, or columns in another order."""
    s, paths = sequence(1.0, **options), [[1, 2], [9]]
    logits, ban = torch.randn(2, VOCAB), [packed(torch.rand(1, VOCAB) > 0.3)[0], None]
    before = logits.clone()
    whole = adjusted(logits, s, 1, paths, ban)
    ids = torch.randperm(VOCAB)[:80]
    assert torch.equal(adjusted(logits[:, ids], s, 1, paths, ban, ids), whole[:, ids])
    assert torch.equal(adjusted(logits[:, :100], s, 1, paths, ban), whole[:, :100])
    assert torch.equal(adjusted(torch.cat((logits, logits), 1), s, 1, paths, ban), whole)
    assert torch.equal(before, logits)


def test_a_slow_or_broken_grammar_is_not_called_again() -> None:
    class Broken(Automaton):
        def fork(self) -> Automaton:
            raise ValueError("never copied")

    sound = Ahead(Guarded(Automaton(3, VOCAB), VOCAB), seconds=60.0)
    first = sound.allowed(0, -1, 5)
    assert first is not None
    token = int(unpacked(first[None], VOCAB)[0].nonzero()[0])
    assert sound.allowed(1, 0, token) is not None
    assert Ahead(Guarded(Automaton(3, VOCAB), VOCAB), seconds=0.0).allowed(0, -1, 5) is None
    broken = Ahead(Guarded(Broken(3, VOCAB), VOCAB), seconds=60.0)
    assert broken.allowed(0, -1, 5) is not None
    assert broken.allowed(1, 0, token) is None
    assert broken.allowed(2, 1, token) is None


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 7},
        {"top_p": 0.8},
        {"top_p": 0.3, "min_p": 0.02},
        {"min_p": 0.1},
        {"top_k": 40, "top_p": 0.95, "temperature": 0.6},
    ],
)
def test_with_filters_the_best_candidate_is_what_the_target_would_draw(options: dict[str, Any]) -> None:
    s = sequence(**{"temperature": 1.0, **options})
    logits = torch.randn(40, VOCAB, generator=torch.Generator().manual_seed(5)) * 2.5
    without = msgspec.structs.replace(s.sampling, top_k=0, top_p=1.0, min_p=0.0)
    differ = 0
    for depth in range(20):
        noise = s.noise.row(len(s.tokens) + depth).expand(40, -1)
        sampled = sample(logits, s.sampling, noise)
        assert likeliest(logits, s, depth) == sampled.tolist()
        differ += int((sampled != sample(logits, without, noise)).sum())
    assert differ > 0, "the filters change some draws"


@pytest.mark.parametrize("shape", ["1,1,1", "3,2,1"])
def test_a_text_after_which_nothing_may_be_drafted_is_no_failure(pair, shape) -> None:
    """One allowed token that may not come twice: the target ends with an error of its own, the engine goes on."""
    models = pair("qwen3")
    odd = SamplingParams(seed=1, max_tokens=6, top_p=0.9, allowed_token_ids=(5,), bad_words=((5, 5),), ignore_eos=True)
    sound = SamplingParams(seed=1, max_tokens=6, top_p=0.9, ignore_eos=True)
    engine = engine_of(models.target, models.draft_model, TreeShape.parse(shape), max_seqs=2)
    engine.add(Request(id="odd", prompt=[3, 4], params=odd))
    engine.add(Request(id="sound", prompt=[3, 4], params=sound))
    ends = {}
    while engine.has_work:
        ends |= {delta.id: delta.finish_reason for delta in engine.step() if delta.finish_reason}
    assert ends == {"odd": "error", "sound": "length"}
