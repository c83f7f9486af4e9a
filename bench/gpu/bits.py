"""Part i: a row's bits in every company, of random weights: models made of the bundled ones are calm deep inside, and a
fault of order there reaches no token. Here every layer moves every number.

Behind a long text: a tree, each of whose paths is run again as a chain and, one of them, token by token; and a chunk of
a prompt, run again in other pieces.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from bench.gpu.case import random_words, tree_of
from bench.gpu.compiling import CHUNK
from foresay.kvpaging import PageTable
from foresay.spec.protocols import Rows
from foresay.spec.tree import DraftTree
from foresay.verifier.paged_model import PagedModel

#: Rows of a chunk that is read once as text and then in pieces, which are read as text and as trees.
PIECES = (1, 2, 64, 65, 33, 90)
#: Tokens of the path that is run one by one.
SINGLE = 6


class Text:
    """A random text of so many committed tokens, and what is run behind it: nothing of that is committed."""

    def __init__(self, model: PagedModel, length: int) -> None:
        self.model, self.length = model, length
        self.table = PageTable(model.store.pool)
        for begin in range(0, length, CHUNK):
            tokens = self._random(min(CHUNK, length - begin))
            self.table.reserve(len(tokens))
            self.model.run([Rows(self.table, tokens, begin, wanted="none")])
            self.table.commit(len(tokens))
        self.table.reserve(max(64, sum(PIECES)))

    def _random(self, count: int) -> Tensor:
        return torch.randint(self.model.vocab_size, (count,))

    def run(self, tokens: Tensor, at: int = 0) -> Tensor:
        """fp32[R, V]: rows of a text, ``at`` rows behind what is committed."""
        return self.model.run([Rows(self.table, tokens, self.length + at)]).logits.clone()

    def tree(self, nodes: int) -> Iterator[tuple[str, bool]]:
        """Whether each path of a random tree has the bits of the tree's rows."""
        random = tree_of(random_words(nodes))
        tree = DraftTree.build(self._random(nodes).tolist(), random.parents.tolist())
        whole = self.model.run([Rows.of_tree(self.table, tree)]).logits.clone()
        parents = tree.parents.tolist()
        leaves = [node for node in range(nodes) if node not in parents]
        paths = [_path(parents, leaf) for leaf in leaves]
        equal = [torch.equal(self.run(tree.tokens[path]), whole[path]) for path in paths]
        yield f"{len(paths)} paths of a tree of {nodes}", all(equal)
        path = max(paths, key=len)[:SINGLE]
        single = [self.run(tree.tokens[node : node + 1], at) for at, node in enumerate(path)]
        yield f"{len(path)} tokens one by one", torch.equal(torch.cat(single), whole[path])

    def chunk(self) -> Iterator[tuple[str, bool]]:
        """Whether the pieces of a chunk have its bits."""
        tokens = self._random(sum(PIECES))
        whole, at = self.run(tokens), 0
        for count in PIECES:
            part = slice(at, at + count)
            yield f"{count} rows of a chunk of {len(tokens)}", torch.equal(self.run(tokens[part], at), whole[part])
            at += count

    def release(self) -> None:
        """Give the pages back."""
        self.table.release()


def compare(model: PagedModel, contexts: tuple[int, ...], nodes: int) -> dict[str, bool]:
    """Which ways have the same bits."""
    found = {}
    for length in contexts:
        text = Text(model, length)
        for way, same in (*text.tree(nodes), *text.chunk()):
            found[f"{way} behind {length}"] = same
        text.release()
    return found


def _path(parents: list[int], node: int) -> list[int]:
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]
