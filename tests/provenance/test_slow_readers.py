"""Whoever reads slowly gets fewer and longer deltas, in which no step and no token is missing."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from foresay.server.api.common.streaming import pieces_of
from foresay.server.api.openai.completions import CompletionAnswer
from foresay.server.engine.generation import Generation
from foresay.server.models.service import AnswerOrigin
from foresay.server.schemas.chat import CompletionRequest
from foresay.server.text.choice import Choice
from foresay.spec.request import Request
from foresay.spec.sampling import SamplingParams
from tests.provenance.drafting import Drafting, Json, check, ids_of, joined
from tests.responses.bare import STUCK, Bare
from tests.responses.serving import serving
from tests.server.scripted import END
from tests.server.wire import until

STORY = "Once upon a time there was a fox. " * 20


@pytest.mark.parametrize("seed", range(3))
async def test_a_socket_that_is_read_late(tokenizer: Any, seed: int) -> None:
    """Its first event is so large that the writer is stuck at once."""
    script = ids_of(STORY, tokenizer)
    engine = Drafting(script, seed, pause=0.001)
    async with (
        serving(engine, tokenizer, send_buffer=2048) as (http, _),
        await Bare.connect(int(http.port or 0), 2048) as bare,
    ):
        create: Json = {"input": "x", "provenance": True, "spec_decode_metrics": "detailed", "max_output_tokens": 400}
        await bare.create(**create, **STUCK)
        await until(lambda: engine.requests and not engine._tasks)
        events: list[Json] = []
        while not events or events[-1]["type"] != "response.completed":
            events.append(json.loads((await bare.read())[1]))
    response = events[-1]["response"]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    steps = len(response["provenance"]["steps"])
    assert len(deltas) < steps, "they were to be merged"
    assert max(len(event["provenance"]["steps"]) for event in deltas) > 5
    assert joined([event["provenance"] for event in deltas]) == response["provenance"]
    check(response["provenance"], script, STORY, response["metrics"])


async def late(engine: Drafting, tokenizer: Any, count: int) -> list[Json]:
    """The chunks of a completion whose reader comes when all is over."""
    requests = [Request(id=f"r{n}", prompt=[5], params=SamplingParams(max_tokens=400)) for n in range(count)]
    choices = [Choice(request, tokenizer, [END], stop=("fox.",), provenance=True) for request in requests]
    shown = CompletionRequest(prompt="", provenance=True, return_token_ids=True, spec_decode_metrics="detailed")
    answer = CompletionAnswer(AnswerOrigin(id="1", model="toy", fingerprint="fs", exact=True), choices, shown)
    async with Generation(engine, requests) as generation:
        await until(lambda: not engine._tasks)
        batch = list(pieces_of(answer, generation, await generation.next(None)))
    chunks: list[Json] = msgspec.to_builtins([one for index, piece in batch for one in answer.chunks(index, piece)])
    return chunks


async def test_choices_that_end_together_have_one_last_chunk(tokenizer: Any) -> None:
    chunks = await late(Drafting(ids_of(STORY, tokenizer)), tokenizer, count=3)
    ended = [chunk["choices"][0]["finish_reason"] is not None for chunk in chunks]
    assert sum(ended) == 3
    assert [position for position, chunk in enumerate(chunks) if "metrics" in chunk] == [len(chunks) - 1]


async def test_steps_that_wait_for_the_writer_are_one_chunk_that_holds_them_all(tokenizer: Any) -> None:
    script = ids_of(STORY, tokenizer)
    _, chunk = await late(Drafting(script, 4), tokenizer, count=1)
    (received,) = chunk["choices"]
    assert received["text"] == STORY[: STORY.index("fox.")]
    steps = received["provenance"]["steps"]
    assert sum(step["discarded"] for step in steps) == len(script) - len(received["token_ids"])
    assert sum(not step["accepted"] and step["drafted"] > 0 for step in steps) > 10, "the engine never heard of the end"
    check(received["provenance"], received["token_ids"], received["text"], chunk["metrics"])
