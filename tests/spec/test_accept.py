"""The accept rule: literal examples, the plain walk, and the reason for it: the same tokens as plain decoding."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from foresay.spec.accept import accept
from foresay.spec.sample import Noise, sample
from foresay.spec.sampling import SamplingParams
from foresay.spec.tree import DraftTree
from tests.spec.laws import reference_draw
from tests.spec.trees import ancestors, random_tree, walk

#: 0 is the root; 1 and 2 hang on it, 3 and 4 on 1, 5 on 2, 6 on 4.
PARENTS = [-1, 0, 0, 1, 1, 2, 4]
TOKENS = [50, 10, 20, 30, 40, 30, 60]


@pytest.mark.parametrize(
    ("sampled", "path", "emitted"),
    [
        # The samples at nodes 0 .. 6; 99 is no child of anybody.
        ([99, 30, 30, 1, 60, 1, 1], [0], [99]),
        ([10, 99, 30, 1, 60, 1, 1], [0, 1], [10, 99]),
        ([10, 30, 30, 77, 60, 1, 1], [0, 1, 3], [10, 30, 77]),
        ([10, 40, 30, 77, 99, 1, 1], [0, 1, 4], [10, 40, 99]),
        ([10, 40, 30, 77, 60, 1, 88], [0, 1, 4, 6], [10, 40, 60, 88]),
        ([20, 40, 30, 77, 60, 66, 88], [0, 2, 5], [20, 30, 66]),
        ([20, 40, 10, 77, 60, 66, 88], [0, 2], [20, 10]),
        # A token that is somebody's child, but not of the node where it was sampled.
        ([40, 40, 30, 77, 60, 66, 88], [0], [40]),
        ([60, 40, 30, 77, 60, 66, 88], [0], [60]),
        # Drawing the root's own token is not staying at the root.
        ([50, 40, 30, 77, 60, 66, 88], [0], [50]),
    ],
)
def test_the_path_the_draws_take(sampled: list[int], path: list[int], emitted: list[int]) -> None:
    assert accept(DraftTree.build(TOKENS, PARENTS), sampled) == path
    assert [sampled[node] for node in path] == emitted


@pytest.mark.parametrize(("nodes", "vocab_size"), [(1, 3), (2, 2), (7, 3), (20, 3), (64, 3), (64, 12)])
def test_random_trees_against_the_walk(nodes: int, vocab_size: int) -> None:
    rng = random.Random(nodes * vocab_size)
    depths = set()
    for _ in range(500):
        tree = random_tree(rng, nodes, vocab_size)
        sampled = [rng.randrange(vocab_size) for _ in range(len(tree))]
        path = accept(tree, sampled)
        assert (path, [sampled[node] for node in path]) == walk(tree.tokens, tree.parents, sampled)
        depths.add(len(path) - 1)
    assert len(depths) >= min(nodes, 4)


class World:
    """A random table from the last tokens to logits, and one way of sampling from it."""

    def __init__(self, number: int) -> None:
        self.rng = random.Random(number)
        self.vocab_size = self.rng.choice([2, 3, 3, 5, 17])
        generator = torch.Generator().manual_seed(number)
        self._table = torch.randn(211, self.vocab_size, generator=generator) * self.rng.choice([0.3, 1.0, 3.0])
        self.sampling = self.rng.choice(
            [
                SamplingParams(temperature=0.0),
                SamplingParams(),
                SamplingParams(temperature=0.7),
                SamplingParams(temperature=1.8),
                SamplingParams(top_k=2, temperature=1.8),
                SamplingParams(top_p=0.7),
                SamplingParams(min_p=0.2, temperature=1.3),
                SamplingParams(top_k=3, top_p=0.9, min_p=0.05),
            ]
        )
        self.seed = self.rng.getrandbits(64)
        self.prompt = [self.rng.randrange(self.vocab_size) for _ in range(self.rng.randint(1, 5))]

    def logits(self, tokens: list[int]) -> Tensor:
        state = 1
        for token in tokens:
            state = (state * 131 + token + 1) % 1_000_003
        return self._table[state % len(self._table)]

    def plain(self, count: int) -> list[int]:
        """Token by token, each from the noise of its own position."""
        tokens, noise = list(self.prompt), Noise(self.seed, self.vocab_size)
        while len(tokens) < len(self.prompt) + count:
            tokens.append(reference_draw(self.logits(tokens), self.sampling, noise.row(len(tokens))))
        return tokens

    def speculative(self, count: int, rows: Callable[[Noise, int, list[int]], Tensor]) -> tuple[list[int], int]:
        """Run by run, each from a random tree; also how many drafted tokens were accepted."""
        tokens, noise, accepted = list(self.prompt), Noise(self.seed, self.vocab_size), 0
        while len(tokens) < len(self.prompt) + count:
            tree = random_tree(self.rng, self.rng.choice([1, 4, 10, 30]), self.vocab_size, root=tokens[-1])
            drafted, parents = tree.tokens, tree.parents
            paths = [ancestors(parents, node)[1:] for node in range(len(tree))]
            logits = torch.stack([self.logits(tokens + [drafted[node] for node in path]) for path in paths])
            sampled = sample(logits, self.sampling, rows(noise, len(tokens), tree.depths))
            path = accept(tree, sampled.tolist())
            tokens += sampled[path].tolist()
            accepted += len(path) - 1
        return tokens[: len(self.prompt) + count], accepted


def _rows(noise: Noise, position: int, depths: list[int]) -> Tensor:
    return torch.stack([noise.row(position + depth) for depth in depths])


@pytest.mark.parametrize("first", range(0, 240, 40))
def test_any_tree_gives_the_tokens_of_plain_decoding(first: int) -> None:
    accepted = 0
    for number in range(first, first + 40):
        tokens, hits = World(number).speculative(12, _rows)
        assert tokens == World(number).plain(12), f"world {number}"
        accepted += hits
    assert accepted > 40 * 2
