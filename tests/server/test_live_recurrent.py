"""A real engine process of a recurrent target, killed and frozen under streams: each says what it says undisturbed."""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path

import pytest

from foresay.server.engine.generation import generate
from foresay.server.host.client import EngineClient
from foresay.server.settings.config import ServeConfig
from foresay.spec.request import Request
from foresay.spec.sampling import SamplingParams
from foresay.spec.trace import Statistics
from tests.heads.mtp import Mtp
from tests.server.live import send_signal
from tests.server.patched import PACED, patch_engines
from tests.verifier.families import make
from tests.verifier.reading import random_tokens

pytestmark = pytest.mark.slow
COUNT, SECONDS = 5, 180.0


def requests(name: str) -> list[Request]:
    """With a prompt in common, and four with one that is longer; warm and cold; the last is another choice of one."""
    rng = random.Random(1)
    begin = random_tokens(rng, 150, 300)
    ends = [random_tokens(rng, length, 300) for length in (1, 10, 42, 130)]
    params = [
        SamplingParams(max_tokens=200, temperature=number % 2, seed=number, ignore_eos=True) for number in range(COUNT)
    ]
    found = [
        Request(id=f"{name} {number}", prompt=begin + end, params=own)
        for number, (end, own) in enumerate(zip([*ends, ends[2]], params, strict=True))
    ]
    found[-1].fork_of = found[2].id
    return found


async def streams(
    engine: EngineClient, name: str, harm: signal.Signals | None = None, slow: Path = Path()
) -> tuple[list[list[int]], int]:
    """The tokens of all, and how often they were resumed. harm: what is done to the engine when all have begun, and
    to the next one when most have come far. slow: a file that makes engines slow until then."""
    tokens: list[list[int]] = [[] for _ in range(COUNT)]
    left, harmed = [] if harm is None else [1, 40], 0
    if left:
        slow.touch()
    resumed = 0

    async def one(number: int, request: Request) -> Statistics | None:
        nonlocal harmed
        async for delta in generate(engine, request):
            tokens[number] += delta.tokens
            now = engine.status
            far = left and sorted(map(len, tokens))[1] >= left[0]
            if harm is not None and far and now.state == "ready" and now.starts != harmed:
                left.pop(0)
                harmed = now.starts
                send_signal(engine, harm)
                if not left:
                    slow.unlink()
        return delta.statistics

    for statistics in await asyncio.gather(*(one(*each) for each in enumerate(requests(name)))):
        resumed += 0 if statistics is None else len(statistics.resumed)
    assert not left
    return tokens, resumed


@pytest.mark.parametrize(("family", "draft"), [("qwen3_5", "mtp,suffix"), ("granite_hybrid", "suffix")])
def test_streams_go_on_in_the_next_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, draft: str
) -> None:
    """With drafts of its own layer and of earlier text; and what those leave is found by prompts after it."""

    async def heard() -> None:
        config = ServeConfig(target=str(tmp_path), draft=draft, max_seqs=COUNT, max_model_len=512, engine_timeout=2.0)
        engine = EngineClient(config)
        await engine.start()
        try:
            await asyncio.wait_for(engine.until_ready(), SECONDS)
            right, _ = await streams(engine, "right")
            assert [len(text) for text in right] == [200] * COUNT
            for harm in (signal.SIGKILL, signal.SIGSTOP):
                found, resumed = await streams(engine, harm.name, harm, tmp_path / "paced" / "slow")
                assert found == right and resumed >= COUNT, harm.name
                assert (await streams(engine, f"after {harm.name}"))[0] == right
        finally:
            await engine.stop()

    (tmp_path / "paced").mkdir()
    make(family, tmp_path)
    if "mtp" in draft:
        Mtp().put_beside(tmp_path)
    patch_engines(PACED, tmp_path / "paced", monkeypatch)
    asyncio.run(heard())
