"""A scripted engine that looks at what it is asked: tools' results in the prompt decide what it says next."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from foresay.server.text.tokenizer import Tokenizer
from foresay.spec.request import Request
from tests.routes.running import SentEngine
from tests.server.scripted import END, INFO


class AnsweringEngine(SentEngine):
    """Says what ``answer`` makes of the prompt. context: tokens of its model's."""

    def __init__(self, tokenizer: Tokenizer, answer: Callable[[str], str], context: int = 4096) -> None:
        super().__init__([END], run=50)
        self.info = msgspec.structs.replace(INFO, max_model_len=context)
        self.prompts: list[str] = []
        self._tokenizer, self._answer = tokenizer, answer
        self._scripts: dict[str, list[int]] = {}

    def script_of(self, request: Request) -> Sequence[int]:
        """The answer to this request, read once."""
        if request.id not in self._scripts:
            prompt = self._tokenizer.decode(request.prompt, skip_special_tokens=False)
            self.prompts.append(prompt)
            self._scripts[request.id] = [*self._tokenizer.encode(self._answer(prompt), False), END]
        return self._scripts[request.id]


def call(name: str, **arguments: Any) -> str:
    """A call as the model of these tests writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def turns_of(prompt: str) -> list[str]:
    """The texts of a conversation, without who said them."""
    return prompt.split("<|end|>")
