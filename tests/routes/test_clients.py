"""The real server with the bundled pair, through the official clients of Anthropic and Ollama, unmodified."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import anthropic
import jsonschema  # type: ignore[import-untyped]
import ollama
import openai
import pytest

from tests.server.live import openai_client

MODEL = "bundled"
ASK: Any = [{"role": "user", "content": "Tell me a story about a fox."}]
SEEDED: Any = {"model": MODEL, "messages": ASK, "options": {"num_predict": 24, "seed": 4, "temperature": 0.7}}
GREEDY: Any = {"model": MODEL, "messages": ASK, "max_tokens": 24, "extra_body": {"temperature": 0.0}}


async def test_anthropic_async(url):
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
        whole = await client.messages.create(**GREEDY)
        async with client.messages.stream(**GREEDY) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            streamed = await stream.get_final_message()
        counted = await client.messages.count_tokens(model=MODEL, messages=ASK)
    assert whole.content[0].type == "text" and whole.content[0].text == text
    assert (streamed.stop_reason, streamed.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    for usage in (whole.usage, streamed.usage):
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted.input_tokens


def test_ollama_sync(url):
    with ollama.Client(host=url) as client:
        whole = client.chat(**SEEDED)
        lines = list(client.chat(**SEEDED, stream=True))
        generated = client.generate(model=MODEL, prompt="Once upon a time", raw=True, options={"num_predict": 8})
        [listed] = client.list().models
        shown = client.show(MODEL)
    with urllib.request.urlopen(f"{url}/v1/models") as response:
        length = json.load(response)["data"][0]["max_model_len"]
    assert "".join(line.message.content or "" for line in lines) == whole.message.content
    assert whole.done_reason in ("stop", "length") and lines[-1].done_reason == whole.done_reason
    assert whole.eval_count and whole.eval_duration and whole.total_duration
    assert whole.eval_duration <= whole.total_duration
    assert generated.eval_count == 8 and generated.response
    assert listed.model == "bundled:latest"
    assert shown.modelinfo is not None and shown.modelinfo["foresay.context_length"] == length


SCHEMA: Any = {
    "type": "object",
    "properties": {"animal": {"enum": ["fox", "hen"]}, "legs": {"type": "integer", "minimum": 2, "maximum": 4}},
    "required": ["animal", "legs"],
    "additionalProperties": False,
}


async def test_answers_that_follow_a_schema(url):
    async with (
        anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as messages,
        ollama.AsyncClient(host=url) as chats,
        openai_client(url) as responses,
    ):
        message = await messages.messages.create(
            model=MODEL,
            messages=ASK,
            max_tokens=60,
            output_config={"format": {"type": "json_schema", "schema": SCHEMA}},
        )
        chat = await chats.chat(model=MODEL, messages=ASK, format=SCHEMA, options={"num_predict": 60})
        raw = await chats.generate(model=MODEL, prompt="x", raw=True, format=SCHEMA, options={"num_predict": 60})
        form: Any = {"format": {"type": "json_schema", "name": "animal", "schema": SCHEMA, "strict": True}}
        response = await responses.responses.create(model=MODEL, input=ASK, max_output_tokens=60, text=form)
        bad: Any = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "nonsense"}}}
        with pytest.raises(openai.BadRequestError, match=r"text\.format"):
            await responses.responses.create(model=MODEL, input=ASK, text=bad)
        with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format"):
            await messages.messages.create(**GREEDY, output_config=bad)
        with pytest.raises(ollama.ResponseError, match="format"):
            await chats.chat(model=MODEL, messages=ASK, format={"type": "nonsense"})
    assert message.content[0].type == "text"
    for text in (message.content[0].text, chat.message.content, raw.response, response.output_text):
        jsonschema.validate(json.loads(text), SCHEMA)
