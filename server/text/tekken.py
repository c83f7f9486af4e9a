"""Mistral's ``tekken.json``, for checkpoints that have no ``tokenizer.json``; transformers reads its vocabulary."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

#: What its templates and prompts count on; without a tokenizer_config.json nothing else says so.
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}


def tokenizer_file(directory: Path) -> Path | None:
    """The file of a checkpoint that has its vocabulary; None if it has neither."""
    files = (directory / name for name in ("tokenizer.json", "tekken.json"))
    return next((file for file in files if file.exists()), None)


def tokenizer_json(directory: Path) -> str | None:
    """``tokenizer.json``, or what ``tekken.json`` says in its words; None if a checkpoint has neither."""
    file = tokenizer_file(directory)
    if file is None or file.name == "tokenizer.json":
        return None if file is None else file.read_text("utf-8")
    return _converted(file, file.stat().st_mtime_ns)


@lru_cache(maxsize=2)
def _converted(file: Path, changed: int) -> str:
    """It takes seconds: merges are found for all tokens. changed: when the file was."""
    from transformers.integrations.mistral.tokenizer import MistralConverter

    return str(MistralConverter(str(file)).converted().to_str())
