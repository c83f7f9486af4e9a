"""The steps that a CPU records whole: those of one text that drafts a chain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from foresay.spec.protocols import Drafter
from foresay.spec.step import StepRunner
from foresay.verifier.graphs.buckets import recorded_steps
from foresay.verifier.graphs.proposer import Proposer
from foresay.verifier.graphs.runner import GraphStepRunner
from foresay.verifier.graphs.step import SpeculativeStep
from foresay.verifier.model_runner import ModelRunner
from foresay.verifier.ops.eager import compiled


def recorded(
    verifier: ModelRunner, drafter: Drafter, proposers: Sequence[Proposer]
) -> tuple[StepRunner, Iterator[None]]:
    """The runner, and what records its steps, one after the other, each in a tenth of a second. Other steps, and those
    not yet recorded, run in parts; so do all if there are no compiled kernels, or the target has recurrent layers,
    whose paths a CPU replays between steps."""
    steps: list[SpeculativeStep] = []
    store = verifier.store
    if not proposers or store.states is not None or not compiled(store.tensors[0]):
        return StepRunner(verifier, drafter), iter(())

    def record() -> Iterator[None]:
        for step in recorded_steps(verifier, proposers):
            steps.append(step)
            yield

    key = 1, store.pool.num_pages
    return GraphStepRunner(verifier, drafter, {key: steps}, run_ahead=False), record()
