"""``prediction`` at every route that has it: what reaches the engine, and real answers (counts: test_matrix.py)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from foresay.server.http.app import create_app
from foresay.server.models.service import Text
from foresay.server.settings.config import ServeConfig
from foresay.spec.engine import EngineCore
from tests.combinations import pairwise
from tests.selfcheck.inprocess import SteppedEngine, bundled
from tests.server.scripted import END, ScriptedEngine, served
from tests.server.staying import alone, service_of

Json = dict[str, Any]
ASKS: dict[str, Json] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Tell me of a fox."}]},
    "/v1/completions": {"prompt": "Once upon a time there was a fox"},
    "/v1/responses": {"input": "Tell me of a fox."},
}
paths = pytest.mark.parametrize("path", ASKS)


def of(text: Any) -> Json:
    return {"prediction": {"type": "content", "content": text}}


# -- what is asked ------------------------------------------------------------------------------------------------


@paths
@pytest.mark.parametrize(
    ("given", "text"),
    [
        (of("once upon"), "once upon"),
        (of([{"type": "text", "text": "once"}, {"type": "text", "text": " upon"}]), "once upon"),
        (of(""), ""),
        (of([]), ""),
        ({"prediction": None}, None),
        ({}, None),
    ],
)
async def test_its_tokens_reach_the_engine(tokenizer, path, given, text):
    engine = ScriptedEngine([*tokenizer.encode("once"), END])
    async with served(engine, tokenizer) as client:
        response = await client.post(path, json=ASKS[path] | given | ({} if "responses" in path else {"n": 2}))
        assert response.status == 200, await response.text()
    wanted = None if text is None else tokenizer.encode(text, False)
    assert [request.prediction for request in engine.requests] == [wanted] * (1 if "responses" in path else 2)


# -- the real model -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine() -> EngineCore:
    return bundled()


@asynccontextmanager
async def serving(engine: EngineCore) -> AsyncIterator[TestClient]:
    service = service_of(SteppedEngine(engine), Text.load(ServeConfig()), model="bundled")
    async with TestClient(TestServer(create_app(alone(service)))) as client:
        yield client


def text_of(answer: Json) -> str:
    if "output" in answer:
        return "".join(part["text"] for item in answer["output"] for part in item["content"])
    first = answer["choices"][0]
    return str(first["text"] if "text" in first else first["message"]["content"])


def provenance_of(answer: Json) -> Json:
    found: Json = answer["provenance"] if "output" in answer else answer["choices"][0]["provenance"]
    return found


@pytest.mark.parametrize(("path", "temperature", "edit"), pairwise([*ASKS], [0, 1], ["none", "words", "wrong"]))
async def test_the_text_is_the_same_and_the_counts_are_those_of_its_tokens(engine, path, temperature, edit):
    most = {"max_output_tokens" if "responses" in path else "max_tokens": 60}
    ask = ASKS[path] | {"seed": 5, "temperature": temperature, "provenance": True, "ignore_eos": True} | most
    async with serving(engine) as client:
        plain = await (await client.post(path, json=ask)).json()
        text = text_of(plain)
        words = text.split(" ")
        predicted = {
            "none": text,
            "words": " ".join("grass" if n % 9 == 5 else word for n, word in enumerate(words) if n % 13 != 7),
            "wrong": "Nothing of the kind will ever be said by anybody. " * 5,
        }[edit]
        answer = await (await client.post(path, json=ask | of(predicted))).json()
    assert text_of(answer) == text
    usage = answer["usage"]
    details = usage.get("completion_tokens_details") or usage["output_tokens_details"]
    provenance = provenance_of(answer)
    accepted = sum(token.get("drafter") == "prediction" for token in provenance["tokens"])
    drafted = sum(step["drafted"] for step in provenance["steps"] if step["drafter"] == "prediction")
    assert details["accepted_prediction_tokens"] == accepted
    assert details["rejected_prediction_tokens"] == drafted - accepted
    assert len(provenance["tokens"]) == 60 == usage.get("completion_tokens", usage.get("output_tokens"))
    assert (accepted >= 40) if edit == "none" else (accepted >= 20 if edit == "words" else accepted < 20)
    if edit == "none":  # with five of them accepted a step, eleven; how many a draft model takes hangs on the processor
        assert len(provenance["steps"]) <= 13 and len(provenance["steps"]) < len(provenance_of(plain)["steps"])


@pytest.mark.parametrize("edit", [False, True])
async def test_where_a_budget_chooses_it_is_one_of_several(edit, monkeypatch):
    """In a tree that several made, each token is counted for whom it came from."""
    chosen = bundled("auto", tree=None)
    assert chosen.scheduler.budget is not None
    chosen.scheduler.budget.timed = False  # what steps take would change what it chooses
    monkeypatch.setattr(chosen.scheduler.cost, "saw", lambda *step: 0.0)
    path = "/v1/completions"
    ask = ASKS[path] | {"seed": 5, "temperature": 1, "provenance": True, "ignore_eos": True, "max_tokens": 60}
    async with serving(chosen) as client:
        plain = await (await client.post(path, json=ask)).json()
        text = text_of(plain)
        predicted = text.replace(" the ", " a ") if edit else text
        answer = await (await client.post(path, json=ask | of(predicted))).json()
    assert text_of(answer) == text
    provenance, details = provenance_of(answer), answer["usage"]["completion_tokens_details"]
    accepted = sum(token.get("drafter") == "prediction" for token in provenance["tokens"])
    assert details["accepted_prediction_tokens"] == accepted >= (10 if edit else 30)
    drafted = sum(step["drafted"] for step in provenance["steps"] if "prediction" in (step["drafter"] or ""))
    assert 0 <= details["rejected_prediction_tokens"] <= drafted - accepted
    assert len(provenance["steps"]) < len(provenance_of(plain)["steps"])
