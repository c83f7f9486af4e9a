"""``stream_pacing: "even"``: the same text and events, with the tokens of a run spread over the time to the next."""

from __future__ import annotations

import asyncio
import json
import random
from itertools import pairwise
from typing import Any

import pytest

from foresay.server.api.common.streaming import Batch, Evenly, Spread, split
from foresay.server.engine.generation import Generation
from foresay.server.schemas.errors import EngineFailed
from foresay.server.text.choice import Choice, ChoiceOptions, Piece, merged
from foresay.server.text.parts import TextPart, TokenParts
from foresay.spec.request import Delta, Request
from foresay.spec.sampling import SamplingParams
from tests.provenance import clock
from tests.provenance.drafting import Drafting, Json, bare, ids_of, joined
from tests.responses.serving import STORY, serving
from tests.server.scripted import END, ScriptedEngine, served

STEP = 0.030


def run_of(tokens: list[int], **fields: Any) -> Piece:
    token_texts = [TokenParts(f"{token} ", [TextPart(f"{token} ")]) for token in tokens]
    return Piece(token_ids=tokens, text="".join(one.text for one in token_texts), token_texts=token_texts, **fields)


def due(spread: Spread, now: float) -> list[int]:
    piece = spread.due(now)
    return [] if piece is None else piece.token_ids


def test_a_run_is_spread_over_the_time_that_the_last_one_took() -> None:
    spread = Spread()
    spread.arrive(0.0, run_of([1]))
    assert (due(spread, 0.0), spread.next_due) == ([1], None)
    spread.arrive(0.3, run_of([2, 3, 4]))
    assert due(spread, 0.3) == [2]
    assert spread.next_due == pytest.approx(0.4)
    assert due(spread, 0.39) == []
    assert due(spread, 0.41) == [3]
    assert (due(spread, 0.51), spread.next_due) == ([4], None)


def test_the_first_run_of_all_goes_out_at_once() -> None:
    spread = Spread()
    spread.arrive(0.0, run_of([1, 2, 3]))
    assert due(spread, 0.0) == [1, 2, 3]


def test_what_is_left_goes_out_with_the_next_run() -> None:
    spread = Spread()
    spread.arrive(0.0, run_of([1]))
    spread.arrive(1.0, run_of([2, 3, 4, 5]))
    assert due(spread, 1.0) == [1, 2]
    spread.arrive(1.1, run_of([6, 7]))
    assert due(spread, 1.1) == [3, 4, 5, 6]


@pytest.mark.parametrize("ending", [{"finish_reason": "stop"}, {"finish_at": 5}])
def test_nothing_waits_at_the_end_of_the_text(ending: Json) -> None:
    spread = Spread()
    spread.arrive(0.0, run_of([1]))
    spread.arrive(1.0, run_of([2, 3]))
    assert due(spread, 1.0) == [1, 2]
    spread.arrive(1.2, run_of([4, 5, 6], **ending))
    piece = spread.due(1.2)
    assert piece is not None and piece.token_ids == [3, 4, 5, 6]
    assert (piece.finish_reason, piece.finish_at) == (ending.get("finish_reason"), ending.get("finish_at"))


def test_split_pieces_are_the_piece(tokenizer: Any) -> None:
    options = ChoiceOptions(stop=("fox",), by_token=True, provenance=True)
    request = Request(id="r", prompt=[5], params=SamplingParams(logprobs=1))
    choice = Choice(request, tokenizer, options, [END])
    engine = Drafting(tokenizer.encode("Once a naïve 🦊 fo"))
    tokens = engine.tokens
    delta = Delta(id="r", tokens=tokens, finish_reason="length", origin=engine.origin(0, tokens), seed=4)
    whole = choice.take(delta)
    pieces = split(whole)
    assert len(pieces) == len(tokens)
    assert "".join(piece.text for piece in pieces) == whole.text == "Once a naïve 🦊 fo"
    assert merged(pieces) == whole


def arrivals_of(script: list[tuple[float, int]]) -> dict[int, float]:
    """When each of the tokens 0, 1, 2 .. goes out, if runs arrive at these times with so many tokens."""
    times: dict[int, float] = {}

    async def play() -> None:
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[Piece] = asyncio.Queue()

        async def engine() -> None:
            token = 0
            for position, (at, count) in enumerate(script):
                await asyncio.sleep(at - loop.time())
                tokens, token = list(range(token, token + count)), token + count
                queue.put_nowait(run_of(tokens, finish_reason="stop" if position == len(script) - 1 else None))

        async def arrivals(timeout: float | None) -> Batch:
            try:
                async with asyncio.timeout(timeout):
                    return [(0, await queue.get())]
            except TimeoutError:
                return []

        running = asyncio.create_task(engine())
        evenly, over = Evenly(arrivals), False
        while not over:
            for _, piece in await evenly(15.0):
                times.update(dict.fromkeys(piece.token_ids, loop.time()))
                over = piece.finish_reason is not None
        await running

    clock.run(play())
    return times


def test_steps_of_one_length_give_even_gaps() -> None:
    times = arrivals_of([(STEP * step, 1 if not step else 3) for step in range(40)])
    gaps = [times[token + 1] - times[token] for token in range(1, len(times) - 4)]
    assert len(gaps) > 100
    assert max(abs(gap - STEP / 3) for gap in gaps) < 1e-6


