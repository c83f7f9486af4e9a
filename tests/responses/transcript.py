"""The conversation shown in docs/protocol.md, taken from a server: ``python -m tests.responses.transcript`` renews it.

The engine says a fixed text, ids are numbered and times left out, so that the page changes only when the protocol does.
"""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

from tests.responses.serving import saying, serving
from tests.server.conftest import byte_level_tokenizer

PAGE = Path(__file__).resolve().parents[2] / "docs" / "protocol.md"
BEGIN, END = "<!-- transcript: python -m tests.responses.transcript -->\n", "<!-- end of transcript -->"
LAST = ("response.completed", "response.incomplete", "response.failed", "error")
#: What is shown of a response; /openapi.json has all of it.
SHOWN = ("id", "status", "previous_response_id", "output", "usage")


class Transcript:
    """Lines as they went over the wire, with ids that are easy to read."""

    def __init__(self, socket: Any) -> None:
        self.lines: list[str] = []
        self._socket = socket
        self._ids: dict[str, str] = {}

    async def say(self, message: dict[str, Any] | str) -> None:
        """The client sends."""
        text = message if isinstance(message, str) else json.dumps(message, ensure_ascii=False)
        self.lines.append(f"> {self._readable(text)}")
        await self._socket.send_str(text)

    async def hear(self, *until: str, alone: bool = False) -> dict[str, Any]:
        """What the server sends, up to an event of one of the types; returns that. alone: no other event is shown."""
        while True:
            event: dict[str, Any] = await self._socket.receive_json(timeout=60)
            shown = event | {"response": _short(event["response"])} if "response" in event else event
            if event["type"] in until or not alone:
                self.lines.append(f"< {self._readable(json.dumps(shown, ensure_ascii=False))}")
            if event["type"] in until:
                return event

    def comment(self, text: str) -> None:
        """Between the lines."""
        self.lines += ["", f"# {text}"]

    def _readable(self, text: str) -> str:
        def numbered(match: re.Match[str]) -> str:
            known = sum(name.startswith(f"{match[1]}_") for name in self._ids.values())
            return self._ids.setdefault(match[0], f"{match[1]}_{known + 1}")

        return re.sub(r"\b(resp|msg|rs|fc)_[0-9a-f]{32}\b", numbered, text)


def _short(response: dict[str, Any]) -> dict[str, Any]:
    return {name: response[name] for name in SHOWN if response[name] not in (None, [])} | {"...": "..."}


async def conversation() -> str:
    """All of it."""
    tokenizer = byte_level_tokenizer()
    engine = saying(tokenizer, "Once upon a time.", run=3, pause=0.01)
    async with serving(engine, tokenizer) as (http, _), http.ws_connect("/v1/responses") as socket:
        lines = Transcript(socket)
        lines.comment("Prepare a conversation: its KV is computed, no text is written. Only the last event.")
        await lines.say({"type": "response.create", "instructions": "Be brief.", "generate": False, "store": False})
        warm = (await lines.hear(*LAST, alone=True))["response"]["id"]
        lines.comment("Continue it: only what is new is sent.")
        create = {"type": "response.create", "instructions": "Be brief.", "input": "Tell me a story.", "store": False}
        await lines.say(create | {"previous_response_id": warm})
        await lines.hear(*LAST)
        lines.comment("An error: the socket stays open.")
        await lines.say({"type": "response.create", "input": "Hi", "temperature": 9, "stream_id": "a"})
        await lines.hear(*LAST)
        lines.comment("Cancel a response. Only a delta and the last event.")
        engine.hold_after = 3
        await lines.say({"type": "response.create", "input": "Again.", "store": False, "stream_id": "a"})
        await lines.hear("response.output_text.delta", alone=True)
        await lines.say({"type": "response.cancel", "stream_id": "a"})
        await lines.hear(*LAST)
    return "\n".join(lines.lines).strip()


def renewed(page: str, lines: str, begin: str = BEGIN) -> str:
    """The page with this transcript in it, behind the comment ``begin``."""
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(END)
    return f"{before}{begin}```text\n{lines}\n```\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text("utf-8"), asyncio.run(conversation())), "utf-8")
