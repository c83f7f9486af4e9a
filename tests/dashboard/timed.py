"""An engine whose every part is the real one but for the target and the drafter, which take the time that is written
down, on a clock that nothing else moves. So the speed-up is known, and what any part of Foresay says of it can be
compared with the truth."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from foresay.kvpaging import PagePool, PageTable, PrefixIndex
from foresay.server.engine.generation import EngineStatus, Sink
from foresay.spec.accept import accept
from foresay.spec.adjust import LogitEdits
from foresay.spec.budget import CostModel
from foresay.spec.engine import EngineCore
from foresay.spec.protocols import FeatureRequest, Forward, Rows, Verified
from foresay.spec.request import EngineInfo, Request
from foresay.spec.scheduler import Scheduler
from foresay.spec.sequence import SequenceState
from foresay.spec.trace import StepTrace
from foresay.spec.tree import DraftTree, TreeShape
from tests.spec.tables import sampled_at

END, FIRST, VOCAB, ROOM = 0, 10, 400, 256
#: Tokens of a draft, and of an answer that ends by itself.
DRAFTED = 3


@dataclass
class Clock:
    """Seconds that pass when somebody works. wild: of a machine that other programs slow down, the paces it has, each
    for a few passes; on a quiet one it has one pace."""

    wild: bool = False
    now: float = 1_000_000.0
    _dice: random.Random = field(default_factory=lambda: random.Random(5))
    _pace: float = 1.0
    _left: int = 0

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        if self.wild and self._left <= 0:
            self._pace, self._left = self._dice.lognormvariate(0.0, 1.6), self._dice.randint(10, 40)
        self._left -= 1
        self.now += self._pace * seconds

    def give(self, patch: pytest.MonkeyPatch) -> None:
        """Everything that times an engine reads it."""
        for module in ("spec.engine", "spec.trace"):
            patch.setattr(f"foresay.{module}.time", SimpleNamespace(perf_counter=self, monotonic=self))


@dataclass(frozen=True)
class Script:
    """Seconds of a plain pass, of drafting, and of the pass over a draft, of which so many tokens are right. ends: an
    answer ends by itself with its fourth token; others go on until they have as many as were asked for."""

    plain: float
    drafting: float
    verifying: float
    right: int
    ends: bool = False

    @property
    def speed_up(self) -> float:
        """The truth."""
        return (self.right + 1) * self.plain / (self.drafting + self.verifying)

    def after(self, token: int) -> int:
        """The token that follows. An answer counts upwards from the first one."""
        if FIRST <= token < FIRST + DRAFTED - 1 or (FIRST <= token < 200 and not self.ends):
            return token + 1
        return END if self.ends and token == FIRST + DRAFTED - 1 else FIRST


class Target:
    """Implements :class:`foresay.spec.protocols.Verifier`: certain of the script's next token."""

    vocab_size, max_positions = VOCAB, ROOM

    def __init__(self, script: Script, clock: Clock) -> None:
        self._script, self._clock = script, clock

    def run(self, rows: Sequence[Rows], features: FeatureRequest | None = None) -> Forward:
        count = sum(len(part.tokens) for part in rows)
        self._clock.spend(self._script.plain if count <= len(rows) else self._script.verifying)
        tokens = [token for part in rows for token in part.tokens]
        logits = torch.zeros(count, VOCAB)
        logits[range(count), [self._script.after(token) for token in tokens]] = 1e4
        starts = [0]
        for part in rows:
            starts.append(starts[-1] + len(part.tokens))
        self._rows, self._last = rows, Forward(logits, starts, {})
        return self._last

    def verify(self, edits: Sequence[LogitEdits | None]) -> list[Verified | None]:
        return [self._verified(rows, self._last.of(index)) for index, rows in enumerate(self._rows)]

    @staticmethod
    def _verified(rows: Rows, logits: Tensor) -> Verified | None:
        if rows.tree is None:
            return None
        sampled = sampled_at(rows, logits[-len(rows.tree) :])
        return sampled, accept(rows.tree, sampled)

    def committed(self, table: PageTable, path: Sequence[int] = (), advanced: int = 0) -> None: ...

    def missing(self, table: PageTable) -> int:
        return 0


