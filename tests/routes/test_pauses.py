"""No request holds up the streams of others: the event loop's longest pause over all routes, fields and shapes of
bodies, counted in its thread's processor time, so that a busy machine does no harm.
"""

from __future__ import annotations

import asyncio
import gc
import io
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from aiohttp.test_utils import TestClient

from foresay.server.api.common.route import Route
from foresay.server.engine.generation import Sink
from foresay.server.engine_process import frames
from foresay.server.http.app import ROUTE_MODULES
from foresay.server.schemas.bounds import LARGEST_BODY, MOST_CALLS, MOST_MESSAGES, MOST_PARTS, MOST_TOOLS
from foresay.spec.request import Delta, Request
from tests.routes.running import SentEngine
from tests.server.scripted import INFO, served

ROUTES = [
    route for module in ROUTE_MODULES for route in module.ROUTES if isinstance(route, Route) and route.body is not None
]
FIELD_BYTES = 1 << 20
#: What is not refused alike in every field, before it is decoded.
IN_FIELDS = ("as many objects as may be", "numbers", "towers", "digits")
#: Routes that decode what another one does.
ALIKE = (
    "/render", "/input_tokens", "/infill", "/apply-template", "/completion", "/compact", "/count_tokens", "/tokenize",
    "/api/generate", "/v1/completions", "/completions",
)  # fmt: skip
#: Texts that a route would tokenize are kept this short: what that takes is another matter.
TEXT_BYTES = 1 << 14
#: 50 ms is the aim on a quiet machine; processor time grows, too, where others use the other half of the core.
#: On a slow machine: so many times the work of decoding as many objects as there may be.
MOST_SECONDS, MOST_YARDS = 0.1, 25
#: A pause that is the machine's does not come again and again.
TRIES = 5


class Probe:
    """The longest callback of an event loop."""

    def __init__(self) -> None:
        self.seconds, self.name = 0.0, ""


@pytest.fixture(autouse=True)
def frozen() -> None:
    """As in a server that has loaded: the garbage collector does not look through all that stays."""
    gc.collect()
    gc.freeze()


@contextmanager
def probing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Probe]:
    probe, run = Probe(), asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        began = time.thread_time()
        run(handle)
        probe.seconds = max(probe.seconds, time.thread_time() - began)

    with monkeypatch.context() as patch:
        patch.setattr(asyncio.Handle, "_run", timed)
        yield probe


