"""``speculation`` in a request reaches the engine through every door that has it."""

from __future__ import annotations

import pytest

from tests.server.scripted import END, ScriptedEngine, served

ASKS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Tell"}]},
    "/v1/completions": {"prompt": "Tell"},
    "/v1/responses": {"input": "Tell"},
}


@pytest.mark.parametrize("path", ASKS)
@pytest.mark.parametrize(
    ("given", "speculates"),
    [({}, True), ({"speculation": None}, True), ({"speculation": {}}, True)]
    + [({"speculation": {"off": off}}, not off) for off in (True, False, None)],
)
async def test_it_reaches_the_engine(tokenizer, path, given, speculates):
    engine = ScriptedEngine([*tokenizer.encode("once"), END])
    async with served(engine, tokenizer) as client:
        response = await client.post(path, json=ASKS[path] | given)
        assert response.status == 200, await response.text()
    (request,) = engine.requests
    assert request.speculate is speculates


@pytest.mark.parametrize("path", ASKS)
@pytest.mark.parametrize("wrong", [{"speculation": {"on": True}}, {"speculation": True}, {"speculation": {"off": 1}}])
async def test_what_it_does_not_know_is_refused(tokenizer, path, wrong):
    engine = ScriptedEngine([END])
    async with served(engine, tokenizer) as client:
        response = await client.post(path, json=ASKS[path] | wrong)
        assert response.status == 400
        assert (await response.json())["error"]["param"].startswith("speculation")
    assert engine.requests == []
