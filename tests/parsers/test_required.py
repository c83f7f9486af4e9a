"""Calls that must be made, by the real server with the bundled pair: valid, and the same with speculation off."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from foresay.server.settings.resolved import BUNDLED
from tests.parsers.families import TEMPLATES
from tests.server.live import LiveServer, openai_client

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "days", "unit"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
STORY: dict[str, Any] = {"type": "function", "function": {"name": "tell", "parameters": {
    "type": "object", "properties": {"about": {"enum": ["fox", "king"]}}, "required": ["about"]}}}  # fmt: skip
SCHEMAS = {"get_weather": SCHEMA, "tell": STORY["function"]["parameters"]}
ASK: Any = [{"role": "user", "content": "Tell me a story about a fox."}]


def target_with(template: str, folder: Path) -> Path:
    """The bundled target, with another chat template."""
    shutil.copytree(BUNDLED / "target", folder)
    (folder / "chat_template.jinja").write_text(template)
    return folder


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> Iterator[str]:
    """A server that drafts a tree."""
    folder = tmp_path_factory.mktemp("tools")
    target = str(target_with(TEMPLATES["hermes"], folder / "target"))
    with LiveServer(folder / "log", target, "--draft", str(BUNDLED / "draft"), "--draft-tree", "3,2,1") as server:
        yield server.wait_for_url()


async def answers(url: str, **fields: Any) -> list[Any]:
    """With drafts and without, whole and streamed: the choice as the client accumulates it."""
    ask = {"model": "target", "messages": ASK, "tools": [WEATHER, STORY], "max_tokens": 120, **fields}
    choices = []
    async with openai_client(url) as client:
        for off in (False, True):
            ask["extra_body"] = {"speculation": {"off": off}}
            choices.append((await client.chat.completions.create(**ask)).choices[0])
            async with client.chat.completions.stream(**ask) as stream:
                async for _ in stream:
                    pass
                choices.append(stream.current_completion_snapshot.choices[0])
    return choices


def calls_of(choice: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]


async def checked(url: str, **fields: Any) -> list[tuple[str, str]]:
    """The calls of all answers, which must be the same; a call that the cap cut off is left out."""
    choices = await answers(url, **fields)
    assert len({json.dumps(calls_of(choice)) for choice in choices}) == 1
    assert len({choice.finish_reason for choice in choices}) == 1
    assert not any(choice.message.content for choice in choices)
    calls = calls_of(choices[0])
    complete = calls[:-1] if choices[0].finish_reason == "length" else calls
    for name, arguments in complete:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    return complete


@pytest.mark.parametrize("temperature", [1.0])
async def test_a_required_call_is_valid_and_the_same_without_speculation(url, temperature):
    for seed in range(3):
        fields = {"temperature": temperature, "seed": seed, "tool_choice": "required"}
        assert len(await checked(url, **fields, parallel_tool_calls=False)) == 1
        assert len(await checked(url, **fields)) >= 1


async def test_a_named_function_is_called_once(url):
    for name in SCHEMAS:
        named = {"type": "function", "function": {"name": name}}
        [(called, _)] = await checked(url, tool_choice=named, temperature=1.0, seed=5)
        assert called == name
