"""Positions, slots and the last tokens, each in one launch: number by number those of the torch code."""

from __future__ import annotations

import pytest
import torch

from verifier.ops import lay_out as places
from verifier.ops import recent as texts
from verifier.ops.kernels import lay_out, recent

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize(("sequences", "width", "page_size"), [(1, 1, 16), (5, 6, 16), (7, 40, 48), (3, 64, 256)])
def test_lay_out(sequences, width, page_size, broadcast, device) -> None:
    generator = torch.Generator().manual_seed(width)
    pages = 1000 // page_size + 1
    tables = torch.randint(1, 1 << 22, (sequences, pages), generator=generator, dtype=torch.int32)
    lengths = torch.randint(0, 1000 - 2 * width, (sequences,), generator=generator, dtype=torch.int32)
    depths = torch.randint(0, 9, (sequences, width), generator=generator, dtype=torch.int32)
    nodes = torch.randint(0, 2 * width, (sequences, width), generator=generator)
    live = torch.ones(sequences, dtype=torch.int32)
    live[2:3] = 0
    lengths[2:3] = 1 << 20
    arguments = (lengths, depths[0] if broadcast else depths, nodes, live)
    wanted = places.lay_out(tables, page_size, *arguments)
    found = lay_out.lay_out(tables.to(device), page_size, *(tensor.to(device) for tensor in arguments))
    assert torch.equal(found[0].cpu(), wanted[0]) and torch.equal(found[1].cpu(), wanted[1])
    assert wanted[1].max() > 0


@pytest.mark.parametrize(("width", "emitted"), [(1, 1), (4, 7), (100, 6), (64, 64)])
def test_recent(width, emitted, device) -> None:
    tokens = torch.arange(3 * width).view(3, width), torch.arange(1000, 1000 + 3 * emitted).view(3, emitted)
    lengths = torch.tensor([0, emitted, (emitted + 1) // 2])
    found = recent.gather_recent(*(tensor.to(device) for tensor in (*tokens, lengths)))
    assert torch.equal(found.cpu(), texts.gather_recent(*tokens, lengths))
