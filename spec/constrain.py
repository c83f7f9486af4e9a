"""A grammar in the step: drafts pruned before they are verified, forced tokens drafted for free, a mask at every node.

::

    plan       forced    tokens the grammar forces: they will be drafted, and pages are reserved
    propose    graft     forced tokens and the drafter's legal nodes become one tree
    forward    masks     computed in a thread of their own, while the target runs
    sample     edits     tokens that may not follow a node are minus infinity in its row
    commit     advance   the emitted tokens, up to the end of the text

The mask decides which tokens are emitted; pruning and forcing only decide which of them are drafted. So the tokens are
those of plain decoding with the same masks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from foresay.spec.errors import ForesayError, InvalidRequest
from foresay.spec.names import GRAMMAR
from foresay.spec.tree import DraftTree

#: A slow grammar must not slow down drafting: after this time, the rest of a tree is drafted without it.
_MOST_SECONDS = 0.02

Result = TypeVar("Result")


class Constraint(Protocol):
    """What one sequence's output must match (a grammar), seen from the committed text.

    It begins before the first output token. Trees are passed as host lists: ``tokens[0]`` is the root (already
    committed, or the prompt's last token), ``parents[0]`` is -1 and every other parent comes before its child. Only
    ``advance`` changes the constraint's state. A method that raises ends this sequence only, with an error that has the
    message of what was raised.

    In a step the calls come in this order, one at a time: ``forced``, ``fork`` (by drafters that let a copy follow what
    they draft), ``legal`` (if anything was drafted), ``masks``, ``advance`` (unless the sequence has ended). Tokens may
    be any the model has, stop tokens among them.
    """

    def forced(self, most: int) -> list[int]:
        """Tokens that the grammar forces, at most ``most``: free drafts.

        Drafts only: each is still sampled under its mask, so one that is not really forced only costs its row.
        """
        ...

    def legal(self, tokens: list[int], parents: list[int]) -> list[bool]:
        """Which nodes the grammar could reach; a node below an illegal one is illegal. The root is legal."""
        ...

    def masks(self, tokens: list[int], parents: list[int]) -> Tensor | None:
        """int32[N, ceil(V / 32)]: bit ``t % 32`` of word ``t // 32`` says that token t may follow the node.

        All bits are set where nothing is constrained. None if that is so everywhere. Tokens past the last word are not
        allowed. Called in another thread, while the target computes. A node without any bit ends the step's output at
        its token, and the next step, where it is the root, asks again: so a node may be left out if time is short. At
        the root it ends the sequence with an error.
        """
        ...

    def advance(self, tokens: list[int]) -> None:
        """These tokens were committed."""
        ...

    def fork(self) -> Constraint:
        """An independent copy in the same state."""
        ...


class Guarded:
    """A constraint whose failure ends only its own sequence.

    error: the first failure; after it the constraint is no longer called, and nothing that was sampled without it may
    be emitted. field: the request's field that errors name; a ForesayError that the constraint raises is the request's
    fault.
    """

    def __init__(self, constraint: Constraint, vocab_size: int, field: str = "") -> None:
        self.constraint, self.field = constraint, field
        self.error: ForesayError | None = None
        self.vocab_size = vocab_size

    def forced(self, most: int) -> list[int]:
        """At most ``most`` tokens to draft for free."""
        return self._guard(lambda: self._of_the_model(self.constraint.forced(most)[:most]) if most > 0 else [], [])

    def legal(self, tokens: list[int], parents: list[int]) -> list[bool]:
        """Which nodes could be reached; at least the root."""
        root_alone = [not node for node in range(len(tokens))]
        return self._guard(lambda: self._per_node(self.constraint.legal(tokens, parents), len(tokens)), root_alone)

    def masks(self, tokens: list[int], parents: list[int]) -> Tensor | None:
        """int32[N, ceil(V / 32)]: the tokens that may follow each node, packed; None if all may follow every node."""
        return self._guard(lambda: self._as_wide(self.constraint.masks(tokens, parents), len(tokens)), None)

    def allowed(self, tree: DraftTree) -> Tensor:
        """The same for a tree that was not pruned; all tokens where nothing is known.

        Nodes below a token that is not allowed are never reached, so the constraint is not called for them.
        """
        tokens, parents = tree.tokens, tree.parents
        packed = torch.full((len(tokens), self._words), -1, dtype=torch.int32)
        kept = [node for node, legal in enumerate(self.legal(tokens, parents) if len(tokens) > 1 else [True]) if legal]
        number = {node: index for index, node in enumerate(kept)} | {-1: -1}
        masks = self.masks([tokens[node] for node in kept], [number[parents[node]] for node in kept])
        if masks is not None:
            packed[torch.tensor(kept)] = masks
        return packed

    def advance(self, tokens: list[int]) -> None:
        """These tokens were committed."""
        self._guard(lambda: self.constraint.advance(tokens), None)

    def _of_the_model(self, tokens: list[int]) -> list[int]:
        assert all(0 <= token < self.vocab_size for token in tokens), f"no tokens of the model: {tokens}"
        return tokens

    @staticmethod
    def _per_node(legal: list[bool], nodes: int) -> list[bool]:
        assert len(legal) == nodes, f"{len(legal)} answers for {nodes} nodes"
        return legal

    @property
    def _words(self) -> int:
        return -(-self.vocab_size // 32)

    def _as_wide(self, masks: Tensor | None, nodes: int) -> Tensor | None:
        """Padded to the model's vocabulary: tokens past the last word are not allowed."""
        if masks is None:
            return None
        assert masks.shape[0] == nodes, f"{masks.shape[0]} masks for {nodes} nodes"
        return functional.pad(masks, (0, self._words - masks.shape[1]))

    def _guard(self, call: Callable[[], Result], otherwise: Result) -> Result:
        if self.error is not None:
            return otherwise
        try:
            return call()
        except Exception as error:
            self.error = self._named(error)
            return otherwise

    def _named(self, error: Exception) -> ForesayError:
        before = "the grammar of " if self.field else "the grammar"
        failed = InvalidRequest(self.field, f" failed: {str(error) or type(error).__name__}", before)
        return failed if isinstance(error, ForesayError) else ForesayError(failed.message)


class Ahead:
    """Follows a grammar along a tree while it is drafted, for drafters that can leave out tokens it does not allow.

    Each node has its own copy of the constraint. A failure or timeout here ends no sequence: the drafts only get worse,
    and the masks of the step decide whether the text can go on.
    """

    def __init__(self, guarded: Guarded, seconds: float = _MOST_SECONDS) -> None:
        self._vocab_size = guarded.vocab_size
        self._at: dict[int, Constraint | None] = {0: None if guarded.error else guarded.constraint}
        self._left = seconds

    def allowed(self, node: int, parent: int, token: int) -> Tensor | None:
        """int32[ceil(V / 32)]: the tokens that may follow a node with this ``token``; None if nothing is known.

        A parent comes before its children; the root is node 0.
        """
        if self._left <= 0:
            return None
        begun = time.perf_counter()
        try:
            return self._allowed(node, parent, token)
        except Exception:
            self._at[node] = None
            return None
        finally:
            self._left -= time.perf_counter() - begun

    def _allowed(self, node: int, parent: int, token: int) -> Tensor | None:
        constraint = self._at.get(node if node == 0 else parent)
        if constraint is not None and node:
            constraint = constraint.fork()
            constraint.advance([token])
        self._at[node] = constraint
        if constraint is None:
            return None
        allowed = Guarded(constraint, self._vocab_size).masks([token], [-1])
        return None if allowed is None else allowed[0]


def graft(constraint: Guarded, forced: Sequence[int], tree: DraftTree, most: int) -> DraftTree:
    """The forced tokens as a chain below the root, and the legal nodes of a proposed tree; at most ``most`` nodes."""
    tokens, parents = tree.tokens, tree.parents
    legal = constraint.legal(tokens, parents) if len(tokens) > 1 else [True]
    if not forced and all(legal):
        return tree
    grown = _Graft(tokens[0], forced)
    for node in range(1, len(tokens)):
        if legal[node]:
            grown.add(node, parents[node], tokens[node], most)
    sources = tuple(tree.sources[node] if node > 0 else "" for node in grown.origin) if tree.sources else ()
    drafter = tree.drafter if any(node > 0 for node in grown.origin) else GRAMMAR
    built = DraftTree.build(grown.tokens, grown.parents, drafter)
    parts = tree.parts or (tree,)
    return replace(built, sources=sources, parts=parts, forced=len(forced))


class _Graft:
    """A tree in the making. origin: the proposed node of each; nodes: where each proposed node went."""

    def __init__(self, root: int, forced: Sequence[int]) -> None:
        self.tokens = [root, *forced]
        self.parents = list(range(-1, len(forced)))
        self.origin = [0] + [-1] * len(forced)
        self.nodes = {0: 0}
        self._children = {(node, token): node + 1 for node, token in enumerate(forced)}

    def add(self, node: int, parent: int, token: int, most: int) -> None:
        """Add a proposed node, unless its parent was left out or the tree is full; if it is there already, map it to
        that one."""
        if parent not in self.nodes:
            return
        below = (self.nodes[parent], token)
        found = self._children.get(below)
        if found is None:
            if len(self.tokens) == most:
                return
            found = self._children[below] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(below[0])
            self.origin.append(node)
        elif self.origin[found] < 0:
            self.origin[found] = node
        self.nodes[node] = found


class MaskThread:
    """Computes the masks of a step while the target runs."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None

    def begin(self, parts: Sequence[tuple[Guarded, DraftTree] | None]) -> Future[list[Tensor | None]]:
        """Start computing the masks of each tree (None where there is no constraint); the result keeps their order."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        return self._thread.submit(
            lambda: [part[0].masks(part[1].tokens, part[1].parents) if part else None for part in parts]
        )
