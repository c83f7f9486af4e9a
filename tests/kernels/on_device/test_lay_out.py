"""Positions, slots and the last tokens, each in one launch: number by number those of the torch code."""

from __future__ import annotations

import pytest
import torch

from foresay.spec.sample import BROKEN
from foresay.verifier.ops.trees import advance, lay_out, text_ends

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
    wanted = lay_out(tables, page_size, *arguments)
    found = lay_out.launch(tables.to(device), page_size, *(tensor.to(device) for tensor in arguments))
    assert torch.equal(found[0].cpu(), wanted[0]) and torch.equal(found[1].cpu(), wanted[1])
    assert wanted[1].max() > 0


@pytest.mark.parametrize(("width", "emitted"), [(1, 1), (4, 7), (100, 6), (64, 64)])
def test_texts_move_on(width, emitted, device) -> None:
    tokens = torch.arange(3 * width).view(3, width), torch.arange(1000, 1000 + 3 * emitted).view(3, emitted)
    tokens[1][1, 0] = BROKEN
    lengths, ends = torch.tensor([70, 7, 9], dtype=torch.int32), torch.tensor([[71], [8], [10]])
    taken = torch.tensor([0, emitted, (emitted + 1) // 2])
    found = [tensor.to(device, copy=True) for tensor in (tokens[0], lengths, ends)]
    wanted = [tensor.clone() for tensor in (tokens[0], lengths, ends)]
    advance.launch(found[0], found[1], found[2], tokens[1].to(device), taken.to(device))
    advance(wanted[0], wanted[1], wanted[2], tokens[1], taken)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(found, wanted, strict=True))
    assert wanted[1].tolist() == (lengths + taken).tolist() and wanted[0].min() >= 0


@pytest.mark.parametrize(("count", "first"), [(1, 0), (4, 0), (6, 1)])
def test_text_ends(count, first, device) -> None:
    known = torch.arange(100, 100 + 5 * 9).view(5, 9)
    lengths = torch.tensor([20, 3, 1, 0, count - 1], dtype=torch.int32)
    found = text_ends.launch(known.to(device), lengths.to(device), count, first)
    wanted = text_ends(known, lengths, count, first)
    assert all(torch.equal(a.cpu(), b) and a.dtype == b.dtype for a, b in zip(found, wanted, strict=True))
