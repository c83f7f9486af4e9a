"""The EAGLE drafter: what its pages hold of a text is always the truth, and is found again by the next request."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from foresay.drafters import hidden_states
from foresay.drafters.eagle import EagleDrafter
from foresay.kvpaging import PagePool, PageTable
from foresay.spec.engine import EngineCore
from foresay.spec.protocols import Rows
from foresay.spec.sample import Noise
from foresay.spec.sampling import SamplingParams
from foresay.spec.sequence import SequenceState
from foresay.spec.tree import TreeShape
from foresay.verifier.heads.paged import EagleHead
from tests.heads.published import draft_ids, make_eagle
from tests.same_tokens.heads import Whisper, load_eagle
from tests.same_tokens.models import Pair, engine_of, paged
from tests.same_tokens.runs import jobs_of, plain, whole
from tests.same_tokens.witness import Job, stepped
from tests.verifier.reading import Reader, random_tokens

LAYERS = [0, 2, 3]


@pytest.fixture(scope="module")
def head(pair, tmp_path_factory) -> EagleHead:
    directory = tmp_path_factory.mktemp("head")
    make_eagle(directory, pair("llama2").target, "safeailab", LAYERS)
    return load_eagle(directory, pair("llama2").target)


class Watched:
    """An engine whose drafter's stores are looked into after every step."""

    def __init__(self, pair: Pair, head: EagleHead, shape: str, texts: dict[str, list[int]], **options) -> None:
        made: list[EagleDrafter] = []

        def drafter(pool: PagePool) -> Whisper:
            made.append(EagleDrafter(head, pool))
            return Whisper(made[0], texts)

        self.engine: EngineCore = engine_of(pair.target, drafter, TreeShape.parse(shape), **options)
        self.pair, self.head, self.drafter = pair, head, made[0]
        self.drafted: list[int] = []

    def run(self, jobs: list[Job]) -> int:
        """Run to the end; returns how many rows were compared."""
        compared = 0
        for deltas in stepped(self.engine, jobs):
            self.drafted += [delta.drafted for delta in deltas]
            compared += sum(self._check(sequence) for sequence in self.engine.scheduler.running)
        return compared

    def _check(self, sequence: SequenceState) -> int:
        """Compare a sequence's features, and its KV as far as it is filled, with a fresh run of its text."""
        table, length = sequence.table, sequence.table.length
        if not length:
            return 0
        assert self.drafter.knows(sequence)
        fresh = fresh_rows(self.pair, self.head, sequence.tokens[:length])
        slots = table.slots(0, length)
        assert torch.allclose(self.drafter.rows[slots], fresh.hidden, rtol=0, atol=1e-4)
        filled = self.drafter.store.filled(table)
        keys, values, _ = self.drafter.store.layer(0)
        assert torch.allclose(keys[slots[:filled]], fresh.keys[:filled], rtol=0, atol=1e-4)
        assert torch.allclose(values[slots[:filled]], fresh.values[:filled], rtol=0, atol=1e-4)
        return filled


class fresh_rows:  # noqa: N801
    """Fused features [R, H] and the head's keys and values [R, G, D] of a text run once, nothing drafted."""

    def __init__(self, pair: Pair, head: EagleHead, tokens: list[int]) -> None:
        reader = Reader(pair.target)
        table = PageTable(reader.pool)
        rows = reader.rows(table, tokens)
        self.hidden = head.fuse(reader.model.run([rows], head.config.needs).features)
        drafter = EagleDrafter(head, reader.pool)
        if len(tokens) > 1:
            text = Rows(table, torch.tensor(tokens[1:]), 1)
            head.run([text], self.hidden[:-1].clone(), drafter.store)
        slots = table.slots(0, len(tokens))
        self.keys, self.values = (part[slots] for part in drafter.store.layer(0)[:2])


