"""Accepted paths of many trees in one launch: what spec/accept.py says of each, and the plain walk agrees."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from foresay.spec.sample import BROKEN
from foresay.spec.tree import MAX_NODES, DraftTree
from foresay.verifier.forward_batch import signed
from foresay.verifier.ops.records import NO_NODE
from foresay.verifier.ops.trees import accept_paths, report
from tests.spec.trees import random_tree, walk

pytestmark = pytest.mark.gpu
VOCAB = 4
GARBAGE = 3


def padded(trees: list[DraftTree], width: int) -> dict[str, Tensor]:
    """The trees' columns, [B, width]; what is behind a tree is garbage that would match."""
    columns = {name: torch.full((len(trees), width), GARBAGE) for name in ("tokens", "parents", "ancestors")}
    for row, tree in enumerate(trees):
        written = {"tokens": tree.tokens, "parents": tree.parents, "ancestors": signed(tree.ancestors)}
        for name, column in columns.items():
            column[row, : len(tree)] = torch.tensor(written[name])
    return columns | {"nodes": torch.tensor([len(tree) for tree in trees])}


def samples(rng: random.Random, trees: list[DraftTree], width: int) -> Tensor:
    """Draws that step into a child at two nodes of three, so that paths are long; some are broken."""
    sampled = torch.full((len(trees), width), GARBAGE)
    for row, tree in enumerate(trees):
        tokens, parents = tree.tokens, tree.parents
        for node in range(len(tree)):
            children = [tokens[n] for n in range(len(tree)) if parents[n] == node]
            lucky = children and rng.random() < 2 / 3
            sampled[row, node] = rng.choice(children) if lucky else rng.choice([BROKEN, *range(VOCAB)])
    return sampled


@pytest.mark.parametrize("width", [1, 2, 7, 33, MAX_NODES])
def test_random_trees(width, device) -> None:
    rng = random.Random(width)
    lengths = []
    for _ in range(4):
        trees = [random_tree(rng, rng.randint(1, width), VOCAB) for _ in range(5)] + [random_tree(rng, width, VOCAB)]
        inputs = padded(trees, width) | {"sampled": samples(rng, trees, width)}
        inputs["slots"] = torch.randperm(1 << 20, generator=torch.Generator().manual_seed(width))[: 6 * width].view(
            6, -1
        )
        wanted = accept_paths(**inputs)
        found = accept_paths.launch(**{name: column.to(device) for name, column in inputs.items()})
        for name in ("lengths", "paths", "emitted", "sources"):
            assert torch.equal(getattr(found, name).cpu(), getattr(wanted, name)), name
        for row, tree in enumerate(trees):
            path, emitted = walk(tree.tokens, tree.parents, inputs["sampled"][row].tolist())
            assert found.paths[row, : len(path)].tolist() == path
            assert found.emitted[row, : len(path)].tolist() == emitted
        lengths += found.lengths.tolist()
    assert width < 7 or max(lengths) > 3, "paths that go somewhere"


def test_a_whole_chain_of_64_and_a_sequence_that_is_padding(device) -> None:
    chain = DraftTree.chain(list(range(64)))
    inputs = padded([chain, DraftTree.chain([5])], 64)
    inputs["nodes"][1] = 0
    inputs["sampled"] = torch.arange(1, 65).repeat(2, 1)
    inputs["slots"] = torch.arange(128).view(2, 64)
    found = accept_paths.launch(**{name: column.to(device) for name, column in inputs.items()})
    assert found.lengths.tolist() == [64, 0]
    assert found.paths[0].tolist() == list(range(64)) and found.emitted[0].tolist() == list(range(1, 65))
    assert found.sources[0].tolist() == list(range(64))
    assert (found.paths[1] == NO_NODE).all() and (found.emitted[1] == NO_NODE).all()


@pytest.mark.parametrize("width", [1, 6, MAX_NODES])
def test_what_the_host_reads_and_who_is_padding(width, device) -> None:
    rng = random.Random(width)
    trees = [random_tree(rng, rng.randint(1, width), VOCAB) for _ in range(4)]
    inputs = padded(trees, width) | {"sampled": samples(rng, trees, width)}
    inputs["slots"] = torch.randperm(4 * width).view(4, width)
    live = torch.tensor([1, 0, 1, 1], dtype=torch.int32)
    outs = []
    for ours, where in ((False, torch.device("cpu")), (True, device)):
        there = {name: column.to(where) for name, column in inputs.items()}
        accepted, reported = (accept_paths.launch, report.launch) if ours else (accept_paths, report)
        found = accepted(**there, live=live.to(where))
        assert found.lengths.tolist()[1] == 0 and (found.paths[1] == NO_NODE).all()
        outs.append(torch.zeros(4, 1 + 4 * width, dtype=torch.int64, device=where))
        tokens, parents, nodes, sampled = (there[name] for name in ("tokens", "parents", "nodes", "sampled"))
        reported(found, tokens, parents, nodes, sampled, outs[-1], -2)
    assert torch.equal(outs[0], outs[1].cpu()) and outs[0].any()
    assert (outs[0] == -2).any() == any(len(tree) < width for tree in trees)
