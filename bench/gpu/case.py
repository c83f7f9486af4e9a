"""One op at one shape: what is asked of it, and how that is judged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Case:
    """One op at one shape.

    make: fresh random inputs. run: the op on them, which is what is timed. wanted: the result in higher precision, from
    the same inputs before ``run`` saw them. bytes: the least it moves. limit: the largest error allowed, where it is
    not the dtype's. written: all that ``run`` wrote in one tensor, from its result and the inputs; None: its result.
    """

    name: str
    make: Callable[[], Sequence[Tensor]]
    run: Callable[..., Any]
    wanted: Callable[..., Tensor]
    bytes: int
    limit: float | None = None
    written: Callable[..., Tensor] | None = None

    def outcome(self) -> tuple[Tensor, Tensor]:
        """What was written and what should have been, on inputs never used before."""
        inputs = self.make()
        wanted = self.wanted(*(tensor.clone() for tensor in inputs))
        result = self.run(*inputs)
        return result if self.written is None else self.written(result, *inputs), wanted
