"""The target's hidden state on its way to a drafter that reads it.

::

    forward     rows of all sequences, one under the other       by_sequence cuts them apart
    tree        root and nodes      [0, 2, 5] accepted            of_path keeps the accepted path, in order
    chunk       prompt rows, perhaps the root after them          of_path(lead) keeps them all

What arrives are the features of the text's last R positions, whatever tree or chunk they came from. Rows of rejected
nodes never leave the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from foresay.spec.sequence import SequenceState

#: Hidden rows by name (``"final"``, ``"layer.3"``), each [R, H].
Features = dict[str, Tensor]


@runtime_checkable
class FeatureReader(Protocol):
    """A :class:`~foresay.spec.protocols.Drafter` whose ``needs`` are not None."""

    def observe(self, sequence: SequenceState, features: Features) -> None:
        """The target's features of the last R committed positions, ``table.length - R .. table.length - 1``.

        Called after each commit and right before ``extend`` or ``committed``. A position may be skipped for good: one
        that a prefix hit brought, or that was committed while no features were requested. The tensors are the drafter's
        to keep.
        """
        ...


def reader_of(drafter: object) -> FeatureReader | None:
    """The drafter, if it reads features. It says so itself: asking for the protocol takes twenty times as long."""
    return None if getattr(drafter, "needs", None) is None else cast(FeatureReader, drafter)


def by_sequence(features: Features, counts: Sequence[int]) -> list[Features]:
    """The features of each sequence of a pass; counts: how many rows each had, in order."""
    if not features:
        return [features] * len(counts)
    parts = {name: rows.split_with_sizes(list(counts)) for name, rows in features.items()}
    return [{name: split[index] for name, split in parts.items()} for index in range(len(counts))]


def of_path(features: Features, lead: int, path: list[int]) -> Features:
    """The rows of a chunk of ``lead`` tokens and of the nodes of ``path`` after it, copied."""
    chosen = torch.tensor([*range(lead), *(lead + node for node in path)], dtype=torch.int64)
    return {name: rows.index_select(0, chosen.to(rows.device)) for name, rows in features.items()}
