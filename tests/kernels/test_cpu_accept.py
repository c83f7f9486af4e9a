"""What follows a sample on a CPU: the same cases as on a GPU, at once and recorded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foresay.spec.sample import BROKEN
from foresay.verifier.ops.eager import references
from foresay.verifier.ops.kernels.cpu.launch import recording
from foresay.verifier.ops.trees import accept_paths, advance, move_paths, report
from tests.kernels.on_device.test_accept import *  # noqa: F403
from tests.kernels.on_device.test_accept import Executor, assert_same, some_trees

pytestmark = pytest.mark.usefixtures("any_processor")


@pytest.fixture  # type: ignore[no-redef]
def executor() -> Executor:
    """The kernels of a CPU."""
    return Executor(accept_paths, report, torch.device("cpu"))


def test_a_recording_reads_other_trees_each_time() -> None:
    inputs = {name: column.clone() for name, column in some_trees(0, 12)[1].items()}
    with recording() as replay:
        found = accept_paths(**inputs)
    for seed in range(1, 5):
        for name, column in some_trees(seed, 12)[1].items():
            inputs[name].copy_(column)
        replay()
        assert_same(found, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value_dim", [0, 5])
def test_rows_are_all_read_before_any_is_written(dtype: torch.dtype, value_dim: int) -> None:
    of = torch.Generator().manual_seed(3)
    keys, values = (torch.randn(3, 80, 2, width, generator=of).to(dtype) for width in (7, value_dim))
    sources, destinations = (
        torch.stack([torch.randperm(40, generator=of) + 40 * n for n in range(2)]) for _ in range(2)
    )
    lengths, moved = torch.tensor([17, 0]), (keys.clone(), values.clone())
    move_paths(tuple(moved), sources, destinations, lengths)
    with references():
        move_paths((keys, values), sources, destinations, lengths)
    assert torch.equal(moved[0], keys) and torch.equal(moved[1], values)


@pytest.mark.parametrize("reach", [1, 2, 5])
def test_the_ends_of_texts_move_on(reach: int) -> None:
    of = torch.Generator().manual_seed(reach)
    recent, emitted = torch.randint(9, (3, reach), generator=of), torch.randint(9, (3, 4), generator=of)
    emitted[1, 0] = BROKEN
    lengths, ends = torch.tensor([5, 6, 7]), torch.tensor([[6], [7], [8]])

    def advanced(taken: Tensor) -> list[Tensor]:
        made = recent.clone(), lengths.clone(), ends.clone()
        advance(*made, emitted, taken)
        return list(made)

    for taken in (torch.tensor([0, 1, 4]), torch.tensor([2, 1, 3])):
        with references():
            wanted = advanced(taken)
        assert all(torch.equal(a, b) for a, b in zip(advanced(taken), wanted, strict=True))
        assert int(wanted[0].min()) >= 0 and torch.equal(wanted[1], lengths + taken)
