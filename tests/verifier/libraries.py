"""Libraries whose bf16 products add up in another order for other numbers of rows, as oneDNN's do on AMX.

They are simulated: exact sums of some stretches of the inner width, added in fp32 one after the other. How many
stretches depends on the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from verifier.model import linear as linear_module
from verifier.model.linear import Linear

#: From how many rows on the order is another: as was found of oneDNN on AMX, at two shapes, and as nobody has met.
BORDERS = {
    "amx": (2, 33, 37),
    "amx 3072 to 256": (2, 166, 192, 256),
    "small groups": (2, 5, 9, 13, 17, 21),
    "late": (200,),
}


def simulate(monkeypatch: pytest.MonkeyPatch, borders: tuple[int, ...]) -> None:
    """Let bf16 layers made from now on multiply with such a library; weights stay unpacked."""
    monkeypatch.setattr(linear_module, "packable", lambda dtype: False)
    monkeypatch.setattr(Linear, "_product", _with(borders, Linear._product))


def _with(borders: tuple[int, ...], real: Callable[[Linear, Tensor], Tensor]) -> Callable[[Linear, Tensor], Tensor]:
    def product(self: Linear, x: Tensor) -> Tensor:
        if self.dtype is not torch.bfloat16:
            return real(self, x)
        stretches = 1 + sum(len(x) >= border for border in borders)
        total = torch.zeros(len(x), self.out_features)
        for part, weight in zip(x.chunk(stretches, 1), self._weight.chunk(stretches, 1), strict=True):
            # Products of bf16 are exact in fp64, and so, but for the rarest, are their sums.
            total += (part.double() @ weight.double().T).float()
        return (total if self._bias is None else total + self._bias).to(x.dtype)

    return product


def differing(linear: Linear, counts: Sequence[int]) -> list[int]:
    """The numbers of rows at which some row has other bits than among the most: the judge."""
    x = torch.randn(max(counts), linear.in_features, generator=torch.Generator().manual_seed(7)).to(linear.dtype)
    whole = linear(x)
    return [count for count in counts if not torch.equal(linear(x[:count]), whole[:count])]
