"""What a captured step reads of the sequences it serves, and how that moves on from step to step.

The tensors live as long as the engine. The host writes them when a sequence joins or its pages change; after that each
step leaves them as the next one needs them, so that the next can start before the host has seen what came of this one.

Legend: S sequences, P pages of a table, T tokens of a text's end, N nodes of a tree.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spec.sampling import SamplingParams
from verifier.ops.accept import AcceptedPaths
from verifier.ops.draw import RowSampling


@dataclass(frozen=True, slots=True)
class Joined:
    """One sequence as the host knows it when it joins a captured step. text: its end, the root last."""

    pages: Many[int]
    length: int
    text: Many[int]
    sampling: SamplingParams
    seed: int


class StepState:
    """The sequences of one bucket; all tensors on the device, none ever replaced.

    tables: int32[S, P], page ids, 0 (the padding page) where there is none. lengths: int32[S], committed tokens, whose
    KV the target has. live: int64[S], 1, or 0 for a place that is only padding. recent: int64[S, T], the ends of the
    texts, the root last. Nothing is known of a text before its ``length + 1 - T``-th token.
    """

    def __init__(self, sequences: int, pages: int, page_size: int, reach: int, device: torch.device | str) -> None:
        self.page_size, self.device = page_size, torch.device(device)
        self.tables = torch.zeros(sequences, pages, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(sequences, dtype=torch.int32, device=device)
        self.live = torch.zeros(sequences, dtype=torch.int64, device=device)
        self.recent = torch.zeros(sequences, reach, dtype=torch.int64, device=device)
        self._sampling: dict[int, RowSampling] = {}
        self._offsets: dict[int, Tensor] = {}

    @property
    def size(self) -> int:
        """S, the number of places."""
        return len(self.lengths)

    @property
    def roots(self) -> Tensor:
        """int64[S]: the last committed token of each, whose KV is not stored yet."""
        return self.recent[:, -1]

    def offsets(self, count: int) -> Tensor:
        """int32[S + 1]: where the rows of each sequence begin if each has ``count``."""
        if count not in self._offsets:
            self._offsets[count] = (torch.arange(self.size + 1, dtype=torch.int32) * count).to(self.device)
        return self._offsets[count]

    def sampling(self, depths: Tensor) -> RowSampling:
        """How the tokens below nodes of these depths are drawn, N rows for each sequence.

        depths: int32[N] or int32[S, N]. The tensors but for the positions are filled by the host (:meth:`join`).
        """
        nodes = depths.shape[-1]
        if nodes not in self._sampling:
            self._sampling[nodes] = _blank(self.size * nodes, self.device)
        positions = (self.lengths[:, None] + depths + 1).flatten().long()
        return replace(self._sampling[nodes], positions=positions)

    def join(self, sequences: Many[Joined]) -> None:
        """Write all places; those past the given sequences become padding."""
        size = self.size
        padding = [Joined((), 0, (), SamplingParams(temperature=0.0), 0)] * (size - len(sequences))
        places = [*sequences, *padding]
        self.write_tables([place.pages for place in places])
        self.lengths.copy_(torch.tensor([place.length for place in places], dtype=torch.int32))
        self.live.copy_(torch.tensor([int(index < len(sequences)) for index in range(size)]))
        self.recent.copy_(torch.tensor([self._end(place.text) for place in places]))
        for nodes, kept in self._sampling.items():
            params = [place.sampling for place in places for _ in range(nodes)]
            fresh = RowSampling.of(params, [place.seed for place in places for _ in range(nodes)], [0] * len(params))
            for name in ("temperature", "top_k", "top_p", "min_p", "seeds"):
                getattr(kept, name).copy_(getattr(fresh, name))

    def write_tables(self, pages: Many[Many[int]]) -> None:
        """The page ids of every place, at most P of each."""
        width = self.tables.shape[1]
        assert all(len(row) <= width for row in pages), "a table outgrew its bucket"
        self.tables[: len(pages)].copy_(
            torch.tensor([[*row, *[0] * (width - len(row))] for row in pages], dtype=torch.int32)
        )

    def _end(self, text: Many[int]) -> list[int]:
        reach = self.recent.shape[1]
        end = list(text[-reach:])
        return [*[0] * (reach - len(end)), *end]

    def advance(self, taken: AcceptedPaths) -> None:
        """The accepted paths become text; the last emitted token of each is its new root."""
        reach = self.recent.shape[1]
        # A broken draw is no token. The host ends its sequence; until then it must not be looked up anywhere.
        text = torch.cat((self.recent, taken.emitted.clamp(min=0)), dim=1)
        where = torch.arange(reach, device=self.device) + taken.lengths[:, None]
        self.recent.copy_(text.gather(1, where))
        self.lengths.add_(taken.lengths.to(torch.int32))


def _blank(rows: int, device: torch.device) -> RowSampling:
    """Greedy rows, to be overwritten."""
    return RowSampling.of([SamplingParams(temperature=0.0)] * rows, [0] * rows, [0] * rows, device)
