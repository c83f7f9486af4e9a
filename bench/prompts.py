"""Prompts to measure on: our own held-out ones, or a file (it may be gzipped) in the format of MT-bench, GSM8K or
HumanEval.

``prompts.jsonl`` was written for this project and is part of no training text: twelve openings of old-fashioned
children's stories (raw text) and twelve grade-school questions (one chat turn each), alternating, so that any leading
part of the file contains both.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from bench import BadOption

OWN = Path(__file__).parent / "prompts.jsonl"


class BadPrompts(BadOption):
    """The prompt file has a line in no known format, or no line at all."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text to continue, or with ``chat`` a user's message to answer."""

    name: str
    text: str
    chat: bool


def load(path: Path | None = None, limit: int | None = None) -> list[Prompt]:
    """The prompts of ``path`` (our own by default), the first ``limit`` of them."""
    path = path or OWN
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text("utf-8")
    lines = text.splitlines()
    prompts = [parse(json.loads(line), f"{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise BadPrompts(f"{path} holds no prompts")
    return prompts[:limit]


def parse(row: Mapping[str, Any], number: str) -> Prompt:
    """One line; ``number`` names it if it has no name of its own."""
    match row:
        case {"text": str(text)}:
            return Prompt(str(row.get("id", number)), text, chat=False)
        case {"chat": str(text)}:
            return Prompt(str(row.get("id", number)), text, chat=True)
        case {"turns": [str(text), *_]} | {"prompt": [str(text), *_]}:  # MT-bench: its first turn
            return Prompt(f"mt_bench-{row.get('question_id', number)}", text, chat=True)
        case {"question": str(text)}:
            return Prompt(f"gsm8k-{number}", text, chat=True)
        case {"task_id": str(name), "prompt": str(text)}:
            return Prompt(name, text, chat=False)
    raise BadPrompts(f"line {number}: expected text, chat, turns, question, or task_id with prompt; got {sorted(row)}")


class Encoder:
    """Prompts to token ids with the tokenizer and chat template of a checkpoint directory."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)

    def __call__(self, prompt: Prompt) -> list[int]:
        """Token ids; a chat prompt goes through the template if there is one."""
        if not prompt.chat or not self.tokenizer.chat_template:
            return list(self.tokenizer(prompt.text)["input_ids"])
        turns = [{"role": "user", "content": prompt.text}]
        return list(self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False))


def encoded(directory: Path, path: Path | None = None, limit: int | None = None) -> dict[str, list[int]]:
    """Token ids by name of what :func:`load` returns, for the checkpoint in ``directory``."""
    encode = Encoder(directory)
    return {prompt.name: encode(prompt) for prompt in load(path, limit)}