def yard() -> float:
    """The processor seconds that a body of as many objects as there may be takes to decode."""
    body = b"[" + b'{"a":1},' * (MOST_PARTS // 2) + b"1]"
    began = time.thread_time()
    for _ in range(3):
        msgspec.json.decode(body)
    return (time.thread_time() - began) / 3


def shapes(size: int) -> dict[str, bytes]:
    """JSON values of about ``size`` bytes that are much work to decode, to walk over, or to complain about."""
    names = b",".join(b'"k%d":{}' % number for number in range(size // 12))
    return {
        "empty lists": b"[" + b"[]," * (size // 3) + b"[]]",
        "empty objects": b"[" + b"{}," * (size // 3) + b"{}]",
        "as many objects as may be": b"[" + b"{}," * min(size // 3, MOST_PARTS - 100) + b"{}]",
        "numbers": b"[" + b"1," * (size // 2) + b"1]",
        "texts": b"[" + b'"a",' * (size // 4) + b'"a"]',
        "names": b"{" + names + b"}",
        "depth": b"[" * (size // 2) + b"]" * (size // 2),
        "towers": b"[" + (b"[" * 150 + b"]" * 150 + b",") * (min(size, 60_000) // 301) + b"1]",
        "digits": b"9" * size,
        "a broken escape": b'"' + b"\\\\" * (size // 2) + b'\\"',
    }


def usual(route: Route) -> dict[str, Any]:
    """A request that would be served."""
    known = {
        "model": "toy",
        "messages": [{"role": "user", "content": "x"}],
        "prompt": "x",
        "input": "x",
        "tokens": [1],
        "max_tokens": 2,
    }
    fields = {field.encode_name for field in msgspec.structs.fields(route.body)}
    body = {name: value for name, value in known.items() if name in fields}
    if "messages" in body or "input" in body:
        body.pop("prompt", None)
    if "max_output_tokens" in fields:
        body.pop("max_tokens", None)
    return body


def with_field(body: dict[str, Any], name: str, value: bytes) -> bytes:
    rest = json.dumps({known: given for known, given in body.items() if known != name}).encode()
    return rest[:-1] + (b"," if len(rest) > 2 else b"") + json.dumps(name).encode() + b":" + value + b"}"


def crowds() -> dict[str, Any]:
    """Fields with as many good entries as there may be, or more."""
    chat, block = {"role": "user", "content": ""}, {"type": "text", "text": "x" * 64}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":[' + "[]," * 3000 + "1]}"}}
    item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": ""}
    thought = {"type": "thinking", "thinking": "x" * 64, "signature": ""}
    requested = {"role": "assistant", "content": "", "tool_calls": [call] * MOST_CALLS}
    function = {"description": "d", "parameters": {"type": "object", "properties": {"a": {}}}}
    tools = [{"type": "function", "function": {"name": f"f{n}"} | function} for n in range(MOST_TOOLS)]
    own = [{"name": f"f{n}", "input_schema": {"type": "object"}} for n in range(MOST_TOOLS)]
    asks = {"function": {"name": "f", "arguments": {}}}
    return {
        "messages": [
            [chat] * MOST_MESSAGES,
            [chat] * (MOST_PARTS // 6),
            [{"role": "user", "content": [block] * (MOST_PARTS // 6)}],
            [{"role": "assistant", "content": [thought] * (MOST_PARTS // 8)}],
            [requested, requested, requested],
            [
                {"role": "assistant", "content": "", "tool_calls": [asks] * 4000},
                *[{"role": "tool", "content": ""}] * 4000,
            ],
        ],
        "input": [
            [{"role": "system", "content": "x" * 64}] * MOST_MESSAGES,
            [item] * MOST_MESSAGES,
            [{"role": "user", "content": ""}] * (MOST_PARTS // 5),
        ],
        "tools": [tools, own, [{"type": "function", "name": f"f{n}"} | function for n in range(MOST_TOOLS)], tools * 3],
        "bad_words": [["a b " * 2000] * 256, ["ab"] * 256, ["a" * 32] * 256],
        "stop": [["a" * 100_000] * 16],
        "logit_bias": [{str(n): 1 for n in range(40_000)}],
        "allowed_token_ids": [[1] * 400_000],
        "stop_token_ids": [[1] * 400_000],
        "prompt": [[1] * 400_000, ["x"] * 40_000, [[1]] * 40_000, [[1] * 4000] * 100],
        "tokens": [[1] * 400_000],
        "chat_template_kwargs": [{f"k{n}": [] for n in range(20_000)}, {"a": [[]] * 4000}],
        "include": [["reasoning.encrypted_content"] * 40_000],
        "metadata": [{str(n): "" for n in range(20_000)}],
        "cache_salt": ["x" * 400_000],
        "request_id": ["x" * 400_000],
        "user": ["x" * 400_000],
    }


def bodies(route: Route) -> Iterator[tuple[str, bytes]]:
    base = usual(route)
    whole, part = shapes(LARGEST_BODY - 1024), shapes(FIELD_BYTES)
    for shape, value in whole.items():
        yield f"body: {shape}", value
        yield f"unknown field: {shape}", with_field(base, "unknown", value)
    crowded = crowds()
    for field in msgspec.structs.fields(route.body):
        name = field.encode_name
        for shape in IN_FIELDS:
            yield f"{name}: {shape}", with_field(base, name, part[shape])
        yield f"{name}: a text", with_field(base, name, b'"' + b"a " * (TEXT_BYTES // 2) + b'"')
        for number, given in enumerate(crowded.get(name, ())):
            yield f"{name}: crowd {number}", with_field(base, name, msgspec.json.encode(given))


LONGEST = 1 << 17  # the context of the engine below
TEXT = "Once upon a fox. " * 14_000  # some 110,000 tokens
SAYS = [{"role": "user", "content": TEXT}]
TOOL = {"type": "function", "name": "f", "description": '"' * 500_000, "parameters": {"type": "object"}}
#: Requests that are much work together, though each of their fields is within its bounds.
LABOURS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": [65] * 4700, "max_tokens": 1, "prompt_logprobs": 20}),
    ("/v1/completions", {"prompt": [65] * 900, "max_tokens": 1, "prompt_logprobs": 20, "n": 5, "stream": True}),
    ("/v1/completions", {"prompt": [65] * 4700, "max_tokens": 1, "logprobs": 20, "echo": True}),
    ("/v1/completions", {"prompt": TEXT, "max_tokens": 1, "echo": True, "return_token_ids": True, "n": 8}),
    ("/v1/completions", {"prompt": TEXT, "max_tokens": 1, "echo": True, "n": 8, "stream": True}),
    (
        "/v1/completions",
        {"prompt": "x", "max_tokens": 1, "n": 128, "stop": ["a" * 255 + chr(98 + n) for n in range(16)]},
    ),
    ("/v1/completions", {"prompt": ["x"] * 128, "max_tokens": 9, "logprobs": 20, "stop": ["ab" * 128] * 16}),
    ("/v1/chat/completions", {"messages": SAYS, "max_tokens": 9}),
    ("/v1/responses", {"input": TEXT, "max_output_tokens": 9, "stream": True}),
    ("/v1/responses", {"input": "x", "max_output_tokens": 9, "tools": [TOOL], "tool_choice": "none", "stream": True}),
    ("/v1/messages", {"messages": SAYS, "max_tokens": 9, "stream": True}),
    ("/v1/messages/count_tokens", {"messages": SAYS}),
    ("/api/chat", {"messages": SAYS, "options": {"num_predict": 9}}),
    ("/api/generate", {"prompt": TEXT, "raw": True, "options": {"num_predict": 9}}),
    ("/tokenize", {"prompt": "\u00e9\u00fc" * 1_000_000, "return_token_strs": True}),
    ("/detokenize", {"tokens": [65] * LONGEST}),
    ("/v1/chat/completions/render", {"messages": SAYS}),
]


class FarEngine(SentEngine):
    """One with a long context, whose results come as bytes, too."""

    info = msgspec.structs.replace(INFO, max_model_len=LONGEST, kv_tokens=LONGEST)

    def __init__(self) -> None:
        super().__init__([65, 66, 67])
        self.info = type(self).info

    def add(self, request: Request, sink: Sink) -> None:
        super().add(request, Unpacked(sink))


class Unpacked:
    """Hears of each delta when the loop has read it."""

    def __init__(self, sink: Sink) -> None:
        self._sink, self.fail = sink, sink.fail

    def put(self, delta: Delta) -> None:
        frame = frames.pack(frames.Deltas([delta]))[frames.HEADER_BYTES :]
        asyncio.get_running_loop().call_soon(self._read, frame)

    def _read(self, frame: bytes) -> None:
        read = frames.unpack_down(frame)
        assert isinstance(read, frames.Deltas)
        self._sink.put(read.deltas[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "body"), LABOURS, ids=lambda given: given if isinstance(given, str) else ",".join(given)
)
async def test_no_answer_holds_up_the_event_loop(agent, path, body, monkeypatch):
    sent = msgspec.json.encode({"model": "toy"} | body)
    (route,) = (one for one in ROUTES if one.path == path)
    async with served(FarEngine(), agent) as client:
        with probing(monkeypatch) as probe:
            for _ in range(TRIES):
                probe.seconds = 0.0
                status, output = await answered(client, route, sent)
                assert status == 200, output[:200]
                if probe.seconds < MOST_SECONDS or probe.seconds < MOST_YARDS * yard():
                    break
    print(f"{1e3 * probe.seconds:.0f} ms, {len(output):,} bytes")
    assert probe.seconds < max(MOST_SECONDS, MOST_YARDS * yard())


@pytest.mark.slow
async def test_no_message_holds_up_the_event_loop(agent, monkeypatch):
    """Over a WebSocket: what is refused, and what runs."""
    (route,) = (one for one in ROUTES if one.path == "/v1/responses")
    labours = [msgspec.json.encode(body) for path, body in LABOURS if path == route.path]
    messages = [("labour", sent) for sent in labours] + list(bodies(route))
    slow: list[str] = []
    async with served(FarEngine(), agent) as client, client.ws_connect(route.path, max_msg_size=0) as socket:
        with probing(monkeypatch) as probe:
            for name, body in messages:
                sent = b'{"type":"response.create","max_output_tokens":2,' + body[1:]
                if len(sent) >= LARGEST_BODY:  # which closes the socket
                    continue
                for _ in range(TRIES):
                    probe.seconds = 0.0
                    await socket.send_str(sent.decode())
                    while (await socket.receive_json(timeout=60))["type"] not in ("error", "response.incomplete"):
                        pass
                    if probe.seconds < MOST_SECONDS or probe.seconds < MOST_YARDS * yard():
                        break
                else:
                    slow.append(f"{name}: {probe.seconds:.3f} s, a yard is {yard():.3f} s")
    assert not slow, slow


@pytest.mark.slow
@pytest.mark.parametrize(
    "route",
    [pytest.param(each, marks=pytest.mark.soak if each.path.endswith(ALIKE) else ()) for each in ROUTES],
    ids=lambda route: route.path,
)
async def test_no_body_holds_up_the_event_loop(agent, route, monkeypatch):
    slow: list[str] = []
    async with served(SentEngine([5]), agent) as client:
        with probing(monkeypatch) as probe:
            for name, body in bodies(route):
                for _ in range(TRIES):
                    await asyncio.sleep(0)  # what made the body is another callback
                    probe.seconds = 0.0
                    status, output = await answered(client, route, body)
                    if probe.seconds < MOST_SECONDS or probe.seconds < MOST_YARDS * yard():
                        break
                else:
                    slow.append(f"{name}: {probe.seconds:.3f} s, a yard is {yard():.3f} s")
                assert status < 500, (name, output[:200])
                assert status == 200 or len(output) < 10_000, (name, "an error that repeats what was sent")
    assert not slow, slow


async def answered(client: TestClient, route: Route, body: bytes) -> tuple[int, bytes]:
    headers = {"Content-Type": "application/json"}
    response = await client.request(route.method, route.path, data=io.BytesIO(body), headers=headers)
    return response.status, await response.read()
