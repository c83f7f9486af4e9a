"""Small breaches of what docs/same-tokens.md argues; each must be seen by the comparison of this suite.

Each function takes pytest's ``monkeypatch``, which also undoes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from foresay.drafters.draft_model import DraftModelDrafter
from foresay.drafters.self_draft import SelfDrafter
from foresay.kvpaging import KVStore, PagePool
from foresay.spec import step
from foresay.spec.adjust import Adjustment
from foresay.spec.constrain import Guarded
from foresay.spec.logits import logprobs_of_run
from foresay.spec.protocols import Drafter, Rows
from foresay.spec.sequence import SequenceState
from foresay.verifier import model_runner
from foresay.verifier.forward_batch import ForwardBatch
from foresay.verifier.graphs.state import BatchSlot
from foresay.verifier.model import forward
from foresay.verifier.model_runner import ModelRunner
from foresay.verifier.ops.attention import rotate_and_store
from foresay.verifier.ops.kernels.cpu import attention, integer_product, linear, rounded
from foresay.verifier.ops.kernels.cpu.asm import Kernel, Variable
from foresay.verifier.ops.kernels.cpu.launch import Compiled, counted
from foresay.verifier.ops.kernels.cpu.values import F32, I64, Value
from foresay.verifier.ops.trees import move_paths
from tests.same_tokens.models import Pair


def rewritten(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, kernel: type) -> None:
    """Kernels that the class of this name writes in the module are written by another one from now on."""
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


def quantized_sums_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same of whole numbers: the terms of each group."""

    class Backwards(integer_product.IntegerProduct):
        def _summed(self, block: Value, rows: list[Value], steps: Value, first: Value) -> list[Variable]:
            self.backwards = len(rows) > 1
            return super()._summed(block, rows, steps, first)

        def _steps(self, steps: Value) -> Iterator[Value]:
            for term in super()._steps(steps):
                yield steps - 1 - term if self.backwards else term

    rewritten(monkeypatch, integer_product, "IntegerProduct", Backwards)


def rounded_sums_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of rounded inputs are scaled a little otherwise where rows are several."""

    class Scaled(rounded._RoundedProduct):
        def _fold(self, values: list[Value], rows: int, *rest: Value) -> None:
            super()._fold([value * (1.0 + 2.0**-20 * (rows > 1)) for value in values], rows, *rest)

    rewritten(monkeypatch, rounded, "_RoundedProduct", Scaled)


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


def lengths_baked_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the prompt recorded kernels work on one row, as if they had been recorded for plain decoding."""
    write = ForwardBatch.write

    def write_once(self: ForwardBatch, rows: Sequence[Rows]) -> None:
        counts = self._staged.arrays["counts"]
        known = counts.any()
        write(self, rows)
        if known:
            counts[0] = 1

    monkeypatch.setattr(ForwardBatch, "write", write_once)


def reused_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise keyed by the depth in the step, not by the absolute position."""

    monkeypatch.setattr(Rows, "positions", property(lambda rows: rows.tree.depths))


def no_compaction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepted rows stay in the slots where the tree had them."""
    monkeypatch.setattr(model_runner, "move_paths", lambda *rows: None)


def scales_by_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each head has the largest scale that it has in any row of the pass."""

    def then_largest(
        qkv: Tensor, rotation: Any, layer: Any, slots: Tensor, norms: Any, count: Tensor, alike: bool
    ) -> Tensor:
        query = rotate_and_store(qkv, rotation, layer, slots, norms, count, alike)
        _largest_scales()(layer[2], slots, counted(count, len(qkv)), layer[2][0].numel())
        return query

    monkeypatch.setattr(forward, "rotate_and_store", then_largest)


@Compiled
def _largest_scales() -> Kernel:
    k = Kernel("largest_scales")
    scales, slots, heads = k.pointer(0), k.pointer(1), k.number(3)
    with k.share(heads) as head:
        top = k.variable(k.constant(0.0, F32))
        for last in (False, True):
            with k.loop(0, k.counted(2)) as row:
                offset = k.load(slots, I64, row) * heads + head
                if last:
                    k.store(top.value, scales, offset)
                else:
                    top.value = k.larger(k.load(scales, F32, offset), top.value)
    return k


def scales_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows move down without their scales."""
    monkeypatch.setattr(model_runner, "move_paths", lambda parts, *rows: move_paths(parts[:2], *rows))


def drafts_over_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's copy reads the last committed token too, as a draft model does whose cache is its own."""

    def copy(pair: Pair, pool: PagePool, before: Drafter | None = None) -> DraftModelDrafter:
        return DraftModelDrafter(ModelRunner(pair.draft, pool.store(KVStore), pair.draft.max_positions))  # type: ignore[arg-type]

    monkeypatch.setattr(Pair, "copy", copy)


def drafts_before_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it drafts begins in the last committed token's slot."""
    joined = SelfDrafter._joined

    def before(self: SelfDrafter, sequence: SequenceState, reach: int) -> BatchSlot:
        return replace(joined(self, sequence, reach), length=sequence.table.length - 1)

    monkeypatch.setattr(SelfDrafter, "_joined", before)


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


def logprobs_of_the_next_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logprobs are taken from the row that a token leads to, not from the one it was sampled from."""
    monkeypatch.setattr(
        step,
        "logprobs_of_run",
        lambda sequence, logits, path, emitted: logprobs_of_run(sequence, logits, [*path[1:], path[-1]], emitted),
    )


def experts_weighed_by_rows(route: Any) -> Any:
    """What experts make counts a little more where rows are several."""

    def routed(
        logits: Tensor, how: Any, correction: Any, count: Tensor, slots: Tensor, factors: Any
    ) -> tuple[Tensor, Tensor]:
        chosen, weights = route(logits, how, correction, count, factors=factors)
        return chosen, weights.mul_(1.0 + (count > 1).float() * 2.0**-12)

    return routed


def experts_of_few_rows(route: Any) -> Any:
    """Rows beyond the fourth of an expert are left out, as where experts have a capacity."""

    def routed(
        logits: Tensor, how: Any, correction: Any, count: Tensor, slots: Tensor, factors: Any
    ) -> tuple[Tensor, Tensor]:
        chosen, weights = route(logits, how, correction, count, factors=factors)
        own = torch.nn.functional.one_hot(chosen.long().clamp(0, how.experts - 1), how.experts)
        before = own.sum(1).cumsum(0).gather(1, chosen.long().clamp(0, how.experts - 1))
        return chosen, weights.mul_((before <= 4).float())

    return routed
