"""``speculation`` in a request reaches the engine through every route that has it."""

from __future__ import annotations

import msgspec
import pytest

from foresay.server.metrics.counters import Counters
from tests.server.scripted import END, STEP, ScriptedEngine, served

ASKS: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Tell"}]},
    "/v1/completions": {"prompt": "Tell"},
    "/v1/responses": {"input": "Tell"},
}


@pytest.mark.parametrize("path", ASKS)
@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (..., (True, "", None)),
        (None, (True, "", None)),
        ({}, (True, "", None)),
        ({"off": True}, (False, "", None)),
        ({"off": False}, (True, "", None)),
        ({"off": None}, (True, "", None)),
        ({"method": "ngram"}, (True, "ngram", None)),
        ({"method": "auto", "max_tokens": 3}, (True, "", 3)),
        ({"method": "draft_model", "max_tokens": 63, "off": False}, (True, "draft_model", 63)),
        ({"method": "none"}, (False, "", None)),
        ({"max_tokens": 0}, (False, "", 0)),
    ],
)
async def test_who_drafts_and_how_far(tokenizer, path, given, wanted):
    engine = ScriptedEngine([*tokenizer.encode("once"), END])
    async with served(engine, tokenizer) as client:
        response = await client.post(path, json=ASKS[path] | ({} if given is ... else {"speculation": given}))
        assert response.status == 200, await response.text()
    (request,) = engine.requests
    assert (request.speculate, request.draft_method, request.most_drafted) == wanted


def test_plain_steps_by_request_say_nothing_of_whether_speculation_pays():
    counted = {"rows": 5, "drafted": 4, "accepted": 2, "emitted": 3}
    step = msgspec.structs.replace(STEP, **counted, seconds={"forward": 0.02}, root_seconds=0.01)
    in_vain = msgspec.structs.replace(step, rows=1, drafted=0, accepted=0, emitted=1)
    counters = Counters()
    counters.step(step)
    assert counters.speed_up == pytest.approx(1.5)
    counters.step(msgspec.structs.replace(in_vain, plain=1))
    assert counters.speed_up == pytest.approx(1.5)
    assert (counters.engine_steps, counters.decode_steps) == (2, 1)
    counters.step(in_vain)
    assert counters.speed_up == pytest.approx(1.0)
