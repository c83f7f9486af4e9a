"""Clients for Node: OpenAI's and Vercel's AI SDK."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foresay.server.text.tokenizer import Tokenizer
from tests.clients.answering import AnsweringEngine, call
from tests.clients.npm import needs_npm, script
from tests.routes.running import running

pytestmark = [pytest.mark.outside, needs_npm]


def weather(prompt: str) -> str:
    if "It rains" in prompt:
        return "Take an umbrella."
    return f"<think>Where?</think>Let me look.{call('weather', city='Ulm')}"


def run(agent: Tokenizer, name: str, home: Path) -> Any:
    engine = AnsweringEngine(agent, weather)
    with running(engine, agent, aliases=("gpt-4o",)) as url:
        return script(name, url, home)


def test_openai_for_node(agent, tmp_path):
    result = run(agent, "openai.mjs", tmp_path)
    for message in (result["whole"], result["streamed"]):
        assert message["content"] == "Let me look."
        assert message["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Ulm"}'}
    assert result["models"] == ["toy", "gpt-4o"]
    assert result["refused"] == {"status": 404, "code": "model_not_found", "name": "NotFoundError"}
    assert result["last"] == "response.completed"
    for output in (result["response"], result["events"]):
        assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
        assert output[2]["arguments"] == '{"city": "Ulm"}'
    assert [one["code"] for one in result["warnings"]] == ["tool_left_out"]


def test_the_ai_sdk(agent, tmp_path):
    result = run(agent, "ai_sdk.mjs", tmp_path)
    for name, thought in (("chat", "Where?"), ("responses", "")):  # of responses it shows summaries only
        found = result[name]
        assert (found["text"], found["streamed"]) == ("Take an umbrella.", "Take an umbrella.")
        assert (found["steps"], found["errors"], found["reasoning"]) == (2, 0, thought)
        assert found["usage"]["inputTokens"] > 0 and found["usage"]["outputTokens"] > 0
    assert result["asked"] == ["Ulm"] * 4
