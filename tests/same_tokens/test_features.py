"""What a drafter is shown of the target: for each position once, and bit for bit what one pass over the text gives."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from torch import Tensor

from foresay.kvpaging import PagePool, PageTable
from foresay.spec.protocols import Drafter, FeatureRequest, Features
from foresay.spec.sequence import SequenceState
from foresay.spec.tree import TreeShape
from tests.same_tokens.models import engine_of
from tests.same_tokens.proposers import RandomTrees
from tests.same_tokens.runs import jobs_of, plain, whole
from tests.same_tokens.witness import run
from tests.verifier.reading import Reader

NEEDS = FeatureRequest(final=True, layers=(0, 2, 3))


class Recorder(RandomTrees):
    """Notes what it is shown, by sequence and position."""

    needs: FeatureRequest | None = NEEDS

    def __init__(self, vocab_size: int, known: dict[str, list[int]]) -> None:
        super().__init__(vocab_size, known=known)
        self.seen: dict[str, dict[int, dict[str, Tensor]]] = defaultdict(dict)
        self.order: list[str] = []

    def observe(self, sequence: SequenceState, features: Features) -> None:
        self.order.append("observe")
        rows = {len(part) for part in features.values()}
        assert len(rows) == 1
        start = sequence.table.length - rows.pop()
        for position in range(start, sequence.table.length):
            row = {name: part[position - start] for name, part in features.items()}
            self.seen[sequence.id][position] = row

    def extend(self, sequence: SequenceState) -> None:
        self.order.append("extend")

    def committed(self, sequence: SequenceState, path: list[int]) -> None:
        self.order.append("committed")


@pytest.mark.parametrize("options", [{}, {"chunk": 7}, {"tokens": 160}])
def test_every_committed_position_is_shown_as_it_is(pair, options) -> None:
    """Through trees of all forms, chunks and preemption."""
    models = pair("llama2")
    jobs = jobs_of(models.vocab_size, (30, 33, 31, 20), 40)
    texts = plain(models.target, jobs)
    recorders: list[Recorder] = []

    def drafter(pool: PagePool) -> Drafter:
        recorders.append(Recorder(models.vocab_size, whole(jobs, texts)))
        return recorders[0]

    run(engine_of(models.target, drafter, TreeShape.parse("2,4,4,3,3,2,1"), **options), jobs)
    for name, tokens in whole(jobs, texts).items():
        reader = Reader(models.target)
        rows = reader.rows(PageTable(reader.pool), tokens[:-1])
        expected = reader.model.run([rows], NEEDS).features
        seen = recorders[0].seen[name]
        assert sorted(seen) == list(range(len(tokens) - 1))
        for feature, wanted in expected.items():
            shown = torch.stack([seen[position][feature] for position in sorted(seen)])
            assert torch.equal(shown, wanted), f"{name}: {feature}"
    assert recorders[0].order[::2] == ["observe"] * (len(recorders[0].order) // 2)


def test_the_last_layers_output_is_what_the_final_norm_reads(pair) -> None:
    models = pair("llama2")
    reader = Reader(models.target)
    rows = reader.rows(PageTable(reader.pool), [1, 2, 3, 4])
    features = reader.model.run([rows], FeatureRequest(final=True, layers=(3,))).features
    last = features["layer.3"]
    normed = last * (last.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    ratio = features["final"] / normed
    assert torch.allclose(ratio, ratio[:1].expand_as(ratio), rtol=1e-3)