def test_no_token_is_later_than_the_next_run_and_none_earlier_than_its_own() -> None:
    source = random.Random(5)
    for _ in range(50):
        script, at = [], 0.0
        for _ in range(60):
            script.append((at, source.randint(1, 6)))
            at += source.choice([0.001, 0.01, 0.03, 0.03, 0.03, 0.5])
        times = arrivals_of(script)
        token = 0
        for (came, count), (following, _) in pairwise([*script, script[-1]]):
            for _ in range(count):
                assert came - 1e-6 <= times[token] <= following + 1e-6
                token += 1
        assert sorted(times.values()) == list(times.values()) and len(times) == token
        assert times[token - 1] == pytest.approx(script[-1][0])


def test_runs_that_change_in_length_give_smaller_gaps_than_bursts() -> None:
    source = random.Random(1)
    script = [(STEP * step + source.uniform(0, 0.2 * STEP), source.randint(1, 6)) for step in range(200)]
    times = list(arrivals_of(script).values())
    gaps = [b - a for a, b in pairwise(times)]
    assert sum(gap < 1e-4 for gap in gaps) < 0.1 * len(gaps), "in bursts, two of three tokens come with another"
    assert times[-1] == pytest.approx(script[-1][0]), "and nothing is lost: the text is over when it was"


def test_an_error_comes_after_all_that_came_before() -> None:
    async def play() -> None:
        batches: list[Any] = [[(0, run_of([1]))], [(0, run_of([2, 3, 4]))], EngineFailed("broken")]

        async def arrivals(timeout: float | None) -> Batch:
            await asyncio.sleep(1.0 if len(batches) > 1 else 0.001)
            batch = batches.pop(0)
            if isinstance(batch, Exception):
                raise batch
            return list(batch)

        evenly = Evenly(arrivals)
        tokens = [token for _ in range(3) for _, piece in await evenly(9.0) for token in piece.token_ids]
        assert tokens == [1, 2, 3, 4]
        with pytest.raises(EngineFailed, match="broken"):
            await evenly(9.0)

    clock.run(play())


def test_silence_is_reported_after_the_timeout() -> None:
    async def play() -> float:
        async with Generation(ScriptedEngine([5], pause=100.0), [request()]) as generation:

            async def arrivals(timeout: float | None) -> Batch:
                assert await generation.next(timeout) == []
                return []

            assert await Evenly(arrivals)(15.0) == []
            return asyncio.get_running_loop().time()

    assert clock.run(play()) == pytest.approx(15.0)


def request() -> Request:
    return Request(id="r", prompt=[1], params=SamplingParams())


def contents(events: list[Json]) -> Json:
    """What a stream holds, however it is cut into deltas."""
    kinds = [event["type"] for event in events]
    once = [kind for position, kind in enumerate(kinds) if position == 0 or kinds[position - 1] != kind]
    text = "".join(event["delta"] for event in events if "delta" in event)
    record = bare(joined([event["provenance"] for event in events if "provenance" in event]))
    content = events[-1]["response"]["output"][0]["content"]
    return {"events": once, "text": text, "record": record, "output": content}


async def response(tokenizer: Any, pacing: str, stop: str | None, pause: float) -> list[Json]:
    events: list[Json] = []
    engine = Drafting(ids_of(STORY, tokenizer), seed=3, pause=pause)
    async with serving(engine, tokenizer) as (http, _), http.ws_connect("/v1/responses") as socket:
        create = {"type": "response.create", "input": "Tell", "provenance": True, "stop": stop}
        await socket.send_json(create | {"stream_pacing": pacing})
        while not events or events[-1]["type"] != "response.completed":
            events.append(await socket.receive_json(timeout=180))
    return events


@pytest.mark.parametrize("stop", [None, "fox"])
async def test_text_and_events_over_a_websocket_are_the_same(tokenizer: Any, stop: str | None) -> None:
    for pause in (0.01, 0.1, 1.0):  # between runs: on a busy machine the tokens of one may still go out together
        at_once, even = [await response(tokenizer, pacing, stop, pause) for pacing in ("at_once", "even")]
        assert contents(even) == contents(at_once)
        if len(even) > len(at_once):
            return
    pytest.fail("each run came in one piece")


async def chat(tokenizer: Any, pacing: str, count: int) -> list[tuple[str, str | None]]:
    ask: Json = {"messages": [{"role": "user", "content": "x"}], "stream": True, "n": count, "stop": "was"}
    async with served(Drafting(ids_of(STORY, tokenizer), seed=3, pause=0.01), tokenizer) as client:
        answer = await client.post("/v1/chat/completions", json=ask | {"stream_pacing": pacing})
        events = (await answer.text()).split("\n\n")[:-2]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert "metrics" in chunks[-1] and not any("metrics" in chunk for chunk in chunks[:-1])
    choices = [chunk["choices"][0] for chunk in chunks]
    mine = [[one for one in choices if one["index"] == index] for index in range(count)]
    return [("".join(one["delta"].get("content") or "" for one in own), own[-1]["finish_reason"]) for own in mine]


async def test_text_and_endings_of_several_choices_are_the_same(tokenizer: Any) -> None:
    expected = [(STORY[: STORY.index("was")], "stop")] * 3
    assert await chat(tokenizer, "at_once", 3) == await chat(tokenizer, "even", 3) == expected


async def test_an_unknown_pacing_is_refused(tokenizer: Any) -> None:
    async with served(ScriptedEngine([END]), tokenizer) as client:
        answer = await client.post("/v1/completions", json={"prompt": "x", "stream_pacing": "slow"})
        assert answer.status == 400
        assert (await answer.json())["error"]["param"] == "stream_pacing"
