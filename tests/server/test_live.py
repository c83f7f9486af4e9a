"""The real server with the bundled pair, through the official client."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from websockets.exceptions import ConnectionClosed

from foresay.server.engine.generation import Generation, generate
from foresay.server.engine_process.child import state_of
from foresay.server.engine_process.client import EngineClient
from foresay.server.settings.config import ServeConfig
from foresay.spec.request import Request
from foresay.spec.sampling import SamplingParams
from tests.server.live import LiveServer, openai_client, status_of
from tests.server.patched import PACED, existing, patched_path
from tests.server.wire import until

MODEL = "bundled"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a file makes engines slow, or holds them."""
    return tmp_path_factory.mktemp("serve")


@pytest.fixture(scope="module")
def paced_server(folder) -> Iterator[LiveServer]:
    """Whose streams last where they are to, and are not resumed. The last test that has it ends it."""
    flags = ("--max-resumes", "0", "--engine-timeout", "10", "--drain-seconds", "180")
    with LiveServer(folder / "log", *flags, variables={"PYTHONPATH": patched_path(PACED, folder)}) as server:
        server.wait_for_url()
        yield server


LONG: dict[str, Any] = {
    "model": MODEL,
    "prompt": "Once",
    "max_tokens": 500,
    "temperature": 0,
    "extra_body": {"ignore_eos": True},
}


async def closed(socket: Any) -> tuple[int, Any]:
    """The code with which a socket is closed, and the last event before that."""
    last = None
    try:
        while True:
            last = await asyncio.wait_for(socket.recv(), 180)
    except ConnectionClosed as error:
        return (error.rcvd.code if error.rcvd else 0), last


@pytest.mark.slow
async def test_sigterm_lets_running_requests_finish(paced_server, folder):
    """And leaves no process behind."""
    url = paced_server.wait_for_url()
    async with openai_client(url) as client, client.responses.connect() as busy, client.responses.connect() as idle:
        with existing(folder / "slow"):
            stream = aiter(await client.completions.create(**LONG, stream=True, stream_options={"include_usage": True}))
            await anext(stream)
            await busy.response.create(model=MODEL, input="Tell me a story.", max_output_tokens=60)
            assert (await busy.recv()).type == "response.created"
            left = paced_server.processes()
            paced_server.terminate()
            assert await closed(idle) == (1012, None)
            async with asyncio.timeout(60):
                while await status_of(url, "/ready") != 503:
                    await asyncio.sleep(0.01)
            with pytest.raises(openai.InternalServerError, match="shutting down"):
                await client.completions.create(model=MODEL, prompt="x")
        *_, last = [chunk async for chunk in stream]
        assert last.usage.completion_tokens == 500
        code, ended = await closed(busy)
        assert code == 1012 and ended.response.usage.output_tokens > 1
    assert await asyncio.to_thread(paced_server.process.wait, 180) == 0
    await until(lambda: all(state_of(process) in "ZX" for process in left))


@pytest.mark.slow
async def test_200_cancels_leave_the_pool_whole_and_the_others_right(checking_engines):
    engine, emitted, files = EngineClient(ServeConfig(max_seqs=4)), list[int](), open_files()
    engine.observe = lambda step: emitted.append(step.emitted)
    await engine.start()
    try:
        await asyncio.wait_for(engine.until_ready(), 180)
        chosen = random.Random(7)
        steady = [said(engine, seed, 0) for seed in range(3)]
        expected = [await one for one in steady]
        running = [asyncio.create_task(said(engine, seed, 1 + number)) for number in range(4) for seed in range(3)]
        await asyncio.gather(*[cancels(engine, range(first, 200, 8), chosen) for first in range(8)])
        assert [await one for one in running] == expected * 4
        assert [await said(engine, 0, number) for number in (8, 9)] == expected[:1] * 2
        assert engine.status.starts == 1, "after the first of these the page ledger added up"
        assert sum(emitted) < 200 * 500 / 2, "what was cancelled is not written to its end"
    finally:
        await engine.stop()
    await until(lambda: open_files() <= files)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def long_request(id: str, seed: int, tokens: int) -> Request:
    return Request(
        id=id, prompt=list(range(5, 40)), params=SamplingParams(seed=seed, max_tokens=tokens, ignore_eos=True)
    )


