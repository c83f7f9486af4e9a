"""Prompts for the target to continue: a text file, a JSON Lines file, or a folder of such files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foresay.spec.errors import ConfigurationError

SUFFIXES = (".txt", ".jsonl")

Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text or a chat. where: file and line it was read from, for error messages."""

    content: str | Messages
    where: str


def read_prompts(path: Path) -> list[Prompt]:
    """One prompt per line: text, or in JSON Lines an object with ``prompt`` (text) or ``messages`` (a chat).

    Raises ConfigurationError, which names file and line, for anything else.
    """
    files = sorted(f for f in path.rglob("*") if f.suffix in SUFFIXES) if path.is_dir() else [path]
    if path.suffix == ".json" and not path.is_dir():
        raise ConfigurationError(
            f"--prompts {path}: one JSON object per line is expected, in a file that ends in .jsonl"
        )
    found = [prompt for file in files for prompt in _of_file(file)]
    if not found:
        raise ConfigurationError(f"--prompts {path}: holds no prompt (files end in {' or '.join(SUFFIXES)})")
    return found


def _of_file(file: Path) -> Iterator[Prompt]:
    try:
        content = file.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise ConfigurationError(f"--prompts {file}: cannot be read ({error.strerror})") from error
    # Only at newlines: texts may hold other characters at which str.splitlines splits.
    for number, line in enumerate(content.split(b"\n"), start=1):
        where = f"{file}, line {number}"
        text = _decoded(line, where)
        if text.strip():
            yield Prompt(_parsed(text, where) if file.suffix == ".jsonl" else text, where)


def _decoded(line: bytes, where: str) -> str:
    try:
        return line.removesuffix(b"\r").decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"--prompts {where}: not UTF-8 text ({error.reason})") from error


def _parsed(line: str, where: str) -> str | Messages:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"--prompts {where}: not valid JSON ({error})") from error
    prompt = value.get("prompt") if isinstance(value, dict) else None
    messages = value.get("messages") if isinstance(value, dict) else None
    if isinstance(prompt, str) and prompt.strip():
        return prompt
    if isinstance(messages, list) and messages and all(_is_message(message) for message in messages):
        return messages
    raise ConfigurationError(
        f'--prompts {where}: expected {{"prompt": "..."}} or {{"messages": [{{"role": "...", "content": "..."}}]}}'
    )


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str)
