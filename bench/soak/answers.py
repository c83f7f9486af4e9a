"""An answer's content, in one form for each API, however it was sent; and how it differs from the right one.

The same fields are picked from a whole answer and from the events of a stream. Ids and times are left out, and so are
token counts that depend on what the server had computed before.
"""

from __future__ import annotations

from typing import Any

from bench.soak.requests import Json

LAST = ("response.completed", "response.incomplete", "response.failed")
CHOICE = (
    "text",
    "logprobs",
    "finish_reason",
    "stop_reason",
    "seed",
    "token_ids",
    "prompt_token_ids",
    "prompt_logprobs",
)
OLLAMA = ("response", "logprobs", "done_reason", "prompt_eval_count", "eval_count")
CLIP = 300


class Reply:
    """What was received of one answer.

    over: it is complete. cut: it was ended early by request. error: its body. id: of a response. unlike: how a
    response's end contradicts its deltas.
    """

    def __init__(self) -> None:
        self.parts: Json = {}
        self.over = self.cut = False
        self.error: Any = None
        self.id: str | None = None
        self.unlike = ""

    def whole(self, api: str, body: Json) -> None:
        """Take a complete answer."""
        self.parts, self.over, self.id = picked(api, body), True, body.get("id")

    def take_event(self, api: str, event: Json) -> None:
        """Take one event of a stream."""
        if event.get("error") and event.get("type", "error") == "error":
            self.error = event
        elif api in ("responses", "socket"):
            self._response(event)
        elif api == "messages":
            self._message(event)
        else:
            self.parts = joined(self.parts, picked(api, event))
            self.over = self.over or bool(event.get("done"))

    def _response(self, event: Json) -> None:
        kind = event["type"]
        if kind == "response.created":
            self.id = event["response"]["id"]
        elif kind == "response.output_text.delta":
            self.parts = joined(self.parts, given({"text": event["delta"], "logprobs": event.get("logprobs")}))
        elif kind in LAST:
            self._end(event["response"])

    def _end(self, response: Json) -> None:
        """The response at its end must have the content of its deltas."""
        whole = picked("responses", response)
        received = {name: whole[name] for name in ("text", "logprobs") if name in whole}
        # The log-probability of a token without text is only in the end.
        self.unlike = difference(self.parts, received, cut=True, where="deltas") or ""
        if self.parts.get("text") != received.get("text"):
            self.unlike = f"the deltas say {clipped(self.parts)}, the end {clipped(received)}"
        self.cut = response["status"] == "cancelled"
        if response["status"] == "failed":
            self.error = {"error": response["error"]}
        elif not self.cut:
            self.parts, self.over = whole, True

    def _message(self, event: Json) -> None:
        if event["type"] == "content_block_delta":
            self.parts = joined(self.parts, {"text": event["delta"].get("text", "")})
        elif event["type"] == "message_delta":
            self.parts = joined(self.parts, {**given(event["delta"]), "usage": counted(event["usage"])})
        elif event["type"] == "message_stop":
            self.over = True


def picked(api: str, body: Json) -> Json:
    """What must be the same, of a whole answer, or of a chunk of completions, chat or Ollama."""
    match api:
        case "completions" | "chat":
            choices = {str(choice["index"]): _choice(choice) for choice in body["choices"]}
            return given({"choices": choices, "usage": counted(body.get("usage"))} | _named(body, CHOICE[-2:]))
        case "responses" | "socket":
            parts = [part for item in body["output"] for part in item["content"]]
            text = {"text": "".join(part["text"] for part in parts)}
            logprobs = {"logprobs": [one for part in parts for one in part["logprobs"]]}
            ends = _named(body, ("status", "incomplete_details", "seed"))
            return given(text | logprobs | ends | {"usage": counted(body["usage"])})
        case "messages":
            text = {"text": "".join(block["text"] for block in body["content"])}
            ends = _named(body, ("stop_reason", "stop_sequence"))
            return given(text | ends | {"usage": counted(body["usage"])})
    return given(_named(body, OLLAMA) | {"content": (body.get("message") or {}).get("content")})


def _choice(choice: Json) -> Json:
    message = choice.get("message") or choice.get("delta") or {}
    return given(_named(choice, CHOICE) | _named(message, ("content", "reasoning_content")))


def _named(body: Json, names: tuple[str, ...]) -> Json:
    return {name: body.get(name) for name in names}


def given(fields: Json) -> Json:
    """Without empty fields: an empty text and none are the same."""
    return {name: value for name, value in fields.items() if value is not None and value not in ("", [], {})}


def counted(usage: Json | None) -> Json:
    """The tokens of prompt and answer. Anthropic counts those of the prompt in two parts."""
    if usage is None:
        return {}
    read = usage.get("prompt_tokens", usage.get("input_tokens", 0)) + usage.get("cache_read_input_tokens", 0)
    return {"read": read, "written": usage.get("completion_tokens", usage.get("output_tokens"))}


def joined(old: Any, new: Any) -> Any:
    """Two pieces of an answer together: texts and lists grow, the rest is from the later one.

    What concerns the prompt is sent in one piece, perhaps with every choice.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        growing = {name for name in new if name in old and not name.startswith("prompt_")}
        return old | {name: joined(old[name], value) if name in growing else value for name, value in new.items()}
    grows = isinstance(old, str | list) and type(old) is type(new)
    return old + new if grows else new


def difference(reply: Any, right: Any, cut: bool, where: str = "") -> str | None:
    """Where an answer differs from the right one, in words; None if it does not. cut: it may be any beginning of it."""
    if isinstance(reply, dict) and isinstance(right, dict):
        names = [name for name in (reply if cut else {**right, **reply}) if not (cut and name == "usage")]
        found = (difference(reply.get(name), right.get(name), cut, f"{where}.{name}") for name in names)
        return next((one for one in found if one is not None), None)
    if cut and isinstance(reply, str | list) and type(reply) is type(right):
        right = right[: len(reply)]
    if reply == right and type(reply) is type(right):
        return None
    return f"{where.strip('.') or 'answer'}: {clipped(reply)} instead of {clipped(right)}"


def clipped(value: Any) -> str:
    """The beginning of a value, of a readable length."""
    text = repr(value)
    return text if len(text) <= CLIP else f"{text[:CLIP]}... ({len(text)} characters)"
