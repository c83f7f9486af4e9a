"""Real engine processes replaced on purpose under streams: the same texts, and nothing lost where that is refused."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Self

import pytest
import pytest_asyncio
from aiohttp import web
from msgspec.structs import replace

from foresay.server.engine.generation import EngineStatus, generate
from foresay.server.engine_process.child import Spawned, spawn
from foresay.server.engine_process.client import EngineClient
from foresay.server.models.models import Models
from foresay.server.models.resident import Heartbeat
from foresay.server.settings.config import ServeConfig
from foresay.server.settings.resolved import BUNDLED
from foresay.spec.errors import ForesayError
from foresay.spec.request import Delta, Grammar, Request
from foresay.spec.sampling import SamplingParams
from tests.server.live import send_signal
from tests.server.patched import PACED, existing, patch_engines
from tests.server.wire import until

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
SECONDS = 180.0
CONFIG = ServeConfig(draft="none", max_seqs=4, max_model_len=1024, engine_timeout=10 * SECONDS)
LARK = 'start: /[a-f]{3,5}/ (" " /[a-f]{3,5}/){80}'
PARAMS = SamplingParams(max_tokens=400, temperature=1.0, seed=7, ignore_eos=True)
ASKED = [
    Request(id="drawn", prompt=[5, 6, 7], params=PARAMS),
    Request(id="greedy", prompt=[5, 6, 8], params=replace(PARAMS, temperature=0.0, repetition_penalty=1.2, logprobs=1)),
    Request(id="led", prompt=[5, 6, 9], params=replace(PARAMS, ignore_eos=False), grammar=Grammar(text=LARK)),
]


_right: list[tuple[list[int], list[object]]] = []


async def right_texts(engine: EngineClient) -> list[tuple[list[int], list[object]]]:
    """Of an engine that nothing has happened to; written once, since all of them write the same."""
    if not _right:
        _right.extend([said(await written(engine, request)) for request in ASKED])
    return _right


class Served:
    """A server's models, of which there is one, and every status that its engine has had. folder: where a file makes
    engines slow."""

    def __init__(self, spawn: Callable[[], Spawned] = spawn, folder: Path = Path()) -> None:
        self.folder = folder
        self.seen: list[EngineStatus] = []
        self.models = Models.of(CONFIG, self.seen.append, spawn)

    async def __aenter__(self) -> Self:
        async for _ in self.models.life(web.Application()):
            break
        await self.models.start()
        await asyncio.wait_for(self.models.arrived(), SECONDS)
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.models.stop()

    @property
    def engine(self) -> EngineClient:
        engine = self.models.first.engine
        assert isinstance(engine, EngineClient)
        return engine

    async def reload(self, draft: str) -> int:
        """Go on in an engine with another draft; returns how many requests do."""
        resumed = await self.models.reload(self.models.first, replace(CONFIG, draft=draft), True)
        assert bool(resumed.pause) == self.models.first.loaded
        return resumed.moved


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """Of :data:`CONFIG`, which it has again at the end of each test."""
    folder = tmp_path_factory.mktemp("paced")
    with pytest.MonkeyPatch.context() as monkeypatch:
        patch_engines(PACED, folder, monkeypatch)
        async with Served(folder=folder) as served:
            yield served


async def written(engine: EngineClient, request: Request, begun: asyncio.Event | None = None) -> list[Delta]:
    """Its deltas. begun: set once some tokens are there."""
    deltas: list[Delta] = []
    async for delta in generate(engine, request):
        deltas.append(delta)
        if begun is not None and sum(len(one.tokens) for one in deltas) > 8:
            begun.set()
    return deltas


def said(deltas: list[Delta]) -> tuple[list[int], list[object]]:
    """Tokens and log-probabilities."""
    tokens = [token for delta in deltas for token in delta.tokens]
    return tokens, [one for delta in deltas for one in delta.logprobs or ()]


async def all_begun(served: Served, name: str) -> list[asyncio.Task[list[Delta]]]:
    """All of them, some tokens on their way, in an engine that writes no more until it is replaced or continued."""
    engine = served.engine
    begun = [asyncio.Event() for _ in ASKED]
    requested = [replace(request, id=f"{name} {request.id}") for request in ASKED]
    with existing(served.folder / "slow"):
        running = [asyncio.create_task(written(engine, *one)) for one in zip(requested, begun, strict=True)]
        async with asyncio.timeout(SECONDS):
            await asyncio.gather(*(event.wait() for event in begun))
        send_signal(engine, signal.SIGSTOP)
    return running


async def test_streams_go_on_in_an_engine_with_another_draft(served: Served) -> None:
    right = await right_texts(served.engine)
    served.seen.clear()
    before, starts = served.engine.process_id, served.engine.status.starts
    running = await all_begun(served, "replaced")
    assert await served.reload("ngram") == 3
    engine = served.engine
    assert engine.status.state == "ready" and engine.info is not None
    assert engine.info.drafter == "ngram" and engine.process_id != before and engine.status.starts == starts + 1
    deltas = await asyncio.gather(*running)
    assert [said(one) for one in deltas] == right
    for one in deltas:
        last = one[-1].ending
        assert last is not None and len(last.resumed) == 1 and not last.changed
    assert [status.cause for status in served.seen if status.cause] == ["replaced"]
    await served.reload("none")


@pytest.mark.soak
async def test_requests_that_come_meanwhile_wait(served: Served) -> None:
    right, model = await right_texts(served.engine), served.models.first
    running = await all_begun(served, "before")
    with existing(served.folder / "held"):
        reloading = asyncio.create_task(served.reload("ngram"))
        await until(lambda: served.engine.status.state == "loading")
        assert model.refusal is None and model.is_well
        waiting = asyncio.create_task(served.models.residency.lease(model, Heartbeat()))
        parsed = asyncio.create_task(written(served.engine, replace(ASKED[0], id="parsed before")))
        await asyncio.sleep(0.2)
        assert not waiting.done() and not parsed.done()
    assert await reloading == 4
    with await waiting:
        assert said(await written(served.engine, replace(ASKED[0], id="late"))) == right[0]
    assert [said(one) for one in await asyncio.gather(*running, parsed)] == [*right, right[0]]
    await served.reload("none")


@pytest.mark.parametrize(
    "broken", [pytest.param(True, marks=pytest.mark.soak), False], ids=["seen when it is read", "seen at once"]
)
async def test_what_does_not_get_ready_changes_nothing(broken: bool, served: Served, tmp_path: Path) -> None:
    engine = served.engine
    right = await right_texts(engine)
    draft = tmp_path / "draft"
    if broken:
        shutil.copytree(BUNDLED / "draft", draft)
        (draft / "model.safetensors").write_bytes((draft / "model.safetensors").read_bytes()[:-1000])
    starts = engine.status.starts
    running = await all_begun(served, "again")
    assert not any(one.done() for one in running)
    with pytest.raises(ForesayError, match=str(draft)):
        await served.reload(str(draft))
    await asyncio.wait_for(engine.until_ready(), SECONDS)
    assert engine.info is not None and engine.info.drafter == "none"
    assert served.models.first.service.config.draft == "none" and served.models.first.loaded
    assert engine.status.starts - starts == (2 if broken else 0), "only where that was not known before"
    send_signal(engine, signal.SIGCONT)
    assert [said(one) for one in await asyncio.gather(*running)] == right


async def test_an_engine_killed_while_it_loads_its_new_settings_goes_back_to_the_earlier(served: Served) -> None:
    right, running = await right_texts(served.engine), await all_begun(served, "killed")
    with existing(served.folder / "held"):
        reloading, starts = asyncio.create_task(served.reload("ngram")), served.engine.status.starts
        await until(lambda: served.engine.status.starts > starts)
        send_signal(served.engine, signal.SIGKILL)
        await until(lambda: served.engine.status.starts > starts + 1)
    with pytest.raises(ForesayError, match="died"):
        await reloading
    assert served.engine.info is not None and served.engine.info.drafter == "none"
    assert [said(one) for one in await asyncio.gather(*running)] == right


async def test_a_server_that_ends_meanwhile_leaves_no_process_behind() -> None:
    spawned: list[int] = []

    def spawning() -> Spawned:
        made = spawn()
        spawned.append(made.process.pid)
        return made

    async with Served(spawning) as served:
        reloading = asyncio.create_task(served.reload("ngram"))
        served.models.reloading["it"] = reloading  # type: ignore[assignment]
        await until(lambda: len(spawned) > 1)
    assert reloading.cancelled() and not any(Path(f"/proc/{process}").exists() for process in spawned)
