"""The same tokens from captured steps that heads draft in. They are hardly ever right, so the truth is whispered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from foresay.kvpaging import PageTable
from foresay.spec.sample import Noise
from foresay.spec.sequence import SequenceState
from foresay.spec.step import ScheduledSequence
from foresay.spec.tree import DraftTree, TreeShape
from foresay.verifier.graphs.capture import Eager
from foresay.verifier.graphs.proposer import AcceptedTree, DeviceTree, Proposer
from foresay.verifier.graphs.runner import GraphStepRunner
from foresay.verifier.graphs.state import StepState
from tests.combinations import alternating
from tests.drafters.contract import Fresh
from tests.same_tokens.captured import captured_engine, run_freely
from tests.same_tokens.heads import KINDS, head_of, target_of
from tests.same_tokens.models import Pair
from tests.same_tokens.runs import jobs_of, plain, whole
from tests.same_tokens.witness import Job

LENGTHS = (9, 2, 17, 33, 5, 40)
SHAPES = {"chain": TreeShape.chain(4), "tree": TreeShape((3, 4, 2))}
#: Kinds that are alike in little.
DIFFERENT = ("medusa", "eagle3", "dspark", "assistant")
_LONGEST = 128


class CapturedWhisper:
    """Puts the true continuation on the way to the last node of each tree, as far as the length of the text says.

    known: prompt and output of each sequence, by id. drafted: who drafted below how many committed tokens, and what.
    """

    def __init__(self, inner: Proposer, known: Mapping[str, list[int]]) -> None:
        self.inner, self._known = inner, known
        self.name, self.shape, self.needs = inner.name, inner.shape, inner.needs
        self.reach, self.readers, self.takes_roots = inner.reach, inner.readers, inner.takes_roots
        self._texts = torch.zeros(8, _LONGEST, dtype=torch.int64)
        self._seated: list[SequenceState] = []
        self.drafted: list[tuple[str, int, list[int]]] = []

    def propose(self, state: StepState) -> DeviceTree:
        tree = self.inner.propose(state)
        seats = zip(self._seated, state.lengths.tolist(), tree.tokens.tolist(), strict=False)
        self.drafted += [(sequence.id, length, tokens) for sequence, length, tokens in seats]
        positions = (state.lengths[:, None] + tree.depths).long()
        truth = self._texts[: state.size].gather(1, positions.clamp(max=_LONGEST - 1))
        hinted = self._on_path(tree) & (tree.depths <= (state.lengths % 6)[:, None])
        return replace(tree, tokens=truth.where(hinted & (state.live > 0)[:, None], tree.tokens))

    def _on_path(self, tree: DeviceTree) -> Tensor:
        """bool[S, N]: which nodes lie on the way to the last."""
        nodes = torch.arange(tree.tokens.shape[1])
        return (tree.ancestors[:, -1:] >> nodes & 1).bool()

    def committed(self, state: StepState, taken: AcceptedTree) -> None:
        self.inner.committed(state, taken)

    def prepare(self, sequences: Sequence[SequenceState]) -> bool:
        self._seated = list(sequences)
        for row, sequence in zip(self._texts, sequences, strict=False):
            text = self._known[sequence.id]
            row[: len(text)] = torch.tensor(text)
        return self.inner.prepare(sequences)

    def takes(self, scheduled: ScheduledSequence) -> bool:
        return self.inner.takes(scheduled)

    def write(self, batch: Sequence[ScheduledSequence]) -> None:
        self.inner.write(batch)

    def arrived(self, sequence: SequenceState, index: int, tree: DraftTree, more: Sequence[Tensor]) -> DraftTree:
        return self.inner.arrived(sequence, index, tree, more)

    def collected(self, sequence: SequenceState, tree: DraftTree, path: list[int]) -> None:
        self.inner.collected(sequence, tree, path)


@dataclass
class Run:
    """A run of captured steps. whispers: one for each number of slots."""

    runner: GraphStepRunner
    whispers: list[CapturedWhisper]
    accepted: int


def run(pair: Pair, kind: str, shape: str, jobs: list[Job], careful: bool = False, **options) -> Run:
    """Run requests in captured steps whose proposers are whispered to, and compare the texts."""
    texts, whispers = plain(pair.target, jobs), []

    def wrap(proposer: Proposer) -> Proposer:
        whispers.append(CapturedWhisper(proposer, whole(jobs, texts)))
        return whispers[-1]

    engine = captured_engine(pair, head_of(pair, kind, shape), SHAPES[shape], wrap=wrap, capture=Eager, **options)
    found = run_freely(engine, jobs, careful)
    assert {name: text.tokens for name, text in found.items()} == {name: text.tokens for name, text in texts.items()}
    assert isinstance(engine.runner, GraphStepRunner)
    return Run(engine.runner, whispers, sum(text.statistics.accepted for text in found.values() if text.statistics))


@pytest.mark.parametrize(("kind", "shape"), alternating(KINDS, ["chain", "tree"]))
def test_heads_in_captured_steps(pair, kind, shape) -> None:
    models = target_of(pair, kind, layers=3)
    done = run(models, kind, shape, jobs_of(models.vocab_size, LENGTHS, 24), shape == "chain", max_seqs=3)
    assert done.runner.counts["launched"] >= 8
    assert done.accepted > 10


@pytest.mark.parametrize("kind", KINDS)
def test_few_pages(pair, kind) -> None:
    """Sequences are preempted and come back."""
    models = target_of(pair, kind, layers=3)
    done = run(models, kind, "chain", jobs_of(models.vocab_size, LENGTHS, 20), tokens=176, page_size=8, prefix=True)
    assert done.runner.counts["launched"]


@pytest.mark.parametrize(
    "kind", [kind if kind in DIFFERENT else pytest.param(kind, marks=pytest.mark.soak) for kind in KINDS]
)
def test_what_they_draft_is_what_follows_from_the_text(pair, kind) -> None:
    """Whatever ran before, ahead or in vain, and wherever the sequence sat."""
    models = target_of(pair, kind, layers=3)
    jobs = jobs_of(models.vocab_size, LENGTHS, 40, ("greedy", "warm", "cool"))
    done = run(models, kind, "chain", jobs, max_seqs=3)
    by_id, texts = {job.id: job for job in jobs}, whole(jobs, plain(models.target, jobs))
    fresh, compared = Fresh(models, head_of(models, kind, "chain")), 0
    noises = {job.id: Noise(job.params.seed or 0, models.vocab_size) for job in jobs}
    for whisper in done.whispers:
        for name, length, tokens in whisper.drafted:
            text = texts[name][: length + 1]
            if len(text) == length + 1 and text[-1] == tokens[0]:
                how = by_id[name].params, PageTable(fresh.pool), noises[name], 10_000, frozenset[int]()
                alone = fresh.drafted(SequenceState(name, text, len(text), *how), TreeShape.chain(len(tokens) - 1))
                assert alone.tokens == tokens
                compared += 1
    assert compared > 30
