"""The real engine on this event loop, so that a test can break it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from foresay.server.engine.build import build_engine
from foresay.server.engine.generation import EngineStatus, Sink
from foresay.server.settings.config import EngineConfig
from foresay.server.settings.resolved import BUNDLED
from foresay.server.text.grammars.compiler import GrammarCompiler
from foresay.spec.adjust import LogitEdits
from foresay.spec.engine import EngineCore
from foresay.spec.protocols import Verified
from foresay.spec.request import EngineInfo, Request
from foresay.spec.trace import StepTrace
from foresay.spec.tree import DraftTree
from foresay.verifier.model_runner import GraphRunner


def bundled(draft: str = "bundled", tree: str | None = "3,2,1") -> EngineCore:
    """The bundled target, a tree drafted in each step, or what the budget chooses."""
    return build_engine(
        EngineConfig(
            draft=draft, draft_tree=tree, dtype="float32", kv_tokens=2048, max_model_len=512, max_seqs=2, threads=1
        )
    )


def take_first_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the accept rule take the first draft at every depth, whatever the target drew."""

    def first_children(self: GraphRunner, edits: Sequence[LogitEdits | None]) -> list[Verified | None]:
        trees = [rows.tree for rows in self._rows]
        return [
            None if tree is None or each is None else _first_children(tree, each[0])
            for tree, each in zip(trees, once(self, edits), strict=True)
        ]

    once = GraphRunner.verify
    monkeypatch.setattr(GraphRunner, "verify", first_children)


def _first_children(tree: DraftTree, sampled: list[int]) -> Verified:
    path = [0]
    while path[-1] in tree.parents:
        child = tree.parents.index(path[-1])
        sampled[path[-1]] = tree.tokens[child]
        path.append(child)
    return sampled, path


class SteppedEngine:
    """Steps while there is work. observe: called with every step."""

    def __init__(self, engine: EngineCore) -> None:
        self.status = EngineStatus("ready")
        self.info: EngineInfo | None = engine.info
        self.observe: Callable[[StepTrace], None] = lambda trace: None
        self.engine = engine
        self.checks: list[Request] = []
        self._compiler = GrammarCompiler.load(BUNDLED / "target", engine.info.vocab_size, engine.info.eos_token_ids)
        self._sinks: dict[str, Sink] = {}
        self._stepping: asyncio.Task[None] | None = None

    def add(self, request: Request, sink: Sink) -> None:
        if request.aside:
            self.checks.append(request)
        constraint = None
        if request.grammar is not None:
            assert self._compiler is not None
            constraint = self._compiler.compile(request.grammar, request.salt)
        self.engine.add(request, constraint)
        self._sinks[request.id] = sink
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step())

    def cancel(self, id: str) -> None:
        self._sinks.pop(id, None)
        self.engine.cancel(id)

    def finish(self, id: str, at_token: int) -> None:
        self.engine.finish(id, at_token)

    async def _step(self) -> None:
        while self.engine.has_work:
            deltas = self.engine.step()
            if self.engine.trace is not None:
                self.observe(self.engine.trace)
            for delta in deltas:
                if (sink := self._sinks.get(delta.id)) is not None:
                    sink.put(delta)
            await asyncio.sleep(0)
