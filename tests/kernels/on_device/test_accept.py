"""Accepted paths of many trees in one launch: what spec/accept.py says of each, and the plain walk agrees."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from foresay.spec.sample import BROKEN
from foresay.spec.tree import MAX_NODES, DraftTree
from foresay.verifier.forward_batch import signed
from foresay.verifier.ops.eager import references
from foresay.verifier.ops.records import NO_NODE, AcceptedPaths
from foresay.verifier.ops.trees import accept_paths, report
from tests.spec.trees import random_tree, walk

pytestmark = pytest.mark.gpu
VOCAB = 4
GARBAGE = 3
NAMES = ("lengths", "paths", "emitted", "sources")


class Executor(NamedTuple):
    """Kernels that are tried, and where they run."""

    accept: Callable[..., AcceptedPaths]
    report: Callable[..., Any]
    device: torch.device


@pytest.fixture
def executor(device: torch.device) -> Executor:
    """The kernels of a GPU."""
    return Executor(accept_paths.launch, report.launch, device)


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


def some_trees(seed: int, width: int) -> tuple[list[DraftTree], dict[str, Tensor]]:
    """Six, one of them as wide as may be, and what an op is given of them; one sequence is padding."""
    rng = random.Random(seed)
    trees = [random_tree(rng, rng.randint(1, width), VOCAB) for _ in range(5)] + [random_tree(rng, width, VOCAB)]
    inputs = padded(trees, width) | {"sampled": samples(rng, trees, width)}
    slots = torch.randperm(1 << 20, generator=torch.Generator().manual_seed(width))[: 6 * width]
    inputs["nodes"][seed % 5] = 0
    return trees, inputs | {"slots": slots.view(6, -1)}


def there(inputs: dict[str, Tensor], executor: Executor) -> dict[str, Tensor]:
    return {name: column.to(executor.device) for name, column in inputs.items()}


def assert_same(found: AcceptedPaths, inputs: dict[str, Tensor]) -> None:
    """As the reference has it."""
    with references():
        wanted = accept_paths(**inputs)
    for name in NAMES:
        assert torch.equal(getattr(found, name).cpu(), getattr(wanted, name)), name


@pytest.mark.parametrize("width", [1, 2, 7, 33, MAX_NODES])
def test_accepted_paths_are_those_of_the_rule(width, executor) -> None:
    lengths = []
    for seed in range(4 if width == MAX_NODES else 6):  # the reference is slow
        trees, inputs = some_trees(seed, width)
        found = executor.accept(**there(inputs, executor))
        assert_same(found, inputs)
        for row, tree in enumerate(trees):
            if inputs["nodes"][row]:
                path, emitted = walk(tree.tokens, tree.parents, inputs["sampled"][row].tolist())
                assert found.paths[row, : len(path)].tolist() == path
                assert found.emitted[row, : len(path)].tolist() == emitted
        lengths += found.lengths.tolist()
    assert width < 7 or max(lengths) > 3, "paths that go somewhere"


def test_a_whole_chain_of_64_and_a_sequence_that_is_padding(executor) -> None:
    chain = DraftTree.chain(list(range(64)))
    inputs = padded([chain, DraftTree.chain([5])], 64)
    inputs["nodes"][1] = 0
    inputs["sampled"] = torch.arange(1, 65).repeat(2, 1)
    inputs["slots"] = torch.arange(128).view(2, 64)
    found = executor.accept(**there(inputs, executor))
    assert found.lengths.tolist() == [64, 0]
    assert found.paths[0].tolist() == list(range(64)) and found.emitted[0].tolist() == list(range(1, 65))
    assert found.sources[0].tolist() == list(range(64))
    assert (found.paths[1] == NO_NODE).all() and (found.emitted[1] == NO_NODE).all()


@pytest.mark.parametrize("width", [1, 6, MAX_NODES])
def test_what_the_host_reads_and_who_is_padding(width, executor) -> None:
    rng = random.Random(width)
    trees = [random_tree(rng, rng.randint(1, width), VOCAB) for _ in range(4)]
    inputs = padded(trees, width) | {"sampled": samples(rng, trees, width)}
    inputs["slots"] = torch.randperm(4 * width).view(4, width)
    inputs["live"] = torch.tensor([1, 0, 1, 1], dtype=torch.int32)

    def reported(by: Executor) -> Tensor:
        given = there(inputs, by)
        found, out = by.accept(**given), torch.zeros(4, 1 + 4 * width, dtype=torch.int64, device=by.device)
        assert found.lengths.tolist()[1] == 0 and (found.paths[1] == NO_NODE).all()
        by.report(found, *(given[name] for name in ("tokens", "parents", "nodes", "sampled")), out, -2)
        return out.cpu()

    with references():
        wanted = reported(Executor(accept_paths, report, torch.device("cpu")))
    assert torch.equal(reported(executor), wanted) and wanted.any()
    assert (wanted == -2).any() == any(len(tree) < width for tree in trees)
