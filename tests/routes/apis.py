"""All APIs that write a text behind one interface: their requests, answers, streams and errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

TURN = {"role": "user", "content": "Tell"}
SCHEMA = {"type": "object", "properties": {}}
FUNCTION = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
SEARCH = {"type": "web_search"}
#: What APIs call the end of a text, in the words of OpenAI's.
FINISHES = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "completed": "stop",
    "incomplete": "length",
}


class Answer(NamedTuple):
    """An answer, whole or joined from a stream. tokens: that the model wrote. error: what broke it off."""

    text: str
    finish: str
    tokens: int | None
    error: str | None = None


@dataclass(frozen=True)
class Api:
    """path, body: of a request. names: what it calls fields, by what OpenAI's chats call them. tools: one that is
    served, one that is not. quiet: what its streams send while the model writes nothing. whole: what only a
    whole answer has."""

    path: str
    body: Mapping[str, Any]
    names: Mapping[str, str] = field(default_factory=dict)
    tools: tuple[Mapping[str, Any], ...] = ()
    quiet: bytes = b": ping\n\n"
    whole: bytes = b"[DONE]"

    @property
    def most(self) -> str:
        """The field that limits the output."""
        return self.name("max_tokens")

    def name(self, field: str) -> str:
        """What it calls a field."""
        return self.names.get(field, f"options.{field}" if self.path.startswith("/api/") else field)

    def request(self, stream: bool = False, **fields: Any) -> dict[str, Any]:
        """A request. fields: by the names of OpenAI's chats."""
        body = {"model": "toy", **self.body, "stream": stream}
        for name, value in fields.items():
            outer, _, inner = self.name(name).partition(".")
            body[outer] = {**body.get(outer, {}), inner: value} if inner else value
        if stream and self.path.endswith("completions"):
            body["stream_options"] = {"include_usage": True}
        return body

    def asking(self, text: str, stream: bool = False, **fields: Any) -> dict[str, Any]:
        """A request whose prompt is ``text``, or has it as its only turn."""
        [name] = {"prompt", "input", "messages"} & self.body.keys()
        return self.request(stream, **fields) | {name: [TURN | {"content": text}] if name == "messages" else text}

    async def answer(self, client: Any, stream: bool = False, **fields: Any) -> Answer:
        """Its answer to a request."""
        return self.joined(await self.exchange(client, self.request(stream, **fields)))

    async def exchange(self, client: Any, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The chunks of the answer to a request; one where that is whole."""
        response = await client.post(self.path, json=body)
        text = await response.text()
        assert response.status == 200, text
        return self.events(text) if body["stream"] else [json.loads(text)]

    def read(self, stream: str) -> Answer:
        """The answer in a stream."""
        return self.joined(self.events(stream))

    def events(self, stream: str) -> list[dict[str, Any]]:
        """The chunks of a stream."""
        ends = "\n" if self.path.startswith("/api/") else "\n\n"
        assert stream.endswith(ends)
        blocks = [block for block in stream.split(ends)[:-1] if not block.startswith(":") and "[DONE]" not in block]
        return [json.loads(block[block.index("{") :]) for block in blocks]

    def joined(self, chunks: list[dict[str, Any]]) -> Answer:
        """The answer of all chunks."""
        whole, finish, tokens, error = "", "", None, None
        for chunk in chunks:
            text, end, count = self._piece(chunk)
            whole, finish, error = whole + text, end or finish, error_in(chunk) or error
            tokens = tokens if count is None else count
        return Answer(whole, FINISHES.get(finish, finish), tokens, error)

    def _piece(self, chunk: dict[str, Any]) -> tuple[str, Any, int | None]:
        """The text of a chunk, why the answer ends with it, and how many tokens it has."""
        if self.path.startswith("/api/"):
            text = chunk.get("response") or chunk.get("message", {}).get("content", "")
            return text, chunk.get("done_reason"), chunk.get("eval_count")
        if self.path == "/v1/responses":
            return self._of_responses(chunk)
        usage = chunk.get("usage") or {}
        if self.path == "/v1/messages":
            delta = chunk.get("delta", {})
            blocks = "".join(block["text"] for block in chunk.get("content", ()))
            end = delta.get("stop_reason") or chunk.get("stop_reason")
            return delta.get("text", blocks), end, usage.get("output_tokens")
        choice = next(iter(chunk.get("choices", ())), {})
        text = choice.get("text") or (choice.get("delta") or choice.get("message") or {}).get("content") or ""
        return text, choice.get("finish_reason"), usage.get("completion_tokens")

    def _of_responses(self, chunk: dict[str, Any]) -> tuple[str, Any, int | None]:
        if chunk.get("type") == "response.output_text.delta":
            return chunk["delta"], None, None
        response = chunk if "output" in chunk else chunk.get("response", {})
        ended = response.get("status") in ("completed", "incomplete")
        texts = [part["text"] for item in response.get("output", ()) for part in item["content"]]
        usage = response.get("usage") or {}
        return "" if "type" in chunk else "".join(texts), ended and response["status"], usage.get("output_tokens")


class Socket(Api):
    """Responses over a WebSocket, where all is streamed."""

    async def exchange(self, client: Any, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        async with client.ws_connect(self.path) as socket:
            await socket.send_json({"type": "response.create", **body, "stream": True})
            while not events or events[-1]["type"] not in ("response.completed", "response.incomplete"):
                events.append(await socket.receive_json(timeout=180))
                assert events[-1]["type"] not in ("error", "response.failed"), events
        return events


def at(found: Any, path: str) -> Any:
    """What is there, step by step; ``...`` if there is nothing."""
    for step in path.split("/" if "/" in path else "."):
        try:
            found = found[int(step)] if isinstance(found, list) else found[step]
        except (KeyError, IndexError, TypeError):
            return ...
    return found


def error_in(chunk: dict[str, Any]) -> str | None:
    """The message of an error of any shape; None without one."""
    response = chunk.get("response")
    error = chunk.get("error") or (response.get("error") if isinstance(response, dict) else None)
    return error["message"] if isinstance(error, dict) else error


CHAT = {"messages": [TURN]}
OLLAMA = {name: name for name in ("tools", "model", "messages", "prompt", "format", "logprobs", "top_logprobs")} | {
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
}
RESPONSES = {"max_tokens": "max_output_tokens", "prompt": "input", "messages": "input"}
APIS = {
    "completions": Api("/v1/completions", {"prompt": "Tell", "max_tokens": 200}),
    "chat": Api("/v1/chat/completions", CHAT, tools=(FUNCTION, SEARCH)),
    "messages": Api(
        "/v1/messages",
        CHAT | {"max_tokens": 200},
        {"stop": "stop_sequences"},
        ({"name": "look", "input_schema": SCHEMA}, {"type": "web_search_20250305", "name": "web_search"}),
        b'event: ping\ndata: {"type":"ping"}\n\n',
        b"message_stop",
    ),
    "responses": Api(
        "/v1/responses",
        {"input": "Tell"},
        RESPONSES,
        ({"type": "function", "name": "look", "parameters": SCHEMA}, SEARCH | {"external": True}),
        whole=b"response.completed",
    ),
    "ollama": Api("/api/chat", CHAT, OLLAMA, (FUNCTION, SEARCH), b"", b'"done":true'),
    "ollama generate": Api("/api/generate", {"prompt": "Tell"}, OLLAMA, quiet=b"", whole=b'"done":true'),
}
#: Where the prompt of a generation is read as it is.
RAW = replace(APIS["ollama generate"], body={"prompt": "Tell", "raw": True})
SOCKET = Socket("/v1/responses", {"input": "Tell"}, RESPONSES)
