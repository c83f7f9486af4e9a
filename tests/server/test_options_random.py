"""Runs of any length, stop strings, caps, n and logprobs at random: one cut for everything, streamed or not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as some

from foresay.server.text.options import choice_seed
from foresay.server.text.tokenizer import Tokenizer
from foresay.spec.request import Request
from tests.server.conftest import byte_level_tokenizer
from tests.server.scripted import END, ScriptedEngine, entry, served

TOKENIZER = byte_level_tokenizer()
STORY = "Once upon a fox there was a 🦊🐍. The fox said: 'naïve tart' and 世界 ended."
STOPS = ["fox", " the", ".", "🐍", "d: 'n", "world", "x t", "世"]


class Random(ScriptedEngine):
    """Each choice has its own words, and its own run lengths."""

    def __init__(self, tokens: Sequence[int], runs: list[int]) -> None:
        super().__init__(tokens, run=max(runs))
        self.runs = runs

    def script_of(self, request: Request) -> Sequence[int]:
        return words(self.tokens, request.params.seed or 0)

    def run_length(self, request: Request, emitted: int) -> int:
        return self.runs[((request.params.seed or 0) + emitted) % len(self.runs)]


def words(tokens: Sequence[int], seed: int) -> list[int]:
    begin = seed % len(tokens)
    return [*tokens[begin:], *tokens[:begin]]


def plain(tokens: Sequence[int], stops: Sequence[str], most: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """What plain decoding would say: token by token, to the first end."""
    for count in range(1, most + 1):
        text = tokenizer.decode(tokens[:count])
        found = [(text.index(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
        if found:
            end, size = min(found)
            return {"text": text[: end + size], "tokens": list(tokens[:count]), "reason": "stop"}
        if tokens[count - 1] == END:
            return {"text": text, "tokens": list(tokens[:count]), "reason": "stop"}
    return {"text": tokenizer.decode(tokens[:most]), "tokens": list(tokens[:most]), "reason": "length"}


@settings(max_examples=150)
@given(
    runs=some.lists(some.integers(1, 9), min_size=1, max_size=6),
    stops=some.lists(some.sampled_from(STOPS), max_size=3, unique=True),
    most=some.integers(1, 70),
    count=some.integers(1, 4),
    seed=some.integers(1, 1000),
    top=some.integers(0, 3),
    path=some.sampled_from(["completions", "chat/completions"]),
    ids=some.booleans(),
)
async def test_text_tokens_logprobs_and_usage_are_cut_at_one_point(
    runs: list[int], stops: list[str], most: int, count: int, seed: int, top: int, path: str, ids: bool
) -> None:
    script = [*TOKENIZER.encode(STORY), END]
    fields = {"max_tokens": most, "n": count, "seed": seed, "stop": stops, "return_token_ids": ids}
    if path == "completions":
        ask = fields | {"prompt": "Tell", "logprobs": top}
    else:
        ask = fields | {"messages": [{"role": "user", "content": "Tell"}], "logprobs": True, "top_logprobs": top}
    async with served(Random(script, runs), TOKENIZER) as client:
        whole = await (await client.post(f"/v1/{path}", json=ask)).json()
        streaming = {"stream": True, "stream_options": {"include_usage": True}}
        events = (await (await client.post(f"/v1/{path}", json=ask | streaming)).text()).split("\n\n")[:-2]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    completed = 0
    for choice in whole["choices"]:
        expected = plain(words(script, choice_seed(seed, choice["index"])), stops, most, TOKENIZER)
        completed += len(expected["tokens"])
        shown = expected if ids else expected | {"tokens": []}
        assert told(choice) == shown
        assert logprobs(choice) == [entry(token, at, top).logprob for at, token in enumerate(expected["tokens"])]
        pieces = [one for chunk in chunks for one in chunk["choices"] if one["index"] == choice["index"]]
        assert told(*pieces) == shown
        assert [value for piece in pieces for value in logprobs(piece)] == logprobs(choice)
        before = [TOKENIZER.decode(expected["tokens"][:at]) for at in range(len(expected["tokens"]))]
        if path == "completions":
            assert choice["logprobs"]["text_offset"] == [len(text.rstrip("\ufffd")) for text in before]
        assert not ids or all(len(logprobs(piece)) == len(piece.get("token_ids", [])) for piece in pieces)
        assert pieces[-1]["seed"] == choice["seed"] == choice_seed(seed, choice["index"])
    assert whole["usage"]["completion_tokens"] == completed
    assert chunks[-1]["usage"] == whole["usage"]


def told(*pieces: dict[str, Any]) -> dict[str, Any]:
    """Text, tokens and ending of a choice, whole or in pieces."""
    texts = [piece.get("text") or piece.get("delta", piece.get("message", {})).get("content") or "" for piece in pieces]
    return {
        "text": "".join(texts),
        "tokens": [token for piece in pieces for token in piece.get("token_ids") or []],
        "reason": pieces[-1]["finish_reason"],
    }


def logprobs(piece: dict[str, Any]) -> list[float]:
    found = piece["logprobs"] or {}
    legacy: list[float] = found.get("token_logprobs", [])
    return legacy + [one["logprob"] for one in found.get("content", [])]
