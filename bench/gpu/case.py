"""One op at one shape: what is asked of it, how that is judged, and the random trees that some ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foresay.spec.tree import DraftTree


@dataclass(frozen=True, slots=True)
class Case:
    """One op at one shape.

    make: fresh random inputs. run: the op on them, which is what is timed. wanted: the result in higher precision, from
    the same inputs before ``run`` saw them. bytes: the least it moves. limit: the largest error allowed, where it is
    not the dtype's. written: all that ``run`` wrote in one tensor, from its result and the inputs; None: its result.
    """

    name: str
    make: Callable[[], Sequence[Tensor]]
    run: Callable[..., Any]
    wanted: Callable[..., Tensor]
    bytes: int
    limit: float | None = None
    written: Callable[..., Tensor] | None = None

    def outcome(self) -> tuple[Tensor, Tensor]:
        """What was written and what should have been, on inputs never used before."""
        inputs = self.make()
        wanted = self.wanted(*(tensor.clone() for tensor in inputs))
        result = self.run(*inputs)
        return result if self.written is None else self.written(result, *inputs), wanted


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
