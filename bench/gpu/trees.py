"""Random trees and the samples that walk down them, as the cases of kernels need them."""

from __future__ import annotations

import torch
from torch import Tensor

from spec.tree import DraftTree


def unsigned(words: Tensor) -> list[int]:
    """Ancestor words as they are before int64 makes the 64th bit a sign."""
    return [word & (1 << 64) - 1 for word in words.tolist()]


def random_words(nodes: int) -> Tensor:
    """int64[N]: ancestor words of a tree whose nodes hang on one of the four before them."""
    words: list[int] = []
    for node in range(nodes):
        parent = max(0, node - 1 - int(torch.randint(4, (1,))))
        words.append((words[parent] if node else 0) | 1 << node)
    return torch.tensor([word - (1 << 64) if word >> 63 else word for word in words])


def tree_of(words: Tensor) -> DraftTree:
    """The tree of these ancestor words, with tokens that tell siblings apart."""
    plain = unsigned(words)
    parents = [(word & ~(1 << node)).bit_length() - 1 for node, word in enumerate(plain)]
    depths = torch.tensor([word.bit_count() - 1 for word in plain])
    return DraftTree(torch.arange(len(words)), torch.tensor(parents), depths, words)


def lucky_draws(tree: DraftTree) -> Tensor:
    """int64[N]: at two nodes of three a child's token, else one that nobody has."""
    parents = tree.parents.tolist()
    sampled = torch.full((len(parents),), len(parents))
    for node in range(len(parents)):
        children = [child for child, parent in enumerate(parents) if parent == node]
        if children and torch.rand(()) < 2 / 3:
            sampled[node] = children[int(torch.randint(len(children), (1,)))]
    return sampled
