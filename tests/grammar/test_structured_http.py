"""Structured output through a real server, with the official client."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import openai
import pydantic
import pytest
from openai.types import Completion

from tests.server.live import openai_client

pytestmark = pytest.mark.slow


class Fox(pydantic.BaseModel):
    """An animal small enough for a toy model."""

    model_config = pydantic.ConfigDict(extra="forbid")

    color: Literal["red", "grey"]
    cubs: int = pydantic.Field(ge=0, le=9)
    friends: list[Literal["owl", "hare"]] = pydantic.Field(max_length=2)


async def text_of(url: str, structured: dict[str, Any], **fields: Any) -> str:
    async with openai_client(url) as client:
        given: dict[str, Any] = {"max_tokens": 60, "seed": 3} | fields
        answer: Completion = await client.completions.create(
            model="bundled", prompt="Once upon a time", extra_body={"structured_outputs": structured}, **given
        )
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    return choice.text


async def test_a_model_of_pydantic(url: str):
    async with openai_client(url) as client:
        answer = await client.chat.completions.parse(
            model="bundled",
            messages=[{"role": "user", "content": "A fox."}],
            response_format=Fox,
            max_tokens=60,
            seed=1,
        )
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, Fox)


async def test_a_stream_of_json_in_several_choices(url: str):
    async with openai_client(url) as client:
        stream = await client.chat.completions.create(
            model="bundled",
            messages=[{"role": "user", "content": "A fox."}],
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "fox", "schema": Fox.model_json_schema(), "strict": True},
            },
            max_tokens=60,
            n=2,
            stream=True,
        )
        texts = ["", ""]
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    for text in texts:
        Fox.model_validate_json(text)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_regex_choice_and_grammars(url: str, temperature: float):
    warm = {"temperature": temperature}
    assert re.fullmatch(r"\d{3}-[a-z]{4}", await text_of(url, {"regex": r"\d{3}-[a-z]{4}"}, **warm))
    assert await text_of(url, {"choice": ["a red fox", "an owl"]}, **warm) in ("a red fox", "an owl")
    lark = 'start: "a" ITEM{1,3}\nITEM: " fox" | " owl"'
    assert re.fullmatch(r"a( fox| owl){1,3}", await text_of(url, {"grammar": lark}, **warm))
    gbnf = 'root ::= "hello " ("world" | "moon") [0-9]{2}'
    assert re.fullmatch(r"hello (world|moon)\d\d", await text_of(url, {"grammar": gbnf}, **warm))
    schema = {"type": "array", "items": {"enum": [1, "x", None]}, "maxItems": 3}
    written = json.loads(await text_of(url, {"json": schema}, **warm))
    assert len(written) <= 3 and all(item in (1, "x", None) for item in written)


async def test_text_that_spells_a_special_token(url: str):
    assert await text_of(url, {"choice": ["<|user|> is no token here"]}) == "<|user|> is no token here"


@pytest.mark.parametrize(
    ("structured", "param", "reason"),
    [
        ({"json": {"type": "objct"}}, "structured_outputs.json", "Invalid type: objct"),
        ({"json": {"type": "string", "not": {"const": "x"}}}, "structured_outputs.json", 'Unimplemented keys: ["not"]'),
        ({"regex": "(a"}, "structured_outputs.regex", "unclosed group"),
        ({"grammar": "start: foo"}, "structured_outputs.grammar", "unknown name"),
        ({"json": {"enum": []}}, "structured_outputs.json", "Unsatisfiable"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_does_not_compile_is_a_400(
    url: str, structured: dict[str, Any], param: str, reason: str, stream: bool
):
    async with openai_client(url) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(
                model="bundled", prompt="x", stream=stream, extra_body={"structured_outputs": structured}
            )
    assert caught.value.param == param
    assert reason in caught.value.message
