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
from foresay.spec.accept import Acceptance
from foresay.spec.engine import Engine
from foresay.spec.protocols import Sampled
from foresay.spec.request import EngineInfo, Request
from foresay.spec.sample import Unsampled
from foresay.spec.trace import StepTrace
from foresay.spec.tree import DraftTree
from foresay.verifier.settle import Settled


def bundled(draft: str = "bundled", tree: str | None = "3,2,1") -> Engine:
    """The bundled target, a tree drafted in each step, or what the budget chooses."""
    return build_engine(
        EngineConfig(
            draft=draft, draft_tree=tree, dtype="float32", kv_tokens=2048, max_model_len=512, max_seqs=2, threads=1
        )
    )


def take_first_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the accept rule take the first draft at every depth, whatever the target drew."""

    def on_host(settled: Settled, trees: Sequence[Unsampled | None]) -> list[Sampled | None]:
        found = once(settled, trees)
        for each, sampled in zip(trees, found, strict=True):
            if each is not None and sampled is not None:
                taken = _first_child(each.tree, sampled.tokens)
                sampled.taken.path[:], sampled.taken.emitted[:] = taken.path, taken.emitted
        return found

    once = Settled.on_host
    monkeypatch.setattr(Settled, "on_host", on_host)


def _first_child(tree: DraftTree, sampled: list[int]) -> Acceptance:
    parents, path = tree.parents, [0]
    while path[-1] in parents:
        path.append(parents.index(path[-1]))
    tokens = tree.tokens
    return Acceptance(path, [*(tokens[node] for node in path[1:]), sampled[path[-1]]])


class SteppedEngine:
    """Steps while there is work. observe: told of every step."""

    def __init__(self, engine: Engine) -> None:
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

    def keep_warm(self, tokens: list[int], salt: str) -> None:
        self.engine.keep_warm(tokens, salt)

    async def _step(self) -> None:
        while self.engine.has_work:
            deltas = self.engine.step()
            if self.engine.trace is not None:
                self.observe(self.engine.trace)
            for delta in deltas:
                if (sink := self._sinks.get(delta.id)) is not None:
                    sink.put(delta)
            await asyncio.sleep(0)
