"""What the step loop needs from a model and a drafter, and the records that they exchange.

Features are the target's hidden states on their way to a drafter that reads them::

    forward     rows of all sequences, concatenated               by_sequence splits them
    tree        root and nodes      [0, 2, 5] accepted            of_path keeps the accepted path, in order
    chunk       prompt rows, perhaps the root after them          of_path(lead) keeps them all

The drafter gets the features of the text's last R positions, whatever tree or chunk they came from. Rows of rejected
nodes never leave the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from foresay.kvpaging import PageTable
from foresay.kvpaging.states import TextState
from foresay.spec.adjust import LogitEdits
from foresay.spec.sample import Noise
from foresay.spec.sampling import SamplingParams
from foresay.spec.sequence import SequenceState
from foresay.spec.tree import DraftTree, TreeShape

LogitRows = Literal["none", "last", "all"]


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one sequence in a forward pass, and the nodes at which tokens are sampled.

    The model holds valid KV for positions ``0 .. base - 1``. Row *i* is written to slot ``base + nodes[i]`` of the
    sequence's pages and has rotary position ``base`` plus its depth. It attends to every position below ``base`` and to
    the rows on its path.

    tokens: one for each row, a list or int64[R] on the host. nodes: which tree node each row is (its slot past
    ``base``); None for a chain, where row i is node i at depth i. words: for each row the ancestor word over nodes,
    itself included; None for a chain. logits: the rows whose logits are computed.
    tree: the last rows are its nodes: a token is sampled at each, with this sampling and noise. None: nothing is
    sampled.
    state: of recurrent layers; None: the table's, which is the target's.
    """

    table: PageTable
    tokens: Sequence[int] | Tensor
    base: int
    nodes: Sequence[int] | None = None
    words: Sequence[int] | None = None
    logits: LogitRows = "all"
    tree: DraftTree | None = None
    sampling: SamplingParams | None = None
    noise: Noise | None = None
    state: TextState | None = None

    @classmethod
    def of_tree(cls, table: PageTable, tree: DraftTree, sequence: SequenceState | None = None) -> Rows:
        """A whole tree after the committed length of ``table``. sequence: the one that tokens are sampled for."""
        nodes, words = (None, None) if tree.is_chain else (range(len(tree)), tree.ancestors)
        if sequence is None:
            return cls(table, tree.tokens, table.length, nodes, words)
        return cls(table, tree.tokens, table.length, nodes, words, "all", tree, sequence.sampling, sequence.noise)

    @property
    def certain(self) -> int:
        """The number of leading rows that are text, whatever is accepted of the tree."""
        return 0 if self.words is not None else len(self.tokens) - (0 if self.tree is None else len(self.tree))

    @property
    def positions(self) -> list[int]:
        """The absolute positions of the sampled tokens: each is one past its node's."""
        assert self.tree is not None, "something is sampled"
        first = self.base + len(self.tokens) - len(self.tree) + 1
        return [first + depth for depth in self.tree.depths]


@dataclass(frozen=True, slots=True)
class FeatureRequest:
    """What a drafter needs from the target: the final hidden state, and the inputs of some layers.

    final: the hidden state after the final norm, the input of the output head. layers: 0-based decoder layers whose
    input (the residual stream) is needed; the number of layers means the output of the last one. sampled: final states
    are read only of rows whose logits are computed; the others may be zeros.
    """

    final: bool = False
    layers: tuple[int, ...] = ()
    sampled: bool = False

    def below(self, layers: int) -> bool:
        """Whether after so many layers nothing is needed of rows whose logits are not computed."""
        return all(layer <= layers for layer in self.layers) and (self.sampled or not self.final)

    @property
    def names(self) -> list[str]:
        """Their names."""
        return [*(f"layer.{layer}" for layer in self.layers), *(["final"] if self.final else [])]


