"""Rows without logits end at the last layer that stores anything; the others have the same bits."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from foresay.kvpaging import PageTable
from foresay.spec.protocols import FeatureRequest, LogitRows, Rows
from foresay.verifier.model import forward
from foresay.verifier.model_runner import ModelRunner
from tests.poison import poison_store
from tests.verifier.families import make
from tests.verifier.reading import Reader, load_decoder, random_tokens, random_tree

#: Families with layers after the last one that stores anything; rows of the others go through all.
FAMILIES = ("gemma4", "gemma4_embedded", "nemotron_h", "nemotron_h_moe")
EVERY, SAMPLED = FeatureRequest(final=True), FeatureRequest(final=True, sampled=True)
LOGITS: tuple[LogitRows, ...] = ("none", "last", "all")


@pytest.fixture(
    scope="module", params=[(each, 0) for each in FAMILIES] + [(each, 40) for each in FAMILIES[:2]], ids=str
)
def reader(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """With window pages, too, of families that have windows."""
    family, windows = request.param
    directory = tmp_path_factory.mktemp(family)
    make(family, directory)
    return Reader(load_decoder(directory), page_size=8, windows=windows)


def passed(reader: Reader, rows: list[Rows], wanted: FeatureRequest | None) -> tuple[list[Tensor], list[Tensor]]:
    """The logits of each sequence, and the final states of the rows that have some, if they are wanted."""
    poison_store(reader.model.store)
    found = reader.model.run(rows, wanted)
    logits = [found.of(index).clone() for index in range(len(rows))]
    if wanted is None:
        return logits, []
    states = found.features["final"].split([len(part.tokens) for part in rows])
    ends = [{"none": len(part.tokens), "last": len(part.tokens) - 1, "all": 0}[part.logits] for part in rows]
    return logits, [each[end:].clone() for each, end in zip(states, ends, strict=True)]


def mixed(reader: Reader, rng: random.Random) -> tuple[list[Rows], list[PageTable]]:
    """Pieces of texts, and trees, after texts of any length, in any order."""
    rows, tables = [], []
    for _ in range(rng.randint(1, 4)):
        table = reader.open(random_tokens(rng, rng.choice((0, 1, 7, 30, 70)), reader.vocab_size))
        if rng.random() < 0.4 and reader.model.store.states is None:
            tree = random_tree(rng, rng.randrange(reader.vocab_size), rng.randint(1, 12), reader.vocab_size)
            rows.append(reader.tree_rows(table, tree))
        else:
            piece = random_tokens(rng, rng.choice((1, 2, 9, 40, 80)), reader.vocab_size)
            rows.append(reader.rows(table, piece, rng.choice(LOGITS)))
        tables.append(table)
    return rows, tables


def test_logits_and_states_are_those_of_a_pass_of_all_rows(reader: Reader) -> None:
    rng = random.Random(11)
    for _ in range(25):
        rows, tables = mixed(reader, rng)
        logits, states = passed(reader, rows, EVERY)
        for wanted in (None, SAMPLED):
            reader.model._replayed.pop(EVERY, None)  # a pass that returns all states serves those that want none
            ours, own = passed(reader, rows, wanted)
            assert all(map(torch.equal, logits, ours))
            assert all(map(torch.equal, states, own)) and (not own or len(own) == len(states))
        for table in tables:
            table.release()


def test_rows_without_logits_are_left_out(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 30 rows the last one alone goes through the layers after that; of none with logits, none does."""
    stack = reader.model.decoder.config.stack
    assert stack.num_kv_layers < len(stack.layers)
    inside, seen = forward.feed_forward, list[int]()

    def counted(layer: Any, normed: Tensor, *more: Any) -> Any:
        seen.append(len(normed))
        return inside(layer, normed, *more)

    monkeypatch.setattr(forward, "feed_forward", counted)
    inner = [layer.feed_forward is not None for layer in stack.layers]
    for request in (None, SAMPLED, EVERY):
        for logits, left in zip(LOGITS, (0, 1), strict=False):
            model = ModelRunner(reader.model.decoder, reader.model.store, 512)
            table = PageTable(reader.pool)
            table.reserve(30)
            seen.clear()
            model._min_sizes = model._min_sizes._replace(rows=30, logits=left, pages=4)
            model.run([Rows(table, list(range(30)), 0, logits=logits)], request)
            behind = 30 if request is EVERY else left
            kept = stack.num_kv_layers
            wanted = [30] * sum(inner[:kept]) + [behind] * sum(inner[kept:]) * bool(behind)
            assert seen and seen == wanted * (len(seen) // len(wanted))  # what is recorded runs twice
            table.release()
