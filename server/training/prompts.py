"""Prompts for the target to go on from: a text file, a JSON Lines file, or a folder of such files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spec.errors import ConfigurationError

SUFFIXES = (".txt", ".jsonl")


def read_prompts(path: Path) -> list[str | list[dict[str, Any]]]:
    """One prompt per line: text, or in JSON Lines an object with ``prompt`` (text) or ``messages`` (a chat).

    Raises ConfigurationError naming file and line for what is none of these.
    """
    files = sorted(f for f in path.rglob("*") if f.suffix in SUFFIXES) if path.is_dir() else [path]
    try:
        found = [prompt for file in files for prompt in _of_file(file)]
    except OSError as error:
        raise ConfigurationError(f"--prompts {path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"--prompts {path}: not UTF-8 text ({error.reason})") from error
    if not found:
        raise ConfigurationError(f"--prompts {path}: holds no prompt (files end in {' or '.join(SUFFIXES)})")
    return found


def _of_file(file: Path) -> list[str | list[dict[str, Any]]]:
    lines = enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
    if file.suffix != ".jsonl":
        return [line for _, line in lines if line.strip()]
    return [_prompt(line, f"{file}, line {number}") for number, line in lines if line.strip()]


def _prompt(line: str, where: str) -> str | list[dict[str, Any]]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ConfigurationError(f"--prompts {where}: not valid JSON ({error})") from error
    prompt = value.get("prompt") if isinstance(value, dict) else None
    messages = value.get("messages") if isinstance(value, dict) else None
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages):
        return messages
    raise ConfigurationError(f'--prompts {where}: expected {{"prompt": "..."}} or {{"messages": [...]}}')
