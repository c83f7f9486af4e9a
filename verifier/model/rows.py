"""Numbers of rows in whose product a row has the same bits, and products of any number made of those.

A library chooses how it adds up by the number of rows: oneDNN's bf16 products on AMX have other bits up to 32 rows, up
to 36 and beyond, and elsewhere for other widths. So a product is asked: which numbers give every row the bits that it
has in small groups. No other number is ever multiplied; what lies between is padded, what lies beyond is split.

Legend: R rows, K inner width, O outer width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn import functional

Product = Callable[[Tensor], Tensor]

#: Reading the weights for one more product takes about as long as so many more rows in one.
_ROWS_OF_A_PRODUCT = 8


class RowCounts:
    """Numbers of rows that agree, at least one; how a product of any other number is made of them."""

    __slots__ = ("_agreed", "_parts")

    def __init__(self, agreed: Iterable[int]) -> None:
        self._agreed = sorted(agreed)
        self._parts: dict[int, tuple[int, ...]] = {0: ()}

    @property
    def largest(self) -> int:
        """The most rows that are multiplied at once."""
        return self._agreed[-1]

    def fitting(self, rows: int) -> int:
        """To how many rows that many are padded, all parts together."""
        return sum(self._divided(rows))

    def multiply(self, product: Product, x: Tensor) -> Tensor:
        """[R, K] -> [R, O]."""
        rows, parts = len(x), self._divided(len(x))
        missing = sum(parts) - rows
        padded = functional.pad(x, (0, 0, 0, missing)) if missing else x
        if len(parts) < 2:
            return product(padded)[:rows]
        return torch.cat([product(part) for part in padded.split(parts)])[:rows]

    def _divided(self, rows: int) -> tuple[int, ...]:
        """The numbers to multiply for so many rows, the last one padded."""
        whole, rest = divmod(rows, self.largest)
        parts = self._parts.get(rest)
        if parts is None:
            parts = self._parts[rest] = self._cheapest(rest)
        return (self.largest,) * whole + parts

    def _cheapest(self, rows: int) -> tuple[int, ...]:
        above = next(count for count in self._agreed if count >= rows)
        if above <= rows + _ROWS_OF_A_PRODUCT:
            return (above,)
        split = ((below, *self._divided(rows - below)) for below in reversed(self._agreed) if below < rows)
        return min(((above,), *split), key=lambda parts: sum(parts) + _ROWS_OF_A_PRODUCT * len(parts))


def agreeing(product: Product, x: Tensor, group: int, counts: Iterable[int]) -> list[int]:
    """The counts at which every row of x [R, K] has the bits that it has among ``group`` rows; none is above R."""
    padded = functional.pad(x, (0, 0, 0, -len(x) % group))
    wanted = torch.cat([product(part) for part in padded.split(group)])
    return [count for count in counts if torch.equal(product(x[:count]), wanted[:count])]


def random_rows(rows: int, width: int, seed: int = 0) -> Tensor:
    """fp32[rows, width] around zero, the same for a seed, whatever torch makes by default."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.rand((rows, width), generator=generator, dtype=torch.float32, device="cpu") - 0.5