class Knowing:
    """Implements :class:`foresay.spec.protocols.Drafter`: right as often as the script says."""

    name = "ngram"
    needs: FeatureRequest | None = None

    def __init__(self, script: Script, clock: Clock) -> None:
        self._script, self._clock = script, clock

    def propose(self, sequences: Sequence[SequenceState], shapes: Sequence[TreeShape]) -> list[DraftTree]:
        self._clock.spend(self._script.drafting)
        return [self._tree(sequence.tokens[-1], shape) for sequence, shape in zip(sequences, shapes, strict=True)]

    def _tree(self, root: int, shape: TreeShape) -> DraftTree:
        tokens = [root]
        for place in range(min(DRAFTED, shape.levels)):
            tokens.append(self._script.after(tokens[-1]) if place < self._script.right else VOCAB - 1)
        return DraftTree.chain(tokens, self.name)

    def extend(self, sequence: SequenceState) -> None: ...

    def committed(self, sequence: SequenceState, path: list[int]) -> None: ...

    def finished(self, sequence: SequenceState) -> None: ...


def engine(script: Script, clock: Clock, drafts: bool = True) -> EngineCore:
    """Of pages of one token, so that a prompt of one leaves nothing to read."""
    pool = PagePool(16 * ROOM, 1)
    cost = CostModel([1, 1 + DRAFTED, 2 + DRAFTED], [script.plain, script.verifying, script.verifying])
    cost.begun(script.plain)
    shape = TreeShape.chain(DRAFTED if drafts else 0)
    scheduler = Scheduler(pool, None, shape, cost, 1)
    target = Target(script, clock)
    drafter = Knowing(script, clock) if drafts else None
    return EngineCore(
        info=_info(drafts, script), pool=pool, prefix=PrefixIndex(pool), verifier=target, drafter=drafter,
        scheduler=scheduler,
    )  # fmt: skip


def _info(drafts: bool, script: Script) -> EngineInfo:
    return EngineInfo(
        target="script", drafter="ngram" if drafts else "none", drafter_reason="", dtype="float32", dtype_reason="",
        device="cpu", exact=True, exact_reason="", kv_tokens=16 * ROOM, page_size=1, max_model_len=ROOM, max_seqs=1,
        draft_shape=(1,) * DRAFTED if drafts else (), drafters=("ngram",) if drafts else (), vocab_size=VOCAB,
        eos_token_ids=(END,), root_seconds=script.plain,
    )  # fmt: skip


class Stepping:
    """Implements :class:`foresay.server.engine.generation.ServedEngine` in the event loop of its server."""

    def __init__(self, engine: EngineCore) -> None:
        self.status, self.info = EngineStatus("ready"), engine.info
        self.observe: Callable[[StepTrace], None] = lambda trace: None
        self._engine, self._sinks = engine, dict[str, Sink]()
        self._running: asyncio.Task[None] | None = None

    def add(self, request: Request, sink: Sink) -> None:
        self._engine.add(request)
        self._sinks[request.id] = sink
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while self._engine.has_work:
            deltas = self._engine.step()
            if self._engine.trace is not None:
                self.observe(self._engine.trace)
            for delta in deltas:
                self._sinks[delta.id].put(delta)
            await asyncio.sleep(0)

    def cancel(self, id: str) -> None:
        self._engine.cancel(id)

    def finish(self, id: str, at_token: int) -> None:
        self._engine.finish(id, at_token)


def building(script: Script, clock: Clock) -> Callable[..., EngineCore]:
    """A stand-in for :func:`foresay.server.engine.build.build_engine`."""
    return lambda config, *rest, **named: engine(script, clock, config.draft != "none")
