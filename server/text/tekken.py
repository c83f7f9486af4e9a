"""Mistral's ``tekken.json``, for checkpoints that have no ``tokenizer.json``; transformers reads its vocabulary."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

#: Special tokens that templates and prompts expect, for lack of a tokenizer_config.json.
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}


def tokenizer_file(directory: Path) -> Path | None:
    """The file with a checkpoint's vocabulary; None if there is none."""
    files = (directory / name for name in ("tokenizer.json", "tekken.json"))
    return next((file for file in files if file.exists()), None)


def tokenizer_json(directory: Path) -> str | None:
    """The text of ``tokenizer.json``, or of ``tekken.json`` converted to it; None if a checkpoint has neither."""
    file = tokenizer_file(directory)
    if file is None or file.name == "tokenizer.json":
        return None if file is None else file.read_text("utf-8")
    return _converted(file, file.stat().st_mtime_ns)


@lru_cache(maxsize=2)
def _converted(file: Path, changed: int) -> str:
    """Slow (seconds): merges are computed for all tokens. changed: the file's modification time, for the cache."""
    from transformers.integrations.mistral.tokenizer import MistralConverter

    return str(MistralConverter(str(file)).converted().to_str())
