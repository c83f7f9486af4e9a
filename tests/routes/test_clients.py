"""Schemas through the official clients of OpenAI, Anthropic and Ollama, of the real server with the bundled pair."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import jsonschema  # type: ignore[import-untyped]
import ollama
import openai
import pytest

from tests.server.live import openai_client

MODEL = "bundled"
ASK: Any = [{"role": "user", "content": "Tell me a story about a fox."}]
GREEDY: Any = {"model": MODEL, "messages": ASK, "max_tokens": 24}


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
