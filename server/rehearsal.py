"""A few steps without drafts before the first request: what drafting will be compared with, and everything is warm."""

from __future__ import annotations

from statistics import median

from kvpaging import PagePool
from spec.budget import StepCost
from spec.engine import Engine
from spec.protocols import Verifier
from spec.request import EngineInfo, Request
from spec.sampling import SamplingParams
from spec.scheduler import Scheduler
from spec.step import StepRunner
from spec.tree import ROOT_ONLY

#: At most so many steps, and no further one when they have taken so many seconds.
_STEPS = 12
_PATIENCE = 0.4


def root_seconds(
    info: EngineInfo, verifier: Verifier, pool: PagePool, cost: StepCost, runner: StepRunner | None = None
) -> float:
    """Seconds of a step that draws one token of one sequence at temperature 1: the median of a few.

    0 for a context too short to decode in. runner: who will run the steps; None: op by op. Leaves nothing behind: all
    pages come back and none is findable.
    """
    if info.max_model_len < 2:
        return 0.0
    engine = Engine(
        info=info,
        pool=pool,
        prefix=None,
        verifier=verifier,
        drafter=None,
        scheduler=Scheduler(pool, None, ROOT_ONLY, cost, max_seqs=1),
        runner=runner,
    )
    tokens = min(_STEPS, info.max_model_len - 1)
    params = SamplingParams(max_tokens=tokens, seed=0, ignore_eos=True)
    engine.add(Request(id="rehearsal", prompt=[0], params=params, speculate=False))
    times: list[float] = []
    while engine.has_work and (len(times) < 2 or sum(times) < _PATIENCE):
        engine.step()
        assert engine.trace is not None, "there is a request to step for"
        times.append(sum(engine.trace.seconds.values()))
    engine.cancel("rehearsal")
    engine.runner.rest()
    return median(times[1:] or times)  # the first one warms up