@dataclass(frozen=True, slots=True)
class Forward:
    """The result of one forward pass.

    held: fp32, the logits of all sequences in order, perhaps followed by others. starts: where each
    sequence's begin there (one more entry than sequences). features: by name (``"final"``, ``"layer.3"``), [R, H]
    over all rows. of_mixtures: int64[L], how many experts of each mixture had any of the rows; None: there are none.
    """

    held: Tensor
    starts: list[int]
    features: dict[str, Tensor]
    of_mixtures: Tensor | None = None

    @property
    def woken(self) -> float:
        """How many experts had any of the rows, per layer of a mixture. It waits for the pass, and is valid until the
        next one."""
        return mean_woken(self.of_mixtures)

    @property
    def logits(self) -> Tensor:
        """fp32[W, V], of all sequences."""
        return self.held[: self.starts[-1]]

    def of(self, index: int) -> Tensor:
        """fp32[w, V]: the logits of sequence number ``index`` of the pass."""
        return self.held[self.starts[index] : self.starts[index + 1]]


def mean_woken(of_mixtures: Tensor | None) -> float:
    """See :class:`Forward`."""
    counts: list[int] = [] if of_mixtures is None else of_mixtures.tolist()
    return sum(counts) / max(1, len(counts))


#: The token sampled at each node of a tree, and the path that these samples take through it.
Verified = tuple[list[int], list[int]]


class Verifier(Protocol):
    """The target model."""

    vocab_size: int

    def run(self, rows: Sequence[Rows], features: FeatureRequest | None = None) -> Forward:
        """One forward pass over ragged rows; stores their KV; never changes a page table."""
        ...

    def verify(self, edits: Sequence[LogitEdits | None]) -> list[Verified | None]:
        """Sample and accept, after the last pass; one entry for each of its sequences, None where nothing is sampled.

        A token is sampled at every node, under the contract of :func:`foresay.spec.sample.sample`, from the logits of
        that pass, which are edited in place first. The KV rows of accepted nodes move down, to be contiguous. edits:
        what each sequence's request changes in the logits of its nodes.
        """
        ...

    def committed(self, table: PageTable, path: Sequence[int] = (), advanced: int = 0) -> None:
        """The table's length grew by rows of the last pass: set fill marks, and advance recurrent states.

        path: the nodes of the pass's tree that are text now, the last rows of the table; the certain rows come before
        them. advanced: by how many nodes of it a captured step has advanced the states; if by more than the path has,
        they stay where they were, and so must the text.
        """
        ...


class Drafter(Protocol):
    """A source of draft tokens. They may be wrong in any way: that only costs speed.

    One whose ``needs`` are not None is a :class:`~foresay.spec.protocols.FeatureReader` too. All calls come from one
    thread, one at a time. docs/drafters.md explains them, and how ``--draft`` names one.
    """

    name: str
    needs: FeatureRequest | None

    def propose(self, sequences: Sequence[SequenceState], shapes: Sequence[TreeShape]) -> list[DraftTree]:
        """One tree per sequence, at most as large as its shape. Writes only scratch rows past the committed length."""
        ...

    def extend(self, sequence: SequenceState) -> None:
        """A prefill chunk was committed: update the drafter's own state."""
        ...

    def committed(self, sequence: SequenceState, path: list[int]) -> None:
        """This path of the last proposed tree was committed: keep those of the drafter's own rows that are still valid.

        path: one node for each committed token, from the root on; -1 for tokens that were no node of the tree (nodes of
        other sources may have been added), which come last. Nothing was proposed if the step computed the prompt, if
        all drafts were forced by a grammar, or if another drafter was called: the path is then 0 and perhaps -1s.
        """
        ...

    def finished(self, sequence: SequenceState) -> None:
        """The sequence has ended (or was preempted): drop its state."""
        ...


@runtime_checkable
class CatchesUp(Protocol):
    """A :class:`Drafter` that computes state for the whole text, at the latest when it drafts."""

    def unread(self, sequence: SequenceState) -> int:
        """Tokens that it has to compute before it can draft, including the last one, the root."""
        ...


@runtime_checkable
class Chains(Protocol):
    """A :class:`Drafter` that knows how often its chains are accepted, and drafts them faster than trees that grow."""

    def chain_chances(self, sequence: SequenceState, levels: int) -> Sequence[float]:
        """The chance of each node of a chain of this many levels to be accepted."""
        ...


