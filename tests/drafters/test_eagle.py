"""The EAGLE drafter: what its pages hold of a text is always the truth, and is found again by the next request."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from foresay.drafters import hidden_states
from foresay.drafters.eagle import EagleDrafter
from foresay.kvpaging import PagePool, PageTable
from foresay.spec.protocols import Rows
from foresay.spec.sample import Noise
from foresay.spec.sampling import SamplingParams
from foresay.spec.sequence import SequenceState
from foresay.spec.tree import TreeShape
from foresay.verifier.heads.paged import EagleHead
from tests.heads.published import draft_ids, make_eagle
from tests.same_tokens.heads import load_eagle
from tests.same_tokens.models import paged
from tests.verifier.reading import random_tokens

LAYERS = [0, 2, 3]


@pytest.fixture(scope="module")
def head(pair, tmp_path_factory) -> EagleHead:
    directory = tmp_path_factory.mktemp("head")
    make_eagle(directory, pair("llama2").target, "safeailab", LAYERS)
    return load_eagle(directory, pair("llama2").target)


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


@pytest.mark.parametrize("read", [39, 33, 30])
def test_its_chain_is_the_plain_one(pair, head, tmp_path, read: int) -> None:
    """At temperature 0, and at 1 with the noise of each position. read: tokens before others drafted; the rest is
    caught up, in a recorded pass if it is short."""
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
    table.commit(read)
    drafter.observe(sequence, {name: rows[:read] for name, rows in forward.features.items()})
    drafter.extend(sequence)
    table.commit(39 - read)
    drafter.observe(sequence, {name: rows[read:] for name, rows in forward.features.items()})
    table.reserve(5)
    hidden = head.fuse(forward.features)
    (tree,) = drafter.propose([sequence], [TreeShape.chain(4)])
    assert tree.tokens[1:] == reference.chain(tokens[1:], hidden, 4, ids)
    assert ("_few" in vars(drafter)) == (read == 33)
    warm = replace(sequence, sampling=SamplingParams(temperature=1.0))
    (tree,) = drafter.propose([warm], [TreeShape.chain(1)])
    noisy = reference(torch.tensor(tokens[1:]), hidden)[0][-1] + sequence.noise.row(40)[ids]
    assert int(tree.tokens[1]) == int(ids[noisy.argmax()])