async def said(engine: EngineClient, seed: int, number: int) -> list[int]:
    request = long_request(f"steady-{number}-{seed}", seed, 48)
    return [token async for delta in generate(engine, request) for token in delta.tokens]


async def cancels(engine: EngineClient, numbers: range, chosen: random.Random) -> None:
    """Requests one after the other, each left at a random moment: waiting, in its prompt, or writing."""
    for number in numbers:
        await cancelled(engine, number, chosen.random() * 0.3)


async def cancelled(engine: EngineClient, number: int, patience: float) -> None:
    async with Generation(engine, [long_request(f"cancelled-{number}", number, 500)]) as generation:
        leaving = asyncio.create_task(asyncio.sleep(patience))
        while not leaving.done():
            await generation.next(timeout=0.01)


# -- options -----------------------------------------------------------------------------------------------------------


PROMPT = "Once upon a time there was a fox"
ASK: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "seed": 3}
IDS = {"return_token_ids": True, "ignore_eos": True}


@pytest.fixture(scope="module")
def blocking(url) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


async def test_logprobs_do_not_depend_on_how_the_tokens_were_drawn(client):
    """They are the model's own: a continuation has the entries that the same text has as an echoed prompt."""
    ask = {"temperature": 1.3, "presence_penalty": 1.0, "logprobs": 2}
    output = (await client.completions.create(**ASK | ask, extra_body=IDS)).choices[0]
    prompt = (await client.completions.create(**ASK, extra_body=IDS)).choices[0].prompt_token_ids
    again = await client.completions.create(
        model=MODEL, prompt=prompt + output.token_ids, max_tokens=0, echo=True, logprobs=2
    )
    echoed = again.choices[0].logprobs
    assert echoed.token_logprobs[len(prompt) :] == output.logprobs.token_logprobs
    assert echoed.top_logprobs[len(prompt) :] == output.logprobs.top_logprobs
    assert again.choices[0].finish_reason == "length"
    assert again.usage.completion_tokens == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("more", [{}, {"echo": True}, {"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}])
def test_what_leaves_no_token_is_refused_before_a_prompt_is_scored(blocking, more, stream):
    nothing = {"allowed_token_ids": [300], "structured_outputs": {"regex": "[0-9]{3}"}}
    with pytest.raises(openai.APIError, match="no token is allowed here"):  # behind an echo in mid-stream
        list(blocking.completions.create(**ASK, stream=stream, extra_body=nothing | more))


async def test_options_hold(client) -> None:
    """Each does what it is for, as far as the text shows."""
    more = {"return_token_ids": True, "ignore_eos": True}
    greedy: dict[str, Any] = {"model": MODEL, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 24}

    async def ids(**fields: Any) -> list[int]:
        return list((await client.completions.create(**greedy, extra_body=more | fields)).choices[0].token_ids)

    plain = await ids()
    assert plain[0] not in await ids(logit_bias={str(plain[0]): -100})
    assert await ids(logit_bias={"305": 100}) == [305] * 24
    assert set(await ids(allowed_token_ids=plain[:3])) <= set(plain[:3])
    repeated = await ids(presence_penalty=-2, frequency_penalty=-2)
    assert len(set(repeated)) < len(set(await ids(presence_penalty=2, frequency_penalty=2)))
    assert len(set(await ids(repetition_penalty=5))) == 24
    word = (await client.completions.create(**greedy)).choices[0].text.split()[1]
    banned = await client.completions.create(**greedy, extra_body={"bad_words": [word]})
    assert word not in banned.choices[0].text.split()
