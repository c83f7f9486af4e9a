"""What clients put into prompts that changes each time is left out with a warning."""

from __future__ import annotations

from typing import Any

import pytest

from tests.routes.test_warnings import found
from tests.server.conftest import byte_level_tokenizer
from tests.server.scripted import END, ScriptedEngine, served

HEADER = "x-anthropic-billing-header: cc_version=2.1.332.0b8; cc_entrypoint=cli; cch=5e1a0;"
LEFT = "<total_tokens>956536 tokens left</total_tokens>\n\nToken usage: 43464/980000; 936536 remaining"
#: Writes all system messages at the beginning.
HOISTING = (
    "<|system|>{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}<|end|>"
    "{% for m in messages if m.role != 'system' %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
)


@pytest.fixture
def engine(agent) -> ScriptedEngine:
    return ScriptedEngine([*agent.encode("Yes", False), END])


def messages(*said: tuple[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in said], "max_tokens": 4, **fields}


USER = ("user", "Tell")
BLOCKS = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in (HEADER, "Be brief.")]
#: By what it is: route, body, what the model sees of the system, and the field of the warning.
ASKED = {
    "blocks": ("/v1/messages", messages(USER, system=BLOCKS), "Be brief.", "system"),
    "one text": ("/v1/messages", messages(USER, system=f"{HEADER}\nBe brief."), "Be brief.", "system"),
    "nothing else": ("/v1/messages", messages(USER, system=BLOCKS[:1]), None, "system"),
    "a message of its own": (
        "/v1/chat/completions",
        messages(("system", HEADER), ("system", "A"), USER),
        "A",
        "messages[0].content",
    ),
    "chat": ("/v1/chat/completions", messages(("system", f"{HEADER}\nA\nB"), USER), "A\nB", "messages[0].content"),
    "responses": ("/v1/responses", {"instructions": f"{HEADER}\nA", "input": "Tell"}, "A", "input"),
    "ollama": (
        "/api/chat",
        {**messages(("system", f"{HEADER}\nA"), USER, stream=False), "max_tokens": None},
        "A",
        "messages[0].content",
    ),
    "generate": ("/api/generate", {"prompt": "Tell", "system": f"{HEADER}\nA", "stream": False}, "A", "prompt"),
}
#: As other versions may write it.
VARIANTS = (
    "x-anthropic-billing-header: cch=5e1a0; cc_entrypoint=sdk-cli; cc_version=2.2",
    "x-anthropic-billing-header: cc_version=3;cc_is_subagent=true;account-kind=a.b/c; workload=;",
    "\nX-Anthropic-Billing-Header: cc_version=2.1.332.0b8 ; cch=00000;  \r",
)
#: System prompts that only resemble it.
RESEMBLING = (
    "x-anthropic-billing-header: what is it?\nTell.",
    f"Explain this line:\n{HEADER}",
    f"{HEADER} And what is cch?\nTell.",
    "x-anthropic-billing-header: cc_version=2 is what?\nTell.",
    "x-anthropic-billing-header:\nTell.",
    LEFT,
)


async def asked(client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The warnings of an answer."""
    response = await client.post(path, json={"model": "toy", **body})
    text = await response.text()
    assert response.status == 200, text
    return found(text)


@pytest.mark.parametrize("name", ASKED)
async def test_a_header_is_left_out_and_named(agent, engine, name):
    path, body, system, field = ASKED[name]
    async with served(engine, agent) as client:
        (warning,) = await asked(client, path, body)
    assert (warning["code"], warning["param"]) == ("client_noise_left_out", field)
    assert (
        "Claude Code's x-anthropic-billing-header" in warning["message"] and "--keep-client-noise" in warning["message"]
    )
    (prompt,) = (agent.decode(request.prompt, False) for request in engine.requests)
    begins = "" if system is None else f"<|system|>{system}<|end|>"
    assert prompt.startswith(f"{begins}<|user|>Tell"), "an empty system message is none"
    async with served(engine, agent, keep_client_noise=True) as client:
        assert await asked(client, path, body) == []
    assert HEADER in agent.decode(engine.requests[-1].prompt, False)


@pytest.mark.parametrize("header", VARIANTS)
async def test_a_header_of_other_versions_is_left_out(agent, engine, header):
    async with served(engine, agent) as client:
        (warning,) = await asked(client, "/v1/messages", messages(USER, system=f"{header}\nBe brief."))
    assert warning["code"] == "client_noise_left_out"
    assert agent.decode(engine.requests[0].prompt, False).startswith("<|system|>Be brief.<|end|><|user|>Tell")


@pytest.mark.parametrize("system", RESEMBLING)
async def test_what_resembles_it_stays(agent, engine, system):
    async with served(engine, agent) as client:
        assert await asked(client, "/v1/messages", messages(USER, ("user", HEADER), system=system)) == []
    assert f"<|system|>{system}<|end|><|user|>Tell\n{HEADER}<|end|>" in agent.decode(engine.requests[0].prompt, False)


async def test_tokens_left_are_left_out_where_a_template_writes_them_first(agent, engine):
    turns = [("system", "Be brief."), USER, ("system", LEFT), ("assistant", "Yes"), USER, ("system", LEFT)]
    kept = ("system", "It rains.")
    hoisting = byte_level_tokenizer(HOISTING)
    async with served(engine, hoisting) as client:
        (warning,) = await asked(client, "/v1/chat/completions", messages(*turns, kept))
    assert warning["param"] == "messages[2].content" and "tokens left" in warning["message"], (
        "once, however many there are"
    )
    assert hoisting.decode(engine.requests[0].prompt, False).startswith("<|system|>Be brief.It rains.<|end|><|user|>")
    async with served(engine, agent) as client:
        assert await asked(client, "/v1/chat/completions", messages(*turns)) == []
    assert agent.decode(engine.requests[1].prompt, False).count(LEFT) == 2, "in its place it harms nobody"
