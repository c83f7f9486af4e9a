"""The likeliest children of many rows in two launches: those of the torch code, in the same order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foresay.verifier.ops.kernels import candidates
from foresay.verifier.ops.records import RowSampling
from tests.kernels.children_cases import ChildrenCases, Find


# numpy warns of what a GPU computes in silence: infinity minus infinity, where the result is not used.
@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:(divide by zero|overflow|invalid value) encountered:RuntimeWarning")
class TestOnDevice(ChildrenCases):
    @pytest.fixture
    def small_pieces(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(candidates, "block_of", lambda width: 64)

    @pytest.fixture
    def find(self, device: torch.device) -> Find:
        def found(
            logits: Tensor, sampling: RowSampling, count: int, token_ids: Tensor | None = None
        ) -> tuple[Tensor, Tensor]:
            s = sampling
            columns = [t.to(device) for t in (s.temperature, s.top_k, s.top_p, s.min_p, s.seeds, s.positions)]
            there = None if token_ids is None else token_ids.to(device)
            tokens, chances = candidates.candidates(logits.to(device), RowSampling(*columns), count, there)
            return tokens.cpu(), chances.cpu()

        return found