@runtime_checkable
class Checks(Protocol):
    """A :class:`Drafter` that can verify what others found, before it goes on from there. checks: whether it does
    now."""

    checks: bool

    def check(self, sequence: SequenceState, found: DraftTree) -> None:
        """Begin the next draft of a sequence so."""
        ...


@runtime_checkable
class LooksUp(Protocol):
    """A :class:`Drafter` that looks up the text, and often finds nothing."""

    def find(self, sequences: Sequence[SequenceState], shapes: Sequence[TreeShape]) -> list[DraftTree | None]:
        """What ``propose`` would return; None where that is only a root."""
        ...


@runtime_checkable
class Lookup(Drafter, LooksUp, Protocol):
    """Both."""


def or_roots(found: Sequence[DraftTree | None], sequences: Sequence[SequenceState], drafter: str) -> list[DraftTree]:
    """For each sequence what was found, or only its root."""
    pairs = zip(found, sequences, strict=True)
    return [DraftTree.chain(one.tokens[-1:], drafter) if tree is None else tree for tree, one in pairs]


#: Hidden states by name (``"final"``, ``"layer.3"``), each [R, H].
Features = Mapping[str, Tensor]
#: Copies the rows of a chunk, and of a path of nodes after it.
FeaturesOfPath = Callable[[int, list[int]], Features]


@runtime_checkable
class FeatureReader(Protocol):
    """A :class:`~foresay.spec.protocols.Drafter` whose ``needs`` are not None."""

    def observe(self, sequence: SequenceState, features: Features) -> None:
        """The target's features of the last R committed positions, ``table.length - R .. table.length - 1``.

        Called after each commit and right before ``extend`` or ``committed``. Positions of a prefix hit, or that were
        committed while no features were requested, are never passed. The drafter may keep the tensors.
        """
        ...


def reader_of(drafter: object) -> FeatureReader | None:
    """The drafter, if it reads features. This checks ``needs``: checking the protocol takes twenty times as long."""
    return None if getattr(drafter, "needs", None) is None else cast(FeatureReader, drafter)


def by_sequence(features: Features, counts: Sequence[int]) -> list[FeaturesOfPath | None]:
    """:func:`of_path` for each sequence of a pass, on its own rows; None if there are no features.

    counts: the number of rows of each, in order. If each has one, all are copied at once, and a sequence's part is made
    when it is read, which is never where nothing is drafted.
    """
    if not features:
        return [None] * len(counts)
    if len(counts) == 1:
        return [partial(of_path, features)]
    if max(counts) == 1:
        copied = {name: rows.clone() for name, rows in features.items()}
        return [RowFeatures(copied, row).of_path for row in range(len(counts))]
    splits = zip(*[rows.split_with_sizes(list(counts)) for rows in features.values()], strict=True)
    return [partial(of_path, dict(zip(features, split, strict=True))) for split in splits]


class RowFeatures(Mapping[str, Tensor]):
    """The features of one row of a pass, [1, H] each. features: of all rows, its own copy."""

    __slots__ = ("_features", "_row")

    def __init__(self, features: Features, row: int) -> None:
        self._features, self._row = features, row

    def __getitem__(self, name: str) -> Tensor:
        return self._features[name][self._row : self._row + 1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._features)

    def __len__(self) -> int:
        return len(self._features)

    def of_path(self, lead: int, path: list[int]) -> Features:
        """These, whichever the row is."""
        return self


def of_path(features: Features, lead: int, path: list[int]) -> Features:
    """The rows of a chunk of ``lead`` tokens and of the nodes of ``path`` after it, copied."""
    if len(path) < 2 and path == [0] * len(path):
        return {name: rows[: lead + len(path)].clone() for name, rows in features.items()}
    chosen = torch.tensor([*range(lead), *(lead + node for node in path)], dtype=torch.int64)
    return {name: rows.index_select(0, chosen.to(rows.device)) for name, rows in features.items()}
