"""Trees that grow below one root by logits that a test makes up."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from foresay.drafters.calibration import Calibration
from foresay.drafters.growth import Growth, GrowthPlan
from foresay.drafters.tree_builder import TreeBuilder
from foresay.kvpaging import PagePool, PageTable
from foresay.spec.sample import Noise
from foresay.spec.sampling import SamplingParams
from foresay.spec.sequence import SequenceState
from foresay.spec.tree import TreeShape
from foresay.verifier.graphs.state import BatchSlot, StepState

_CPU = torch.device("cpu")


def sequence(tokens: list[int], temperature: float = 1.0, vocab: int = 40) -> SequenceState:
    """A text that begins with its first token. Its request changes logits, so that the host looks at candidates."""
    table, sampling = PageTable(PagePool(4, 16)), SamplingParams(temperature=temperature, min_tokens=99)
    return SequenceState("s", tokens, 1, sampling, table, Noise(3, vocab), 99, frozenset({0}))


def uncalibrated() -> Calibration:
    """Leaves chances as they are."""
    calibration = Calibration()
    calibration.active = False
    return calibration


def grown(
    s: SequenceState,
    shape: TreeShape,
    logits_of: Callable[[TreeBuilder], Tensor],
    free: bool = False,
    calibration: Calibration | None = None,
) -> TreeBuilder:
    """A tree below the end of a text. logits_of: fp32[F, V] or [1, V], below the front of what there is."""
    plan, state = GrowthPlan(shape, 1, _CPU, free), StepState(1, 4, 16, 1, _CPU)
    length = len(s.tokens) - 1
    state.join([BatchSlot([], length, s.tokens, s.sampling, s.noise.seed)])
    calibration = calibration or uncalibrated()
    tree = TreeBuilder(s, shape, calibration, None, s.tokens[-1:], fixed=plan.levels)
    plan.write(calibration, [shape], [tree.kind])
    growth = Growth(plan, state)
    while not tree.over:
        growth.grow(logits_of(tree))
        tree.add(growth.levels[-1], 0)
    if not shape.is_chain:
        plan.bars.end(tree.depth)
        tree.finish([part.numpy() for part in growth.tree().more], 0, "x")
    return tree
