"""Moving the rows of accepted paths in one launch: all read, then all written."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foresay.verifier.ops.trees import move_paths

pytestmark = pytest.mark.gpu
PAGE = 4
SLOTS = 12 * PAGE


def cache(layers: int, heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(layers, SLOTS, heads, dim, generator=torch.Generator().manual_seed(dim)).to(dtype)


def padded(rows: list[list[int]], width: int, rest: int) -> Tensor:
    """int64[B, width]; what is behind a row is a slot that must be left alone."""
    return torch.tensor([row + [rest] * (width - len(row)) for row in rows])


def assert_moved_alike(
    keys: Tensor, values: Tensor, sources: list[list[int]], destinations: list[list[int]], device: torch.device
) -> None:
    width = max(len(row) for row in sources) + 2
    index = (padded(sources, width, 2), padded(destinations, width, 45), torch.tensor([len(row) for row in sources]))
    moved = [tensor.to(device, copy=True) for tensor in (keys, values)]
    move_paths.launch(tuple(moved), *(tensor.to(device) for tensor in index))
    move_paths((keys, values), *index)
    assert torch.equal(moved[0].cpu(), keys) and torch.equal(moved[1].cpu(), values)


@pytest.mark.parametrize(
    ("sources", "destinations"),
    [
        ([[9, 11, 14]], [[9, 10, 11]]),
        ([[5, 6, 7, 4]], [[4, 5, 6, 7]]),
        ([[20, 21]], [[21, 20]]),
        ([[8, 40, 13, 14], [], [17]], [[8, 9, 39, 40], [], [16]]),
    ],
    ids=["a path moves down", "a cycle", "a swap", "three sequences over page borders"],
)
@pytest.mark.parametrize("heads", [(1, 3), (2, 64), (3, 50)], ids=str)
def test_rows_are_read_before_any_is_written(heads, sources, destinations, dtype, device) -> None:
    keys = cache(2, heads[0], heads[1], dtype)
    assert_moved_alike(keys, keys.flip(1), sources, destinations, device)


@pytest.mark.parametrize("value_dim", [0, 3])
def test_values_may_be_narrower_than_keys_or_of_no_width(value_dim, device) -> None:
    keys, values = cache(1, 1, 70, torch.float32), cache(1, 1, value_dim, torch.float32)
    assert_moved_alike(keys, values, [[30, 33]], [[30, 31]], device)


@pytest.mark.parametrize("groups", [1, 3])
def test_scales_move_with_their_rows(groups, device) -> None:
    keys, scales = cache(2, groups, 24, torch.float32), cache(2, 2, groups, torch.float32)
    parts = [keys.to(torch.float8_e4m3fn), keys.flip(1).to(torch.float8_e4m3fn), scales]
    moved = [part.to(device, copy=True) for part in parts]
    index = (torch.tensor([[9, 11, 14]]), torch.tensor([[9, 10, 11]]), torch.tensor([3]))
    move_paths.launch(tuple(moved), *(tensor.to(device) for tensor in index))
    move_paths(tuple(parts), *index)
    assert all(torch.equal(a.cpu().float(), b.float()) for a, b in zip(moved, parts, strict=True))
    assert not torch.equal(scales[:, 14], scales[:, 9]) and torch.equal(moved[2].cpu()[:, 11], scales[:, 14])


def test_a_random_permutation_of_64_rows(device) -> None:
    keys, values = torch.randn(1, 80, 1, 8), torch.randn(1, 80, 1, 8)
    generator = torch.Generator().manual_seed(3)
    sources, destinations = (torch.randperm(64, generator=generator)[None] + 16 for _ in range(2))
    moved = [tensor.to(device, copy=True) for tensor in (keys, values)]
    index = [tensor.to(device) for tensor in (sources, destinations, torch.tensor([64]))]
    move_paths.launch(tuple(moved), index[0], index[1], index[2])
    wanted = keys.clone()
    wanted[:, destinations[0]] = keys[:, sources[0]]
    assert torch.equal(moved[0].cpu(), wanted)
    move_paths((keys, values), sources, destinations, torch.tensor([64]))
    assert torch.equal(moved[0].cpu(), keys) and torch.equal(moved[1].cpu(), values)