SHAPES = ["1,1,1", "3,4,2"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", [{"chunk": 24}, {"tokens": 160}])
def test_its_rows_are_those_of_the_committed_text(pair, head, shape, options) -> None:
    """Through acceptances and rejections, prefill in chunks, four sequences at a time, preemption."""
    models = pair("llama2")
    jobs = jobs_of(models.vocab_size, (30, 33, 1, 20), 30)
    texts = whole(jobs, plain(models.target, jobs))
    watched = Watched(models, head, shape, texts, **options)
    assert watched.run([replace(job, arrives=3 * index) for index, job in enumerate(jobs)]) > 500


@pytest.mark.parametrize("prompt", [49, 60])
def test_a_prefix_hit_brings_features_and_rows(pair, head, prompt) -> None:
    """The second request drafts in its first step, also where the pages hold all of its prompt but the last token."""
    models = pair("llama2")
    (job,) = jobs_of(models.vocab_size, (prompt,), 12)
    texts = whole([job], plain(models.target, [job]))
    watched = Watched(models, head, "3,4,2", texts | {"again": texts[job.id]}, prefix=True)
    watched.run([job])
    watched.drafted.clear()
    watched.run([replace(job, id="again")])
    first_draft = 0 if prompt == 49 else 1  # of 60 tokens 12 are computed, which takes the first step
    assert watched.drafted[first_draft] == 9


@pytest.mark.parametrize("read", [True, False])
def test_a_fork_drafts_at_once(pair, head, read: bool) -> None:
    """A table forked in the middle of a page, and cut back by a token, as other choices of one prompt are. read: else
    the hidden states still wait, and go with the page."""
    models = pair("llama2")
    tokens = random_tokens(random.Random(2), 21, models.vocab_size)
    pool = PagePool(20, 16)
    verifier, drafter = paged(models.target, pool), EagleDrafter(head, pool)
    table = PageTable(pool)
    sequence = SequenceState("a", tokens, 21, SamplingParams(temperature=0.0), table, Noise(1, 300), 99, frozenset())
    table.reserve(21)
    forward = verifier.run([Rows(table, torch.tensor(tokens), 0)], drafter.needs)
    table.commit(21)
    drafter.observe(sequence, forward.features)
    if read:
        drafter.extend(sequence)
    assert drafter.hidden_states.filled(table) == 21 * read
    fork = replace(sequence, id="b", table=table.fork())
    fork.table.truncate(20)
    fork.table.reserve(10)
    (tree,) = drafter.propose([fork], [TreeShape((3, 4, 2))])
    assert len(tree) == 10


def test_too_many_hidden_states_do_not_wait(pair, head, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest page's are stored."""
    monkeypatch.setattr(hidden_states, "_MOST_BYTES", 20 * 3 * 64 * 4)
    pool = PagePool(20, 16)
    drafter, table, tokens = EagleDrafter(head, pool), PageTable(pool), list(range(40))
    sequence = SequenceState("a", tokens, 40, SamplingParams(temperature=0.0), table, Noise(1, 300), 99, frozenset())
    table.reserve(40)
    for _ in range(39):
        table.commit(1)
        drafter.observe(sequence, {name: torch.zeros(1, 64) for name in head.config.names})
    assert drafter.hidden_states.filled(table) == 32
    assert drafter.knows(sequence)


def test_without_features_it_drafts_nothing(pair, head) -> None:
    """A text that another drafter saw computed: nobody stored its features."""
    models = pair("llama2")
    pool = PagePool(20, 16)
    drafter, table = EagleDrafter(head, pool), PageTable(pool)
    tokens = random_tokens(random.Random(2), 21, models.vocab_size)
    sequence = SequenceState("a", tokens, 21, SamplingParams(temperature=0.0), table, Noise(1, 300), 99, frozenset())
    table.reserve(30)
    table.commit(20)
    (tree,) = drafter.propose([sequence], [TreeShape((3, 4, 2))])
    assert tree.tokens == tokens[-1:]
    assert sequence.unable == "eagle3 cannot draft: the target's hidden states of 20 tokens are missing."
    table.commit(1)
    tokens.append(5)
    drafter.observe(sequence, {name: torch.zeros(1, 64) for name in head.config.names})
    drafter.extend(sequence)
    (tree,) = drafter.propose([sequence], [TreeShape((3, 4, 2))])
    assert len(tree) == 1


def test_its_chain_is_the_plain_one(pair, head, tmp_path) -> None:
    """At temperature 0, and at 1 with the noise of each position."""
    models = pair("llama2")
    reference = make_eagle(tmp_path, models.target, "safeailab", LAYERS)
    ids = draft_ids(tmp_path)
    assert ids is not None
    tokens = random_tokens(random.Random(9), 40, models.vocab_size)
    pool = PagePool(20, 16)
    verifier, drafter = paged(models.target, pool), EagleDrafter(head, pool)
    table = PageTable(pool)
    sequence = SequenceState("a", tokens, 40, SamplingParams(temperature=0.0), table, Noise(1, 300), 99, frozenset())
    table.reserve(39)
    forward = verifier.run([Rows(table, torch.tensor(tokens[:-1]), 0)], drafter.needs)
    table.commit(39)
    drafter.observe(sequence, forward.features)
    drafter.extend(sequence)
    table.reserve(5)
    hidden = head.fuse(forward.features)
    (tree,) = drafter.propose([sequence], [TreeShape.chain(4)])
    assert tree.tokens[1:] == reference.chain(tokens[1:], hidden, 4, ids)
    warm = replace(sequence, sampling=SamplingParams(temperature=1.0))
    (tree,) = drafter.propose([warm], [TreeShape.chain(1)])
    noisy = reference(torch.tensor(tokens[1:]), hidden)[0][-1] + sequence.noise.row(40)[ids]
    assert int(tree.tokens[1]) == int(ids[noisy.argmax()])
