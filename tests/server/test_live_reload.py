"""Real engine processes replaced on purpose under streams: the same texts, and nothing lost where that is refused."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import pytest_asyncio
from msgspec.structs import replace

from foresay.server.engine.generation import EngineStatus, generate
from foresay.server.host.child import Spawned
from foresay.server.host.client import EngineClient
from foresay.server.host.spare import Spares
from foresay.server.settings.config import ServeConfig
from foresay.server.settings.resolved import BUNDLED
from foresay.spec.errors import ForesayError
from foresay.spec.request import Delta, Grammar, Request
from foresay.spec.sampling import SamplingParams

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


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(spares: Spares) -> AsyncIterator[EngineClient]:
    """Of :data:`CONFIG`, which it has again at the end of each test."""
    engine = EngineClient(CONFIG, spares)
    await engine.start()
    try:
        await asyncio.wait_for(engine.until_ready(), SECONDS)
        yield engine
    finally:
        await engine.stop()


@contextmanager
def crowded(engine: EngineClient, room: bool) -> Iterator[None]:
    """If there is no room beside the engine that serves."""
    before = engine.footprint
    assert before is not None
    engine.footprint = before if room else replace(before, held=before.capacity)
    yield
    engine.footprint = before


async def written(engine: EngineClient, request: Request, begun: asyncio.Event | None = None) -> list[Delta]:
    """Its deltas. begun: set once some tokens are there."""
    deltas: list[Delta] = []
    async for delta in generate(engine, request):
        deltas.append(delta)
        if begun is not None and sum(len(one.tokens) for one in deltas) > 20:
            begun.set()
    return deltas


def said(deltas: list[Delta]) -> tuple[list[int], list[object]]:
    """Tokens and log-probabilities."""
    tokens = [token for delta in deltas for token in delta.tokens]
    return tokens, [one for delta in deltas for one in delta.logprobs or ()]


async def all_begun(engine: EngineClient, name: str) -> list[asyncio.Task[list[Delta]]]:
    """All of them, some tokens on their way, in an engine that writes no more until it is replaced or continued."""
    begun = [asyncio.Event() for _ in ASKED]
    asked = [replace(request, id=f"{name} {request.id}") for request in ASKED]
    running = [asyncio.create_task(written(engine, *one)) for one in zip(asked, begun, strict=True)]
    await asyncio.gather(*(event.wait() for event in begun))
    os.kill(engine.process_id or 0, signal.SIGSTOP)
    return running


@pytest.mark.parametrize("room", [True, False])
async def test_streams_go_on_in_an_engine_with_another_draft(room: bool, engine: EngineClient) -> None:
    right = await right_texts(engine)
    told: list[str] = []
    seen: list[EngineStatus] = []
    engine.observe_status = [seen.append]
    for number, draft in enumerate(("ngram", "none"), start=engine.status.starts + 1):
        before = engine.process_id
        running = await all_begun(engine, draft)
        config = replace(CONFIG, draft=draft)
        with crowded(engine, room):
            moved = await engine.replace(config, lambda phase, share: told.append(phase), changed=draft == "none")
        assert engine.status.state == "ready" and engine.info is not None
        assert moved == 3 and engine.info.drafter == draft and engine.status.starts == number
        assert engine.process_id != before
        deltas = await asyncio.gather(*running)
        assert [said(one) for one in deltas] == right
        for one in deltas:
            last = one[-1].statistics
            assert last is not None and len(last.resumed) == 1
            assert last.changed == (last.resumed if draft == "none" else [])
    assert [status.cause for status in seen if status.cause] == ["replaced", "replaced"]
    assert any(status.state == "loading" for status in seen) != room, "beside each other nobody waits"
    assert told


@pytest.mark.parametrize("room", [True, False])
@pytest.mark.parametrize("broken", [True, False], ids=["seen when it is read", "seen at once"])
async def test_what_does_not_get_ready_changes_nothing(
    broken: bool, room: bool, engine: EngineClient, tmp_path: Path
) -> None:
    right = await right_texts(engine)
    draft = tmp_path / "draft"
    if broken:
        shutil.copytree(BUNDLED / "draft", draft)
        (draft / "model.safetensors").write_bytes((draft / "model.safetensors").read_bytes()[:-1000])
    starts = engine.status.starts
    running = await all_begun(engine, "again")
    assert not any(one.done() for one in running)
    with crowded(engine, room), pytest.raises(ForesayError, match=str(draft)):
        await engine.replace(replace(CONFIG, draft=str(draft)), lambda phase, share: None, changed=False)
    await asyncio.wait_for(engine.until_ready(), SECONDS)
    assert engine.info is not None and engine.info.drafter == "none"
    left = broken and not room  # only where that was not known before
    assert engine.status.starts - starts == (2 if left else 0)
    os.kill(engine.process_id or 0, signal.SIGCONT)
    assert [said(one) for one in await asyncio.gather(*running)] == right


async def test_who_gives_up_waiting_leaves_no_process_behind(
    engine: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawned: list[int] = []
    spawn = engine._spawn

    def spawning() -> Spawned:
        made = spawn()
        spawned.append(made.process.pid)
        return made

    monkeypatch.setattr(engine, "_spawn", spawning)
    status = engine.status
    replacing = asyncio.create_task(engine.replace(replace(CONFIG, draft="ngram"), lambda *told: None, changed=False))
    while not spawned:
        await asyncio.sleep(0.01)
    replacing.cancel()
    await asyncio.gather(replacing, return_exceptions=True)
    assert not Path(f"/proc/{spawned[0]}").exists() and engine.status == status


async def test_a_model_that_is_unloaded_meanwhile_ends_its_replacement(engine: EngineClient) -> None:
    with crowded(engine, room=False):
        replacing = asyncio.create_task(
            engine.replace(replace(CONFIG, draft="ngram"), lambda *told: None, changed=False)
        )
        while engine.status.state == "ready":
            await asyncio.sleep(0)
        await engine.unload()
        with pytest.raises(ForesayError, match="unloaded"):
            await asyncio.wait_for(replacing, 10)
    await engine.start()
    info = await asyncio.wait_for(engine.until_ready(), SECONDS)
    assert info.drafter == "none", "its settings are those before"


async def test_an_engine_that_is_not_ready_is_not_replaced() -> None:
    engine = EngineClient(CONFIG)
    with pytest.raises(ForesayError, match="not loaded"):
        await engine.replace(CONFIG, lambda phase, share: None, changed=False)
