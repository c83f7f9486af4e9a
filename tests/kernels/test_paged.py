"""What the kernels' tests are given: the same numbers on every device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.paged import kept


class OnCuda(Tensor):
    """Divides by a number as torch does on CUDA."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "div" in func.__name__ and not isinstance(args[1], Tensor):
            func, args = Tensor.mul, (args[0], torch.tensor(1.0) / args[1])
        return super().__torch_function__(func, types, args, kwargs or {})

    def cpu(self, *_: Any) -> Tensor:
        return self.as_subclass(Tensor)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_quantised_keys_are_the_same_on_every_device(dtype: torch.dtype) -> None:
    rows = torch.randn(600, 2, 64, generator=torch.Generator().manual_seed(1))
    elsewhere = rows.as_subclass(OnCuda)
    assert not torch.equal((elsewhere / 448.0).as_subclass(Tensor), rows / 448.0), "it divides otherwise"
    for mine, its in zip(kept(rows, rows, dtype), kept(elsewhere, elsewhere, dtype), strict=True):
        assert mine is not None and its is not None
        assert torch.equal(mine.float(), its.as_subclass(Tensor).float())
