"""Small breaches of what docs/same-tokens.md argues; each must be seen by the comparison of this suite.

Each function takes pytest's ``monkeypatch``, which also undoes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from types import ModuleType

import pytest
from torch import Tensor

from foresay.spec.adjust import Adjustment
from foresay.spec.constrain import Guarded
from foresay.spec.protocols import Rows
from foresay.verifier import model_runner
from foresay.verifier.ops.kernels.cpu import attention, kernel_cache, linear
from foresay.verifier.ops.kernels.cpu.asm import Variable
from foresay.verifier.ops.kernels.cpu.launch import Compiled
from foresay.verifier.ops.kernels.cpu.values import F32, Value


def rewritten(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, kernel: type) -> None:
    """Kernels that the class of this name writes in the module are written by another one from now on."""
    monkeypatch.setattr(kernel_cache, "unpatched", False)
    monkeypatch.setattr(module, name, kernel)
    for each, found in vars(module).items():
        if isinstance(found, Compiled):
            monkeypatch.setattr(module, each, Compiled(found.write))


def sums_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product of several rows adds up from the last term to the first, one of a single row the other way round."""

    class Backwards(linear._FloatProduct):
        def _summed(self, block: Value, row: Value, rows: int) -> list[Variable]:
            self.backwards = rows > 1
            return super()._summed(block, row, rows)

        def _steps(self, steps: Value) -> Iterator[Value]:
            for term in super()._steps(steps):
                yield steps - 1 - term if self.backwards else term

    rewritten(monkeypatch, linear, "_FloatProduct", Backwards)


def weights_by_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of a path are added up for themselves, and then to those of what is committed."""

    class Apart(attention._Attention):
        def _weigh(self, first: Value, part: Value, span: Value, low: Value, high: Value) -> None:
            super()._weigh(first, part, span, low, high)
            k, border = self.k, self.k.smallest(self.border, high)
            border = k.select((border > low) & (self._info_of(self.row, 2) > 0), border, low)
            with k.loop(first, first + self.team) as query:
                ends = [end - span for end in (low, border, high)]
                totals = [self._added_up(query, *stretch) for stretch in pairwise(ends)]
                k.store(totals[0] + totals[1], self.parts.of(part, query), self.parts.total)

        def _added_up(self, query: Value, low: Value, high: Value) -> Value:
            total = self.k.variable(self.k.constant(0.0, F32))
            with self.k.loop(low, high) as offset:
                weight = self.k.load(self.spans.scores_of(query), self.spans.of_weights, offset)
                total.value = total.value + self.k.widened(weight)
            return total.value

    rewritten(monkeypatch, attention, "_Attention", Apart)


def values_by_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values of a path are added up before those of what is committed."""

    class PathFirst(attention._Attention):
        def _in_order(self, index: Value, count: Value) -> Value:
            return self.k.select(self._info_of(self.row, 2) > 0, count - 1 - index, index)

    rewritten(monkeypatch, attention, "_Attention", PathFirst)


def reused_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise keyed by the depth in the step, not by the absolute position."""

    monkeypatch.setattr(Rows, "positions", property(lambda rows: rows.tree.depths))


def no_compaction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepted rows stay in the slots where the tree had them."""
    monkeypatch.setattr(model_runner, "move_paths", lambda *rows: None)


def penalties_of_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """All nodes of a tree are penalised by the committed counts alone."""
    edits = Adjustment.edits
    monkeypatch.setattr(Adjustment, "edits", lambda self, text, paths: edits(self, text, [[]] * len(paths)))


def masks_of_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """The grammar does not follow the path: every node may be followed by what may follow the root."""
    masks = Guarded.masks

    def of_the_root(self: Guarded, tokens: list[int], parents: list[int]) -> Tensor | None:
        root = masks(self, tokens[:1], parents[:1])
        return None if root is None else root.expand(len(tokens), -1)

    monkeypatch.setattr(Guarded, "masks", of_the_root)
