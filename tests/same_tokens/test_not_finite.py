"""Tokens whose keys, values or states are not finite: rows that do not see them are as ever, with any drafter."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from foresay.kvpaging import PagePool
from foresay.spec.engine import EngineCore
from foresay.spec.protocols import Drafter, FeatureReader
from foresay.spec.sequence import SequenceState
from foresay.spec.tree import DraftTree, TreeShape
from tests.same_tokens.heads import Passing, head_drafter
from tests.same_tokens.models import MakeDrafter, Pair, blur, engine_of
from tests.same_tokens.runs import TREES, assert_same, jobs_of, maker, plain, shape_of, whole
from tests.same_tokens.witness import Job, run
from tests.verifier.families import make
from tests.verifier.reading import load_decoder

BAD = (40, 41, 42, 43, 44)
#: A hidden dimension that no token but the last two of ``BAD`` has anything in.
AT = 7
VALUES = {"nan": torch.nan, "inf": torch.inf, "mixed": None}


@torch.no_grad()
def spoil(model, value: float | None) -> None:
    """Make states of some tokens not finite, and of others the values of one layer alone. value: None for all kinds."""
    kinds = (torch.nan, torch.inf, -torch.inf) if value is None else (value,) * 3
    embedding = model.model.embed_tokens.weight
    embedding[:, AT] = 0.0
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[AT] = 0.0
        layer.mlp.down_proj.weight[AT] = 0.0
    for token, kind in zip(BAD, kinds, strict=False):
        embedding[token] = kind
    embedding[torch.tensor(BAD[3:]), AT] = 1.0
    model.model.layers[0].self_attn.v_proj.weight[:, AT] = 3e38
    model.model.layers[1].self_attn.k_proj.weight[:, AT] = 3e38


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Pair]:
    """A target that some tokens break, and a draft model that other tokens break too."""

    @cache
    def made(family: str = "llama2", kind: str = "mixed") -> Pair:
        root, decoders = tmp_path_factory.mktemp(kind), []
        for name in ("target", "draft"):
            model = make(family, root / name, num_hidden_layers=2)
            if name == "draft":
                blur(model)
                with torch.no_grad():
                    model.model.embed_tokens.weight[100:104] = torch.nan
            spoil(model, VALUES[kind])
            model.save_pretrained(root / name)
            decoders.append(load_decoder(root / name, probed=False))
        return Pair(root / "target", root / "draft", *decoders)

    return made


class Spiked(Passing):
    """Puts bad tokens into the trees that another drafter grew, and hangs more below, as far as there is room."""

    def __init__(self, inner: Drafter) -> None:
        super().__init__(inner)
        self._rng = random.Random(3)
        self._grown: dict[str, int] = {}
        self.spikes = 0
        if isinstance(inner, FeatureReader):
            self.observe = inner.observe

    def propose(self, sequences: Sequence[SequenceState], shapes: Sequence[TreeShape]) -> list[DraftTree]:
        trees = self.inner.propose(sequences, shapes)
        self._grown |= {sequence.id: len(tree) for sequence, tree in zip(sequences, trees, strict=True)}
        return [self._spiked(tree, shape) for tree, shape in zip(trees, shapes, strict=True)]

    def committed(self, sequence: SequenceState, path: list[int]) -> None:
        grown = self._grown.pop(sequence.id, 1)
        self.inner.committed(sequence, [node if node < grown else -1 for node in path])

    def _spiked(self, tree: DraftTree, shape: TreeShape) -> DraftTree:
        tokens, parents, depths = list(tree.tokens), list(tree.parents), list(tree.depths)
        for node in range(1, len(tokens)):
            if self._rng.random() < 0.3:
                tokens[node] = self._rng.choice(BAD)
        while len(tokens) < shape.nodes:
            parents.append(self._rng.choice([node for node in range(len(tokens)) if depths[node] < shape.levels]))
            depths.append(depths[parents[-1]] + 1)
            tokens.append(self._rng.choice(BAD))
        self.spikes += sum(token in BAD for token in tokens)
        return DraftTree.build(tokens, parents, tree.drafter)


def spiked(make_drafter: MakeDrafter, made: list[Spiked]) -> MakeDrafter:
    def spiking(pool: PagePool) -> Drafter:
        inner = make_drafter(pool)
        assert inner is not None
        made.append(Spiked(inner))
        return made[-1]

    return spiking


def jobs_for(vocab_size: int) -> list[Job]:
    """Requests, two of them with prompts that end them and their neighbours not."""
    jobs = jobs_of(vocab_size, (9, 17, 33, 40), 16)
    clean = [replace(job, prompt=[token for token in job.prompt if token not in BAD] or [5]) for job in jobs]
    broken = [replace(job, id=f"{job.id}-broken", prompt=[*job.prompt[:-3], bad, *job.prompt[-3:]])
              for job, bad in zip(clean[2:], BAD[2:4], strict=True)]  # fmt: skip
    return [replace(job, arrives=index) for index, job in enumerate([clean[0], broken[0], *clean[1:], broken[1]])]


def assert_unharmed(models: Pair, make_drafter: MakeDrafter, shape: TreeShape, **options: Any) -> EngineCore:
    jobs = jobs_for(models.vocab_size)
    expected = plain(models.target, jobs, page_size=options.get("page_size", 16))
    assert {job.id for job in jobs if expected[job.id].finish_reason == "error"} >= {"r2-broken", "r3-broken"}
    assert sum(len(text.tokens) for text in expected.values()) > 40
    made: list[Spiked] = []
    engine = engine_of(models.target, spiked(make_drafter, made), shape, **options)
    assert_same(expected, run(engine, jobs))
    assert not made or made[0].spikes > 20
    return engine


def texts_of(models: Pair) -> Mapping[str, list[int]]:
    jobs = jobs_for(models.vocab_size)
    return whole(jobs, plain(models.target, jobs))


@pytest.mark.parametrize(
    ("drafter", "kind", "max_seqs"),
    [
        *(("truth", kind, max_seqs) for kind in VALUES for max_seqs in (1, 4)),
        *((drafter, "mixed", 4) for drafter in ("chain4", TREES[1], "suffix tree", "ngram")),
    ],
)
def test_what_a_row_does_not_see_does_not_reach_it(hostile, drafter: str, kind: str, max_seqs: int) -> None:
    models = hostile(kind=kind)
    assert_unharmed(models, maker(models, drafter, texts_of(models)), shape_of(drafter), max_seqs=max_seqs, chunk=8)


@pytest.mark.parametrize("kind", ["medusa", "eagle3", "eagle1"])
def test_heads(hostile, tmp_path: Path, kind: str) -> None:
    models = hostile()
    assert_unharmed(models, head_drafter(kind, tmp_path, models.target, "tree"), TreeShape.parse("3,4,2"))


@pytest.mark.parametrize("family", ["mistral", "llama2"])
def test_windows(hostile, family: str) -> None:
    models = hostile(family)
    assert_unharmed(models, maker(models, "truth", texts_of(models)), shape_of("truth"), page_size=8)
