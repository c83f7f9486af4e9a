"""What docs/protocol.md shows of provenance: ``python -m tests.provenance.transcript`` takes it from a server again."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from tests.responses.serving import saying, serving
from tests.responses.transcript import LAST, PAGE, Transcript, renewed
from tests.server.conftest import byte_level_tokenizer

BEGIN = "<!-- transcript: python -m tests.provenance.transcript -->\n"
#: Events without deltas are in the other transcript.
SILENT = ("added", "in_progress", "created", "done")


class Telling(Transcript):
    """Only deltas, and of the last event what is reported in it."""

    async def hear(self, *until: str, alone: bool = False) -> dict[str, Any]:
        while True:
            event: dict[str, Any] = await self._socket.receive_json(timeout=180)
            if event["type"] in until:
                metrics = event["response"]["metrics"]["speculative_decoding"]
                event |= {"response": {"metrics": {"speculative_decoding": metrics}, "...": "..."}}
            if not event["type"].endswith(SILENT):
                self.lines.append(f"< {self._readable(json.dumps(event, ensure_ascii=False))}")
            if event["type"] in until:
                return event


async def telling() -> str:
    """A stop string inside a run, over a WebSocket and over HTTP."""
    engine = saying(byte_level_tokenizer(), "Once upon a time there was a fox.", run=3, pause=0.05)
    ask = {"provenance": True, "stop": " was"}
    async with serving(engine, byte_level_tokenizer()) as (http, _):
        async with http.ws_connect("/v1/responses") as socket:
            lines = Telling(socket)
            lines.comment("Three tokens a step; the stop string ends inside the third. Only deltas and the last event.")
            await lines.say({"type": "response.create", "input": "Tell me a story.", "store": False} | ask)
            await lines.hear(*LAST)
        lines.comment("The second step again, as a chunk of POST /v1/completions.")
        answer = await http.post("/v1/completions", json={"prompt": "Tell me", "stream": True} | ask)
        chunks = [json.loads(event.removeprefix("data: ")) for event in (await answer.text()).split("\n\n")[:-2]]
        shown = {"choices": chunks[1]["choices"], "...": "..."}
        lines.lines.append(f"< data: {json.dumps(shown, ensure_ascii=False)}")
    return "\n".join(lines.lines).strip()


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text("utf-8"), asyncio.run(telling()), BEGIN), "utf-8")
